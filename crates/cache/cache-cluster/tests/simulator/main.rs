//! A seeded simulator of a whole cache: servers that forward requests, hand partitions over,
//! balance them, and end, while messages and answers of the directory are lost.
//!
//! The state machine of hand-overs, the transactions, the rules of claims and placement, and the
//! planning of moves are the real ones. The steps between them are those of `handover_source` and
//! `handover_target`. Messages, time and items are simulated.

mod clients;
mod handover;
mod server;
mod world;

use world::{Mutant, World};

/// Steps of a seed with faults.
const STEPS: usize = 4000;

fn play(seed: u64, mutant: Option<Mutant>) -> Result<world::Totals, String> {
    let mut world = World::new(seed, mutant);
    for _ in 0..STEPS {
        world.step();
        if let Some(wrong) = world.wrong() {
            return Err(wrong);
        }
    }
    world.run_to_idle();
    world.wrong().map_or_else(|| Ok(world.totals()), Err)
}

#[test]
fn no_reply_is_wrong_and_all_handovers_end() {
    let mut sums = world::Totals::default();
    for seed in 0..100 {
        let totals = play(seed, None).unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
        sums.add(totals);
    }
    // The seeds must have reached the cases that they are for.
    assert!(sums.hits > 10_000 && sums.forwards > 10_000, "{sums:?}");
    assert!(sums.moves > 500 && sums.retracted > 100 && sums.claims > 500, "{sums:?}");
    assert!(sums.moved_replies > 500 && sums.resumed > 50 && sums.expired > 500, "{sums:?}");
}

#[test]
fn mutants_are_noticed() {
    for mutant in Mutant::ALL {
        let noticed = (0..150).any(|seed| play(seed, Some(mutant)).is_err());
        assert!(noticed, "{mutant:?}");
    }
}
