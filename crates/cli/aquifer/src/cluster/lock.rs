//! Locks that show whether a daemon runs.
//!
//! A daemon holds its lock from start to end, and the kernel releases the lock however the process
//! ends. So a process number in a lock file is valid only while the lock is held.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::inotify;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use aquifer_channel::exiting::is_exiting;
use aquifer_channel::socket::wait_readable;

/// Maximum number of attempts to acquire a lock. A process that only tests the lock holds it shared
/// for a moment, so a failed attempt does not show that the daemon runs.
const ATTEMPTS_MAX: u32 = 100_000;
/// Number of attempts after which a process that has ended or was killed counts as not running,
/// though its lock is held.
const ATTEMPTS_DEAD_MAX: u32 = 2_000;
/// Time after which the lock file of a killed process is replaced. A hostile program can make the
/// kernel wait in a thread of the process, which then keeps all its descriptors.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause between two attempts at a lock whose holder starts or ends.
const ATTEMPT_PAUSE: Duration = Duration::from_micros(50);

/// The line in a lock file that says that its process was asked to stop.
const ENDING: &str = "ending\n";

/// Exclusive lock of a file, held until it is dropped.
#[derive(Debug)]
pub struct FileLock {
    file: File,
}

impl Drop for FileLock {
    fn drop(&mut self) {
        // Closing the descriptor is not enough: a child that another thread is starting has a copy
        // of it until its exec.
        let _ = self.file.unlock();
    }
}

/// Writes into a daemon's lock file that the daemon was asked to stop.
#[derive(Debug)]
pub struct EndingMark {
    file: File,
}

impl EndingMark {
    /// Writes the line below the number of the process.
    pub fn write(&self) {
        let marked =
            self.file.metadata().and_then(|file| self.file.write_all_at(ENDING.as_bytes(), file.len()));
        if let Err(error) = marked {
            tracing::warn!(%error, "the lock file does not show that this process ends");
        }
    }
}

/// Watch over the lock file of a running daemon.
///
/// The watch's descriptor becomes readable when the file's attributes change, such as its number of
/// links.
#[derive(Debug)]
pub struct LockWatch {
    events: OwnedFd,
    file: File,
}

impl AsFd for LockWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }
}

impl LockWatch {
    /// Reads the events. Returns true if the file was deleted.
    pub fn is_deleted(&self) -> bool {
        let mut events = [0; 1024];
        // The descriptor does not block, and the contents of the events are not needed.
        while matches!(rustix::io::read(&self.events, &mut events), Ok(1..)) {}
        rustix::fs::fstat(&self.file).is_ok_and(|file| file.st_nlink == 0)
    }
}

/// A running process. Its descriptor stays valid for it even if the kernel reuses its number.
#[derive(Debug)]
pub struct LockHolder {
    /// Process number.
    pub pid: u32,
    /// Process descriptor.
    pub pidfd: OwnedFd,
    /// True if the process was asked to stop.
    pub is_ending: bool,
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

impl FileLock {
    /// Locks the file and writes this process's number into it.
    ///
    /// Returns `None` if another running process holds the lock.
    ///
    /// # Errors
    /// If a system call fails.
    pub fn try_acquire(path: &Path) -> io::Result<Option<Self>> {
        let mut file = open(path)?;
        let begun = Instant::now();
        for _ in 0..ATTEMPTS_MAX {
            match file.try_lock() {
                Ok(()) => {
                    // Not truncated first: on a full disk the file would lose its block.
                    let number = format!("{}\n", std::process::id());
                    file.write_all_at(number.as_bytes(), 0)?;
                    file.set_len(number.len() as u64)?;
                    return Ok(Some(Self { file }));
                }
                Err(TryLockError::Error(error)) => return Err(error),
                // A process that has just ended may hold the lock for a moment longer.
                Err(TryLockError::WouldBlock) if holder(path)?.is_some() => return Ok(None),
                Err(TryLockError::WouldBlock) if begun.elapsed() >= EXIT_TIMEOUT => {
                    file = replace(path, &file)?;
                }
                Err(TryLockError::WouldBlock) => std::thread::sleep(ATTEMPT_PAUSE),
            }
        }
        Ok(None)
    }

    /// The mark by which this process records in the file that it was asked to stop.
    ///
    /// # Errors
    /// If the system has no descriptor.
    pub fn ending_mark(&self) -> io::Result<EndingMark> {
        Ok(EndingMark { file: self.file.try_clone()? })
    }

    /// Watches whether the file is deleted, alone or with its folder.
    ///
    /// # Errors
    /// If a system call fails, such as at the user's limit of inotify instances.
    pub fn watch(&self) -> io::Result<LockWatch> {
        let events = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
        // Not by its path, where another file may be now. An unlinked file that is open reports
        // only the change of its number of links.
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        inotify::add_watch(&events, path, inotify::WatchFlags::ATTRIB)?;
        Ok(LockWatch { events, file: self.file.try_clone()? })
    }

    /// Locks the file. If another process holds the lock, calls `waiting`, and waits for that
    /// process.
    ///
    /// # Errors
    /// If a system call fails.
    pub fn acquire(path: &Path, waiting: impl FnOnce()) -> io::Result<Self> {
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

    /// Locks the file; returns `None` if it is locked.
    ///
    /// # Errors
    /// If a system call fails.
    pub fn acquire_if_free(path: &Path) -> io::Result<Option<Self>> {
        let file = open(path)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Self { file })),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }
}

/// Replaces a file whose lock a killed process holds. Returns the new file, or that of another
/// process that has replaced it first.
fn replace(path: &Path, held: &File) -> io::Result<File> {
    let folder = File::open(path.parent().unwrap_or(Path::new("/")))?;
    // So that no other process replaces the file that this one creates.
    folder.lock()?;
    let (held, there) = (held.metadata()?, std::fs::symlink_metadata(path));
    if there.is_ok_and(|there| (there.dev(), there.ino()) == (held.dev(), held.ino())) {
        std::fs::remove_file(path)?;
    }
    open(path)
}

/// Whether a process holds the lock exclusively.
fn is_held(file: &File) -> io::Result<bool> {
    match file.try_lock_shared() {
        Ok(()) => file.unlock().map(|()| false),
        Err(TryLockError::WouldBlock) => Ok(true),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// The running process that holds the lock of a file; `None` if there is none.
///
/// # Errors
/// If a system call fails, or if the holder has not written its number.
pub fn holder(path: &Path) -> io::Result<Option<LockHolder>> {
    let mut file = match OpenOptions::new().read(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let mut attempts_dead = 0;
    for _ in 0..ATTEMPTS_MAX {
        if !is_held(&file)? || attempts_dead >= ATTEMPTS_DEAD_MAX {
            return Ok(None);
        }
        // The holder writes its number after it has locked the file, so the number may be missing.
        let record = read_record(&mut file)?;
        let pid = record.and_then(|record| i32::try_from(record.pid).ok()).and_then(Pid::from_raw);
        if let (Some(LockRecord { pid: number, is_ending }), Some(pid)) = (record, pid) {
            if let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty())
                // The lock is still held: the number was that of its holder when the descriptor was
                // opened.
                && is_held(&file)?
                // A killed process holds its lock until the kernel has released its descriptors.
                && !has_ended(&pidfd)
                && !is_exiting(number)
            {
                return Ok(Some(LockHolder { pid: number, pidfd, is_ending }));
            }
            attempts_dead += 1;
        }
        std::thread::sleep(ATTEMPT_PAUSE);
    }
    Err(io::Error::other("the lock is held by a process that has not written its number into the file"))
}

/// Record in a lock file of the last process that locked it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LockRecord {
    /// Process number.
    pub pid: u32,
    /// True if the process was asked to stop.
    pub is_ending: bool,
}

/// Reads the record of a lock file's last process; `None` if no process has locked it.
///
/// # Errors
/// If a system call fails.
pub fn last_record(path: &Path) -> io::Result<Option<LockRecord>> {
    match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        file => read_record(&mut file?),
    }
}

fn read_record(file: &mut File) -> io::Result<Option<LockRecord>> {
    let mut text = String::new();
    file.rewind()?;
    file.read_to_string(&mut text)?;
    let (number, rest) = text.split_once('\n').unzip();
    let pid = number.and_then(|text| text.parse().ok());
    Ok(pid.map(|pid| LockRecord { pid, is_ending: rest == Some(ENDING) }))
}

fn has_ended(pidfd: &OwnedFd) -> bool {
    wait_readable(&[pidfd], Duration::ZERO).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_has_one_holder_and_names_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("part.lock");
        assert!(holder(&path).unwrap().is_none());
        let lock = FileLock::try_acquire(&path).unwrap().unwrap();
        assert!(FileLock::try_acquire(&path).unwrap().is_none());
        let process = holder(&path).unwrap().expect("this process holds it");
        assert_eq!(process.pid, std::process::id());
        drop(lock);
        assert!(holder(&path).unwrap().is_none(), "the number in the file of a free lock has no meaning");
        std::fs::write(&path, "no number").unwrap();
        assert!(FileLock::try_acquire(&path).unwrap().is_some());
    }

    #[test]
    fn a_lock_shows_that_its_holder_ends() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("part.lock");
        let lock = FileLock::try_acquire(&path).unwrap().unwrap();
        assert!(!holder(&path).unwrap().unwrap().is_ending);
        lock.ending_mark().unwrap().write();
        let process = holder(&path).unwrap().unwrap();
        assert!(process.is_ending && process.pid == std::process::id());
        drop(lock);
        let record = LockRecord { pid: std::process::id(), is_ending: true };
        assert_eq!(last_record(&path).unwrap(), Some(record), "it is known after its end");
        let _next = FileLock::try_acquire(&path).unwrap().unwrap();
        assert!(!holder(&path).unwrap().unwrap().is_ending);
        assert_eq!(last_record(&path).unwrap(), Some(LockRecord { is_ending: false, ..record }));
        assert_eq!(last_record(&folder.path().join("no.lock")).unwrap(), None);
    }

    #[test]
    fn the_lock_of_a_process_that_has_just_ended_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("part.lock");
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        std::fs::write(&path, format!("{}\n", ended.id())).unwrap();
        let held = open(&path).unwrap();
        held.lock().unwrap();
        std::thread::scope(|scope| {
            let taker = scope.spawn(|| FileLock::try_acquire(&path).unwrap());
            // Longer than it takes to find the lock held.
            (0..100_000).for_each(|_| std::thread::yield_now());
            held.unlock().unwrap();
            assert!(taker.join().unwrap().is_some());
        });
    }

    #[test]
    fn the_deletion_of_a_lock_file_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        std::fs::create_dir(&state).unwrap();
        let path = state.join("part.lock");
        let lock = FileLock::try_acquire(&path).unwrap().unwrap();
        let watch = lock.watch().unwrap();
        assert!(!watch.is_deleted());
        std::fs::rename(&path, state.join("moved.lock")).unwrap();
        assert!(!watch.is_deleted(), "it has another name");
        std::fs::remove_dir_all(&state).unwrap();
        assert!(wait_readable(&[&watch.events], Duration::MAX).unwrap());
        assert!(watch.is_deleted());
        // A new lock at the same path is not the one that was deleted.
        std::fs::create_dir(&state).unwrap();
        let next = FileLock::try_acquire(&path).unwrap().unwrap();
        assert!(watch.is_deleted() && !next.watch().unwrap().is_deleted());
    }

    #[test]
    fn a_child_before_its_exec_does_not_hold_the_lock() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("part.lock");
        let lock = FileLock::try_acquire(&path).unwrap().unwrap();
        let child_copy = lock.file.try_clone().unwrap();
        drop(lock);
        assert!(FileLock::try_acquire(&path).unwrap().is_some());
        drop(child_copy);
    }

    #[test]
    fn tests_of_a_lock_do_not_prevent_its_acquisition() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("part.lock");
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !done.load(std::sync::atomic::Ordering::Relaxed) {
                        holder(&path).unwrap();
                    }
                });
            }
            let all_acquired =
                (0..200).all(|_| FileLock::try_acquire(&path).is_ok_and(|lock| lock.is_some()));
            // Before the assertion: if it failed first, the threads would never end.
            done.store(true, std::sync::atomic::Ordering::Relaxed);
            assert!(all_acquired);
        });
    }
}
