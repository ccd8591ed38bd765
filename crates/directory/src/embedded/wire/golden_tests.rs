//! Golden bytes of `docs/formats/directory.md`: the protocol of the embedded directory.
//! A changed golden file needs a new version there ([`VERSION`]).

use aquifer_tests_support::{Golden, golden};

use super::*;
use crate::embedded::frame;

const NUMBER: u64 = 0x0102_0304_0506_0708;
const OTHER: u64 = 0x1112_1314_1516_1718;

/// By their numbers on the wire.
const BOUNDS: [Bound; 11] = [
    Bound::KeyBytes,
    Bound::ValueBytes,
    Bound::ListEntries,
    Bound::ListBytes,
    Bound::TransactionParts,
    Bound::TransactionBytes,
    Bound::Keys,
    Bound::StoreBytes,
    Bound::Leases,
    Bound::TtlMin,
    Bound::TtlMax,
];

fn lease() -> Option<LeaseId> {
    Some(LeaseId(0x2122_2324_2526_2728))
}

fn entry(lease: Option<LeaseId>) -> Entry {
    Entry { key: "nodes/1".into(), value: vec![0, 0xff], version: NUMBER, lease }
}

fn requests() -> Vec<(&'static str, Request)> {
    let transaction = Transaction {
        compares: vec![
            Compare { key: "a".into(), version: 0 },
            Compare { key: "bc".into(), version: NUMBER },
        ],
        operations: vec![
            Operation::Put { key: "a".into(), value: vec![1, 2, 3], lease: lease() },
            Operation::Put { key: "bc".into(), value: Vec::new(), lease: None },
            Operation::Delete { key: "é".into() },
        ],
    };
    vec![
        ("get", Request::Get("nodes/1".into())),
        ("list", Request::List("nodes/".into())),
        ("transaction", Request::Transaction(transaction)),
        ("grant", Request::Grant(Duration::from_millis(NUMBER))),
        ("keep alive", Request::KeepAlive(LeaseId(NUMBER))),
        ("revoke", Request::Revoke(LeaseId(NUMBER))),
        ("watch", Request::Watch { prefix: "nodes/".into(), from_revision: NUMBER }),
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

fn responses() -> Vec<(&'static str, Response)> {
    let event = |kind| Response::Event(Event { revision: NUMBER, key: "nodes/1".into(), kind });
    let listing = Listing { revision: NUMBER, entries: vec![entry(None), entry(lease())] };
    vec![
        ("done", Response::Done),
        ("no entry", Response::Entry(None)),
        ("entry", Response::Entry(Some(entry(None)))),
        ("entry with a lease", Response::Entry(Some(entry(lease())))),
        ("listing", Response::Listing(listing)),
        ("committed", Response::Outcome(TransactionOutcome::Committed { revision: NUMBER })),
        ("conflict", Response::Outcome(TransactionOutcome::Conflict { key: "a".into(), version: NUMBER })),
        ("lease", Response::Lease(Lease { id: LeaseId(NUMBER), epoch: OTHER })),
        ("put", event(EventKind::Put { value: vec![7], lease: None })),
        ("put with a lease", event(EventKind::Put { value: vec![7], lease: lease() })),
        ("deleted", event(EventKind::Delete)),
    ]
}

fn add(golden: &mut Golden, name: &str, response: &Response) {
    let bytes = response.encode();
    assert_eq!(Response::decode(&bytes).as_ref(), Some(response), "{name}");
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
    assert_eq!(check_server_hello(&hello(Some("why"))), Err("why".into()));
    for (name, request) in requests() {
        let bytes = request.encode();
        assert_eq!(Request::decode(&bytes), Some(request), "{name}");
        golden.bytes(name, &bytes);
    }
    for (name, response) in responses() {
        add(&mut golden, name, &response);
    }
    for (name, error) in errors() {
        add(&mut golden, name, &Response::Error(error));
    }
    for (number, bound) in (0..).zip(BOUNDS) {
        assert_eq!(Bound::ALL[number], bound);
        let error = DirectoryError::Limit { bound, got: NUMBER };
        add(&mut golden, &format!("limit {number}"), &Response::Error(error));
    }
    let mut framed = Vec::new();
    frame::write(&mut framed, b"body").expect("a vector takes all");
    assert_eq!(frame::read(&mut framed.as_slice()).expect("it is whole").as_deref(), Some(&b"body"[..]));
    golden.bytes("frame", &framed);
    golden.text("longest frame", &frame::FRAME_BYTES_MAX.to_string());
    golden.check();
}
