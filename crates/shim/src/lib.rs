//! The library that `aquifer run` loads into an unmodified program (LD_PRELOAD). It opens a userfaultfd, hands it to the agent,
//! and keeps a worker thread that takes pages out of the program when the agent says so.
//!
//! It uses libc and `ipc` only, allocates nothing after a fork, and does nothing at all in a program that no agent asked for.

// The kernel's interface is made of integers that are addresses, descriptors and negative errnos at once.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::ptr_as_ptr,
    missing_docs,
    missing_debug_implementations
)]

mod attach;
mod batch;
mod children;
mod credentials;
mod next;
mod raw;
mod say;
mod threads;
mod uffd;
mod worker;

use core::ffi::CStr;

use aquifer_ipc::Token;

pub use children::{_Fork, clone, syscall};
pub use credentials::{
    setegid, seteuid, setgid, setgroups, setregid, setresgid, setresuid, setreuid, setuid,
};
pub use threads::pthread_create;

/// Runs when the dynamic linker has loaded the library, before the program's own code.
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

extern "C" fn start() {
    // SAFETY: no other thread runs yet, so the environment does not change under us.
    let variable = |name: &CStr| unsafe {
        let value = libc::getenv(name.as_ptr());
        (!value.is_null()).then(|| CStr::from_ptr(value).to_bytes())
    };
    let (Some(path), Some(run)) = (variable(c"AQUIFER_SOCKET"), variable(c"AQUIFER_RUN")) else {
        return;
    };
    match Token::from_hex(run) {
        Some(token) => {
            children::find_next();
            attach::attach_program(path, token);
        }
        None => say::fail("AQUIFER_RUN is not a run's token: start programs with `aquifer run`", 0),
    }
}
