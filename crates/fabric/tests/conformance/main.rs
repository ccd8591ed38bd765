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
    conformance!(crate::providers::ShmHarness);
}

mod tcp {
    conformance!(crate::providers::TcpHarness<false>);
}

mod tcp_sealed {
    conformance!(crate::providers::TcpHarness<true>);
}

mod sim {
    conformance!(crate::providers::SimHarness);
}
