//! Whose the processors were while something ran.

use std::fs;

use crate::processes::processor_ticks;

/// What the processors have done since the machine began, in ticks of 10 ms of each.
#[derive(Clone, Debug)]
pub struct Processors {
    parts: Vec<u32>,
    /// All ticks there were, and those in which anybody had one: others on the same hardware included.
    all: u64,
    busy: u64,
    /// Those of this process, of the children that it has waited for, and of `parts`.
    ours: u64,
}

impl Processors {
    /// Begin to count. What `parts` use is not others', and nor is what this process and its children use.
    #[must_use]
    pub fn watch(parts: Vec<u32>) -> Self {
        let (all, busy) = machine_ticks(&fs::read_to_string("/proc/stat").unwrap_or_default());
        let ours = parts.iter().copied().chain([std::process::id()]).map(processor_ticks).sum();
        Self { parts, all, busy, ours }
    }

    /// The part of all ticks that others have had since then: 0 … 1. Of children only those count as ours that were waited for meanwhile.
    #[must_use]
    pub fn taken_by_others(&self) -> f64 {
        let now = Self::watch(self.parts.clone());
        let others = (now.busy - self.busy).saturating_sub(now.ours.saturating_sub(self.ours));
        #[expect(clippy::cast_precision_loss, reason = "ticks of a few minutes")]
        let part = others as f64 / (now.all - self.all).max(1) as f64;
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
    fn what_this_process_does_is_not_others() {
        let processors = Processors::watch(Vec::new());
        let before = processor_ticks(std::process::id());
        while processor_ticks(std::process::id()) < before + 20 {
            std::hint::black_box(before);
        }
        let now = Processors::watch(Vec::new());
        assert!(now.ours >= processors.ours + 20);
        assert!(processors.taken_by_others() <= 1.0);
    }
}
