//! Whose the processors were while something ran.

use std::fs;

use crate::processes::processor_ticks;

/// Counts from some moment on who has the processors.
#[derive(Clone, Debug)]
pub struct Processors {
    parts: Vec<u32>,
    since: Ticks,
}

/// What the processors have done since the machine began, in ticks of 10 ms of each.
#[derive(Clone, Copy, Debug)]
struct Ticks {
    all: u64,
    /// Those in which anybody had one: others on the same hardware included.
    busy: u64,
    /// Those of whom they are counted for.
    ours: u64,
}

impl Processors {
    /// Begin to count. What `parts` use is not others', and nor is what this process and its children use.
    #[must_use]
    pub fn watch(parts: Vec<u32>) -> Self {
        let since = Ticks::now(&parts);
        Self { parts, since }
    }

    /// The part of all ticks that others have had since then: 0 … 1. Of children only those count as ours that were waited for meanwhile.
    #[must_use]
    pub fn taken_by_others(&self) -> f64 {
        self.since.taken_by_others_until(Ticks::now(&self.parts))
    }
}

impl Ticks {
    fn now(parts: &[u32]) -> Self {
        let (all, busy) = machine_ticks(&fs::read_to_string("/proc/stat").unwrap_or_default());
        let ours = parts.iter().copied().chain([std::process::id()]).map(processor_ticks).sum();
        Self { all, busy, ours }
    }

    fn taken_by_others_until(self, now: Self) -> f64 {
        let [all, busy, ours] = [(now.all, self.all), (now.busy, self.busy), (now.ours, self.ours)]
            .map(|(now, before)| now.saturating_sub(before));
        #[expect(clippy::cast_precision_loss, reason = "ticks of a few minutes")]
        let part = busy.saturating_sub(ours) as f64 / all.max(1) as f64;
        part
    }
}

/// All ticks, and the busy ones, by the first line of `/proc/stat`.
fn machine_ticks(stat: &str) -> (u64, u64) {
    /// user, nice, system, idle, iowait, irq, softirq, steal; the guests' behind them are in the first two already.
    const FIELDS: usize = 8;
    const IDLE: usize = 3;
    const WAITING: usize = 4;
    let words = stat.lines().next().unwrap_or_default().split_whitespace().skip(1);
    let ticks: Vec<u64> = words.take(FIELDS).filter_map(|word| word.parse().ok()).collect();
    let at = |field: usize| ticks.get(field).copied().unwrap_or(0);
    let all = ticks.iter().sum();
    (all, all - at(IDLE) - at(WAITING))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_stolen_is_busy_and_guests_count_once() {
        assert_eq!(machine_ticks("cpu  1 2 3 100 50 4 5 6 7 8\ncpu0 9 9 9"), (171, 21));
        assert_eq!(machine_ticks(""), (0, 0));
    }

    #[test]
    fn others_have_what_is_busy_and_not_ours() {
        let before = Ticks { all: 1000, busy: 600, ours: 100 };
        let until = |all, busy, ours| before.taken_by_others_until(Ticks { all, busy, ours });
        assert_eq!(until(1200, 700, 150), 0.25);
        assert_eq!(until(1200, 700, 200), 0.0, "all that was busy was ours");
        assert_eq!(until(1200, 700, 0), 0.5, "a part has ended: what it had is taken for others'");
    }

    #[test]
    fn what_this_process_does_is_ours() {
        let before = Ticks::now(&[]);
        // It ends only if this process is counted.
        while Ticks::now(&[]).ours < before.ours + 20 {}
        assert!(Ticks::now(&[]).busy > before.busy, "whoever has a processor keeps it busy");
    }
}
