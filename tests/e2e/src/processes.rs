//! Other processes, as `/proc` shows them.

use std::fs;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

/// All descendants of a process, of all its threads.
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

/// Resident anonymous memory of a process, in bytes; `None` if it has ended.
#[must_use]
pub fn resident_anonymous_bytes(pid: u32) -> Option<u64> {
    let read = |path: String| field_kib(&fs::read_to_string(path).ok()?, "RssAnon:");
    read(format!("/proc/{pid}/status")).map(|kib| kib * 1024)
}

/// Resident anonymous memory of a process, in bytes, with each page that is shared after a fork
/// divided among its processes. The sum over parent and children is their memory together.
#[must_use]
pub fn proportional_anonymous_bytes(pid: u32) -> Option<u64> {
    field_kib(&fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?, "Pss_Anon:")
        .map(|kib| kib * 1024)
}

fn field_kib(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Minor faults of a process, over all its threads; 0 if it has ended.
#[must_use]
pub fn faults(pid: u32) -> u64 {
    const MINOR_FAULTS_FIELD: usize = 7;
    let [faults] = stat_fields(pid, [MINOR_FAULTS_FIELD]);
    faults
}

/// Processor time of a process and of the children that it has waited for, in ticks of 10 ms; 0 if
/// it has ended.
#[must_use]
pub fn processor_ticks(pid: u32) -> u64 {
    /// Times in user and kernel mode, of the process and of its children.
    const TICK_FIELDS: [usize; 4] = [11, 12, 13, 14];
    stat_fields(pid, TICK_FIELDS).iter().sum()
}

/// Fields of `/proc/PID/stat`, counted from the one behind the name; 0 if the process has ended.
fn stat_fields<const N: usize>(pid: u32, fields: [usize; N]) -> [u64; N] {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name may contain blanks and brackets.
    let words: Vec<&str> =
        text.rsplit_once(')').map_or("", |(_, fields)| fields).split_whitespace().collect();
    fields.map(|field| words.get(field).and_then(|word| word.parse().ok()).unwrap_or(0))
}

/// The number of userfaultfds that a process has.
#[must_use]
pub fn userfaultfds(pid: u32) -> usize {
    let folder = format!("/proc/{pid}/fd");
    let is_userfaultfd = |number: &u32| {
        fs::read_link(format!("{folder}/{number}"))
            .is_ok_and(|target| target.as_os_str() == "anon_inode:[userfaultfd]")
    };
    numbers(&folder).iter().filter(|number| is_userfaultfd(number)).count()
}

/// The effective user id of a process; `None` if it has ended.
#[must_use]
pub fn user(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let ids = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    ids.split_whitespace().nth(1)?.parse().ok()
}

/// Command line of a process.
#[must_use]
pub fn arguments(pid: u32) -> Vec<String> {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words = bytes.split(|byte| *byte == 0).filter(|word| !word.is_empty());
    words.map(|word| String::from_utf8_lossy(word).into_owned()).collect()
}

/// Process numbers of all processes.
#[must_use]
pub fn all() -> Vec<u32> {
    numbers("/proc")
}

/// The entries of a directory that are numbers; none if it does not exist.
fn numbers(directory: &str) -> Vec<u32> {
    let entries = fs::read_dir(directory).ok().into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Whether a process runs. A zombie does not.
#[must_use]
pub fn is_alive(pid: u32) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    // The name in brackets may contain any character.
    stat.rsplit(')').next().is_some_and(|rest| !rest.trim_start().starts_with(['Z', 'X']))
}

/// Kills a process and waits for its end.
///
/// # Panics
/// If there is no such process, or it does not end.
pub fn kill(pid: u32) {
    let number = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a process number");
    let pidfd = pidfd_open(number, PidfdFlags::empty()).expect("the process is there");
    kill_process(number, Signal::KILL).expect("the process is ours");
    let timeout = Timespec { tv_sec: 30, tv_nsec: 0 };
    let ended = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&timeout));
    assert_eq!(ended, Ok(1), "process {pid} does not end");
}

/// Sends a signal to a process.
///
/// # Panics
/// If there is no such process.
pub fn signal(pid: u32, signal: Signal) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a process number");
    // While the descriptor is open, the kernel does not reuse the number.
    let _held = pidfd_open(pid, PidfdFlags::empty()).expect("the process is there");
    kill_process(pid, signal).expect("the process is ours");
}

/// Sends a signal to a process, unless it has ended.
pub fn signal_if_alive(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw)
        && let Ok(_held) = pidfd_open(pid, PidfdFlags::empty())
    {
        // Fails if it ends just now.
        let _ = kill_process(pid, signal);
    }
}

/// Report about a process that does not end: for each thread its state, system call and kernel
/// stack, and the pending faults of its userfaultfds.
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
