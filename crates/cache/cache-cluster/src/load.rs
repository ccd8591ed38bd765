//! Rates of requests to each partition.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Time constant of the exponential moving average of a rate.
const TIME_CONSTANT: Duration = Duration::from_secs(2);

/// Requests per second of each partition, averaged over the last seconds.
#[derive(Debug)]
pub(crate) struct Loads(Mutex<State>);

#[derive(Debug)]
struct State {
    counted: Vec<u64>,
    rates: Vec<f64>,
    at: Instant,
}

impl Loads {
    pub fn new(partitions: usize) -> Self {
        let state = State { counted: vec![0; partitions], rates: vec![0.0; partitions], at: Instant::now() };
        Self(Mutex::new(state))
    }

    /// Updates the rates from the numbers of requests that each partition has had by `now`.
    #[expect(clippy::cast_precision_loss, reason = "the numbers are far below 2^52")]
    pub fn update(&self, counts: &[u64], now: Instant) {
        let mut state = self.0.lock();
        let passed = now.saturating_duration_since(state.at).as_secs_f64();
        if passed <= 0.0 {
            return;
        }
        let weight = 1.0 - (-passed / TIME_CONSTANT.as_secs_f64()).exp();
        let State { counted, rates, at } = &mut *state;
        for ((count, counted), rate) in counts.iter().zip(counted).zip(rates) {
            let current = count.saturating_sub(*counted) as f64 / passed;
            *rate += (current - *rate) * weight;
            *counted = *count;
        }
        *at = now;
    }

    /// Sets the rate of a partition that this server has received, in requests per second.
    pub fn set(&self, partition: usize, rate: f64) {
        self.0.lock().rates[partition] = rate.clamp(0.0, 1e12);
    }

    /// The rate of a partition, in requests per second.
    pub fn rate(&self, partition: usize) -> f64 {
        self.0.lock().rates[partition]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_follow_the_load() {
        let loads = Loads::new(2);
        let start = Instant::now();
        for second in 1..=30_u32 {
            loads.update(&[u64::from(second) * 1000, 0], start + Duration::from_secs(u64::from(second)));
        }
        assert!((990.0..=1010.0).contains(&loads.rate(0)), "{}", loads.rate(0));
        loads.update(&[30_000, 0], start + Duration::from_secs(40));
        assert!(loads.rate(0) < 10.0 && loads.rate(1).abs() < 0.1);
    }
}
