//! Messages of the directory's socket, and the records that the directory stores.

use std::time::Duration;

use aquifer_directory::embedded::frame::{self, FRAME_BYTES_MAX};
use aquifer_directory::embedded::wire::{
    DirectoryRequest, DirectoryResponse, check_client_hello, check_server_hello, hello,
};
use aquifer_directory::names::{
    AgentRecord, HolderRecord, MemoryHolder, NodeLife, NodeRecord, RecalledRecord, RecalledRun,
    RequestedMemory, ResizeBlocker, agent_key, decode, encode, host_of_agent_key,
};
use aquifer_directory::{
    Compare, DirectoryEntry, DirectoryError, KeyOperation, Lease, LeaseId, Listing, Mutation, Transaction,
    TransactionOutcome, WatchEvent, WatchEventKind, limits,
};
use aquifer_fabric::FabricAddress;
use aquifer_mutation::Mutations;

use crate::Target;

pub(crate) const WIRE: Target = Target {
    name: "directory-wire",
    run: read_stream,
    seeds: streams,
    with_mutation: |work| Mutation::AcceptAnyLeaseTag.while_active(work),
};

pub(crate) const RECORDS: Target = Target {
    name: "directory-records",
    run: parse_record,
    seeds: records,
    with_mutation: |work| Mutation::AcceptOtherDigits.while_active(work),
};

/// Reads frames from a stream in the two ways of the product, and parses each as a message.
fn read_stream(bytes: &[u8]) -> bool {
    let (mut stream, mut received) = (bytes, bytes.to_vec());
    let mut is_valid = true;
    loop {
        let split = frame::split_first(&mut received);
        match (frame::read(&mut stream), split) {
            (Ok(Some(body)), Ok(Some(same))) => {
                assert!(body == same && body.len() <= FRAME_BYTES_MAX);
                assert!(stream == received);
                is_valid &= parse_message(&body);
            }
            (Ok(None), Ok(None)) => return is_valid,
            // An incomplete frame is an error only if the stream has ended.
            (Err(_), Ok(None) | Err(_)) => return false,
            (read, split) => panic!("read {read:?}, split {split:?}"),
        }
    }
}

/// Parses a message of either side. Returns whether it is one.
fn parse_message(body: &[u8]) -> bool {
    let request = DirectoryRequest::decode(body);
    let response = DirectoryResponse::decode(body);
    if let Some(request) = &request {
        assert_eq!(request.encode(), body, "{request:?}");
    }
    if let Some(response) = &response {
        assert_eq!(response.encode(), body, "{response:?}");
    }
    if let Some(DirectoryResponse::Listing(listing)) = &response {
        assert!(listing.entries.len() <= limits::LIST_ENTRIES_MAX);
    }
    if let Some(DirectoryRequest::Transaction(transaction)) = &request {
        // The core refuses a transaction with one part too many.
        let most = limits::TRANSACTION_PARTS_MAX + 1;
        assert!(transaction.compares.len() <= most && transaction.operations.len() <= most);
    }
    let is_hello = check_client_hello(body).is_ok() || check_server_hello(body).is_ok();
    request.is_some() || response.is_some() || is_hello
}

fn streams() -> Vec<(&'static str, Vec<u8>)> {
    let stream = |bodies: &[Vec<u8>]| {
        let mut bytes = Vec::new();
        bodies.iter().for_each(|body| frame::write(&mut bytes, body).expect("the frame is short"));
        bytes
    };
    let entry = DirectoryEntry {
        key: "nodes/1".to_owned(),
        value: b"{}".to_vec(),
        version: 9,
        lease: Some(LeaseId(4)),
    };
    let transaction = Transaction {
        compares: vec![Compare::version("a", 3), Compare::absent("b")],
        operations: vec![
            KeyOperation::put("a", b"1".to_vec(), Some(LeaseId(7))),
            KeyOperation::put("b", b"2".to_vec(), None),
            KeyOperation::Delete { key: "c".to_owned() },
        ],
    };
    let kind = WatchEventKind::Put { value: b"3".to_vec(), lease: None };
    let event = WatchEvent { revision: 12, key: "agents/2".to_owned(), kind };
    let conflict = TransactionOutcome::Conflict { key: "a".to_owned(), version: 5 };
    vec![
        ("hello", stream(&[hello(None), hello(Some(""))])),
        (
            "requests",
            stream(
                &[
                    DirectoryRequest::Get("nodes/1".to_owned()),
                    DirectoryRequest::List("nodes/".to_owned()),
                    DirectoryRequest::Grant(Duration::from_secs(5)),
                    DirectoryRequest::Watch { prefix: "agents/".to_owned(), from_revision: 7 },
                ]
                .map(|request| request.encode()),
            ),
        ),
        ("transaction", stream(&[DirectoryRequest::Transaction(transaction).encode()])),
        (
            "listing",
            stream(&[
                DirectoryResponse::Listing(Listing { revision: 10, entries: vec![entry.clone()] }).encode()
            ]),
        ),
        (
            "responses",
            stream(
                &[
                    DirectoryResponse::Done,
                    DirectoryResponse::Entry(Some(entry)),
                    DirectoryResponse::Outcome(conflict),
                    DirectoryResponse::Lease(Lease { id: LeaseId(8), epoch: 11 }),
                    DirectoryResponse::Event(event),
                    DirectoryResponse::Error(DirectoryError::ChangedTwice { key: "a".to_owned() }),
                ]
                .map(|response| response.encode()),
            ),
        ),
    ]
}

/// Parses an entry of the directory: a line with the key, and the value.
fn parse_record(bytes: &[u8]) -> bool {
    let Some(end) = bytes.iter().position(|byte| *byte == b'\n') else { return false };
    let Ok(key) = std::str::from_utf8(&bytes[..end]) else { return false };
    if let Some(host) = host_of_agent_key(key) {
        assert_eq!(agent_key(host), key, "another key names the same host");
    }
    let value = bytes[end + 1..].to_vec();
    let entry = DirectoryEntry { key: key.to_owned(), value, version: 1, lease: None };
    if let Ok(node) = decode::<NodeRecord>(&entry)
        && let Ok(address) = FabricAddress::parse(&node.fabric, &node.address)
    {
        assert_eq!(address.provider(), node.fabric);
        assert_eq!(FabricAddress::parse(address.provider(), &address.address()), Ok(address));
    }
    // Not `||`: each parser reads each value.
    parse_as::<NodeRecord>(&entry)
        | parse_as::<AgentRecord>(&entry)
        | parse_as::<HolderRecord>(&entry)
        | parse_as::<NodeLife>(&entry)
        | parse_as::<RequestedMemory>(&entry)
        | parse_as::<RecalledRecord>(&entry)
}

/// Returns whether the value is such a record. If it is, it must be the same when it is read again.
fn parse_as<T>(entry: &DirectoryEntry) -> bool
where
    T: serde::de::DeserializeOwned + serde::Serialize + PartialEq + std::fmt::Debug,
{
    let Ok(record) = decode::<T>(entry) else { return false };
    let again = DirectoryEntry { value: encode(&record), ..entry.clone() };
    assert_eq!(decode::<T>(&again).expect("it was encoded"), record);
    true
}

fn records() -> Vec<(&'static str, Vec<u8>)> {
    let line = |key: &str, value: Vec<u8>| [key.as_bytes(), b"\n", &value].concat();
    let node = NodeRecord {
        id: 3,
        fabric: "tcp".to_owned(),
        address: "10.0.0.1:7400".to_owned(),
        memory_bytes: 1 << 30,
        memory_bytes_max: 1 << 31,
        requested_memory_bytes: 1 << 29,
        resize_blocker: Some(ResizeBlocker::InUse),
        recalled_bytes: 7 << 20,
        recalled_from: vec![MemoryHolder { tenant: Some(1000), bytes: 5 << 20 }],
        kept_ms: 5000,
        epoch: 17,
        is_disk: true,
    };
    let life = NodeLife { node: 3, epoch: 17, kept_ms: 5000 };
    let agent = AgentRecord {
        host: 12,
        address: "/run/aquifer/agent".to_owned(),
        epoch: 18,
        claim_epoch: 16,
        is_recovery: false,
    };
    let holder =
        HolderRecord { host: 12, claim_epoch: 16, grace_ms: 1000, remaining_lives: Some(vec![life]) };
    let requested = RequestedMemory {
        drained_from: Some(1 << 30),
        is_forced: true,
        ..RequestedMemory::new(3, 17, 1 << 29)
    };
    let run = RecalledRun {
        node: 3,
        name: "redis-server".to_owned(),
        tenant: 1000,
        bytes: 5 << 20,
        only_copy_bytes: 2 << 20,
    };
    let recalled = RecalledRecord { host: 12, runs: vec![run] };
    vec![
        ("node", line("nodes/3", encode(&node))),
        ("agent", line("agents/12", encode(&agent))),
        ("holder", line("holders/12", encode(&holder))),
        ("life", line("lives/3", encode(&life))),
        ("requested-memory", line("wanted/3", encode(&requested))),
        ("recalled", line("recalled/12", encode(&recalled))),
    ]
}
