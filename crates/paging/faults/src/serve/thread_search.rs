//! Search for the process of a thread whose number is one of its own PID namespace.
//!
//! For a process that may be another user's, this reads only `/proc/PID/status` and the list of
//! threads. Opening other files can make the kernel wait for the process, for ever if it is
//! hostile.

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::fs;
use std::path::Path;

/// Maximum number of candidates that a search returns.
const CANDIDATES_MAX: usize = 1024;
/// Maximum number of status files that one search reads. Each takes some 13 µs.
const STATUSES_MAX: usize = 1 << 14;
/// Maximum number of ancestors of a process that a search checks.
const GENERATIONS_MAX: usize = 32;

/// A search for the process of a forked child.
#[derive(Debug)]
pub(crate) struct ThreadSearch {
    /// The parent of the process, if it is known.
    pub parent: Option<u32>,
    /// The processes of the run's programs.
    pub programs: Vec<u32>,
    /// The user of the run.
    pub tenant: u32,
    /// Whether to search other PID namespaces even if a child of the programs has the number in the
    /// agent's namespace, and to search all threads there.
    pub is_wide: bool,
}

impl ThreadSearch {
    /// Returns the process that has this thread in the agent's PID namespace, and the processes
    /// that may have it in another one. They belong to the run or its user, and are no programs
    /// yet. The most likely ones are first.
    pub fn processes_with(&self, thread: u32) -> Vec<u32> {
        let here = Status::read(thread).filter(|status| self.may_be(status));
        let is_child = here.as_ref().is_some_and(|status| self.programs.contains(&status.parent));
        let here = here.map(|status| status.process);
        let others = if is_child && !self.is_wide { Vec::new() } else { self.of_other_namespaces(thread) };
        here.into_iter().chain(others).take(CANDIDATES_MAX).collect()
    }

    /// Whether the process with this thread in the agent's PID namespace is a child of the run's
    /// programs.
    pub fn is_child(&self, thread: u32) -> bool {
        Status::read(thread).is_some_and(|status| self.programs.contains(&status.parent))
    }

    /// Returns the processes of other PID namespaces that have this number there, or that have a
    /// thread with it. Children of the parent are first, then other descendants of a program, then
    /// the rest.
    fn of_other_namespaces(&self, number: u32) -> Vec<u32> {
        let Ok(folders) = fs::read_dir("/proc") else { return Vec::new() };
        let numbers = folders.flatten().filter_map(|folder| folder.file_name().to_str()?.parse().ok());
        let all: HashMap<u32, Status> =
            numbers.take(STATUSES_MAX).filter_map(|number| Some((number, Status::read(number)?))).collect();
        let parent_of = |process| all.get(&process).map_or(0, |status| status.parent);
        let left = Cell::new(STATUSES_MAX);
        let mut found = Vec::new();
        for status in all.values().filter(|status| status.inner_number.is_some()) {
            let has_number = status.inner_number == Some(number);
            if !has_number && !self.is_wide || self.programs.contains(&status.process) {
                continue;
            }
            let descends = self.descends_from_program(status.parent, parent_of);
            let may_be = descends || status.user == self.tenant;
            if may_be && (has_number || has_thread(status.process, number, &left)) {
                found.push((Some(status.parent) == self.parent, descends, status.process));
            }
        }
        found.sort_unstable_by_key(|likelihood| Reverse(*likelihood));
        found.into_iter().map(|(.., process)| process).collect()
    }

    /// Whether a process belongs to the run or its user.
    fn may_be(&self, status: &Status) -> bool {
        let parent_of = |process| Status::read(process).map_or(0, |status| status.parent);
        status.user == self.tenant || self.descends_from_program(status.parent, parent_of)
    }

    /// Whether this process or one of its ancestors is a program of the run.
    fn descends_from_program(&self, mut process: u32, parent_of: impl Fn(u32) -> u32) -> bool {
        (0..GENERATIONS_MAX).any(|_| {
            let is_program = self.programs.contains(&process);
            process = if process > 1 { parent_of(process) } else { 0 };
            is_program
        })
    }
}

/// Whether a process of another PID namespace has a thread with this number there. Reads at most
/// `left` status files, and subtracts those that it reads.
fn has_thread(process: u32, number: u32, left: &Cell<usize>) -> bool {
    let Ok(threads) = fs::read_dir(format!("/proc/{process}/task")) else { return false };
    let threads = threads.flatten().take_while(|_| left.get() > 0).inspect(|_| left.set(left.get() - 1));
    let statuses = threads.filter_map(|thread| Status::read_file(&thread.path().join("status")));
    statuses.into_iter().any(|status| status.inner_number == Some(number))
}

/// Fields of `/proc/PID/status`.
#[derive(PartialEq, Eq, Debug)]
struct Status {
    process: u32,
    parent: u32,
    /// The effective user.
    user: u32,
    /// The number in the process's own PID namespace, if that is another one.
    inner_number: Option<u32>,
}

impl Status {
    fn read(number: u32) -> Option<Self> {
        Self::read_file(format!("/proc/{number}/status").as_ref())
    }

    fn read_file(path: &Path) -> Option<Self> {
        // The name of a program may be any bytes.
        let text = fs::read(path).ok()?;
        Self::parse(&String::from_utf8_lossy(&text))
    }

    fn parse(text: &str) -> Option<Self> {
        let numbers = |name| {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            line.unwrap_or_default().split_whitespace().filter_map(|word| word.parse().ok())
        };
        Some(Self {
            process: numbers("Tgid:").next()?,
            parent: numbers("PPid:").next()?,
            user: numbers("Uid:").nth(1)?,
            inner_number: numbers("NSpid:").skip(1).last(),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::parent_id;

    use super::*;

    const STATUS: &str = "Name:\tUid: 7\\n\nTgid:\t210\nPid:\t211\nPPid:\t200\nUid:\t5\t6\t7\t8\n";

    #[test]
    fn a_status_is_parsed() {
        let here = Status { process: 210, parent: 200, user: 6, inner_number: None };
        assert_eq!(Status::parse(&format!("{STATUS}NSpid:\t211\n")), Some(here));
        let inner = Status::parse(&format!("{STATUS}NSpid:\t211\t30\t3\n"));
        assert_eq!(inner.and_then(|status| status.inner_number), Some(3));
        assert_eq!(Status::parse("Tgid:\t210\n"), None);
    }

    #[test]
    fn a_process_is_found_by_its_thread_and_its_ancestors() {
        let own = std::process::id();
        let search =
            ThreadSearch { parent: None, programs: vec![parent_id()], tenant: u32::MAX - 1, is_wide: true };
        let thread = rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs();
        assert_eq!(search.processes_with(thread).first(), Some(&own));

        let status = Status::read(own).unwrap();
        let of_user = |tenant| ThreadSearch { parent: None, programs: Vec::new(), tenant, is_wide: true };
        assert!(of_user(status.user).may_be(&status));
        assert!(!of_user(status.user + 1).may_be(&status), "it is another user's");
        assert!(of_user(status.user + 1).processes_with(thread).is_empty(), "not even if it has the number");
    }
}
