//! Input of an agent from programs, the kernel, the keeper and earlier agents.

use aquifer_extents::fuzz_target::{book_seeds, record_seed, recover_book};
use aquifer_faults::serve::fuzz_target::{
    journal_seeds, parse_process_file, process_file_seeds, read_worker_memory, record_seeds, recover_journal,
    worker_seeds,
};
use aquifer_ipc::RunToken;
use aquifer_mutation::Mutations;

use crate::Target;

pub(crate) const WORKER: Target = Target {
    name: "worker-memory",
    run: read_worker_memory,
    seeds: worker_seeds,
    with_mutation: |work| aquifer_faults::Mutation::TrustBatchCount.while_active(work),
};

pub(crate) const JOURNAL: Target = Target {
    name: "journal",
    run: recover_journal,
    seeds: journal_seeds,
    with_mutation: |work| aquifer_faults::Mutation::TrustRangeCount.while_active(work),
};

pub(crate) const PROCESS_FILES: Target = Target {
    name: "process-files",
    run: parse_process_file,
    seeds: process_file_seeds,
    with_mutation: |work| aquifer_faults::Mutation::IgnoreAddressEnd.while_active(work),
};

pub(crate) const RECORDS: Target = Target {
    name: "keeper-records",
    run: parse_record,
    seeds: records,
    with_mutation: |work| aquifer_ipc::Mutation::AcceptLongToken.while_active(work),
};

pub(crate) const BOOK: Target = Target {
    name: "session-book",
    run: recover_book,
    seeds: book_seeds,
    with_mutation: |work| aquifer_extents::Mutation::TrustEntryCount.while_active(work),
};

/// Parses the record of a run, of a program, of a session or of a node; or a token, as a program
/// gets it in its environment.
fn parse_record(bytes: &[u8]) -> bool {
    if let Some(token) = RunToken::from_hex(bytes) {
        assert_eq!(token.to_hex().as_bytes(), bytes);
        return true;
    }
    let text = std::str::from_utf8(bytes);
    let is_session = text.is_ok_and(aquifer_extents::fuzz_target::parse_record);
    let is_node = text.is_ok_and(aquifer_node::fuzz_target::parse_record);
    aquifer_faults::serve::fuzz_target::parse_record(bytes) | is_session | is_node
}

fn records() -> Vec<(&'static str, Vec<u8>)> {
    let mut all = record_seeds();
    all.push(("session", record_seed().into_bytes()));
    all.push(("node", aquifer_node::fuzz_target::record_seed().into_bytes()));
    all.push(("token", RunToken([0xbd; 16]).to_hex().into_bytes()));
    all
}
