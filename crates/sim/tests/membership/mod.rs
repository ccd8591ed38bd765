//! The simulator of membership: hosts and nodes with leases in a directory that they are cut off
//! from, or that stops, and recoveries of hosts that are dead or only seem so.
//!
//! A host goes on until a node fences it, and nothing of it is freed before. At the end, memory is
//! owned by hosts with valid leases only.

mod host;
mod node;
mod world;

use aquifer_host::Mutation;
use aquifer_mutation::Mutations;
use aquifer_sim::Simulator;
use world::{MembershipCounts, run};

const SIMULATOR: Simulator<Mutation, MembershipCounts> =
    Simulator { name: "membership", play: run, regressions: &[], mutations: Mutation::ALL };
const SCHEDULES: u64 = 1_200;
/// The fixed schedules must do each thing at least this often.
const COUNT_MIN: u64 = 30;

#[test]
fn hosts_go_on_until_they_are_fenced_and_no_memory_is_lost() {
    let mut counts = MembershipCounts::default();
    let is_whole = SIMULATOR.play_fixed(SCHEDULES, |schedule| counts.add(&schedule));
    println!("{counts:?}");
    for (what, count) in counts.labelled().into_iter().filter(|_| is_whole) {
        assert!(count >= COUNT_MIN, "the schedules had only {count} {what}");
    }
}

#[test]
fn every_mutation_is_noticed() {
    SIMULATOR.assert_mutations_noticed();
}

mod long {
    #[test]
    fn new_schedules_of_membership() {
        super::SIMULATOR.play_new();
    }
}
