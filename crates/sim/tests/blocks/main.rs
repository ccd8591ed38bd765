//! A block volume, its pump and its readers, over the simulated fabric: what is read is held against what was written, while nodes die, pages
//! are damaged, the pool is full, and others write in the middle of a read. In the end everything must have been given back.

#[allow(dead_code, reason = "the paging simulator does more with it")]
#[path = "../paging/absence.rs"]
mod absence;
#[allow(dead_code, reason = "the paging simulator does more with it")]
#[path = "../paging/cluster.rs"]
mod cluster;
#[allow(dead_code, reason = "the other half is for programs' memory")]
#[path = "../paging/memory.rs"]
mod memory;
mod model;
mod world;

use aquifer_pager::Mutation;
use aquifer_sim::{asked_seed, first_failure, play_all};
use world::{Seen, run};

const SCHEDULES: u64 = 3_000;
/// A fault must show within so many schedules.
const MUTANT_SCHEDULES: u64 = 6_000;

#[test]
fn every_byte_is_what_was_written_and_all_is_given_back() {
    let mut seen = Seen::default();
    play_all(SCHEDULES, |seed| run(seed, Mutation::None), |schedule| seen.add(&schedule));
    println!("{seen:?}");
    if asked_seed().is_none() {
        for (what, count) in seen.counts() {
            assert!(count > 100, "the schedules had only {count} {what}");
        }
    }
}

#[test]
fn every_fault_is_caught() {
    if asked_seed().is_some() {
        return;
    }
    let mutations = [
        Mutation::DropUpdateFlag,
        Mutation::ReclaimUnacknowledged,
        Mutation::AcknowledgeEarly,
        Mutation::SkipChecksum,
        Mutation::ForgetRelease,
        Mutation::AbsorbIntoSealed,
        Mutation::FetchUnreferenced,
        Mutation::MoveUnlooked,
    ];
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| ()));
    let mut missed = Vec::new();
    for mutation in mutations {
        match first_failure(0..MUTANT_SCHEDULES, |seed| run(seed, mutation)) {
            Some((seed, error)) => println!("{mutation:?}: schedule {seed}: {error}"),
            None => missed.push(mutation),
        }
    }
    std::panic::set_hook(usual);
    assert!(missed.is_empty(), "not caught within {MUTANT_SCHEDULES} schedules: {missed:?}");
}
