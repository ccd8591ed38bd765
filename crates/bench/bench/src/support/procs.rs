//! Other processes, as `/proc` shows them.

use std::fs;
use std::path::Path;

/// Resident anonymous memory of a process in bytes; 0 if it has ended.
pub fn anonymous_bytes(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    parse_anonymous_bytes(&status).unwrap_or(0)
}

fn parse_anonymous_bytes(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

/// All descendants of a process, without the process itself.
pub fn descendants(pid: u32) -> Vec<u32> {
    /// Bound of the search, in case process numbers are reused during it.
    const PROCESSES_MAX: usize = 1024;
    let mut found = children(pid);
    let mut next = 0;
    while next < found.len() && found.len() < PROCESSES_MAX {
        found.extend(children(found[next]));
        next += 1;
    }
    found
}

fn children(pid: u32) -> Vec<u32> {
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else {
        return Vec::new();
    };
    let lists = tasks.flatten().map(|task| fs::read_to_string(task.path().join("children")));
    lists.flatten().flat_map(|list| parse_numbers(&list)).collect()
}

fn parse_numbers(list: &str) -> Vec<u32> {
    list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// Processor time of a process in µs, in user and kernel mode; 0 if it has ended.
pub fn cpu_us(pid: u32) -> u64 {
    cpu_ns(pid) / 1000
}

/// Processor time of a process in ns, in user and kernel mode; 0 if it has ended.
pub fn cpu_ns(pid: u32) -> u64 {
    let Ok(pid) = libc::pid_t::try_from(pid) else { return 0 };
    let mut clock = 0;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: both pointers are valid for writes, and the values are read only after success.
    let is_known = unsafe {
        libc::clock_getcpuclockid(pid, &raw mut clock) == 0 && libc::clock_gettime(clock, &raw mut time) == 0
    };
    if !is_known {
        return 0;
    }
    let part = |value| u64::try_from(value).unwrap_or(0);
    part(time.tv_sec) * 1_000_000_000 + part(time.tv_nsec)
}

/// Processes with an argument that starts with `needle`, such as the daemons with a state folder.
pub fn with_argument(needle: &Path) -> Vec<u32> {
    let needle = needle.as_os_str().as_encoded_bytes();
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|&pid| pid != std::process::id() && has_argument(pid, needle)).collect()
}

fn has_argument(pid: u32, needle: &[u8]) -> bool {
    let arguments = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    arguments.split(|&byte| byte == 0).any(|argument| argument.starts_with(needle))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_resident_memory() {
        let status = "Name:\tx\nVmRSS:\t   900 kB\nRssAnon:\t     512 kB\nRssFile:\t 4 kB\n";
        assert_eq!(parse_anonymous_bytes(status), Some(512 << 10));
        assert_eq!(parse_anonymous_bytes("RssAnon:\t512\n"), None);
        assert_eq!(parse_anonymous_bytes(""), None);
        assert!(anonymous_bytes(std::process::id()) > 0);
    }

    #[test]
    fn processor_time_grows_with_work() {
        let own = std::process::id();
        let before = cpu_ns(own);
        assert!(before > 0);
        while cpu_ns(own) < before + 1_000_000 {}
        assert_eq!(cpu_ns(u32::MAX), 0);
    }

    #[test]
    fn finds_children_of_children_and_arguments() {
        let mark = format!("/nowhere/{}", std::process::id());
        // The shell waits for its child, so that there are two generations.
        let mut shell = std::process::Command::new("sh")
            .args(["-c", "cat; true", &mark])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        while descendants(shell.id()).is_empty() {
            std::thread::yield_now();
        }
        assert!(descendants(std::process::id()).contains(&descendants(shell.id())[0]));
        assert!(with_argument(Path::new(&mark)).contains(&shell.id()));
        drop(shell.stdin.take());
        assert!(shell.wait().unwrap().success());
        assert!(descendants(shell.id()).is_empty());
        assert_eq!(cpu_us(u32::MAX), 0);
    }
}
