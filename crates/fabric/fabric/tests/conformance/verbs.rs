//! The suite over the RDMA device with the IP address in `AQUIFER_VERBS_ADDRESS`. If
//! `AQUIFER_INITIATORS` names the address of `initiators-verbs` on another machine, the suite's
//! endpoints are there.

#[macro_use]
mod suite;

mod afar;
mod atomics;
mod data;
mod death;
mod harness;
mod keys;
mod limits;
mod messages;
mod remap;

use std::net::SocketAddr;
use std::sync::Arc;

use aquifer_fabric::handshake::Credential;
use aquifer_fabric::{
    Access, Admission, ClusterKey, Endpoint, EndpointError, Identity, Key, Memory, Region, Scope, Target,
    TargetError, Tenant, Ticket, UnixClock, WindowSpec, WorkError,
};
use aquifer_fabric_verbs::{self as verbs, VerbsEndpoint, VerbsTarget};
use harness::{ENDPOINTS_MAX, Harness, KEY, LIMITS, REGIONS_MAX, WHO, WINDOWS_MAX};

mod device {
    conformance!(super::VerbsHarness);
}

/// The RDMA device whose address the environment names.
struct VerbsHarness {
    target: Option<VerbsTarget>,
    address: SocketAddr,
}

impl VerbsHarness {
    fn admitting(admission: Admission) -> Self {
        let options = verbs::VerbsOptions {
            endpoints_max: ENDPOINTS_MAX,
            regions_max: REGIONS_MAX,
            windows_max: WINDOWS_MAX,
            limits: LIMITS,
            admission,
            clock: UnixClock::new(|| NOW_S),
        };
        let address =
            std::env::var("AQUIFER_VERBS_ADDRESS").expect("AQUIFER_VERBS_ADDRESS is that of an RDMA device");
        let address = SocketAddr::new(address.parse().expect("an IP address"), 0);
        let target = VerbsTarget::listen(address, &KEY, options).unwrap();
        Self { address: target.address(), target: Some(target) }
    }
}

impl Harness for VerbsHarness {
    fn start() -> Self {
        Self::admitting(Admission::Members)
    }

    fn target(&self) -> &dyn Target {
        self.target.as_ref().unwrap()
    }

    fn connect(&self, who: Identity) -> Result<Box<dyn Endpoint>, EndpointError> {
        match std::env::var("AQUIFER_INITIATORS") {
            Ok(initiators) => afar::connect(initiators.parse().expect("an address"), self.address, who),
            Err(_) => verbs::connect(self.address, &KEY, who),
        }
    }

    fn kill_target(&mut self) {
        self.target = None;
    }
}

/// The time at the target.
const NOW_S: u64 = 1_800_000_000;

#[test]
fn a_ticket_admits_to_its_service_until_it_expires() {
    let harness = VerbsHarness::admitting(Admission::Tickets(3));
    let good =
        Ticket { tenant: WHO.tenant, host: WHO.host, epoch: WHO.epoch, expiry_s: NOW_S + 1, service: 3 };
    let connect = |ticket: Ticket, key: &ClusterKey, identity| {
        let credential = Credential::Ticket(ticket, ticket.secret(key));
        VerbsEndpoint::connect_by(harness.address, &credential, identity)
    };
    let (_memory, region) = harness.region(Access::ALL, Scope::Tenant(WHO.tenant));
    let mut client = harness.client_of(Box::new(connect(good, &KEY, WHO).unwrap()));
    assert_eq!(client.read(region.base, region.key, 64), Ok(64));
    let other = Identity { tenant: Tenant(WHO.tenant.0 + 1), ..WHO };
    for (ticket, key, identity) in [
        (Ticket { expiry_s: NOW_S, ..good }, &KEY, WHO),
        (Ticket { service: 4, ..good }, &KEY, WHO),
        (good, &ClusterKey([0; 32]), WHO),
        (good, &KEY, other),
    ] {
        assert!(connect(ticket, key, identity).is_err(), "{ticket:?}");
    }
    assert!(VerbsEndpoint::connect(harness.address, &KEY, WHO).is_err(), "the cluster key is no ticket");
}

/// The prefix of the names of Soft-RoCE devices.
const SOFT: &str = "rxe";

/// A device must enforce rights and bounds against a hostile initiator, which always runs on this
/// machine. Soft-RoCE does not check bounds, so there the second half is expected to fail.
#[test]
fn a_device_enforces_windows_against_hostile_initiators() {
    let harness = VerbsHarness::start();
    let (_memory, region) = harness.region(Access::ALL, Scope::Anyone);
    let range = region.base + 4096..region.base + 8192;
    let window = WindowSpec { range: range.clone(), access: Access::READ, scope: Scope::Anyone };
    let key = harness.target().bind(&window).unwrap();
    let mut endpoint = VerbsEndpoint::connect(harness.address, &KEY, WHO).unwrap();
    endpoint.skip_local_checks();
    let mut client = harness.client_of(Box::new(endpoint));
    assert_eq!(client.read(range.start, key, 64), Ok(64));
    assert_eq!(
        client.write(range.start, key, 64),
        Err(WorkError::RemoteAccess),
        "the window is for READ only"
    );
    assert_eq!(client.read(range.start, key, 64), Ok(64));
    let is_soft = verbs::devices().is_ok_and(|found| found.iter().any(|caps| caps.name.starts_with(SOFT)));
    for addr in [range.end, range.start - 64, range.end - 32] {
        let outcome = client.read(addr, key, 64);
        if is_soft && outcome == Ok(64) {
            println!("expected to fail on Soft-RoCE, and failed: a READ beyond its window was served");
        } else {
            assert_eq!(outcome, Err(WorkError::RemoteAccess), "a READ beyond its window");
        }
    }
}
