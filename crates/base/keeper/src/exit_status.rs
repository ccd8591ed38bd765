//! Exit statuses of processes that are not children of this one.

use std::mem::size_of;
use std::os::fd::OwnedFd;

use rustix::ioctl::{Opcode, Updater, ioctl, opcode};

/// How a process ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExitStatus {
    /// The process exited with this code.
    Code(u8),
    /// The process was killed by this signal.
    Signal(u8),
}

impl ExitStatus {
    /// Converts a status of `wait(2)`.
    fn from_wait(status: u32) -> Self {
        let signal = u8::try_from(status & 0x7f).expect("seven bits");
        let code = u8::try_from(status >> 8 & 0xff).expect("eight bits");
        if signal == 0 { Self::Code(code) } else { Self::Signal(signal) }
    }
}

/// The status of a zombie, which has ended and is not reaped; `None` if `pid` is not a zombie.
pub fn of_zombie(pid: u32) -> Option<ExitStatus> {
    parse_stat(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Parses the exit code, field 52, of a zombie's `/proc/PID/stat`. The name, field 2, may contain
/// any character.
fn parse_stat(stat: &str) -> Option<ExitStatus> {
    let mut fields = stat.get(stat.rfind(')')? + 1..)?.split_whitespace();
    (fields.next()? == "Z").then_some(())?;
    fields.last()?.parse().ok().map(ExitStatus::from_wait)
}

/// `struct pidfd_info` of `linux/pidfd.h` in its first version (Linux 6.13).
#[repr(C)]
#[derive(Default)]
struct PidfdInfo {
    mask: u64,
    cgroup: u64,
    /// Process ids and credentials; not read.
    _unused: [u32; 11],
    exit_code: u32,
}

/// `PIDFD_INFO_EXIT`.
const INFO_EXIT: u64 = 1 << 3;
/// `PIDFD_GET_INFO`.
const GET_INFO: Opcode = opcode::read_write::<PidfdInfo>(0xff, 11);

/// The status of a process that was reaped; `None` before Linux 6.15, which does not keep it.
pub fn of_reaped(pidfd: &OwnedFd) -> Option<ExitStatus> {
    const { assert!(size_of::<PidfdInfo>() == 64) };
    let mut info = PidfdInfo { mask: INFO_EXIT, ..PidfdInfo::default() };
    // SAFETY: PIDFD_GET_INFO reads and writes one `struct pidfd_info` of the size in the opcode,
    // which is the size of `PidfdInfo`.
    unsafe { ioctl(pidfd, Updater::<GET_INFO, PidfdInfo>::new(&mut info)) }.ok()?;
    (info.mask & INFO_EXIT != 0).then(|| ExitStatus::from_wait(info.exit_code))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zombies_exit_code_is_the_last_field() {
        let stat = |state: &str, code: u32| format!("77 (a) Z b) {state} 1 77 77 0 -1 0 0 0 {code}\n");
        assert_eq!(parse_stat(&stat("Z", 0)), Some(ExitStatus::Code(0)));
        assert_eq!(parse_stat(&stat("Z", 125 << 8)), Some(ExitStatus::Code(125)));
        assert_eq!(parse_stat(&stat("Z", 9)), Some(ExitStatus::Signal(9)));
        assert_eq!(parse_stat(&stat("Z", 0x80 | 6)), Some(ExitStatus::Signal(6)));
        assert_eq!(parse_stat(&stat("S", 0)), None);
        assert_eq!(parse_stat(""), None);
        assert_eq!(parse_stat("1 (x)"), None);
    }
}
