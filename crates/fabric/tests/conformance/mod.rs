//! One suite for every provider: what the interface promises, each of them must keep. Those that need nothing; see `verbs.rs` for the other.

#[macro_use]
mod suite;

mod atomics;
mod data;
mod death;
mod harness;
mod keys;
mod limits;
mod messages;
mod providers;

mod shm {
    conformance!(super::providers::ShmHarness);
}

mod tcp {
    conformance!(super::providers::TcpHarness<false>);
}

mod tcp_sealed {
    conformance!(super::providers::TcpHarness<true>);
}

mod sim {
    conformance!(super::providers::SimHarness);
}
