//! Golden codes of refusals and names of the providers.
//! A changed golden file needs new versions in `docs/formats/fabric-tcp.md` and
//! `docs/formats/fabric-shm.md`.

use aquifer_tests_support::golden;

use crate::FabricAddress;
use crate::handshake::{Refusal, RefusalCode, RefusalReason};
use crate::target::{Host, Tenant};
use crate::work::EndpointError;

#[test]
fn golden_refusals() {
    let mut golden = golden!("refusals");
    let host = Host(7);
    let reasons = [
        RefusalReason::GoingAway,
        RefusalReason::TryAgain,
        RefusalReason::Fenced { host, fenced: 9, epoch: 8 },
        RefusalReason::Full(3),
        RefusalReason::TenantFull { tenant: Tenant(5), limit: 3 },
        RefusalReason::UnknownSession,
        RefusalReason::TicketExpired(3),
        RefusalReason::OtherIdentity,
        RefusalReason::OtherUser { uid: 1, allowed: 0 },
    ];
    for reason in &reasons {
        golden.text(&reason.to_string(), &(reason.code() as u16).to_string());
        let refusal = Refusal::parse(&reason.to_refusal().encode()).expect("the refusal has a code");
        assert_eq!(refusal, reason.to_refusal());
        let error = EndpointError::Refused { address: "a".into(), refusal };
        assert_eq!(error.is_target_away(), matches!(reason, RefusalReason::GoingAway), "{reason}");
        assert_eq!(error.is_fence(), matches!(reason, RefusalReason::Fenced { .. }), "{reason}");
    }
    assert_eq!(RefusalCode::WrongKey as u16, 6);
    assert_eq!(Refusal::parse(&[99, 0, b'x']), Some(Refusal::other("x")), "a later code");
    assert_eq!(Refusal::parse(&[1]), None);
    golden.check();
}

#[test]
fn golden_names_of_providers() {
    let mut golden = golden!("reach");
    let address = "10.0.0.1:7400".parse().expect("the text is an address");
    let shm = FabricAddress::Shm("/run/node-1.sock".into());
    for reach in [shm, FabricAddress::Tcp(address), FabricAddress::Verbs(address)] {
        let (provider, address) = (reach.provider(), reach.address());
        assert_eq!(FabricAddress::parse(provider, &address), Ok(reach));
        golden.text(provider, &address);
    }
    golden.check();
}
