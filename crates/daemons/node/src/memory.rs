//! The memory that this machine can lend.

use std::io;
use std::time::{Duration, Instant};

use aquifer_host_memory::{PressureWatch, pressure_files};

/// Time for which memory must be short before hosts have to move their pages: a short peak is over
/// before much is moved.
const SHORTAGE_TIME: Duration = Duration::from_secs(2);
/// Time after a report of pressure in which the node lends no more than it did then.
const PRESSURE_TIME: Duration = Duration::from_secs(10);
/// Pressure counts only while less than this multiple of the memory that stays available is
/// available: a group of processes at a limit of its own has pressure on a machine with much free
/// memory, too.
const PRESSURE_FACTOR: u64 = 4;

/// The memory of the machine that is available, and what of it must stay.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AvailableMemory {
    /// Memory that stays available to the machine even if more is requested, if any.
    pub keep_free_bytes: Option<u64>,
    /// Measures the available memory.
    pub measure: fn() -> io::Result<u64>,
    /// Whether the kernel's reports of pressure count, too.
    pub watches_pressure: bool,
}

/// Memory that can be lent in all. `available` does not include the pages that the lent memory has
/// already allocated. `keep_free` stays with the machine.
pub(crate) const fn affordable_bytes(allocated: u64, available: u64, keep_free: u64) -> u64 {
    allocated.saturating_add(available).saturating_sub(keep_free)
}

/// Memory to lend next, if `requested` is requested and `lent` is lent.
///
/// `affordable` changes all the time, so a change because of it is made only if it is at least
/// `step`.
pub(crate) fn next_lent_bytes(requested: u64, lent: u64, affordable: u64, step: u64) -> u64 {
    let next = requested.min(affordable);
    let fulfils_request = requested < lent || next == requested && lent < requested;
    if fulfils_request || next.abs_diff(lent) >= step { next } else { lent }
}

/// Whether this machine is short of memory, by the time for which it is, and by reports of the
/// kernel.
#[derive(Debug)]
pub(crate) struct Shortage {
    keep_free_bytes: Option<u64>,
    pressure: Option<PressureWatch>,
    /// The most to lend after a report of pressure, and the time until which that holds.
    under_pressure: Option<(u64, Instant)>,
    short_since: Option<Instant>,
}

impl Shortage {
    /// Creates the state of a machine that is not short. Without `keep_free_bytes`, it never is.
    pub fn new(available: AvailableMemory) -> Self {
        let keep_free_bytes = available.keep_free_bytes;
        let is_watched = available.watches_pressure && keep_free_bytes.is_some();
        let pressure = is_watched.then(|| PressureWatch::new(&pressure_files()));
        Self { keep_free_bytes, pressure, under_pressure: None, short_since: None }
    }

    /// The most to lend because of the kernel's reports of pressure, with `available` bytes
    /// available. After a report that is `lent_under_pressure`.
    pub fn limit(&mut self, available: u64, lent_under_pressure: u64, now: Instant) -> u64 {
        let (Some(keep_free), Some(pressure)) = (self.keep_free_bytes, &mut self.pressure) else {
            return u64::MAX;
        };
        pressure.wait(Duration::ZERO, None);
        if pressure.consume_report() && available < keep_free.saturating_mul(PRESSURE_FACTOR) {
            self.under_pressure = Some((lent_under_pressure, now + PRESSURE_TIME));
        }
        self.under_pressure.take_if(|(_, until)| *until <= now);
        self.under_pressure.map_or(u64::MAX, |(bytes, _)| bytes)
    }

    /// Whether memory has been short for some time, now that `is_short` says whether it is.
    pub fn is_lasting(&mut self, is_short: bool, now: Instant) -> bool {
        if !is_short {
            self.short_since = None;
            return false;
        }
        now.saturating_duration_since(*self.short_since.get_or_insert(now)) >= SHORTAGE_TIME
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocated_pages_of_the_lent_memory_count_as_available() {
        assert_eq!(affordable_bytes(1, 6, 2), 5);
        assert_eq!(affordable_bytes(1, 2, 9), 0);
        assert_eq!(affordable_bytes(u64::MAX, 2, 0), u64::MAX);
    }

    #[test]
    fn lending_follows_the_available_memory_in_steps() {
        assert_eq!(next_lent_bytes(8, 8, 20, 4), 8, "the request is fulfilled");
        assert_eq!(next_lent_bytes(8, 0, 8, 4), 8);
        for (affordable, next) in [(46, 46), (47, 50), (50, 50), (53, 50), (54, 54)] {
            assert_eq!(
                next_lent_bytes(100, 50, affordable, 4),
                next,
                "a change smaller than a step is not made: {affordable}"
            );
        }
        assert_eq!(
            next_lent_bytes(50, 50, 47, 4),
            50,
            "the request is fulfilled, and the change is smaller than a step"
        );
        assert_eq!(next_lent_bytes(50, 50, 46, 4), 46);
        assert_eq!(next_lent_bytes(51, 50, 51, 4), 51, "a change that fulfils the request may be small");
        assert_eq!(next_lent_bytes(30, 50, 40, 4), 30, "a request for less is fulfilled");
        assert_eq!(next_lent_bytes(49, 50, 48, 4), 48);
    }

    #[test]
    fn a_shortage_lasts_after_two_seconds_without_a_break() {
        let measure = || Ok(0);
        let available = AvailableMemory { keep_free_bytes: None, measure, watches_pressure: true };
        let mut shortage = Shortage::new(available);
        let start = Instant::now() + Duration::from_secs(1000);
        assert!(!shortage.is_lasting(true, start));
        assert!(!shortage.is_lasting(true, start + SHORTAGE_TIME / 2));
        assert!(shortage.is_lasting(true, start + SHORTAGE_TIME));
        assert!(!shortage.is_lasting(false, start + SHORTAGE_TIME));
        assert!(!shortage.is_lasting(true, start + 2 * SHORTAGE_TIME), "the time begins again");
        assert_eq!(shortage.limit(0, 0, start), u64::MAX, "no memory has to stay available");
    }
}
