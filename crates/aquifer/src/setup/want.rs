//! Programs of a cgroup that find no memory although there is swap left.

use std::time::{Duration, Instant};

use super::SetupError;
use super::cgroup::Cgroup;

/// They try again for so long, before the kernel may kill one. After five seconds a forking program was once killed that else goes on.
const PATIENCE: Duration = Duration::from_secs(15);

/// Whether a cgroup's programs are in want of memory.
#[derive(Clone, Copy, Debug, Default)]
pub enum Want {
    /// They are not.
    #[default]
    None,
    /// They wait and try again, since then.
    Since(Instant),
    /// It is the kernel's affair now.
    Hopeless,
}

impl Want {
    /// When all that is resident is in use at the moment, the kernel finds nothing to swap out, and would kill a program though the
    /// device has room. So they wait, and try again whenever this is called, for a while.
    pub fn heed(&mut self, cgroup: &Cgroup) -> Result<(), SetupError> {
        let since = match *self {
            Self::Hopeless => return Ok(()),
            _ if !cgroup.is_in_want() => {
                *self = Self::None;
                return Ok(());
            }
            Self::None => Instant::now(),
            Self::Since(since) => since,
        };
        let is_hopeless = since.elapsed() > PATIENCE;
        *self = if is_hopeless { Self::Hopeless } else { Self::Since(since) };
        cgroup.set_waits_in_want(!is_hopeless)
    }
}
