//! The suite over an RDMA device: that with the IP address in `AQUIFER_VERBS_ADDRESS`.

#[macro_use]
mod suite;

mod atomics;
mod data;
mod death;
mod harness;
mod keys;
mod limits;
mod messages;

use std::net::SocketAddr;

use aquifer_fabric::verbs::{self, VerbsTarget};
use aquifer_fabric::{Endpoint, EndpointError, Identity, Target};
use harness::{ENDPOINTS_MAX, Harness, KEY, LIMITS, REGIONS_MAX, WINDOWS_MAX};

conformance!(VerbsHarness);

/// Over the RDMA device with the address that the environment names.
struct VerbsHarness {
    target: Option<VerbsTarget>,
    address: SocketAddr,
}

impl Harness for VerbsHarness {
    fn start() -> Self {
        let options = verbs::Options {
            endpoints_max: ENDPOINTS_MAX,
            regions_max: REGIONS_MAX,
            windows_max: WINDOWS_MAX,
            limits: LIMITS,
        };
        let address =
            std::env::var("AQUIFER_VERBS_ADDRESS").expect("AQUIFER_VERBS_ADDRESS is that of an RDMA device");
        let address = SocketAddr::new(address.parse().expect("an IP address"), 0);
        let target = VerbsTarget::listen(address, &KEY, options).unwrap();
        Self { address: target.address(), target: Some(target) }
    }

    fn target(&self) -> &dyn Target {
        self.target.as_ref().unwrap()
    }

    fn connect(&self, who: Identity) -> Result<Box<dyn Endpoint>, EndpointError> {
        verbs::connect(self.address, &KEY, who)
    }

    fn settle(&self) {
        std::thread::yield_now();
    }

    fn kill_target(&mut self) {
        self.target = None;
    }
}
