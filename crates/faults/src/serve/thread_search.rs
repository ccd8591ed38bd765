//! Finds the process of a thread whose number is one of its own PID namespace.

use std::cmp::Reverse;
use std::fs;
use std::path::Path;

use super::stat;

/// Processes that are proposed at most.
const CANDIDATES_MAX: usize = 16;
/// Parents that are looked at, from a process on.
const GENERATIONS_MAX: usize = 32;

/// What is known of the process that is looked for.
#[derive(Debug)]
pub(crate) struct ThreadSearch {
    /// The processes of the run's programs. One of them may have forked it.
    pub programs: Vec<u32>,
    /// The user of the run.
    pub tenant: u32,
    /// Other PID namespaces are looked at, too, if a child of the programs has the number here, and
    /// all threads there.
    pub is_wide: bool,
}

impl ThreadSearch {
    /// The process with such a thread here, and those of the run and of its users that may have one
    /// in another PID namespace.
    pub fn processes_with(&self, thread: u32) -> Vec<u32> {
        let here = Status::read(thread);
        let is_child = here.as_ref().is_some_and(|status| self.programs.contains(&status.parent));
        let here = here.map(|status| status.process);
        let others = if is_child && !self.is_wide { Vec::new() } else { self.of_other_namespaces(thread) };
        here.into_iter().chain(others).take(CANDIDATES_MAX).collect()
    }

    /// Processes of other PID namespaces that have this number there, or one of whose threads has
    /// it, the newest first.
    fn of_other_namespaces(&self, number: u32) -> Vec<u32> {
        let Ok(folders) = fs::read_dir("/proc") else { return Vec::new() };
        let users = self.users();
        let numbers = folders.flatten().filter_map(|folder| folder.file_name().to_str()?.parse().ok());
        let statuses = numbers.filter_map(Status::read);
        let has_number = |status: &Status| {
            status.inner_number == Some(number) || self.is_wide && has_thread(status.process, number)
        };
        let is_it = |status: &Status| {
            status.inner_number.is_some() && self.may_be(status, &users) && has_number(status)
        };
        let mut found: Vec<u32> = statuses.filter(is_it).map(|status| status.process).collect();
        found.sort_by_cached_key(|process| Reverse(start_ticks(*process)));
        found
    }

    /// Whether a process belongs to the run or to one of its users.
    fn may_be(&self, status: &Status, users: &[u32]) -> bool {
        users.contains(&status.user) || self.descends_from_program(status.parent)
    }

    /// The users of the run and of its programs.
    fn users(&self) -> Vec<u32> {
        let of_programs = self.programs.iter().filter_map(|process| Some(Status::read(*process)?.user));
        [self.tenant].into_iter().chain(of_programs).collect()
    }

    /// Whether this process or one of its ancestors is a program of the run.
    fn descends_from_program(&self, mut process: u32) -> bool {
        (0..GENERATIONS_MAX).any(|_| {
            let is_program = self.programs.contains(&process);
            process = if process > 1 { Status::read(process).map_or(0, |status| status.parent) } else { 0 };
            is_program
        })
    }
}

/// Whether a process of another PID namespace has a thread with this number there.
fn has_thread(process: u32, number: u32) -> bool {
    let Ok(threads) = fs::read_dir(format!("/proc/{process}/task")) else { return false };
    let statuses = threads.flatten().filter_map(|thread| Status::read_file(&thread.path().join("status")));
    statuses.into_iter().any(|status| status.inner_number == Some(number))
}

/// When a process was started, in clock ticks since the start of the machine.
fn start_ticks(process: u32) -> Option<u64> {
    let text = fs::read(format!("/proc/{process}/stat")).ok()?;
    stat::field(&text, stat::START)
}

/// Of `/proc/PID/status`.
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
        // The name of a program is any bytes.
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
        let search = ThreadSearch { programs: Vec::new(), tenant: u32::MAX - 1, is_wide: true };
        let thread = rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs();
        assert_eq!(search.processes_with(thread).first(), Some(&own));

        let status = Status::read(own).unwrap();
        assert!(!search.may_be(&status, &search.users()), "it is another user's");
        let of_parent = ThreadSearch { programs: vec![status.parent], ..search };
        assert!(of_parent.may_be(&status, &[]));
        let of_user = ThreadSearch { programs: Vec::new(), tenant: status.user, is_wide: true };
        assert!(of_user.may_be(&status, &of_user.users()));
        assert!(start_ticks(own) >= start_ticks(1));
    }
}
