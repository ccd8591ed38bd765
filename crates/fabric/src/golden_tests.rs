//! Golden texts that initiators parse: two refusals and the names of the providers.
//! A changed golden file needs new versions in `docs/formats/fabric-tcp.md` and
//! `docs/formats/fabric-shm.md`: an older initiator does not recognise other words.

use aquifer_tests_support::golden;

use crate::FabricAddress;
use crate::handshake::GOING_AWAY;
use crate::handshake::refusal::is_fence_refusal;
use crate::tables::TargetTables;
use crate::target::{Host, Identity, Tenant};
use crate::work::EndpointError;

#[test]
fn golden_refusals_that_initiators_know() {
    let mut golden = golden!("refusals");
    let refused = |reason: &str| EndpointError::Refused { address: "a".into(), reason: reason.into() };
    golden.text("going away", GOING_AWAY);
    assert!(refused(GOING_AWAY).is_target_away() && !refused("full").is_target_away());
    let mut tables = TargetTables::new(1, 1, 1);
    tables.fence(Host(7), 9);
    let who = Identity { host: Host(7), epoch: 8, tenant: Tenant(0) };
    let fenced = tables.refusal(who).expect("it is fenced").to_string();
    golden.text("fenced", &fenced);
    assert!(is_fence_refusal(&fenced) && refused(&fenced).is_fence() && !refused(GOING_AWAY).is_fence());
    golden.check();
}

#[test]
fn golden_names_of_providers() {
    let mut golden = golden!("reach");
    let address = "10.0.0.1:7400".parse().expect("it is an address");
    let shm = FabricAddress::Shm("/run/node-1.sock".into());
    for reach in [shm, FabricAddress::Tcp(address), FabricAddress::Verbs(address)] {
        let (provider, address) = (reach.provider(), reach.address());
        assert_eq!(FabricAddress::parse(provider, &address), Ok(reach));
        golden.text(provider, &address);
    }
    golden.check();
}
