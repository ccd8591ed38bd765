//! The code inside a program that attaches it to the agent.
//!
//! The code opens a userfaultfd, sends it to the agent, and starts the worker: a process that
//! shares the program's memory and moves pages out of it at the agent's command. It interposes
//! functions of libc: those that create children and threads, those by which a program sees
//! workers, those whose changes of memory the kernel does not report, and those that make much
//! memory resident at once. The library that contains this code decides what is paged: the shim all
//! memory, and the allocator only its own.
//!
//! The code uses only libc and `ipc`. It allocates no memory after a fork, and has no effect before
//! [`attach_program`] is called.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::ptr_as_ptr,
    reason = "the kernel's interface has integers that are addresses, descriptors or negative errnos"
)]
#![allow(missing_docs, missing_debug_implementations, reason = "only libraries of this workspace use it")]

mod attach;
pub mod batch;
mod children;
mod connect_back;
mod descriptors;
pub mod fatal;
mod hidden;
mod memory;
mod memory_functions;
mod moves;
mod next;
mod pieces;
mod populate;
mod processes;
mod raw;
mod threads;
mod uffd;
mod worker;

pub use attach::{Paged, attach_program};
pub use children::{_Fork, clone, syscall};
pub use hidden::{kill, readdir, readdir64, wait, wait3, wait4, waitid, waitpid};
pub use memory::{madvise, process_madvise, shmat};
pub use moves::mremap;
pub use populate::{mlock, mlock2, mmap, mmap64};
pub use threads::pthread_create;
