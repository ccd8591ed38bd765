//! Start times of processes, because the kernel reuses process ids.

use std::fs;

/// The start time of a process in ticks since boot, which differs from that of a later process with
/// the same id; `None` if there is no such process.
#[must_use]
pub fn start_time(pid: u32) -> Option<u64> {
    parse_start_time(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Parses the start time, field 22, of a process's stat; `None` for a zombie. The command's name
/// may contain any character, so fields are counted from its closing bracket.
fn parse_start_time(stat: &str) -> Option<u64> {
    let (_, after_name) = stat.rsplit_once(')')?;
    let mut fields = after_name.split_whitespace();
    let state = fields.next()?;
    (!matches!(state, "Z" | "X")).then(|| fields.nth(18)?.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_time_ignores_a_hostile_command_name() {
        let fields = (4..=21).map(|field| field.to_string()).collect::<Vec<_>>().join(" ");
        assert_eq!(parse_start_time(&format!("7 (a) S 9 (b c)) R {fields} 777 23")), Some(777));
        assert_eq!(parse_start_time(&format!("7 (a) Z {fields} 777 23")), None, "a zombie");
        assert_eq!(parse_start_time("7 (a) S 1 2"), None);
        assert_eq!(parse_start_time(""), None);
        assert!(start_time(std::process::id()).is_some());
    }
}
