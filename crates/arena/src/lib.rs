//! Where a program has its segments: at the same addresses in each process of a tenant, so that
//! pointers within a segment stay valid when it moves (RAMP §3).
//!
//! - [`Arena`] is the range of addresses, reserved without access.
//! - [`Mapping`] is a segment in it. It is *armed* while pages are elsewhere: touching such a page
//!   waits for the agent. It is *withdrawn* when the segment is handed over: a touch is a fault.
//! - [`report_touches`] tells a person what a crash in the arena means.
//! - [`WrittenPages`] knows which pages of a mapping the program has written, and [`copies`] where
//!   copies of a segment are.
//! - [`calls`] has what a program asks of its agent.
//! - [`PageFaults`] is the agent's end of an armed mapping.
//!
//! [Decision 20](../../../docs/decisions/0020-move-armed-segments.md) has the measurements.

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
