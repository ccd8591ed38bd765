//! One conformance suite for every provider. This module runs it over the providers that need no
//! device; `verbs.rs` runs it over RDMA devices.

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

mod multiplexed {
    conformance_without_messages!(super::providers::MultiplexedHarness);
}
