//! Runs a program and watches it from outside: time, processor time, resident memory.

use std::fs::File;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};

use super::{interrupt, procs};
use crate::bench::BenchError;

/// How often resident memory is looked at.
const SAMPLE: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
/// What a failed program said last is shown up to this many characters.
const MESSAGE_CHARS_MAX: usize = 2000;

/// Whose memory is the program's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Watched {
    /// The started process and all that it starts.
    All,
    /// Only what the started process starts: it is `aquifer run` itself.
    Started,
}

/// Where a program reads and writes.
#[derive(Debug)]
pub struct Streams<'a> {
    /// Its input; nothing, if `None`.
    pub input: Option<&'a Path>,
    /// Gets its output.
    pub output: &'a Path,
}

/// How a program did.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// How it ended.
    pub status: ExitStatus,
    /// From start to end.
    pub elapsed: Duration,
    /// Processor time of it and of all that it waited for.
    pub cpu_us: u64,
    /// The most anonymous memory that was seen resident.
    pub resident_peak_bytes: u64,
    /// What it said on standard error, its end.
    pub message: String,
}

/// A moment of a running program.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    /// Since its start.
    pub elapsed: Duration,
    /// Anonymous memory that is resident.
    pub resident_bytes: u64,
}

/// A process group that is killed if it is left behind.
struct Group(Pid);

impl Drop for Group {
    fn drop(&mut self) {
        // Of a group that has ended there is nothing left to kill.
        let _ = rustix::process::kill_process_group(self.0, Signal::KILL);
    }
}

/// Runs `command` in a process group of its own until it ends; `on_moment` hears of it every 10 ms.
///
/// # Errors
/// If it cannot be started, or a signal asks to stop: then it and all that it started are killed.
/// That the program fails is no error here.
pub fn run(
    command: Command,
    streams: &Streams<'_>,
    watched: Watched,
    mut on_moment: impl FnMut(Moment),
) -> Result<Outcome, BenchError> {
    attend(command, streams, watched, |_, moment| on_moment(moment))
}

/// As [`run`]; `on_moment` is told, too, whom it may send signals to.
///
/// # Errors
/// As [`run`].
pub fn attend(
    mut command: Command,
    streams: &Streams<'_>,
    watched: Watched,
    mut on_moment: impl FnMut(Pid, Moment),
) -> Result<Outcome, BenchError> {
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
    // `reap` waits for it, and learns its processor time.
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
        if interrupt::asked() && !stopped {
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
    // An empty one tells nothing; that it cannot be removed harms nothing, its folder goes, too.
    let _ = std::fs::remove_file(&message_path);
    Ok(Outcome { status, elapsed, cpu_us, resident_peak_bytes, message })
}

/// Of what was started those are counted that were there at the last look, `known`, too: a process
/// that is about to become another program seems to have all that its parent has.
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

    fn shell(script: &str, watched: Watched) -> (Outcome, String) {
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
    fn what_outlives_the_program_is_killed() {
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
