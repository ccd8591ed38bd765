//! Whether a run was within its limit, and whether that can be judged.

use std::time::Duration;

use crate::processors::Processors;
use crate::run::Outcome;
use crate::witness::Witness;

const MIB: u64 = 1 << 20;
/// The promise: the limit, 10 % and 16 MiB.
const SLACK_BYTES: u64 = 16 * MIB;
/// While the agent's processor is taken away, by others on this machine or on the same hardware, and the program's is not, nobody can keep it to its limit.
/// A run during which others than the cluster, the program and this test have had more than this part of the processors is not judged, and repeated.
const OTHERS_MAX: f64 = 0.1;
/// Nor is one during which the most urgent thread waited for a processor for this long: a program on all processors can fill all that is tolerated in less.
const LATENESS_MAX: Duration = Duration::from_millis(4);
/// Once is an accident that no witness saw; twice, with nothing to excuse it, is a defect.
const STRIKES: u32 = 2;
/// A program that is over its limit each time is, whatever the machine did.
const TRIES: u32 = 4;

/// What a run with this limit may be seen with.
#[must_use]
pub const fn most_bytes(limit: u64) -> u64 {
    limit + limit / 10 + SLACK_BYTES
}

/// Run something on the cluster whose processes are `parts`; and again, if it was seen with more than `most_bytes`, until it was so twice while it could have been kept from that.
/// The last run, which its caller judges.
pub fn run_judged(parts: &[u32], most_bytes: u64, mut run: impl FnMut() -> Outcome) -> Outcome {
    let (mut tries, mut strikes) = (0, 0);
    loop {
        let processors = Processors::watch(parts.to_vec());
        let witness = Witness::start();
        let outcome = run();
        let (others, lateness) = (processors.taken_by_others(), witness.stop());
        if outcome.peak.total_bytes <= most_bytes {
            return outcome;
        }
        println!(
            "over its limit, with {} MiB, while others had {:.0} % of the processors and an urgent thread waited for {lateness:?}",
            outcome.peak.total_bytes / MIB,
            others * 100.0
        );
        tries += 1;
        strikes += u32::from(others <= OTHERS_MAX && lateness <= LATENESS_MAX);
        if strikes == STRIKES || tries == TRIES {
            return outcome;
        }
    }
}

/// Fails if a run was seen with more than it may have.
///
/// # Panics
/// If it was.
pub fn assert_within_limit(outcome: &Outcome, limit: u64) {
    assert!(outcome.peak.samples > 0, "nothing was sampled");
    assert!(
        outcome.peak.total_bytes <= most_bytes(limit),
        "resident {} MiB, with the mempool {} MiB, over the limit of {} MiB (+ 10 % + 16 MiB)",
        outcome.peak.anonymous_bytes / MIB,
        outcome.peak.total_bytes / MIB,
        limit / MIB
    );
}
