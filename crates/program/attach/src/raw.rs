//! System calls without libc. The worker must not access errno, nor other pageable memory of the
//! program.

use core::arch::asm;

/// Makes a system call. Returns the kernel's result, which is a negative errno on failure.
///
/// # Safety
/// As of the system call.
pub unsafe fn syscall(number: i64, arguments: [usize; 6]) -> isize {
    let result: isize;
    // SAFETY: the kernel changes rcx and r11 and no other register; the caller is responsible for
    // the effects of the call.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") arguments[0],
            in("rsi") arguments[1],
            in("rdx") arguments[2],
            in("r10") arguments[3],
            in("r8") arguments[4],
            in("r9") arguments[5],
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result
}

/// Closes a descriptor, which must belong to this library.
pub fn close(fd: i32) {
    // SAFETY: nothing else uses the descriptor.
    unsafe {
        syscall(libc::SYS_close, [fd as usize, 0, 0, 0, 0, 0]);
    }
}

/// Starts a process that shares the memory of this one, and runs `entry(argument)` on the stack
/// that ends at `stack_top`.
///
/// The new process is unknown to libc. Its end sends no signal, and a tracer of this process does
/// not trace it. Returns its process number, or a negative errno. With `CLONE_PIDFD` its pidfd is
/// stored at `pidfd`.
///
/// # Safety
/// `stack_top` must be the 16-aligned end of memory that nothing else uses, and `entry` must never
/// return.
pub unsafe fn spawn(
    flags: i32,
    stack_top: usize,
    entry: extern "C" fn(usize) -> !,
    argument: usize,
    pidfd: *mut i32,
) -> isize {
    let flags = libc::CLONE_VM | libc::CLONE_UNTRACED | flags;
    let result: isize;
    // SAFETY: the child's stack pointer is `stack_top`, and the child only calls `entry`, whose
    // address and argument are in registers. The parent continues as after any system call.
    unsafe {
        asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r12",
            "call r13",
            "ud2",
            "2:",
            inlateout("rax") libc::SYS_clone => result,
            in("rdi") i64::from(flags),
            in("rsi") stack_top,
            in("rdx") pidfd,
            in("r10") 0,
            in("r8") 0,
            in("r12") argument,
            in("r13") entry,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    result
}
