//! The pool's machines, many hosts at once, over the simulated fabric: delays, reordering, crashes.
//! Every change of a control word is held against a model the moment it happens.

mod client;
mod schedule;
mod shadow;

use aquifer_pool::op::Mutation;
use aquifer_sim::{asked_seed, first_failure, play_all};
use schedule::{Seen, run};

const SCHEDULES: u64 = 12_000;
/// A fault must show within so many schedules.
const MUTANT_SCHEDULES: u64 = 40_000;

#[test]
fn no_chunk_is_owned_twice_and_none_is_lost() {
    let mut seen = Seen::default();
    play_all(SCHEDULES, |seed| run(seed, Mutation::None), |schedule| seen.add(&schedule));
    println!("{seen:?}");
    if asked_seed().is_none() {
        seen.assert_complete();
    }
}

#[test]
fn every_fault_is_caught() {
    if asked_seed().is_some() {
        return;
    }
    std::panic::set_hook(Box::new(|_| ()));
    let mut missed = Vec::new();
    for mutation in Mutation::ALL {
        match first_failure(0..MUTANT_SCHEDULES, |seed| run(seed, mutation)) {
            Some((seed, error)) => println!("{mutation:?}: schedule {seed}: {error}"),
            None => missed.push(mutation),
        }
    }
    drop(std::panic::take_hook());
    assert!(missed.is_empty(), "not caught within {MUTANT_SCHEDULES} schedules: {missed:?}");
}
