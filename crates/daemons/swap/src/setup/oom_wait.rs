//! Programs of a cgroup that wait for memory although swap is free.

use std::time::{Duration, Instant};

use super::SetupError;
use super::cgroup::Cgroup;

/// Time for which programs retry without getting a page. After it the kernel may kill one.
const OOM_TIMEOUT: Duration = Duration::from_secs(10);

/// The state of programs of a cgroup that wait for memory.
///
/// If all resident pages are in use for a moment, the kernel can swap nothing out, and would
/// kill a program although the device has room. So the programs wait, and retry at each
/// [`poll`](Self::poll), for a limited time. With cgroups of version 2 they never wait.
#[derive(Clone, Copy, Debug, Default)]
pub enum OomWait {
    /// No program waits.
    #[default]
    None,
    /// Programs wait and retry.
    Waiting {
        /// The time when they got the last page.
        since: Instant,
        /// Number of pages that were charged to the cgroup until then.
        pages: u64,
    },
    /// The time has passed: the kernel may kill a program.
    Expired,
}

impl OomWait {
    /// Resets the state after a change of the limit.
    ///
    /// # Errors
    /// If the cgroup cannot be changed.
    pub fn reset(&mut self, cgroup: &Cgroup) -> Result<(), SetupError> {
        match std::mem::take(self) {
            Self::Expired => cgroup.set_oom_waits(true),
            Self::None | Self::Waiting { .. } => Ok(()),
        }
    }

    /// Wakes waiting programs. Permits the kernel to kill once the time has passed.
    ///
    /// # Errors
    /// If the cgroup cannot be read or changed.
    pub fn poll(&mut self, cgroup: &Cgroup) -> Result<(), SetupError> {
        let is_under_oom = cgroup.is_under_oom();
        match *self {
            Self::Expired => return Ok(()),
            Self::None if !is_under_oom => return Ok(()),
            Self::None => *self = Self::Waiting { since: Instant::now(), pages: cgroup.pages_charged() },
            Self::Waiting { since, pages } => {
                // A retrying program does not count as waiting, so only a new page ends the wait.
                let charged = cgroup.pages_charged();
                *self = match (charged == pages, is_under_oom) {
                    (true, _) if since.elapsed() > OOM_TIMEOUT => Self::Expired,
                    (true, _) => *self,
                    (false, true) => Self::Waiting { since: Instant::now(), pages: charged },
                    (false, false) => Self::None,
                };
            }
        }
        match self {
            Self::Expired => cgroup.set_oom_waits(false),
            Self::Waiting { .. } if is_under_oom => cgroup.set_oom_waits(true),
            _ => Ok(()),
        }
    }
}
