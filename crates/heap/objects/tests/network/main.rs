//! Heaps over TCP, and with reads of memory as a device serves it.

mod suite;

use suite::tests;

mod over_tcp {
    crate::tests! { None }
}

/// Another target stands for an RDMA device: it translates nothing.
mod by_a_device {
    use aquifer_fabric::tcp::{ConnectOptions, connect_with_ticket};

    use crate::suite::{Device, KEY, listen};

    fn device() -> Option<Device> {
        let target = listen();
        let address = target.address();
        let connect = |address, ticket: &aquifer_fabric::Ticket| {
            connect_with_ticket(address, ticket, &ticket.secret(&KEY), ConnectOptions::default())
        };
        Some(Device { target, connect, address })
    }

    crate::tests! { device() }
}
