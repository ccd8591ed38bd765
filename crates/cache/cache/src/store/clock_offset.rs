//! The seconds of a partition, which continue when the partition moves to a server whose clock
//! started at another time.

use std::sync::atomic::{AtomicI32, Ordering};

/// The seconds by which a partition is ahead of the clock of its server.
#[derive(Debug, Default)]
pub(super) struct ClockOffset(AtomicI32);

impl ClockOffset {
    pub(super) fn set(&self, seconds: i32) {
        self.0.store(seconds, Ordering::Release);
    }

    /// Converts a second of the server's clock to one of the partition. 0 means none and stays 0.
    #[inline]
    pub(super) fn to_partition(&self, second: u32) -> u32 {
        shifted(second, i64::from(self.0.load(Ordering::Relaxed)))
    }

    /// Converts a second of the partition to one of the server's clock. 0 means none and stays 0.
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
    fn seconds_are_converted_and_0_stays_0() {
        let offset = ClockOffset::default();
        assert_eq!((offset.to_partition(7), offset.to_server(7)), (7, 7));
        offset.set(-5);
        assert_eq!((offset.to_partition(7), offset.to_server(2), offset.to_partition(3)), (2, 7, 1));
        assert_eq!((offset.to_partition(0), offset.to_server(0)), (0, 0));
        offset.set(i32::MAX);
        assert_eq!(offset.to_partition(u32::MAX), u32::MAX);
    }
}
