//! The simulator of the pool: state machines of many hosts over the simulated fabric, with delays,
//! reordering and crashes.
//!
//! Each change of a control word is compared with a model at the moment when it happens.

mod client;
mod exhaustive;
mod model;
mod schedule;

use aquifer_mutation::Mutations;
use aquifer_pool::op::Mutation;
use aquifer_sim::Simulator;
use schedule::{PoolCounts, run};

const SIMULATOR: Simulator<Mutation, PoolCounts> =
    Simulator { name: "pool", play: run, regressions: &[], mutations: Mutation::ALL };
const SCHEDULES: u64 = 1_200;

#[test]
fn no_chunk_is_owned_twice_and_none_is_lost() {
    let mut counts = PoolCounts::default();
    let is_whole = SIMULATOR.play_fixed(SCHEDULES, |schedule| counts.add(&schedule));
    println!("{counts:?}");
    if is_whole {
        counts.assert_complete();
    }
}

#[test]
fn every_mutation_is_noticed() {
    SIMULATOR.assert_mutations_noticed();
}

mod long {
    #[test]
    fn new_schedules_of_the_pool() {
        super::SIMULATOR.play_new();
    }
}
