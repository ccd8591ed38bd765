//! The addresses of segments: the same in each process of a tenant, so that pointers within a
//! segment stay valid when it moves (RaMP §3).
//!
//! - [`Arena`] is the range of addresses, reserved without access.
//! - [`Mapping`] is a segment in it. A mapping is *armed* while pages are missing: a thread that
//!   touches such a page waits for the agent. It is *withdrawn* when the segment is handed over: a
//!   touch raises SIGSEGV.
//! - [`report_touches`] explains a crash in the arena on standard error.
//! - [`WrittenPages`] tracks which pages of a mapping the program writes.
//! - [`copies`] has the record of a segment's copies on memory nodes.
//! - [`calls`] has the calls of a program to its agent, and the answers.
//! - [`PageFaults`] is the agent's end of an armed mapping.
//!
//! A page is *present* if its bytes are in the memory of this host, and otherwise *missing*:
//! another host has them.
//!
//! [Decision 20](../../../../docs/decisions/0020-move-armed-segments.md) has the measurements.

mod arena;
pub mod calls;
pub mod copies;
mod faults;
mod mapping;
mod touch_report;
mod uffd;
mod written;

pub use arena::{ARENA_BYTES, ARENA_START, Arena, ArenaError, SEGMENT_BYTES_MAX};
pub use faults::PageFaults;
pub use mapping::{Mapping, Touch, revoke};
pub use touch_report::report_touches;
pub use written::WrittenPages;
