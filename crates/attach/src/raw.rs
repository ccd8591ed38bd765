//! System calls without libc: the worker may access neither errno nor any other memory of the program.

use core::arch::asm;

/// A system call; the result is the kernel's, negative errno included.
///
/// # Safety
/// As of the call that is made.
pub unsafe fn syscall(number: i64, arguments: [usize; 6]) -> isize {
    let result: isize;
    // SAFETY: the kernel clobbers rcx and r11 and nothing else; the caller answers for the call's own effects.
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

/// Starts a process that shares this one's memory, and runs `entry(argument)` on `stack_top`.
///
/// The new process is unknown to libc. Its end sends no signal, and a tracer of this process does not trace it.
/// Returns its number, or a negative errno. With `CLONE_PIDFD` its pidfd is stored at `pidfd`.
///
/// # Safety
/// `stack_top` must be the 16-aligned end of memory that nothing else uses, and `entry` must never return.
pub unsafe fn spawn(
    flags: i32,
    stack_top: usize,
    entry: extern "C" fn(usize) -> !,
    argument: usize,
    pidfd: *mut i32,
) -> isize {
    let flags = libc::CLONE_VM | libc::CLONE_UNTRACED | flags;
    let result: isize;
    // SAFETY: in the child the stack pointer is `stack_top` and the only thing done is the call of `entry`, whose
    // argument and address were in registers; the parent goes on as after any system call.
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
