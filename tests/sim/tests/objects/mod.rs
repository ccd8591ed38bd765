//! The simulator of object heaps: the real heap over words of memory, and readers that take one
//! step between any two stores.
//!
//! Each read must return bytes that the object had at some time during the read, or say why it
//! cannot. No pointer may break while its object lives. At the end all memory and all addresses
//! must be free.

mod memory;
mod reader;
mod world;

use aquifer_objects::Mutation;
use aquifer_sim::Simulator;
use world::{ObjectsCounts, run};

const SIMULATOR: Simulator<Mutation, ObjectsCounts> = Simulator {
    name: "objects",
    play: run,
    regressions: &[],
    mutations: &[
        Mutation::WriteUnlocked,
        Mutation::KeepVersion,
        Mutation::KeepFreed,
        Mutation::TrustAddress,
        Mutation::TrustFirstHeader,
        Mutation::FreeEarly,
        Mutation::MoveUnlocked,
        Mutation::ReuseAddress,
        Mutation::ForgetSecond,
        Mutation::ReserveNoNumbers,
        Mutation::WriteUnrecorded,
        Mutation::MergeUnrecorded,
        Mutation::ForgetHome,
        Mutation::ForgetBlockEarly,
        Mutation::TrustCopies,
        Mutation::MixClasses,
        Mutation::ReplaceUnrecorded,
        Mutation::TrustReplacement,
    ],
};
const SCHEDULES: u64 = 500;
/// Each counted event must happen at least this often in the fixed schedules.
const COUNT_MIN: u64 = 100;

#[test]
fn every_read_is_correct_and_all_memory_is_freed() {
    let mut counts = ObjectsCounts::default();
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
    fn new_schedules_of_objects() {
        super::SIMULATOR.play_new();
    }
}
