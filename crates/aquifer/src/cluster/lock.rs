//! A part is alive while it holds its lock: the kernel releases it however the part ends, and no pid goes stale.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, pidfd_open};

use aquifer_channel::socket::wait_readable;
use aquifer_swap::ending::is_ending;

/// Those who look hold the lock shared for a moment; so often, at most, one lets them pass.
const ATTEMPTS_MAX: u32 = 100_000;
/// Between looks at a lock whose holder comes or goes.
const LOOK: Duration = Duration::from_micros(50);

/// A lock that is held until it is dropped.
#[derive(Debug)]
pub struct Lock {
    file: File,
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Said, not left to the descriptor's end: a child that another thread starts has a copy until its exec.
        let _ = self.file.unlock();
    }
}

/// What the lock says about a part.
#[derive(Debug)]
pub enum Life {
    /// Nobody holds it.
    Dead,
    /// Somebody does.
    Alive(Process),
}

/// A living process: the descriptor stays its own even if the number is given to another.
#[derive(Debug)]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// Its descriptor.
    pub pidfd: OwnedFd,
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

impl Lock {
    /// Take it and write this process' number in it; `None` if another process, that lives, holds it.
    pub fn take(path: &Path) -> io::Result<Option<Self>> {
        let mut file = open(path)?;
        for _ in 0..ATTEMPTS_MAX {
            match file.try_lock() {
                Ok(()) => {
                    file.set_len(0)?;
                    file.rewind()?;
                    writeln!(file, "{}", std::process::id())?;
                    return Ok(Some(Self { file }));
                }
                Err(TryLockError::Error(error)) => return Err(error),
                // One that has just ended may have it for a moment still: then it is waited for.
                Err(TryLockError::WouldBlock) if matches!(life(path)?, Life::Alive(_)) => return Ok(None),
                Err(TryLockError::WouldBlock) => std::thread::sleep(LOOK),
            }
        }
        Ok(None)
    }

    /// Take it, after whoever holds it; `waiting` is called if that is somebody.
    pub fn wait(path: &Path, waiting: impl FnOnce()) -> io::Result<Self> {
        let file = open(path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::Error(error)) => return Err(error),
            Err(TryLockError::WouldBlock) => {
                waiting();
                file.lock()?;
            }
        }
        Ok(Self { file })
    }
}

/// Whether somebody holds it who does not just look.
fn is_held(file: &File) -> io::Result<bool> {
    match file.try_lock_shared() {
        Ok(()) => file.unlock().map(|()| false),
        Err(TryLockError::WouldBlock) => Ok(true),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Who holds the lock.
pub fn life(path: &Path) -> io::Result<Life> {
    let mut file = match OpenOptions::new().read(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Life::Dead),
        file => file?,
    };
    for _ in 0..ATTEMPTS_MAX {
        if !is_held(&file)? {
            return Ok(Life::Dead);
        }
        let mut text = String::new();
        file.rewind()?;
        file.read_to_string(&mut text)?;
        // It takes the lock first and writes its number then.
        let number = text.strip_suffix('\n').and_then(|text| text.parse::<u32>().ok());
        let pid = number.and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
        if let (Some(number), Some(pid)) = (number, pid)
            && let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty())
            // Still held: so the number was its holder's when the descriptor was opened.
            && is_held(&file)?
            // One that was killed a moment ago has its lock until the last of it is gone.
            && !has_ended(&pidfd)
            && !is_ending(number)
        {
            return Ok(Life::Alive(Process { pid: number, pidfd }));
        }
        std::thread::sleep(LOOK);
    }
    Err(io::Error::other("it is held by a process that does not say which"))
}

fn has_ended(pidfd: &OwnedFd) -> bool {
    wait_readable(&[pidfd], Duration::ZERO).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_held_once_and_tells_by_whom() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("part.lock");
        assert!(matches!(life(&path).unwrap(), Life::Dead));
        let lock = Lock::take(&path).unwrap().unwrap();
        assert!(Lock::take(&path).unwrap().is_none());
        let Life::Alive(process) = life(&path).unwrap() else { panic!("we hold it") };
        assert_eq!(process.pid, std::process::id());
        drop(lock);
        assert!(matches!(life(&path).unwrap(), Life::Dead), "the number in the file means nothing");
        std::fs::write(&path, "no number").unwrap();
        assert!(Lock::take(&path).unwrap().is_some());
    }

    #[test]
    fn the_lock_of_one_that_has_just_ended_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("part.lock");
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        std::fs::write(&path, format!("{}\n", ended.id())).unwrap();
        let held = open(&path).unwrap();
        held.lock().unwrap();
        std::thread::scope(|scope| {
            let taker = scope.spawn(|| Lock::take(&path).unwrap());
            // As long as it takes to find the lock held, many times over.
            (0..100_000).for_each(|_| std::thread::yield_now());
            held.unlock().unwrap();
            assert!(taker.join().unwrap().is_some());
        });
    }

    #[test]
    fn a_child_on_its_way_to_exec_keeps_nobody_from_the_lock() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("part.lock");
        let lock = Lock::take(&path).unwrap().unwrap();
        let childs = lock.file.try_clone().unwrap();
        drop(lock);
        assert!(Lock::take(&path).unwrap().is_some());
        drop(childs);
    }

    #[test]
    fn those_who_look_do_not_keep_a_part_from_its_lock() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("part.lock");
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !done.load(std::sync::atomic::Ordering::Relaxed) {
                        life(&path).unwrap();
                    }
                });
            }
            let all_taken = (0..200).all(|_| Lock::take(&path).is_ok_and(|lock| lock.is_some()));
            // Before anything is asserted: they would look for ever.
            done.store(true, std::sync::atomic::Ordering::Relaxed);
            assert!(all_taken);
        });
    }
}
