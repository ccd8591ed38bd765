//! Retires a target whose process died while its memory was kept. Peers may still have the memory
//! mapped.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use crate::control::ControlMemory;

/// The interval at which the process of an endpoint is checked during an access.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Time after which an access in flight is logged. An access takes microseconds.
const WARN_AFTER: Duration = Duration::from_secs(1);

/// Ends all accesses by peers of a dead target. When this returns, none is in flight, and none will
/// begin.
///
/// `control` is the target's [`crate::Target::control`]. A process that stalls in the middle of an
/// access is waited for until it resumes or dies.
///
/// # Errors
/// If `control` is not control memory.
pub fn retire(control: OwnedFd) -> io::Result<()> {
    let stat = rustix::fs::fstat(&control)?;
    let len = u64::try_from(stat.st_size).unwrap_or(0);
    let control = ControlMemory::open_to_retire(control, len).map_err(io::Error::other)?;
    control.set_dead();
    for slot in 0..control.endpoints() {
        let begun = Instant::now();
        let mut is_logged = false;
        while !control.drain(slot, Some(POLL_INTERVAL)) {
            let pid = control.process(slot);
            if pid != 0 && !has_mapped(pid, stat.st_ino) {
                break;
            }
            if begun.elapsed() > WARN_AFTER && !std::mem::replace(&mut is_logged, true) {
                tracing::warn!(
                    pid,
                    "a process stalls in the middle of an access; waiting until it resumes or ends"
                );
            }
        }
    }
    Ok(())
}

/// Whether a process maps the memory with this inode. If not, the process is dead, or its id
/// belongs to another process.
fn has_mapped(pid: u32, inode: u64) -> bool {
    let maps = match std::fs::read_to_string(format!("/proc/{pid}/maps")) {
        Ok(maps) => maps,
        // The process may be alive, but its maps are not readable.
        Err(error) => return error.kind() == io::ErrorKind::PermissionDenied,
    };
    maps.lines().any(|line| line.split_whitespace().nth(4) == Some(inode.to_string().as_str()))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::target::{Host, Identity, Tenant};

    const WHO: Identity = Identity { host: Host(1), epoch: 1, tenant: Tenant(0) };

    fn control_with(pid: u32) -> (ControlMemory, OwnedFd) {
        let control = ControlMemory::create(2, 1, 0).unwrap();
        control.open_slot(1, WHO);
        control.set_process(1, pid);
        control.active(1).store(1, Ordering::SeqCst);
        let fd = control.fd().try_clone_to_owned().unwrap();
        (control, fd)
    }

    #[test]
    fn a_process_that_died_in_an_access_is_not_waited_for() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        // The process id may belong to another process by now.
        let (control, fd) = control_with(child.id());
        retire(fd).unwrap();
        assert!(!control.is_alive());
        drop(child.stdin.take());
        child.wait().unwrap();
        let (_control, fd) = control_with(child.id());
        retire(fd).unwrap();
    }

    #[test]
    fn a_live_process_is_waited_for() {
        let (control, fd) = control_with(std::process::id());
        let control = Arc::new(control);
        let is_over = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&is_over);
        let ours = Arc::clone(&control);
        let retiring = std::thread::spawn(move || {
            retire(fd).unwrap();
            assert!(seen.load(Ordering::SeqCst), "retire did not wait");
        });
        while ours.is_alive() {
            std::thread::yield_now();
        }
        is_over.store(true, Ordering::SeqCst);
        ours.active(1).store(2, Ordering::SeqCst);
        retiring.join().unwrap();
    }

    #[test]
    fn memory_of_another_kind_is_refused() {
        let other = crate::Memory::create("other", 8192).unwrap();
        assert!(retire(other.fd().try_clone_to_owned().unwrap()).is_err());
    }
}
