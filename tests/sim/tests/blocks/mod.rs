//! The simulator of block volumes: a real volume, its pump, mover and readers over the simulated
//! fabric.
//!
//! Bytes that are read are compared with bytes that were written, while nodes die, pages are
//! damaged, the pool is full, and other threads write during a read. At the end all memory must be
//! free.

mod model;
mod world;

use aquifer_pager::Mutation;
use aquifer_sim::Simulator;
use world::{BlocksCounts, run};

const SIMULATOR: Simulator<Mutation, BlocksCounts> = Simulator {
    name: "blocks",
    play: run,
    regressions: &[],
    mutations: &[
        Mutation::DropUpdateFlag,
        Mutation::ReclaimUnacknowledged,
        Mutation::AcknowledgeEarly,
        Mutation::SkipChecksum,
        Mutation::ForgetRelease,
        Mutation::AbsorbIntoSealed,
        Mutation::FetchUnreferenced,
        Mutation::MoveUnchecked,
    ],
};
const SCHEDULES: u64 = 500;
/// Each counted event must happen at least this often in the fixed schedules.
const COUNT_MIN: u64 = 15;

#[test]
fn every_byte_is_correct_and_all_memory_is_freed() {
    let mut counts = BlocksCounts::default();
    let has_all_replicas = SIMULATOR.play_fixed(SCHEDULES, |schedule| counts.add(&schedule));
    println!("{counts:?}");
    for (what, count) in counts.labelled().into_iter().filter(|_| has_all_replicas) {
        assert!(count >= COUNT_MIN, "the schedules had only {count} {what}");
    }
}

#[test]
fn every_mutation_is_noticed() {
    SIMULATOR.assert_mutations_noticed();
}

mod long {
    #[test]
    fn new_schedules_of_blocks() {
        super::SIMULATOR.play_new();
    }
}
