//! The code inside a program that attaches it to the agent.
//!
//! It opens a userfaultfd, sends it to the agent, and starts the worker: a process that shares the program's memory and moves
//! pages out of it at the agent's command. It interposes the functions of libc that make children and threads. The library
//! that contains it decides what is paged: the shim all memory, the allocator only its own.
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
mod memory;
mod next;
mod raw;
pub mod say;
mod threads;
mod uffd;
mod worker;

pub use attach::{Paged, attach_program};
pub use children::{_Fork, clone, syscall};
pub use memory::{madvise, process_madvise, shmat};
pub use threads::pthread_create;
