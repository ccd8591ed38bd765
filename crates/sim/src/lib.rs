//! The seeded simulators, one per protocol, are this crate's tests. Here is what they share: seeds,
//! and how a failing one is told.
//!
//! `AQUIFER_SEED=n cargo test -p aquifer-sim` plays schedule n alone.

use std::num::NonZero;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// The variable that asks for one schedule only.
pub const SEED_VARIABLE: &str = "AQUIFER_SEED";

/// The one seed that the user asks for.
///
/// # Panics
/// If the variable is no number.
#[must_use]
pub fn asked_seed() -> Option<u64> {
    let text = std::env::var(SEED_VARIABLE).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{SEED_VARIABLE}={text} is not a number")))
}

/// Play one schedule; a panic in it counts as its failure.
///
/// # Errors
/// What went wrong.
pub fn play<T>(schedule: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(schedule)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
        Err(format!("panicked: {}", text.unwrap_or_default()))
    })
}

/// Play schedules 0 to `count`, on all processors, or the one that is asked for, and hand over what each yields.
///
/// # Panics
/// If one fails, with its seed and how to play it again.
pub fn play_all<T>(
    count: u64,
    schedule: impl Fn(u64) -> Result<T, String> + Sync,
    each: impl FnMut(T) + Send,
) {
    let seeds = asked_seed().map_or(0..count, |seed| seed..seed + 1);
    let next = AtomicU64::new(seeds.start);
    let each = Mutex::new(each);
    let play_some = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                return None;
            }
            match play(|| schedule(seed)) {
                Ok(yielded) => each.lock().expect("counting does not panic")(yielded),
                Err(error) => {
                    next.fetch_max(seeds.end, Ordering::Relaxed);
                    return Some((seed, error));
                }
            }
        }
    };
    let players = std::thread::available_parallelism().map_or(1, NonZero::get);
    let failures = std::thread::scope(|scope| {
        let players: Vec<_> = (0..players).map(|_| scope.spawn(play_some)).collect();
        players.into_iter().filter_map(|player| player.join().expect("panics are caught")).min()
    });
    if let Some((seed, error)) = failures {
        panic!("schedule {seed} failed: {error}\nplay it alone with {SEED_VARIABLE}={seed}");
    }
}

/// The first of these schedules that fails, and how.
pub fn first_failure<T>(
    seeds: impl IntoIterator<Item = u64>,
    schedule: impl Fn(u64) -> Result<T, String>,
) -> Option<(u64, String)> {
    seeds.into_iter().find_map(|seed| play(|| schedule(seed)).err().map(|error| (seed, error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_and_panics_are_found_with_their_seed() {
        let schedule = |seed| match seed {
            7 => Err("broken".to_owned()),
            _ => Ok(()),
        };
        assert_eq!(first_failure(0..8, schedule), Some((7, "broken".to_owned())));
        assert_eq!(first_failure(0..7, schedule), None);
        let panics = play(|| -> Result<(), String> { panic!("seven {}", 7) });
        assert_eq!(panics, Err("panicked: seven 7".to_owned()));
    }
}
