//! What puts a process under the agent's care, from inside it. It opens a userfaultfd, hands it to the agent, and keeps a worker thread
//! that takes pages out of the process when the agent says so. Stands in for those functions of libc that make children and threads, or change
//! who a process is. What loads it decides what is paged: the shim everything, the allocator only what it hands out.
//!
//! It uses libc and `ipc` only, allocates nothing after a fork, and does nothing at all before [`attach_program`].

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
pub mod batch;
mod children;
mod credentials;
mod next;
mod raw;
pub mod say;
mod threads;
mod uffd;
mod worker;

pub use attach::{Paged, attach_program};
pub use children::{_Fork, clone, syscall};
pub use credentials::{
    setegid, seteuid, setgid, setgroups, setregid, setresgid, setresuid, setreuid, setuid,
};
pub use threads::pthread_create;
