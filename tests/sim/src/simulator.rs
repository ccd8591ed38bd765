//! The simulator of a protocol: fixed schedules, new schedules, and mutations that it must notice.

use std::fmt::Debug;
use std::hash::{BuildHasher, RandomState};

use aquifer_mutation::Mutations;
use parking_lot::Mutex;

use crate::corpus::Corpus;
use crate::play::{SEED_VARIABLE, asked_seed, on_all_processors, play, play_all, quietly};

/// The environment variable with the number of new schedules to play. The default is
/// [`NEW_SCHEDULES`].
pub const SCHEDULES_VARIABLE: &str = "AQUIFER_SCHEDULES";
/// New schedules that a long test plays by default.
const NEW_SCHEDULES: u64 = 20_000;
/// The environment variable that makes [`Simulator::assert_mutations_noticed`] search all schedules
/// again and write the corpus.
const RECORD_VARIABLE: &str = "AQUIFER_RECORD_MUTANTS";
/// Number of schedules within which a mutation that is not in the corpus must be noticed.
const MUTANT_SCHEDULES: u64 = 2_000;
/// Number of schedules that recording searches. A mutation that is noticed later than
/// [`MUTANT_SCHEDULES`] is reported: bias the schedules towards the step that it breaks.
const RECORD_SCHEDULES: u64 = 100_000;

/// The simulator of one protocol.
#[derive(Debug)]
pub struct Simulator<M: 'static, T> {
    /// The name of the simulator and of its corpus.
    pub name: &'static str,
    /// Plays the schedule with this seed. Fails if the protocol violated an invariant.
    pub play: fn(u64) -> Result<T, String>,
    /// Schedules that once showed a fault of the product.
    pub regressions: &'static [u64],
    /// The mutations that the simulator must notice.
    pub mutations: &'static [M],
}

impl<M: Mutations + Sync, T> Simulator<M, T> {
    /// Plays schedules 0 to `count`, the regressions and those of the corpus, and passes each
    /// result to `each`. Returns false if [`SEED_VARIABLE`] selects one schedule: then counts of
    /// events are not meaningful.
    ///
    /// # Panics
    /// If a schedule fails, with its seed.
    pub fn play_fixed(&self, count: u64, each: impl FnMut(T) + Send) -> bool {
        let recorded = Corpus::read(self.name).0.into_values().chain(self.regressions.iter().copied());
        let others = recorded.filter(|seed| *seed >= count);
        let seeds = asked_seed().map_or_else(|| (0..count).chain(others).collect(), |seed| vec![seed]);
        self.assert_all_pass(&seeds, each);
        asked_seed().is_none()
    }

    /// Plays schedules from a random seed on, as many as [`SCHEDULES_VARIABLE`] says.
    ///
    /// # Panics
    /// If a schedule fails, with its seed.
    pub fn play_new(&self) {
        let count = std::env::var(SCHEDULES_VARIABLE).map_or(NEW_SCHEDULES, |text| {
            text.parse().unwrap_or_else(|_| panic!("{SCHEDULES_VARIABLE}={text} is not a number"))
        });
        // Seeds are short enough to be typed.
        let first = u64::from(u32::MAX) + RandomState::new().hash_one(self.name) % (1 << 40);
        println!("{}: schedules {first} to {}", self.name, first + count);
        self.assert_all_pass(&(first..first + count).collect::<Vec<_>>(), drop);
    }

    fn assert_all_pass(&self, seeds: &[u64], each: impl FnMut(T) + Send) {
        if let Some((seed, error)) = play_all(seeds, self.play, each) {
            panic!(
                "{}: schedule {seed} failed: {error}\nplay it alone with {SEED_VARIABLE}={seed}",
                self.name
            );
        }
    }

    /// Checks that each mutation is noticed, by the schedule that the corpus names or by one of the
    /// first [`MUTANT_SCHEDULES`].
    ///
    /// # Panics
    /// If a mutation is not noticed.
    pub fn assert_mutations_noticed(&self) {
        if asked_seed().is_some() {
            return;
        }
        let is_recording = std::env::var_os(RECORD_VARIABLE).is_some();
        let (recorded, most) = match is_recording {
            true => (Corpus::default(), RECORD_SCHEDULES),
            false => (Corpus::read(self.name), MUTANT_SCHEDULES),
        };
        let found = Mutex::new(Corpus::default());
        on_all_processors(self.mutations, |&mutation| {
            if let Some(seed) = self.first_notice(mutation, &recorded, most) {
                found.lock().0.insert(format!("{mutation:?}"), seed);
            }
            true
        });
        let found = found.into_inner();
        if is_recording {
            found.write(self.name);
            let is_late = |seed: &u64| *seed >= MUTANT_SCHEDULES && !self.regressions.contains(seed);
            let late = found.0.iter().filter(|(_, seed)| is_late(seed));
            late.for_each(|(name, seed)| {
                println!("{}: {name} is noticed only in schedule {seed}", self.name)
            });
        } else if found != recorded && recorded != Corpus::default() {
            println!("the corpus of '{}' is out of date: run `make mutants`", self.name);
        }
        let missed: Vec<_> = self
            .mutations
            .iter()
            .filter(|mutation| !found.0.contains_key(&format!("{mutation:?}")))
            .collect();
        assert!(missed.is_empty(), "{}: not noticed within {most} schedules: {missed:?}", self.name);
    }

    /// The recorded seed if it notices the mutation, or else the first regression or seed that
    /// does.
    fn first_notice(&self, mutation: M, recorded: &Corpus, most: u64) -> Option<u64> {
        let recorded = recorded.0.get(&format!("{mutation:?}")).copied();
        let notice = |seed: &u64| {
            let outcome = quietly(|| play(|| mutation.while_active(|| (self.play)(*seed))));
            // A schedule that fails without the mutation as well has not noticed it.
            let is_noticed = outcome.is_err() && quietly(|| play(|| (self.play)(*seed))).is_ok();
            if let Err(error) = outcome {
                let by = if is_noticed { "" } else { " (also without the mutation)" };
                println!("{mutation:?}: schedule {seed}{by}: {error}");
            }
            is_noticed
        };
        recorded.into_iter().chain(self.regressions.iter().copied()).chain(0..most).find(notice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    aquifer_mutation::mutations! {
        /// Two steps of a protocol for this test.
        pub enum Mutation {
            /// Noticed in schedule 1,234.
            Rare,
            /// Never noticed.
            Never,
        }
    }

    fn play_one(seed: u64) -> Result<(), String> {
        let is_broken = Mutation::Rare.is_active() && seed == 1_234;
        if is_broken { Err("broken".to_owned()) } else { Ok(()) }
    }

    fn simulator(mutations: &'static [Mutation]) -> Simulator<Mutation, ()> {
        Simulator { name: "none-of-the-corpora", play: play_one, regressions: &[], mutations }
    }

    #[test]
    fn a_mutation_is_noticed_and_fixed_schedules_pass() {
        simulator(&[Mutation::Rare]).assert_mutations_noticed();
        simulator(&[]).play_fixed(2_000, drop);
        assert_eq!(
            simulator(&[]).first_notice(Mutation::Rare, &Corpus::default(), MUTANT_SCHEDULES),
            Some(1_234)
        );
    }

    #[test]
    #[should_panic(expected = "not noticed within 2000 schedules: [Never]")]
    fn a_mutation_that_nothing_notices_fails() {
        simulator(Mutation::ALL).assert_mutations_noticed();
    }
}
