//! What `/proc` tells of other processes.

use std::fs;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

/// The children of a process, over all its threads, and theirs.
#[must_use]
pub fn descendants(pid: u32) -> Vec<u32> {
    let mut found = Vec::new();
    let mut next = vec![pid];
    while let Some(parent) = next.pop() {
        let Ok(threads) = fs::read_dir(format!("/proc/{parent}/task")) else { continue };
        for thread in threads.flatten() {
            let Ok(text) = fs::read_to_string(thread.path().join("children")) else { continue };
            let children: Vec<u32> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
            next.extend(&children);
            found.extend(children);
        }
    }
    found
}

/// Resident anonymous memory, in bytes. A process whose first thread has ended is asked through
/// another.
#[must_use]
pub fn resident_anonymous_bytes(pid: u32) -> Option<u64> {
    let read = |path: String| field_kib(&fs::read_to_string(path).ok()?, "RssAnon:");
    read(format!("/proc/{pid}/status")).map(|kib| kib * 1024)
}

/// As [`resident_anonymous_bytes`], pages that are shared after a fork counted in part, so that the
/// sum over parent and children is what they take together.
#[must_use]
pub fn proportional_anonymous_bytes(pid: u32) -> Option<u64> {
    field_kib(&fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?, "Pss_Anon:")
        .map(|kib| kib * 1024)
}

fn field_kib(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Faults of a process so far, all its threads together; 0 if it is gone.
#[must_use]
pub fn faults(pid: u32) -> u64 {
    const MINOR_FAULTS_FIELD: usize = 7;
    let [faults] = stat_fields(pid, [MINOR_FAULTS_FIELD]);
    faults
}

/// What a process and the children that it has waited for have had of the processors so far, in
/// ticks of 10 ms; 0 if it is gone.
#[must_use]
pub fn processor_ticks(pid: u32) -> u64 {
    /// In user and kernel mode, its own and its children's.
    const TICK_FIELDS: [usize; 4] = [11, 12, 13, 14];
    stat_fields(pid, TICK_FIELDS).iter().sum()
}

/// Fields of its `/proc/PID/stat`; 0 if it is gone.
fn stat_fields<const N: usize>(pid: u32, fields: [usize; N]) -> [u64; N] {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name may hold anything; the fields are counted from behind it.
    let words: Vec<&str> =
        text.rsplit_once(')').map_or("", |(_, fields)| fields).split_whitespace().collect();
    fields.map(|field| words.get(field).and_then(|word| word.parse().ok()).unwrap_or(0))
}

/// The command line of a process.
#[must_use]
pub fn arguments(pid: u32) -> Vec<String> {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words = bytes.split(|byte| *byte == 0).filter(|word| !word.is_empty());
    words.map(|word| String::from_utf8_lossy(word).into_owned()).collect()
}

/// All processes.
#[must_use]
pub fn all() -> Vec<u32> {
    numbers("/proc")
}

/// The entries of a directory that are numbers; none, if it is gone.
fn numbers(directory: &str) -> Vec<u32> {
    let entries = fs::read_dir(directory).ok().into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Whether it runs still: a zombie does not.
#[must_use]
pub fn is_alive(pid: u32) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    // The name in brackets may hold anything.
    stat.rsplit(')').next().is_some_and(|rest| !rest.trim_start().starts_with(['Z', 'X']))
}

/// Kill a process of ours, and wait until nothing of it is left.
///
/// # Panics
/// If there is no such process, or it does not end.
pub fn kill(pid: u32) {
    let number = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a process number");
    let pidfd = pidfd_open(number, PidfdFlags::empty()).expect("the process is there");
    kill_process(number, Signal::KILL).expect("the process is ours");
    let patience = Timespec { tv_sec: 30, tv_nsec: 0 };
    let ended = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&patience));
    assert_eq!(ended, Ok(1), "process {pid} does not end");
}

/// Send a signal to a process of ours.
///
/// # Panics
/// If there is no such process.
pub fn signal(pid: u32, signal: Signal) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a process number");
    // Opened first: the number is then not another's.
    let _held = pidfd_open(pid, PidfdFlags::empty()).expect("the process is there");
    kill_process(pid, signal).expect("the process is ours");
}

/// What each thread of a process does, for people who look why it does not end: its state, its
/// system call, where it is in the kernel, and how many faults wait at the descriptors that it has
/// for them.
#[must_use]
pub fn report(pid: u32) -> String {
    let read = |path: String| fs::read_to_string(path).unwrap_or_default();
    let mut report = format!("process {pid}: {}\n", arguments(pid).join(" "));
    for thread in numbers(&format!("/proc/{pid}/task")) {
        let folder = format!("/proc/{pid}/task/{thread}");
        let state = read(format!("{folder}/status"));
        let state = state.lines().find(|line| line.starts_with("State:")).unwrap_or_default();
        let name = read(format!("{folder}/comm"));
        let call = read(format!("{folder}/syscall"));
        report += &format!("  thread {thread} {}: {state}; system call {}\n", name.trim(), call.trim());
        read(format!("{folder}/stack")).lines().take(6).for_each(|line| report += &format!("    {line}\n"));
    }
    for descriptor in numbers(&format!("/proc/{pid}/fdinfo")) {
        let info = read(format!("/proc/{pid}/fdinfo/{descriptor}"));
        let waiting = info.lines().filter(|line| line.starts_with("pending:") || line.starts_with("total:"));
        waiting.for_each(|line| report += &format!("  descriptor {descriptor}: {line}\n"));
    }
    report
}
