//! Plays schedules: one, or many on all processors.

use std::cell::Cell;
use std::num::NonZero;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;

/// The environment variable that selects one schedule.
pub const SEED_VARIABLE: &str = "AQUIFER_SEED";

thread_local! {
    /// Whether panics of this thread are expected and must not be printed.
    static PANICS_ARE_EXPECTED: Cell<bool> = const { Cell::new(false) };
}

/// The seed that [`SEED_VARIABLE`] asks for.
///
/// # Panics
/// If the variable is not a number.
#[must_use]
pub fn asked_seed() -> Option<u64> {
    let text = std::env::var(SEED_VARIABLE).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{SEED_VARIABLE}={text} is not a number")))
}

/// Plays one schedule; a panic in it counts as its failure.
pub fn play<T>(schedule: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(schedule)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
        Err(format!("panicked: {}", text.unwrap_or_default()))
    })
}

/// Runs `work` without printing panics of this thread. Other tests run beside it.
pub fn quietly<T>(work: impl FnOnce() -> T) -> T {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !PANICS_ARE_EXPECTED.get() {
                usual(panic);
            }
        }));
    });
    PANICS_ARE_EXPECTED.set(true);
    let result = work();
    PANICS_ARE_EXPECTED.set(false);
    result
}

/// Calls `work` for each item on all processors until one call returns `false`.
pub fn on_all_processors<I: Sync>(items: &[I], work: impl Fn(&I) -> bool + Sync) {
    let next = AtomicUsize::new(0);
    let is_stopped = AtomicBool::new(false);
    let work_some = || {
        while !is_stopped.load(Ordering::Relaxed) {
            let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) else { return };
            if !work(item) {
                is_stopped.store(true, Ordering::Relaxed);
            }
        }
    };
    let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..processors {
            scope.spawn(work_some);
        }
    });
}

/// Plays the schedules with these seeds on all processors, and passes each result to `each`.
/// Returns the smallest failing seed of those played, with its error.
pub fn play_all<T>(
    seeds: &[u64],
    schedule: impl Fn(u64) -> Result<T, String> + Sync,
    each: impl FnMut(T) + Send,
) -> Option<(u64, String)> {
    let each = Mutex::new(each);
    let failure = Mutex::new(None::<(u64, String)>);
    on_all_processors(seeds, |&seed| match play(|| schedule(seed)) {
        Ok(yielded) => {
            each.lock()(yielded);
            true
        }
        Err(error) => {
            let mut failure = failure.lock();
            let is_first = failure.as_ref().is_none_or(|(first, _)| seed < *first);
            if is_first {
                *failure = Some((seed, error));
            }
            false
        }
    });
    failure.into_inner()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_and_panics_are_reported_with_their_seed() {
        let schedule = |seed| match seed {
            7 => Err("broken".to_owned()),
            _ => Ok(seed),
        };
        let mut sum = 0;
        assert_eq!(play_all(&[1, 2, 4], schedule, |seed| sum += seed), None);
        assert_eq!(sum, 7);
        assert_eq!(play_all(&[7], schedule, drop), Some((7, "broken".to_owned())));
        let panics = quietly(|| play(|| -> Result<(), String> { panic!("seven {}", 7) }));
        assert_eq!(panics, Err("panicked: seven 7".to_owned()));
    }

    #[test]
    fn all_items_are_processed_until_a_call_returns_false() {
        let count = AtomicUsize::new(0);
        on_all_processors(&[(); 100], |()| count.fetch_add(1, Ordering::Relaxed) < 1_000);
        assert_eq!(count.load(Ordering::Relaxed), 100);
        on_all_processors(&[(); 100_000], |()| false);
    }
}
