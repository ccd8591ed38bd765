//! Rate limits of tenants, as token buckets.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::Rate;
use crate::target::Tenant;

/// Capacity of a bucket, as the time in which the rate fills it.
const BURST_TIME: Duration = Duration::from_millis(100);

#[derive(Clone, Copy, Debug)]
struct TokenBucket {
    bytes: f64,
    operations: f64,
    filled: Instant,
}

/// The token buckets of all tenants.
#[derive(Debug)]
pub(super) struct RateLimiter {
    rate: Rate,
    buckets: HashMap<Tenant, TokenBucket>,
}

impl RateLimiter {
    pub fn new(rate: Rate) -> Self {
        Self { rate, buckets: HashMap::new() }
    }

    /// Charges a tenant for bytes and operations that were served. Returns the time for which the
    /// tenant must be delayed, if any.
    pub fn charge(&mut self, tenant: Tenant, bytes: u64, operations: u64, now: Instant) -> Option<Duration> {
        let Rate { bytes_per_s, operations_per_s } = self.rate;
        let full = |rate: Option<u64>| rate.map_or(0.0, |rate| rate as f64 * BURST_TIME.as_secs_f64());
        let (most_bytes, most_operations) = (full(bytes_per_s), full(operations_per_s));
        let bucket = self.buckets.entry(tenant).or_insert(TokenBucket {
            bytes: most_bytes,
            operations: most_operations,
            filled: now,
        });
        let passed = now.saturating_duration_since(bucket.filled).as_secs_f64();
        bucket.filled = now;
        let refill =
            |level: f64, rate: Option<u64>, most: f64| (level + rate.unwrap_or(0) as f64 * passed).min(most);
        bucket.bytes = refill(bucket.bytes, bytes_per_s, most_bytes) - bytes as f64;
        bucket.operations = refill(bucket.operations, operations_per_s, most_operations) - operations as f64;
        let wait = |level: f64, rate: Option<u64>| rate.map_or(0.0, |rate| -level / rate as f64);
        let seconds = wait(bucket.bytes, bytes_per_s).max(wait(bucket.operations, operations_per_s));
        (seconds > 0.0).then(|| Duration::from_secs_f64(seconds.min(60.0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_above_its_rate_is_delayed_and_no_other() {
        let rate = Rate { bytes_per_s: Some(1_000_000), operations_per_s: None };
        let mut limiter = RateLimiter::new(rate);
        let start = Instant::now();
        assert_eq!(limiter.charge(Tenant(1), 100_000, 1, start), None, "a burst passes");
        let wait = limiter.charge(Tenant(1), 500_000, 1, start).unwrap();
        assert!((wait.as_secs_f64() - 0.5).abs() < 0.01, "{wait:?}");
        assert_eq!(limiter.charge(Tenant(2), 50_000, 1, start), None);
        assert_eq!(limiter.charge(Tenant(1), 0, 1, start + Duration::from_millis(600)), None);
    }

    #[test]
    fn operations_are_limited_too() {
        let mut limiter = RateLimiter::new(Rate { bytes_per_s: None, operations_per_s: Some(100) });
        let start = Instant::now();
        assert!(limiter.charge(Tenant(1), 1 << 40, 10, start).is_none());
        assert!(limiter.charge(Tenant(1), 0, 10, start).is_some());
    }
}
