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

/// Near which schedule those show that show seldom: they are played from there on, and then those before.
fn likely(mutation: Mutation) -> u64 {
    match mutation {
        Mutation::SkipRecheck => 4_400,
        Mutation::HintAwake => 1_650,
        Mutation::SectionLast => 850,
        Mutation::SkipSign | Mutation::KeepLeft => 650,
        Mutation::KeepPart => 400,
        Mutation::TrustChain => 300,
        _ => 0,
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
        let likely = likely(mutation);
        let seeds = (likely..MUTANT_SCHEDULES).chain(0..likely);
        match first_failure(seeds, |seed| run(seed, mutation)) {
            Some((seed, error)) => println!("{mutation:?}: schedule {seed}: {error}"),
            None => missed.push(mutation),
        }
    }
    drop(std::panic::take_hook());
    assert!(missed.is_empty(), "not caught within {MUTANT_SCHEDULES} schedules: {missed:?}");
}
