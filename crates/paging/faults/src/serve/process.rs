//! The process whose memory a userfaultfd serves.
//!
//! The number of a process is not an identity: the kernel may reuse it after the end of the
//! process, and the process may execute a program whose memory its user may not read. So a process
//! is opened once, proves by the canary that it has the memory of the userfaultfd, and is
//! identified by descriptors afterwards.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use aquifer_channel::peer::PeerProcess;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Dir, Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::canary::Canary;

/// The reason why a process is not accepted as the one that a userfaultfd serves.
#[derive(Debug, thiserror::Error)]
pub enum ProofError {
    /// The process cannot be opened.
    #[error("cannot open the process: {0}")]
    System(#[from] io::Error),
    /// The process is in a PID namespace that the agent does not see.
    #[error("the process is in a PID namespace that the agent does not see")]
    OtherNamespace,
    /// The process has ended.
    #[error("the process has ended")]
    Ended,
    /// The process does not have the memory that its userfaultfd serves.
    #[error("the userfaultfd serves the memory of another process")]
    OtherMemory,
}

/// A process that has not yet proved to have the served memory.
#[derive(Debug)]
pub(crate) struct UnprovenProcess {
    pid: u32,
    pidfd: OwnedFd,
}

impl UnprovenProcess {
    /// Returns the process that has made a connection.
    pub fn peer(peer: PeerProcess) -> Result<Self, ProofError> {
        if peer.pid == 0 {
            return Err(ProofError::OtherNamespace);
        }
        Ok(Self { pid: peer.pid, pidfd: peer.pidfd.ok_or(ProofError::Ended)? })
    }

    /// Opens the process that now has a number: the number of its first thread.
    pub fn numbered(pid: u32) -> Result<Self, ProofError> {
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(ProofError::Ended)?;
        let pidfd = pidfd_open(number, PidfdFlags::empty()).map_err(io::Error::from)?;
        Ok(Self { pid, pidfd })
    }

    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Proves that the process has the memory in which `fill` fills a canary. `fill` returns the
    /// canary that it has filled.
    ///
    /// The nonce must not have been in any memory before: a process that has read a nonce can write
    /// it to the memory of another process that it has started. So the files are opened first, and
    /// a canary that was filled already proves nothing.
    ///
    /// A hostile program can make this wait for any time, because it can map a file that it serves
    /// itself. So only a thread that serves no other program may call this.
    pub fn prove(self, fill: impl FnOnce() -> Option<Canary>) -> Result<ProgramProcess, ProofError> {
        let Self { pid, pidfd } = self;
        let folder = open_folder(rustix::fs::CWD, format!("/proc/{pid}"))?;
        // A process keeps its number until it has ended, so the folder belongs to this process.
        if has_ended(&pidfd, Duration::ZERO) {
            return Err(ProofError::Ended);
        }
        let files = MemoryFiles::open(&folder)?;
        if !fill().is_some_and(|canary| canary.is_in(&files.memory)) {
            return Err(ProofError::OtherMemory);
        }
        Ok(ProgramProcess {
            pid,
            pidfd: Arc::new(pidfd),
            folder: Some(folder),
            files,
            worker: OnceLock::new(),
        })
    }
}

/// Open files in `/proc` of the memory of a process. They refer to that memory even after the
/// process has executed another program. When the memory is gone, they read as empty.
#[derive(Debug)]
struct MemoryFiles {
    memory: Arc<OwnedFd>,
    pagemap: Arc<OwnedFd>,
    maps: Arc<OwnedFd>,
}

impl MemoryFiles {
    /// Opens the files of a process.
    fn open(folder: &OwnedFd) -> io::Result<Self> {
        let open = |name| open_file(folder, name).map(|file| Arc::new(OwnedFd::from(file)));
        let (pagemap, maps) = (open("pagemap")?, open("maps")?);
        // `mem` must be opened last: a process that has replaced its memory does not get it back,
        // so a canary in the memory of this file proves that the others have the same memory.
        Ok(Self { pagemap, maps, memory: open("mem")? })
    }
}

/// Maximum length in bytes of a file in `/proc`, for each area that the kernel permits. `smaps` has
/// some 1,000 bytes for an area, but a program chooses the length of a path.
const AREA_BYTES_MAX: usize = 2048;
/// Maximum number of areas of a process, if the kernel does not report it.
const AREAS_MAX: usize = 65_530;
/// Number of descriptors that the keeper holds of a process.
const KEPT_FDS: usize = 4;

/// The descriptors of a process from the keeper.
#[derive(Debug)]
pub(crate) struct KeptProcess {
    pub memory: OwnedFd,
    pub pagemap: OwnedFd,
    pub maps: OwnedFd,
    pub pidfd: OwnedFd,
}

/// A process that has proved to have the memory that a userfaultfd serves.
#[derive(Debug)]
pub(crate) struct ProgramProcess {
    pid: u32,
    pidfd: Arc<OwnedFd>,
    /// `/proc/PID` of this process, never of another one; `None` if the process had ended when this
    /// agent took over, and another process has its memory.
    folder: Option<OwnedFd>,
    files: MemoryFiles,
    /// `/proc/PID` of the worker, which lives as long as the memory; `None` if the worker is in
    /// another PID namespace.
    worker: OnceLock<Option<OwnedFd>>,
}

impl ProgramProcess {
    /// Makes the process from the descriptors that another agent has stored in the keeper.
    pub fn recovered(pid: u32, kept: KeptProcess) -> Self {
        let KeptProcess { memory, pagemap, maps, pidfd } = kept;
        let folder = open_folder(rustix::fs::CWD, format!("/proc/{pid}")).ok();
        let folder = folder.filter(|_| !has_ended(&pidfd, Duration::ZERO));
        let files =
            MemoryFiles { memory: Arc::new(memory), pagemap: Arc::new(pagemap), maps: Arc::new(maps) };
        Self { pid, pidfd: Arc::new(pidfd), folder, files, worker: OnceLock::new() }
    }

    /// Returns the descriptors of the process that the keeper holds, the pidfd last.
    pub fn kept_fds(&self) -> [Arc<OwnedFd>; KEPT_FDS] {
        let MemoryFiles { memory, pagemap, maps } = &self.files;
        [memory, pagemap, maps, &self.pidfd].map(Arc::clone)
    }

    pub fn pid(&self) -> u32 {
        self.pid
    }

    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Reads memory of the program, and returns the number of bytes. It is less than requested if
    /// the memory is gone or a page is missing.
    ///
    /// Does not wait for a userfaultfd: a missing first page is an error.
    pub fn read_memory(&self, address: u64, bytes: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::io::pread(&self.files.memory, bytes, address)?)
    }

    pub fn pagemap(&self) -> BorrowedFd<'_> {
        self.files.pagemap.as_fd()
    }

    /// Reads `/proc/PID/maps`, if it is not too long.
    pub fn read_maps(&self) -> io::Result<Vec<u8>> {
        let (mut text, mut buffer) = (Vec::new(), vec![0; 1 << 16]);
        loop {
            match rustix::io::pread(&self.files.maps, &mut *buffer, text.len() as u64)? {
                0 => return Ok(text),
                _ if text.len() > maps_bytes_max() => return Err(io::ErrorKind::FileTooLarge.into()),
                length => text.extend_from_slice(&buffer[..length]),
            }
        }
    }

    /// Finds the worker's process, which has `number` in its own PID namespace. In the agent's
    /// namespace another process may have the number; that one does not have the canary.
    ///
    /// A program that reports a wrong number falsifies only its own statistics.
    pub fn find_worker(&self, number: u32, canary: Canary) {
        self.worker.get_or_init(|| {
            let folder = open_folder(rustix::fs::CWD, format!("/proc/{number}")).ok()?;
            let memory = open_file(&folder, "mem").ok()?;
            canary.is_in(&memory).then_some(folder)
        });
    }

    pub fn has_worker(&self) -> bool {
        self.worker.get().is_some()
    }

    /// Opens a file in `/proc` for statistics: that of the worker, or that of the process if no
    /// worker is known. After an `execve` the latter is about the new program.
    pub fn open(&self, file: &str) -> io::Result<File> {
        let folder = self.worker.get().and_then(Option::as_ref).or(self.folder.as_ref());
        open_file(folder.ok_or(io::ErrorKind::NotFound)?, file)
    }

    /// Opens a file in `/proc` of the last thread of the process, which has not ended even if the
    /// first thread has.
    pub fn open_of_any_thread(&self, file: &str) -> io::Result<File> {
        let folder = self.folder.as_ref().ok_or(io::ErrorKind::NotFound)?;
        let tasks = rustix::fs::openat(folder, "task", OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())?;
        let last = Dir::read_from(&tasks)?.flatten().last().ok_or(io::ErrorKind::NotFound)?;
        open_file(&open_folder(&tasks, last.file_name())?, file)
    }

    /// Reads a file of [`Self::open`], if it is not too long.
    pub fn read(&self, file: &str) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        self.open(file)
            .and_then(|file| file.take(maps_bytes_max() as u64 + 1).read_to_end(&mut bytes))
            .ok()?;
        (bytes.len() <= maps_bytes_max()).then_some(bytes)
    }

    /// Returns the effective user of the process now.
    pub fn user(&self) -> Option<u32> {
        let mut text = String::new();
        self.open_of_thread(self.pid, "status").and_then(|mut file| file.read_to_string(&mut text)).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix("Uid:"))?;
        line.split_ascii_whitespace().nth(1)?.parse().ok()
    }

    /// Opens a file of one thread of the process.
    pub fn open_of_thread(&self, thread: u32, file: &str) -> io::Result<File> {
        let folder = self.folder.as_ref().ok_or(io::ErrorKind::NotFound)?;
        open_file(folder, &format!("task/{thread}/{file}"))
    }
}

/// Returns the maximum length in bytes of a file in `/proc`.
fn maps_bytes_max() -> usize {
    static BYTES: std::sync::LazyLock<usize> = std::sync::LazyLock::new(|| {
        let areas = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
        areas.trim().parse().unwrap_or(AREAS_MAX).max(AREAS_MAX).saturating_mul(AREA_BYTES_MAX)
    });
    *BYTES
}

/// Waits until the process of a pidfd has ended, at most `within`. Returns whether it has.
pub(crate) fn has_ended(pidfd: impl AsFd, within: Duration) -> bool {
    let deadline = Instant::now() + within;
    loop {
        let rest = deadline.saturating_duration_since(Instant::now());
        let rest = Timespec::try_from(rest).unwrap_or_default();
        let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
        match poll(&mut fds, Some(&rest)) {
            // See [`super::interrupt`].
            Err(rustix::io::Errno::INTR) => {}
            result => return result.is_ok_and(|ready| ready > 0),
        }
    }
}

fn open_folder(at: impl AsFd, path: impl rustix::path::Arg) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(at, path, flags, Mode::empty())?)
}

fn open_file(folder: &OwnedFd, name: &str) -> io::Result<File> {
    Ok(rustix::fs::openat(folder, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::canary::tests::missing_canary;

    #[test]
    fn only_the_process_that_has_the_memory_is_proven() {
        let Some((uffd, canary)) = missing_canary() else {
            return aquifer_tests_support::skip("no userfaultfd that reports forks");
        };
        let own = UnprovenProcess::numbered(std::process::id()).unwrap();
        let own = own.prove(|| canary.filled(&uffd)).unwrap();
        assert_eq!(own.pid(), std::process::id());
        let mut bytes = [0; 8];
        assert_eq!(own.read_memory(canary.page * 4096, &mut bytes).unwrap(), 8);
        assert_eq!(u64::from_ne_bytes(bytes), canary.number);
        assert!(own.read_maps().unwrap() == std::fs::read("/proc/self/maps").unwrap());

        let again = UnprovenProcess::numbered(std::process::id()).unwrap();
        let again = again.prove(|| canary.filled(&uffd));
        assert!(matches!(again, Err(ProofError::OtherMemory)), "what was filled before proves nothing");

        let mut other = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let process = UnprovenProcess::numbered(other.id()).unwrap();
        assert!(matches!(process.prove(|| Some(canary)), Err(ProofError::OtherMemory)));
        let process = UnprovenProcess::numbered(other.id()).unwrap();
        other.kill().unwrap();
        other.wait().unwrap();
        let ended = process.prove(|| Some(canary));
        assert!(matches!(ended, Err(ProofError::System(_) | ProofError::Ended)), "{ended:?}");
        assert!(UnprovenProcess::numbered(0).is_err());
    }

    #[test]
    fn a_reused_process_number_proves_nothing() {
        let Some((uffd, canary)) = missing_canary() else {
            return aquifer_tests_support::skip("no userfaultfd that reports forks");
        };
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        let UnprovenProcess { pidfd, .. } = UnprovenProcess::numbered(ended.id()).unwrap();
        ended.wait().unwrap();
        // Simulates that this process was started with the number of the ended one.
        let reused = UnprovenProcess { pid: std::process::id(), pidfd };
        assert!(matches!(reused.prove(|| canary.filled(&uffd)), Err(ProofError::Ended)));
    }

    #[test]
    fn a_missing_page_is_not_waited_for() {
        let Some((uffd, canary)) = missing_canary() else {
            return aquifer_tests_support::skip("no userfaultfd that reports forks");
        };
        let process = UnprovenProcess::numbered(std::process::id()).unwrap();
        let process = process.prove(|| canary.filled(&uffd)).unwrap();
        let missing = crate::serve::canary::tests::registered_page(&uffd);
        assert!(process.read_memory(missing * 4096, &mut [0; 16]).is_err());
    }
}
