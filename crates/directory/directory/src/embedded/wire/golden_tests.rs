//! Golden bytes of `docs/formats/directory.md`: the protocol of the embedded directory.
//!
//! A changed golden file needs a new [`VERSION`].

use aquifer_tests_support::{Golden, golden};

use super::*;
use crate::embedded::frame;

const NUMBER: u64 = 0x0102_0304_0506_0708;
const OTHER: u64 = 0x1112_1314_1516_1718;

/// All limits, in the order of their numbers in the protocol.
const LIMIT_KINDS: [LimitKind; 11] = [
    LimitKind::KeyBytes,
    LimitKind::ValueBytes,
    LimitKind::ListEntries,
    LimitKind::ListBytes,
    LimitKind::TransactionParts,
    LimitKind::TransactionBytes,
    LimitKind::Keys,
    LimitKind::StoreBytes,
    LimitKind::Leases,
    LimitKind::TtlMin,
    LimitKind::TtlMax,
];

fn lease() -> Option<LeaseId> {
    Some(LeaseId(0x2122_2324_2526_2728))
}

fn entry(lease: Option<LeaseId>) -> DirectoryEntry {
    DirectoryEntry { key: "nodes/1".into(), value: vec![0, 0xff], version: NUMBER, lease }
}

fn requests() -> Vec<(&'static str, DirectoryRequest)> {
    let transaction = Transaction {
        compares: vec![
            Compare { key: "a".into(), version: 0 },
            Compare { key: "bc".into(), version: NUMBER },
        ],
        operations: vec![
            KeyOperation::Put { key: "a".into(), value: vec![1, 2, 3], lease: lease() },
            KeyOperation::Put { key: "bc".into(), value: Vec::new(), lease: None },
            KeyOperation::Delete { key: "é".into() },
        ],
    };
    vec![
        ("get", DirectoryRequest::Get("nodes/1".into())),
        ("list", DirectoryRequest::List("nodes/".into())),
        ("transaction", DirectoryRequest::Transaction(transaction)),
        ("grant", DirectoryRequest::Grant(Duration::from_millis(NUMBER))),
        ("keep alive", DirectoryRequest::KeepAlive(LeaseId(NUMBER))),
        ("revoke", DirectoryRequest::Revoke(LeaseId(NUMBER))),
        ("watch", DirectoryRequest::Watch { prefix: "nodes/".into(), from_revision: NUMBER }),
    ]
}

fn errors() -> Vec<(&'static str, DirectoryError)> {
    let (one, two) = ("one".to_owned(), "two".to_owned());
    vec![
        ("lease gone", DirectoryError::LeaseGone(LeaseId(NUMBER))),
        ("compacted", DirectoryError::Compacted { asked: NUMBER, oldest: OTHER }),
        ("invalid key", DirectoryError::InvalidKey { key: one.clone(), why: two.clone() }),
        ("changed twice", DirectoryError::ChangedTwice { key: one.clone() }),
        ("storage", DirectoryError::Storage { path: one.clone(), cause: two.clone() }),
        ("protocol", DirectoryError::Protocol { why: one.clone() }),
        ("taken", DirectoryError::Taken { key: one.clone() }),
        ("format", DirectoryError::Format { path: one.clone(), why: two.clone() }),
        ("unavailable", DirectoryError::Unavailable { address: one.clone(), cause: two.clone() }),
        ("refused", DirectoryError::Refused { address: one, why: two }),
    ]
}

fn responses() -> Vec<(&'static str, DirectoryResponse)> {
    let event = |kind| DirectoryResponse::Event(WatchEvent { revision: NUMBER, key: "nodes/1".into(), kind });
    let listing = Listing { revision: NUMBER, entries: vec![entry(None), entry(lease())] };
    vec![
        ("done", DirectoryResponse::Done),
        ("no entry", DirectoryResponse::Entry(None)),
        ("entry", DirectoryResponse::Entry(Some(entry(None)))),
        ("entry with a lease", DirectoryResponse::Entry(Some(entry(lease())))),
        ("listing", DirectoryResponse::Listing(listing)),
        ("committed", DirectoryResponse::Outcome(TransactionOutcome::Committed { revision: NUMBER })),
        (
            "conflict",
            DirectoryResponse::Outcome(TransactionOutcome::Conflict { key: "a".into(), version: NUMBER }),
        ),
        ("lease", DirectoryResponse::Lease(Lease { id: LeaseId(NUMBER), epoch: OTHER })),
        ("put", event(WatchEventKind::Put { value: vec![7], lease: None })),
        ("put with a lease", event(WatchEventKind::Put { value: vec![7], lease: lease() })),
        ("deleted", event(WatchEventKind::Delete)),
    ]
}

fn add(golden: &mut Golden, name: &str, response: &DirectoryResponse) {
    let bytes = response.encode();
    assert_eq!(DirectoryResponse::decode(&bytes).as_ref(), Some(response), "{name}");
    golden.bytes(name, &bytes);
}

#[test]
fn golden_requests_and_responses() {
    let mut golden = golden!("wire");
    golden.bytes("hello of a client", &hello(None));
    golden.bytes("hello of a server", &hello(Some("")));
    golden.bytes("hello of a server that refuses", &hello(Some("why")));
    assert_eq!(check_client_hello(&hello(None)), Ok(()));
    assert_eq!(check_server_hello(&hello(Some(""))), Ok(()));
    assert_eq!(check_server_hello(&hello(Some("why"))), Err(DirectoryHelloError::Refused("why".into())));
    for (name, request) in requests() {
        let bytes = request.encode();
        assert_eq!(DirectoryRequest::decode(&bytes), Some(request), "{name}");
        golden.bytes(name, &bytes);
    }
    for (name, response) in responses() {
        add(&mut golden, name, &response);
    }
    for (name, error) in errors() {
        add(&mut golden, name, &DirectoryResponse::Error(error));
    }
    for (number, kind) in (0..).zip(LIMIT_KINDS) {
        assert_eq!(LimitKind::ALL[number], kind);
        let error = DirectoryError::Limit { kind, got: NUMBER };
        add(&mut golden, &format!("limit {number}"), &DirectoryResponse::Error(error));
    }
    let mut framed = Vec::new();
    frame::write(&mut framed, b"body").expect("a vector has no limit");
    assert_eq!(
        frame::read(&mut framed.as_slice()).expect("the frame is complete").as_deref(),
        Some(&b"body"[..])
    );
    golden.bytes("frame", &framed);
    golden.text("longest frame", &frame::FRAME_BYTES_MAX.to_string());
    golden.check();
}
