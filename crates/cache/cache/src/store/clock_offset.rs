//! The seconds of a partition. They go on when it moves to a server whose clock started at another
//! time.

use std::sync::atomic::{AtomicI32, Ordering};

/// By how many seconds a partition is ahead of the clock of its server.
#[derive(Debug, Default)]
pub(super) struct ClockOffset(AtomicI32);

impl ClockOffset {
    pub(super) fn set(&self, seconds: i32) {
        self.0.store(seconds, Ordering::Release);
    }

    /// A second of the server's clock as one of the partition. 0 means none and remains.
    #[inline]
    pub(super) fn to_partition(&self, second: u32) -> u32 {
        shifted(second, i64::from(self.0.load(Ordering::Relaxed)))
    }

    /// A second of the partition as one of the server's clock. 0 means none and remains.
    #[inline]
    pub(super) fn to_server(&self, second: u32) -> u32 {
        shifted(second, -i64::from(self.0.load(Ordering::Relaxed)))
    }
}

#[inline]
fn shifted(second: u32, by: i64) -> u32 {
    if by == 0 || second == 0 {
        return second;
    }
    u32::try_from((i64::from(second) + by).max(1)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_shifted_and_none_remains_none() {
        let offset = ClockOffset::default();
        assert_eq!((offset.to_partition(7), offset.to_server(7)), (7, 7));
        offset.set(-5);
        assert_eq!((offset.to_partition(7), offset.to_server(2), offset.to_partition(3)), (2, 7, 1));
        assert_eq!((offset.to_partition(0), offset.to_server(0)), (0, 0));
        offset.set(i32::MAX);
        assert_eq!(offset.to_partition(u32::MAX), u32::MAX);
    }
}
