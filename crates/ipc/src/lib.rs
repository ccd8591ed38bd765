//! What a program's shim, `aquifer run`, the agent and the keeper say to each other on one machine. The bytes are in `docs/formats/ipc.md`.
//!
//! - [`frame`]: messages over Unix sockets, parsed as hostile.
//! - [`control`]: the memory that an agent and a program's worker share.
//! - [`size`]: sizes of memory, as people write them.
//! - [`ring`]: the memory through which a program asks for extents, and reads and writes them.
//!
//! This crate does no I/O and uses nothing but `core`'s part of the standard library, for it is linked into every program.

pub mod control;
pub mod frame;
#[cfg(test)]
mod golden_tests;
mod hello;
pub mod ring;
pub mod size;

pub use control::{BUFFERS, Control, TAKE_PAGES_MAX};
pub use frame::{
    FRAME_BYTES_MAX, Frame, FrameError, KeptKind, OpenRun, Put, SetLimit, Share, Token, VERSION,
};
pub use hello::Hello;

/// Environment variable that tells a program where the agent listens.
pub const SOCKET_VARIABLE: &str = "AQUIFER_SOCKET";
/// Environment variable that carries the run's token, in hexadecimal.
pub const RUN_VARIABLE: &str = "AQUIFER_RUN";
/// Environment variable that says how much of what the allocator hands out may be resident. Without it the allocator is an ordinary one.
pub const LOCAL_VARIABLE: &str = "AQUIFER_LOCAL";
/// Environment variable that says on how many memory nodes each page of the allocator's is to be.
pub const REPLICAS_VARIABLE: &str = "AQUIFER_REPLICAS";
/// What a program that has the shim loaded finds by this name.
pub const SHIM_SYMBOL: &core::ffi::CStr = c"aquifer_shim_is_loaded";
/// Exit code of a program that could not be paged, as of `env` and `timeout` for their own failures.
pub const EXIT_FAILED: i32 = 125;
