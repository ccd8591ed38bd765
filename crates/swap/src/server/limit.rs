//! The limit of a run with a swap device.

use aquifer_ipc::size::ByteSize;
use aquifer_pager::LIMIT_BYTES_MIN;

use crate::setup::SetupError;
use crate::setup::cgroup::Cgroup;

/// The limit of a run: its programs, and the device's share of the mempool.
#[derive(Debug)]
pub(super) struct DeviceLimit {
    bytes: u64,
    /// The device's share of the mempool, which stays as it is.
    share_bytes: u64,
    swap_bytes: u64,
    /// Whether the cgroup has the limit.
    is_applied: bool,
}

impl DeviceLimit {
    /// The limit of a run whose cgroup has been created with `resident_bytes` and `swap_bytes`.
    pub(super) fn new(bytes: u64, resident_bytes: u64, swap_bytes: u64) -> Self {
        Self { bytes, share_bytes: bytes - resident_bytes, swap_bytes, is_applied: true }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Changes the limit; [`Self::apply`] does the work.
    ///
    /// # Errors
    /// If the limit is too small, as a sentence.
    pub(super) fn set(&mut self, bytes: u64) -> Result<(), String> {
        let least = self.share_bytes + LIMIT_BYTES_MIN;
        if bytes < least {
            return Err(format!(
                "a limit of {} is too small for this run, whose device uses {} of it: give at least {}",
                ByteSize(bytes),
                ByteSize(self.share_bytes),
                ByteSize(least)
            ));
        }
        tracing::info!(bytes, "limit changed");
        self.bytes = bytes;
        self.is_applied = false;
        Ok(())
    }

    /// Brings the cgroup a step nearer to the limit.
    ///
    /// # Errors
    /// If the cgroup cannot be changed. It is not tried again.
    pub(super) fn apply(&mut self, cgroup: &Cgroup) -> Result<(), SetupError> {
        if self.is_applied {
            return Ok(());
        }
        self.is_applied = true;
        self.is_applied = cgroup.change_limits(self.bytes - self.share_bytes, self.swap_bytes)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_below_the_least_changes_nothing() {
        let mut limit = DeviceLimit::new(32 << 20, 30 << 20, 64 << 20);
        let error = limit.set(9 << 20).unwrap_err();
        assert!(error.contains("at least 10 MiB"), "{error}");
        assert_eq!(limit.bytes(), 32 << 20);
        assert!(limit.is_applied);
        limit.set(10 << 20).unwrap();
        assert_eq!(limit.bytes(), 10 << 20);
        assert!(!limit.is_applied);
    }
}
