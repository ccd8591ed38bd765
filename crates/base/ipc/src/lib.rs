//! Formats of the messages and the shared memory between processes of one machine: programs,
//! `aquifer run`, the agent, memory nodes and the keeper. The bytes are in `docs/formats/ipc.md`.
//!
//! - [`frame`]: the messages on Unix sockets.
//! - [`control`]: the memory that the agent shares with a program's worker.
//! - [`ring`]: the memory through which a program requests extents, and reads and writes them.
//! - [`size`]: memory sizes as text.
//!
//! All readers treat their input as hostile.
//! The crate does no I/O, and depends on nothing but mutations, because it is linked into every
//! program.

pub mod control;
pub mod frame;
#[cfg(test)]
mod golden_tests;
mod hello;
mod mutation;
mod open_run;
pub mod ring;
pub mod size;

pub use control::{BATCH_PAGES_MAX, STAGING_BUFFERS, WorkerControl};
pub use frame::{
    FRAME_BYTES_MAX, Frame, FrameError, HeldItem, HeldKind, HoldSpans, KeeperShare, RunToken, SetLimit,
    VERSION,
};
pub use hello::{
    CANARY_BYTES, CONNECT_BACK_REQUESTS_MAX, PROOF_PAGE, ProgramHello, SOCKET_NAME_BYTES,
    SOCKET_SECRET_BYTES, connect_back_page, socket_address,
};
pub use mutation::Mutation;
pub use open_run::{LIMIT_MAX_AUTO, OpenRun};

/// Environment variable with the path of the agent's socket, for the shim.
pub const SOCKET_VARIABLE: &str = "AQUIFER_SOCKET";
/// Environment variable with the run's token in hexadecimal.
pub const RUN_VARIABLE: &str = "AQUIFER_RUN";
/// Environment variable with the resident limit of the allocator's memory. Without it,
/// `libaquifer-malloc` pages nothing.
pub const LOCAL_VARIABLE: &str = "AQUIFER_LOCAL";
/// Environment variable with the most memory of the allocator that may be resident while the host
/// has idle memory: a size, or `auto`.
pub const LOCAL_MAX_VARIABLE: &str = "AQUIFER_LOCAL_MAX";
/// Environment variable with the number of memory nodes that hold each page of the allocator.
pub const REPLICAS_VARIABLE: &str = "AQUIFER_REPLICAS";
/// Symbol by which a process detects that the shim is loaded.
pub const SHIM_SYMBOL: &core::ffi::CStr = c"aquifer_shim_is_loaded";
/// Exit code of a program that could not be paged. `env` and `timeout` use the same code for
/// failures of their own.
pub const EXIT_FAILED: i32 = 125;
