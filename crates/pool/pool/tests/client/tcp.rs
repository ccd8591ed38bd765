//! Tests of the client over TCP.

#[path = "suite.rs"]
mod suite;

use std::net::SocketAddr;

use aquifer_fabric::ClusterKey;
use aquifer_fabric::tcp::{self, ConnectOptions, TcpOptions, TcpTarget};
use aquifer_fabric::{Endpoint, EndpointError, Identity, Target};

const KEY: ClusterKey = ClusterKey([3; 32]);

/// A node's target.
struct Bed {
    address: SocketAddr,
    target: TcpTarget,
}

impl Bed {
    const TURNS: u64 = 1000;

    fn bare() -> Self {
        let any = "127.0.0.1:0".parse().expect("an address");
        let target = TcpTarget::listen(any, &KEY, TcpOptions::default()).expect("a target");
        Self { address: target.address(), target }
    }

    fn target(&self) -> &dyn Target {
        &self.target
    }

    fn connect(&self, who: Identity) -> Result<Box<dyn Endpoint>, EndpointError> {
        tcp::connect(self.address, &KEY, who, ConnectOptions::default())
    }
}
