//! Removes the worker's effective capabilities, and restricts it to the system calls that it makes.
//!
//! The program can write to the worker's stack, and so control the worker. A program that has
//! confined itself must not gain rights by that.
//!
//! The worker has no effective capability, because it uses none. But it keeps the program's
//! permitted capabilities. So a process that lacks them cannot trace the worker, and cannot reach
//! the program's memory or root folder through it.

use crate::raw::syscall;
use aquifer_uffd::{UFFDIO_MOVE, UFFDIO_WRITEPROTECT};

const CAPABILITY_VERSION: u32 = 0x2008_0522;
const SECCOMP_SET_MODE_FILTER: usize = 1;
/// The architecture of x86-64 system calls in `struct seccomp_data`.
const ARCHITECTURE_X86_64: u32 = 0xc000_003e;
const RET_KILL_PROCESS: u32 = 0x8000_0000;
const RET_ALLOW: u32 = 0x7fff_0000;

/// Loads a 32-bit word of `struct seccomp_data`.
const LOAD: u16 = 0x20;
/// Compares the loaded word with a value, and skips instructions.
const JUMP_IF_EQUAL: u16 = 0x15;
/// Ends the filter with a decision.
const RETURN: u16 = 0x06;
/// Offset of the call's number in `struct seccomp_data`.
const NUMBER: u32 = 0;
/// Offset of the architecture in `struct seccomp_data`.
const ARCHITECTURE: u32 = 4;
/// Offset of the lower half of an argument in `struct seccomp_data`.
const fn argument(index: u32) -> u32 {
    16 + 8 * index
}

/// An instruction of a seccomp filter: `struct sock_filter`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Instruction {
    code: u16,
    /// Number of instructions that a jump skips if the comparison is true, or false.
    if_true: u8,
    if_false: u8,
    value: u32,
}

/// Half of the capabilities of a process: `struct __user_cap_data_struct`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct CapabilitySets {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// A seccomp filter: `struct sock_fprog`.
#[repr(C)]
struct Filter {
    length: u16,
    instructions: *const Instruction,
}

const fn instruction(code: u16, if_true: u8, if_false: u8, value: u32) -> Instruction {
    Instruction { code, if_true, if_false, value }
}

/// Allows the call with this number. For another number, continues behind these instructions.
const fn allow(number: i64) -> [Instruction; 2] {
    [instruction(JUMP_IF_EQUAL, 0, 1, number as u32), instruction(RETURN, 0, 0, RET_ALLOW)]
}

/// Allows the call with this number if an argument has one of two values, and otherwise kills the
/// process. For another number, continues behind these instructions.
const fn allow_with_argument(number: i64, index: u32, one: u32, other: u32) -> [Instruction; 6] {
    [
        instruction(JUMP_IF_EQUAL, 0, 5, number as u32),
        instruction(LOAD, 0, 0, argument(index)),
        instruction(JUMP_IF_EQUAL, 1, 0, one),
        instruction(JUMP_IF_EQUAL, 0, 1, other),
        instruction(RETURN, 0, 0, RET_ALLOW),
        instruction(RETURN, 0, 0, RET_KILL_PROCESS),
    ]
}

const CHECK_ARCHITECTURE: [Instruction; 4] = [
    instruction(LOAD, 0, 0, ARCHITECTURE),
    instruction(JUMP_IF_EQUAL, 1, 0, ARCHITECTURE_X86_64),
    instruction(RETURN, 0, 0, RET_KILL_PROCESS),
    instruction(LOAD, 0, 0, NUMBER),
];

/// System calls that the worker makes, and that are allowed with any arguments.
const UNRESTRICTED: [i64; 11] = [
    libc::SYS_futex,
    libc::SYS_futex_waitv,
    libc::SYS_clock_gettime,
    libc::SYS_sched_yield,
    libc::SYS_mincore,
    libc::SYS_munlock,
    libc::SYS_poll,
    libc::SYS_sendto,
    libc::SYS_restart_syscall,
    libc::SYS_exit,
    libc::SYS_exit_group,
];
/// System calls of which an argument must have one of two values: number, index of the argument,
/// and the values.
const RESTRICTED: [(i64, u32, u32, u32); 4] = [
    (libc::SYS_ioctl, 1, UFFDIO_MOVE as u32, UFFDIO_WRITEPROTECT as u32),
    (libc::SYS_madvise, 2, libc::MADV_DONTNEED as u32, libc::MADV_DONTNEED as u32),
    (libc::SYS_sched_setaffinity, 0, 0, 0),
    (libc::SYS_unshare, 0, libc::CLONE_VM as u32, libc::CLONE_VM as u32),
];

/// Number of instructions. The last one kills the process.
const LENGTH: usize = CHECK_ARCHITECTURE.len() + 2 * UNRESTRICTED.len() + 6 * RESTRICTED.len() + 1;

static FILTER: [Instruction; LENGTH] = filter();

const fn filter() -> [Instruction; LENGTH] {
    let mut filter = [instruction(RETURN, 0, 0, RET_KILL_PROCESS); LENGTH];
    let mut used = 0;
    used = append(&mut filter, used, &CHECK_ARCHITECTURE);
    let mut at = 0;
    while at < UNRESTRICTED.len() {
        used = append(&mut filter, used, &allow(UNRESTRICTED[at]));
        at += 1;
    }
    at = 0;
    while at < RESTRICTED.len() {
        let (number, index, one, other) = RESTRICTED[at];
        used = append(&mut filter, used, &allow_with_argument(number, index, one, other));
        at += 1;
    }
    filter
}

/// Stores instructions in a filter with `used` instructions, and returns the new number.
const fn append(filter: &mut [Instruction; LENGTH], used: usize, part: &[Instruction]) -> usize {
    let mut at = 0;
    while at < part.len() {
        filter[used + at] = part[at];
        at += 1;
    }
    used + part.len()
}

/// Confines the calling process. Returns 0 or a negative errno.
pub fn confine() -> isize {
    let header = [CAPABILITY_VERSION, 0];
    let mut sets = [CapabilitySets::default(); 2];
    let filter = Filter { length: LENGTH as u16, instructions: FILTER.as_ptr() };
    // SAFETY: the structs have the layouts that these calls read and write. The calls change only
    // this process.
    unsafe {
        let no_new_privileges = [libc::PR_SET_NO_NEW_PRIVS as usize, 1, 0, 0, 0, 0];
        let mut result = syscall(libc::SYS_prctl, no_new_privileges);
        if result == 0 {
            let arguments = [header.as_ptr() as usize, sets.as_mut_ptr() as usize, 0, 0, 0, 0];
            result = syscall(libc::SYS_capget, arguments);
            for set in &mut sets {
                *set = CapabilitySets { permitted: set.permitted, ..CapabilitySets::default() };
            }
            if result == 0 {
                result = syscall(libc::SYS_capset, arguments);
            }
        }
        if result == 0 {
            let filter = (&raw const filter) as usize;
            result = syscall(libc::SYS_seccomp, [SECCOMP_SET_MODE_FILTER, 0, filter, 0, 0, 0]);
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ARCHITECTURE_I386: u32 = 0x4000_0003;

    /// Runs the filter on a system call, and returns its decision.
    fn evaluate(architecture: u32, number: i64, arguments: [u64; 6]) -> u32 {
        let mut data = [0u8; 64];
        data[0..4].copy_from_slice(&(number as u32).to_ne_bytes());
        data[4..8].copy_from_slice(&architecture.to_ne_bytes());
        for (bytes, argument) in data[16..].chunks_exact_mut(8).zip(arguments) {
            bytes.copy_from_slice(&argument.to_ne_bytes());
        }
        let (mut at, mut loaded) = (0, 0);
        loop {
            let Instruction { code, if_true, if_false, value } = FILTER[at];
            at += 1;
            match code {
                LOAD => {
                    let from = value as usize;
                    loaded = u32::from_ne_bytes(data[from..from + 4].try_into().unwrap());
                }
                JUMP_IF_EQUAL => at += usize::from(if loaded == value { if_true } else { if_false }),
                RETURN => return value,
                _ => panic!("unknown instruction {code}"),
            }
        }
    }

    #[test]
    fn only_the_calls_of_the_worker_are_allowed() {
        let with = |index: usize, value: u64| {
            let mut arguments = [7; 6];
            arguments[index] = value;
            arguments
        };
        let x86_64 = |number, arguments| evaluate(ARCHITECTURE_X86_64, number, arguments);
        for number in UNRESTRICTED {
            assert_eq!(x86_64(number, [7; 6]), RET_ALLOW);
            let decision = evaluate(ARCHITECTURE_I386, number, [7; 6]);
            assert_eq!(decision, RET_KILL_PROCESS, "call {number} of another architecture");
        }
        for (number, index, one, other) in RESTRICTED {
            for value in [one, other] {
                assert_eq!(x86_64(number, with(index as usize, value.into())), RET_ALLOW);
            }
            assert_eq!(x86_64(number, with(index as usize, 99)), RET_KILL_PROCESS);
        }
        let allowed = |number: &i64| {
            UNRESTRICTED.contains(number) || RESTRICTED.iter().any(|(other, ..)| other == number)
        };
        for number in (0..600).filter(|number| !allowed(number)) {
            assert_eq!(x86_64(number, [0; 6]), RET_KILL_PROCESS, "call {number}");
        }
    }
}
