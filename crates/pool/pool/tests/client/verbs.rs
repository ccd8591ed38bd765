//! Tests of the client over the RDMA device with the IP address in `AQUIFER_VERBS_ADDRESS`.

#[path = "suite.rs"]
mod suite;

use std::net::SocketAddr;

use aquifer_fabric::ClusterKey;
use aquifer_fabric::{Endpoint, EndpointError, Identity, Target};
use aquifer_fabric_verbs::{self as verbs, VerbsOptions, VerbsTarget};

const KEY: ClusterKey = ClusterKey([3; 32]);

/// A node's target.
struct Bed {
    address: SocketAddr,
    target: VerbsTarget,
}

impl Bed {
    /// Few turns, because the device may be emulated.
    const TURNS: u64 = 100;

    fn bare() -> Self {
        let address =
            std::env::var("AQUIFER_VERBS_ADDRESS").expect("AQUIFER_VERBS_ADDRESS is that of an RDMA device");
        let address = SocketAddr::new(address.parse().expect("an IP address"), 0);
        let target = VerbsTarget::listen(address, &KEY, VerbsOptions::default()).expect("a target");
        Self { address: target.address(), target }
    }

    fn target(&self) -> &dyn Target {
        &self.target
    }

    fn connect(&self, who: Identity) -> Result<Box<dyn Endpoint>, EndpointError> {
        verbs::connect(self.address, &KEY, who)
    }
}
