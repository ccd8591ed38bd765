use proptest::prelude::*;

use super::*;

fn text() -> impl Strategy<Value = String> {
    "[a-zé/0-9]{0,12}"
}

fn value() -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec(any::<u8>(), 0..20)
}

fn lease() -> impl Strategy<Value = Option<LeaseId>> {
    proptest::option::of(any::<u64>().prop_map(LeaseId))
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        (text(), value(), lease()).prop_map(|(key, value, lease)| Operation::Put { key, value, lease }),
        text().prop_map(|key| Operation::Delete { key }),
    ]
}

fn transaction() -> impl Strategy<Value = Transaction> {
    let compare = (text(), any::<u64>()).prop_map(|(key, version)| Compare { key, version });
    (proptest::collection::vec(compare, 0..4), proptest::collection::vec(operation(), 0..4))
        .prop_map(|(compares, operations)| Transaction { compares, operations })
}

fn request() -> impl Strategy<Value = Request> {
    prop_oneof![
        text().prop_map(Request::Get),
        text().prop_map(Request::List),
        transaction().prop_map(Request::Transaction),
        any::<u64>().prop_map(|ms| Request::Grant(Duration::from_millis(ms))),
        any::<u64>().prop_map(|id| Request::KeepAlive(LeaseId(id))),
        any::<u64>().prop_map(|id| Request::Revoke(LeaseId(id))),
        (text(), any::<u64>()).prop_map(|(prefix, from_revision)| Request::Watch { prefix, from_revision }),
    ]
}

fn entry() -> impl Strategy<Value = Entry> {
    (text(), value(), any::<u64>(), lease()).prop_map(|(key, value, version, lease)| Entry {
        key,
        value,
        version,
        lease,
    })
}

fn error() -> impl Strategy<Value = DirectoryError> {
    prop_oneof![
        any::<u64>().prop_map(|id| DirectoryError::LeaseGone(LeaseId(id))),
        any::<(u64, u64)>().prop_map(|(asked, oldest)| DirectoryError::Compacted { asked, oldest }),
        (proptest::sample::select(Bound::ALL.to_vec()), any::<u64>())
            .prop_map(|(bound, got)| DirectoryError::Limit { bound, got }),
        (text(), text()).prop_map(|(key, why)| DirectoryError::InvalidKey { key, why }),
        text().prop_map(|key| DirectoryError::ChangedTwice { key }),
        (text(), text()).prop_map(|(path, cause)| DirectoryError::Storage { path, cause }),
        text().prop_map(|why| DirectoryError::Protocol { why }),
        text().prop_map(|key| DirectoryError::Taken { key }),
        (text(), text()).prop_map(|(path, why)| DirectoryError::Format { path, why }),
        (text(), text()).prop_map(|(address, cause)| DirectoryError::Unavailable { address, cause }),
        (text(), text()).prop_map(|(address, why)| DirectoryError::Refused { address, why }),
    ]
}

fn event() -> impl Strategy<Value = Event> {
    let kind = prop_oneof![
        (value(), lease()).prop_map(|(value, lease)| EventKind::Put { value, lease }),
        Just(EventKind::Delete),
    ];
    (any::<u64>(), text(), kind).prop_map(|(revision, key, kind)| Event { revision, key, kind })
}

fn response() -> impl Strategy<Value = Response> {
    prop_oneof![
        Just(Response::Done),
        proptest::option::of(entry()).prop_map(Response::Entry),
        (any::<u64>(), proptest::collection::vec(entry(), 0..4))
            .prop_map(|(revision, entries)| Response::Listing(Listing { revision, entries })),
        any::<u64>().prop_map(|revision| Response::Outcome(TransactionOutcome::Committed { revision })),
        (text(), any::<u64>())
            .prop_map(|(key, version)| Response::Outcome(TransactionOutcome::Conflict { key, version })),
        any::<(u64, u64)>().prop_map(|(id, epoch)| Response::Lease(Lease { id: LeaseId(id), epoch })),
        event().prop_map(Response::Event),
        error().prop_map(Response::Error),
    ]
}

/// All parsers at once: none may panic, and what is understood must be the only way to say it.
fn parse_everything(bytes: &[u8]) {
    if let Some(request) = Request::decode(bytes) {
        assert_eq!(request.encode(), bytes);
    }
    if let Some(response) = Response::decode(bytes) {
        assert_eq!(response.encode(), bytes);
    }
    let _hello = check_client_hello(bytes);
    let _hello = check_server_hello(bytes);
}

proptest! {
    #[test]
    fn requests_survive_the_wire(request in request()) {
        prop_assert_eq!(Request::decode(&request.encode()), Some(request));
    }

    #[test]
    fn responses_survive_the_wire(response in response()) {
        prop_assert_eq!(Response::decode(&response.encode()), Some(response));
    }

    #[test]
    fn cut_or_lengthened_messages_are_refused(request in request(), response in response(), at in any::<prop::sample::Index>()) {
        for bytes in [request.encode(), response.encode()] {
            let cut = &bytes[..at.index(bytes.len())];
            prop_assert_eq!(Request::decode(cut).map(|request| request.encode()).filter(|bytes| bytes != cut), None);
        }
        let whole = request.encode();
        prop_assert_eq!(Request::decode(&whole[..whole.len() - 1]), None);
        prop_assert_eq!(Request::decode(&[whole, vec![0]].concat()), None);
    }

    #[test]
    fn mutated_messages_never_panic(
        request in request(),
        response in response(),
        flips in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        for mut bytes in [request.encode(), response.encode()] {
            for (at, value) in &flips {
                let at = at.index(bytes.len());
                bytes[at] = *value;
            }
            parse_everything(&bytes);
        }
    }

    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        parse_everything(&bytes);
    }
}

/// Files of the corpus that one of the parsers understands. All others are damaged in the way that their names say.
const UNDERSTOOD: [&str; 3] = ["get", "hello", "transaction"];

#[test]
fn the_corpus_is_parsed_as_its_names_say() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/corpus/wire");
    let mut understood = Vec::new();
    for file in std::fs::read_dir(folder).unwrap() {
        let file = file.unwrap();
        let bytes = std::fs::read(file.path()).unwrap();
        parse_everything(&bytes);
        if Request::decode(&bytes).is_some()
            || Response::decode(&bytes).is_some()
            || check_client_hello(&bytes).is_ok()
        {
            understood.push(file.file_name().into_string().unwrap());
        }
    }
    understood.sort();
    assert_eq!(understood, UNDERSTOOD);
}

#[test]
fn an_announced_count_reserves_nothing_and_is_bounded() {
    let listing = |count: u32| [&[3][..], &[0; 8], &count.to_le_bytes()].concat();
    assert_eq!(Response::decode(&listing(u32::MAX)), None);
    assert_eq!(Response::decode(&listing(1)), None);
    assert!(Response::decode(&listing(0)).is_some());
}

#[test]
fn hellos_say_what_is_wrong() {
    assert_eq!(check_client_hello(&hello(None)), Ok(()));
    assert_eq!(check_server_hello(&hello(Some(""))), Ok(()));
    assert_eq!(check_server_hello(&hello(Some("full"))), Err("full".to_owned()));
    let mut newer = hello(None);
    newer[8] = 2;
    assert!(check_client_hello(&newer).unwrap_err().contains("version 2"));
    let mut newer = hello(Some(""));
    newer[8] = 2;
    assert!(check_server_hello(&newer).unwrap_err().contains("version 2"));
    assert!(check_client_hello(b"GET / HTTP/1.0\r\n").unwrap_err().contains("something else"));
    assert!(check_server_hello(b"RFB 003.008\n").unwrap_err().contains("not Aquifer"));
    assert!(check_client_hello(&hello(None)[..10]).unwrap_err().contains("length"));
    assert!(check_server_hello(&hello(Some("why"))[..14]).unwrap_err().contains("cut"));
}
