//! Golden texts that initiators parse: two refusals and the names of the providers.
//! A changed golden file needs new versions in `docs/formats/fabric-tcp.md` and
//! `docs/formats/fabric-shm.md`: an older initiator does not recognise other words.

use aquifer_tests_support::golden;

use crate::Reach;
use crate::handshake::LEAVING;
use crate::tables::{Tables, is_fence};
use crate::target::{Host, Identity, Tenant};
use crate::work::EndpointError;

#[test]
fn golden_refusals_that_initiators_know() {
    let mut golden = golden!("refusals");
    let refused = |reason: &str| EndpointError::Refused { address: "a".into(), reason: reason.into() };
    golden.text("going away", LEAVING);
    assert!(refused(LEAVING).is_of_absence() && !refused("full").is_of_absence());
    let mut tables = Tables::new(1, 1, 1);
    tables.fence(Host(7), 9);
    let who = Identity { host: Host(7), epoch: 8, tenant: Tenant(0) };
    let fenced = tables.refusal(who).expect("it is fenced");
    golden.text("fenced", &fenced);
    assert!(is_fence(&fenced) && refused(&fenced).is_of_fence() && !refused(LEAVING).is_of_fence());
    golden.check();
}

#[test]
fn golden_names_of_providers() {
    let mut golden = golden!("reach");
    let address = "10.0.0.1:7400".parse().expect("it is an address");
    let shm = Reach::Shm("/run/node-1.sock".into());
    for reach in [shm, Reach::Tcp(address), Reach::Verbs(address)] {
        let (provider, address) = (reach.provider(), reach.address());
        assert_eq!(Reach::parse(provider, &address), Ok(reach));
        golden.text(provider, &address);
    }
    golden.check();
}
