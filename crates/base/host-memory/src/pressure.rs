//! Reports of the kernel that processes wait for memory (PSI): an early sign, where the estimate of
//! the available memory is too high.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// The triggers that are tried, in this order: some process has waited for the first number of
/// microseconds within the second. Without the capability CAP_SYS_RESOURCE the second must be a
/// multiple of two seconds.
const TRIGGERS: [&str; 2] = ["some 50000 1000000", "some 100000 2000000"];

/// The files in which the kernel reports pressure, each with a trigger.
#[derive(Debug)]
pub struct PressureWatch {
    files: Vec<File>,
    has_pressure: bool,
}

impl PressureWatch {
    /// Sets a trigger in each file. A file whose kernel or permissions allow none is left out.
    #[must_use]
    pub fn new(paths: &[PathBuf]) -> Self {
        let files = paths.iter().filter_map(|path| match set_trigger(path) {
            Ok(file) => Some(file),
            Err(error) => {
                tracing::debug!(%error, path = %path.display(), "the kernel reports no pressure here");
                None
            }
        });
        Self { files: files.collect(), has_pressure: false }
    }

    /// Whether [`Self::wait`] has found a report since the last call.
    pub fn consume_report(&mut self) -> bool {
        std::mem::take(&mut self.has_pressure)
    }

    /// Waits until pressure is reported or `wake` is readable, at most `interval`.
    ///
    /// # Panics
    /// If the interval is longer than the system can wait.
    pub fn wait(&mut self, interval: Duration, wake: Option<BorrowedFd<'_>>) {
        let timeout = Timespec::try_from(interval).expect("the interval is short");
        let files = self.files.iter().map(|file| PollFd::from_borrowed_fd(file.as_fd(), PollFlags::PRI));
        let wake = wake.map(|wake| PollFd::from_borrowed_fd(wake, PollFlags::IN));
        let mut polled: Vec<_> = files.chain(wake).collect();
        // An error here is that of a signal; then the wait was shorter.
        let _ready = poll(&mut polled, Some(&timeout));
        let events: Vec<_> = polled.iter().map(PollFd::revents).take(self.files.len()).collect();
        self.has_pressure |= events.iter().any(|events| events.contains(PollFlags::PRI));
        // The file of a cgroup that was removed would be ready for ever.
        let mut events = events.into_iter();
        self.files.retain(|_| !events.next().expect("one for each file").contains(PollFlags::ERR));
    }
}

fn set_trigger(path: &Path) -> io::Result<File> {
    let mut last = Err(io::ErrorKind::NotFound.into());
    for trigger in TRIGGERS {
        let mut file = OpenOptions::new().read(true).write(true).open(path)?;
        last = file.write_all(trigger.as_bytes()).map(|()| file);
        if last.is_ok() {
            break;
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_triggers_is_left_out() {
        let mut watch = PressureWatch::new(&["/nonexistent".into(), "/proc/self/status".into()]);
        assert!(watch.files.is_empty());
        let wake = rustix::event::eventfd(1, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        watch.wait(Duration::from_secs(60), Some(wake.as_fd()));
        assert!(!watch.consume_report());
    }
}
