//! Runs programs and measures their time, processor time and resident memory.

use std::fs::File;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};

use super::{interrupt, procs};
use crate::BenchError;

/// Time between two samples of resident memory.
const SAMPLE: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
/// Most characters of a failed program's standard error that are kept.
const MESSAGE_CHARS_MAX: usize = 2000;

/// The processes whose memory is sampled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Watched {
    /// The started process and its descendants.
    All,
    /// Only the descendants of the started process, which is `aquifer run`.
    Started,
}

/// Input and output of a program.
#[derive(Debug)]
pub struct Streams<'a> {
    /// File with the program's standard input; empty if `None`.
    pub input: Option<&'a Path>,
    /// File for the program's standard output.
    pub output: &'a Path,
}

/// Exit status and measurements of a program.
#[derive(Clone, Debug)]
pub struct ProgramOutcome {
    /// Exit status.
    pub status: ExitStatus,
    /// Time from start to end.
    pub elapsed: Duration,
    /// Processor time of the process and of the children that it waited for.
    pub cpu_us: u64,
    /// Peak of sampled resident anonymous memory.
    pub resident_peak_bytes: u64,
    /// The end of the program's standard error.
    pub message: String,
}

/// A sample of a running program.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    /// Time since the program's start.
    pub elapsed: Duration,
    /// Resident anonymous memory.
    pub resident_bytes: u64,
}

/// A process group, which is killed on drop.
struct Group(Pid);

impl Drop for Group {
    fn drop(&mut self) {
        // Fails if all its processes have ended.
        let _ = rustix::process::kill_process_group(self.0, Signal::KILL);
    }
}

/// Runs a command in a process group of its own, and calls `on_moment` with a sample every 10 ms.
///
/// # Errors
/// If the program cannot be started, or a signal asks to stop; then its group is killed. A program
/// that fails is no error.
pub fn run(
    command: Command,
    streams: &Streams<'_>,
    watched: Watched,
    mut on_moment: impl FnMut(Moment),
) -> Result<ProgramOutcome, BenchError> {
    run_with_pid(command, streams, watched, |_, moment| on_moment(moment))
}

/// Like [`run`], but also passes the process number to `on_moment`, for signals.
///
/// # Errors
/// Those of [`run`].
pub fn run_with_pid(
    mut command: Command,
    streams: &Streams<'_>,
    watched: Watched,
    mut on_moment: impl FnMut(Pid, Moment),
) -> Result<ProgramOutcome, BenchError> {
    interrupt::check()?;
    let program = PathBuf::from(command.get_program());
    let message_path = streams.output.with_extension("stderr");
    let create = |path: &Path| File::create(path).map_err(BenchError::io("create", path));
    let input = match streams.input {
        Some(path) => Stdio::from(File::open(path).map_err(BenchError::io("open", path))?),
        None => Stdio::null(),
    };
    command.stdin(input).stdout(create(streams.output)?).stderr(create(&message_path)?).process_group(0);
    let start = Instant::now();
    // `reap` waits for the child instead of `child.wait()`, because it reads the processor time.
    let child = command.spawn().map_err(BenchError::io("start", &program))?;
    let pid = child.id();
    let raw = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a process has a positive number");
    let group = Group(raw);
    let end = pidfd_open(raw, PidfdFlags::empty())
        .map_err(|source| BenchError::io("watch", &program)(source.into()))?;
    let mut resident_peak_bytes = 0;
    let mut known = Vec::new();
    let mut stopped = false;
    loop {
        let mut fds = [PollFd::new(&end, PollFlags::IN)];
        if poll(&mut fds, Some(&SAMPLE)).is_ok_and(|ready| ready > 0) {
            break;
        }
        if interrupt::is_requested() && !stopped {
            stopped = true;
            let _ = rustix::process::kill_process_group(raw, Signal::KILL);
        }
        let resident_bytes = resident(pid, watched, &mut known);
        resident_peak_bytes = resident_peak_bytes.max(resident_bytes);
        on_moment(raw, Moment { elapsed: start.elapsed(), resident_bytes });
    }
    let elapsed = start.elapsed();
    let (status, cpu_us) = reap(raw).map_err(BenchError::io("wait for", &program))?;
    drop(group);
    interrupt::check()?;
    let message = tail(&std::fs::read(&message_path).unwrap_or_default());
    // A failure is ignored: the folder is removed later.
    let _ = std::fs::remove_file(&message_path);
    Ok(ProgramOutcome { status, elapsed, cpu_us, resident_peak_bytes, message })
}

/// Resident anonymous memory of the program.
///
/// Counts only descendants that were in the last sample, too (`known`): before its exec a new
/// process shares the memory of its parent, which would be counted twice.
fn resident(pid: u32, watched: Watched, known: &mut Vec<u32>) -> u64 {
    let own = if watched == Watched::All { procs::anonymous_bytes(pid) } else { 0 };
    let started = procs::descendants(pid);
    let counted = started.iter().filter(|pid| known.contains(pid));
    let bytes = own + counted.map(|pid| procs::anonymous_bytes(*pid)).sum::<u64>();
    *known = started;
    bytes
}

fn reap(pid: Pid) -> std::io::Result<(ExitStatus, u64)> {
    let mut status = 0;
    loop {
        // SAFETY: an all-zero rusage is a valid one, and both pointers live through the call.
        let (reaped, usage) = unsafe {
            let mut usage: libc::rusage = std::mem::zeroed();
            let reaped = libc::wait4(pid.as_raw_nonzero().get(), &raw mut status, 0, &raw mut usage);
            (reaped, usage)
        };
        if reaped >= 0 {
            let us = |time: libc::timeval| {
                u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000 + u64::try_from(time.tv_usec).unwrap_or(0)
            };
            return Ok((ExitStatus::from_raw(status), us(usage.ru_utime) + us(usage.ru_stime)));
        }
        let error = std::io::Error::last_os_error();
        if error.kind() != std::io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

fn tail(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let text = text.trim();
    let skipped = text.chars().count().saturating_sub(MESSAGE_CHARS_MAX);
    text.chars().skip(skipped).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, watched: Watched) -> (ProgramOutcome, String) {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("output");
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let outcome = run(command, &Streams { input: None, output: &output }, watched, |_| {}).unwrap();
        (outcome, std::fs::read_to_string(output).unwrap())
    }

    #[test]
    fn output_code_and_message_are_the_programs() {
        let (outcome, output) = shell("echo out; echo oops >&2; cat; exit 3", Watched::All);
        assert_eq!((outcome.status.code(), output.as_str()), (Some(3), "out\n"));
        assert_eq!(outcome.message, "oops");
        let (outcome, _) = shell("kill -9 $$", Watched::All);
        assert_eq!(outcome.status.signal(), Some(9));
    }

    #[test]
    fn processor_time_of_children_counts() {
        let busy = "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done";
        let (outcome, _) = shell(&format!("sh -c '{busy}'; true"), Watched::Started);
        assert!(outcome.cpu_us > 0, "{outcome:?}");
    }

    #[test]
    fn processes_that_outlive_the_program_are_killed() {
        let (_, output) = shell("cat /dev/zero >/dev/null & echo $!", Watched::All);
        let pid = output.trim();
        let gone = || match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
            Ok(stat) => stat.rsplit_once(')').is_some_and(|(_, rest)| rest.starts_with(" Z")),
            Err(_) => true,
        };
        while !gone() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn only_the_end_of_a_long_message_is_kept() {
        let long = "x".repeat(MESSAGE_CHARS_MAX) + "end\n";
        assert_eq!(tail(long.as_bytes()).chars().count(), MESSAGE_CHARS_MAX);
        assert!(tail(long.as_bytes()).ends_with("end"));
        assert_eq!(tail(&[0xff]), "\u{fffd}");
    }
}
