//! Programs of a cgroup that find no memory although there is swap left.

use std::time::{Duration, Instant};

use super::SetupError;
use super::cgroup::Cgroup;

/// They try again for so long without getting a page, before the kernel may kill one.
const PATIENCE: Duration = Duration::from_secs(10);

/// Whether a cgroup's programs are in want of memory.
#[derive(Clone, Copy, Debug, Default)]
pub enum Want {
    /// They are not.
    #[default]
    None,
    /// They wait and try again.
    Since {
        /// When they last got a page.
        since: Instant,
        /// Pages that they had got by then.
        pages: u64,
    },
    /// It is the kernel's affair now.
    Hopeless,
}

impl Want {
    /// When all that is resident is in use at the moment, the kernel finds nothing to swap out, and would kill a program though the
    /// device has room. So they wait, and try again whenever this is called, for a while.
    pub fn heed(&mut self, cgroup: &Cgroup) -> Result<(), SetupError> {
        let is_in_want = cgroup.is_in_want();
        match *self {
            Self::Hopeless => return Ok(()),
            Self::None if !is_in_want => return Ok(()),
            Self::None => *self = Self::Since { since: Instant::now(), pages: cgroup.pages_got() },
            Self::Since { since, pages } => {
                // Who is just trying again waits for nothing: only a page ends the want.
                let got = cgroup.pages_got();
                *self = match (got == pages, is_in_want) {
                    (true, _) if since.elapsed() > PATIENCE => Self::Hopeless,
                    (true, _) => *self,
                    (false, true) => Self::Since { since: Instant::now(), pages: got },
                    (false, false) => Self::None,
                };
            }
        }
        match self {
            Self::Hopeless => cgroup.set_waits_in_want(false),
            Self::Since { .. } if is_in_want => cgroup.set_waits_in_want(true),
            _ => Ok(()),
        }
    }
}
