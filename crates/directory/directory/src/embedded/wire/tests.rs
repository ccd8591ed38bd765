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

fn operation() -> impl Strategy<Value = KeyOperation> {
    prop_oneof![
        (text(), value(), lease()).prop_map(|(key, value, lease)| KeyOperation::Put { key, value, lease }),
        text().prop_map(|key| KeyOperation::Delete { key }),
    ]
}

fn transaction() -> impl Strategy<Value = Transaction> {
    let compare = (text(), any::<u64>()).prop_map(|(key, version)| Compare { key, version });
    (proptest::collection::vec(compare, 0..4), proptest::collection::vec(operation(), 0..4))
        .prop_map(|(compares, operations)| Transaction { compares, operations })
}

fn request() -> impl Strategy<Value = DirectoryRequest> {
    prop_oneof![
        text().prop_map(DirectoryRequest::Get),
        text().prop_map(DirectoryRequest::List),
        transaction().prop_map(DirectoryRequest::Transaction),
        any::<u64>().prop_map(|ms| DirectoryRequest::Grant(Duration::from_millis(ms))),
        any::<u64>().prop_map(|id| DirectoryRequest::KeepAlive(LeaseId(id))),
        any::<u64>().prop_map(|id| DirectoryRequest::Revoke(LeaseId(id))),
        (text(), any::<u64>())
            .prop_map(|(prefix, from_revision)| DirectoryRequest::Watch { prefix, from_revision }),
    ]
}

fn entry() -> impl Strategy<Value = DirectoryEntry> {
    (text(), value(), any::<u64>(), lease()).prop_map(|(key, value, version, lease)| DirectoryEntry {
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
        (proptest::sample::select(LimitKind::ALL.to_vec()), any::<u64>())
            .prop_map(|(kind, got)| DirectoryError::Limit { kind, got }),
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

fn event() -> impl Strategy<Value = WatchEvent> {
    let kind = prop_oneof![
        (value(), lease()).prop_map(|(value, lease)| WatchEventKind::Put { value, lease }),
        Just(WatchEventKind::Delete),
    ];
    (any::<u64>(), text(), kind).prop_map(|(revision, key, kind)| WatchEvent { revision, key, kind })
}

fn response() -> impl Strategy<Value = DirectoryResponse> {
    prop_oneof![
        Just(DirectoryResponse::Done),
        proptest::option::of(entry()).prop_map(DirectoryResponse::Entry),
        (any::<u64>(), proptest::collection::vec(entry(), 0..4))
            .prop_map(|(revision, entries)| DirectoryResponse::Listing(Listing { revision, entries })),
        any::<u64>()
            .prop_map(|revision| DirectoryResponse::Outcome(TransactionOutcome::Committed { revision })),
        (text(), any::<u64>()).prop_map(|(key, version)| DirectoryResponse::Outcome(
            TransactionOutcome::Conflict { key, version }
        )),
        any::<(u64, u64)>()
            .prop_map(|(id, epoch)| DirectoryResponse::Lease(Lease { id: LeaseId(id), epoch })),
        event().prop_map(DirectoryResponse::Event),
        error().prop_map(DirectoryResponse::Error),
    ]
}

/// Runs all parsers: none may panic, and a message has one encoding only.
fn parse_everything(bytes: &[u8]) {
    if let Some(request) = DirectoryRequest::decode(bytes) {
        assert_eq!(request.encode(), bytes);
    }
    if let Some(response) = DirectoryResponse::decode(bytes) {
        assert_eq!(response.encode(), bytes);
    }
    let _hello = check_client_hello(bytes);
    let _hello = check_server_hello(bytes);
}

proptest! {
    #[test]
    fn requests_survive_encoding(request in request()) {
        prop_assert_eq!(DirectoryRequest::decode(&request.encode()), Some(request));
    }

    #[test]
    fn responses_survive_encoding(response in response()) {
        prop_assert_eq!(DirectoryResponse::decode(&response.encode()), Some(response));
    }

    #[test]
    fn cut_or_lengthened_messages_are_refused(
        request in request(),
        response in response(),
        at in any::<prop::sample::Index>(),
    ) {
        for bytes in [request.encode(), response.encode()] {
            let cut = &bytes[..at.index(bytes.len())];
            let decoded = DirectoryRequest::decode(cut).map(|request| request.encode());
            prop_assert_eq!(decoded.filter(|bytes| bytes != cut), None);
        }
        let whole = request.encode();
        prop_assert_eq!(DirectoryRequest::decode(&whole[..whole.len() - 1]), None);
        prop_assert_eq!(DirectoryRequest::decode(&[whole, vec![0]].concat()), None);
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

/// Files of the corpus that are valid. The names of all others say how they are damaged.
const VALID: [&str; 3] = ["get", "hello", "transaction"];

#[test]
fn the_corpus_is_parsed_as_its_names_say() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/corpus/wire");
    let mut valid = Vec::new();
    for file in std::fs::read_dir(folder).unwrap() {
        let file = file.unwrap();
        let bytes = std::fs::read(file.path()).unwrap();
        parse_everything(&bytes);
        if DirectoryRequest::decode(&bytes).is_some()
            || DirectoryResponse::decode(&bytes).is_some()
            || check_client_hello(&bytes).is_ok()
        {
            valid.push(file.file_name().into_string().unwrap());
        }
    }
    valid.sort();
    assert_eq!(valid, VALID);
}

#[test]
fn a_count_reserves_no_memory_and_has_a_limit() {
    let listing = |count: u32| [&[3][..], &[0; 8], &count.to_le_bytes()].concat();
    assert_eq!(DirectoryResponse::decode(&listing(u32::MAX)), None);
    assert_eq!(DirectoryResponse::decode(&listing(1)), None);
    assert!(DirectoryResponse::decode(&listing(0)).is_some());
}

#[test]
fn a_refused_hello_names_the_reason() {
    assert_eq!(check_client_hello(&hello(None)), Ok(()));
    assert_eq!(check_server_hello(&hello(Some(""))), Ok(()));
    assert_eq!(
        check_server_hello(&hello(Some("full"))),
        Err(DirectoryHelloError::Refused("full".to_owned()))
    );
    let mut newer = hello(None);
    newer[8] = 2;
    assert_eq!(check_client_hello(&newer), Err(DirectoryHelloError::ClientVersion(2)));
    let mut newer = hello(Some(""));
    newer[8] = 2;
    assert_eq!(check_server_hello(&newer), Err(DirectoryHelloError::ServerVersion(2)));
    assert_eq!(check_client_hello(b"GET / HTTP/1.0\r\n"), Err(DirectoryHelloError::ForeignClient));
    assert_eq!(check_server_hello(b"RFB 003.008\n"), Err(DirectoryHelloError::ForeignServer));
    assert_eq!(check_client_hello(&hello(None)[..10]), Err(DirectoryHelloError::ClientLength));
    assert_eq!(check_server_hello(&hello(Some("why"))[..14]), Err(DirectoryHelloError::ServerLength));
}
