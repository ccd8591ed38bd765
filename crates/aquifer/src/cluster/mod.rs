//! A cluster on this machine: every part is a process of this same binary, alive as long as it holds its lock.
//!
//! There is no supervisor: `up` looks which parts are missing and starts those.

mod down;
#[cfg(test)]
mod golden_tests;
pub mod key;
mod launch;
mod lend;
mod limit;
mod lock;
mod part;
mod parts;
mod shape;
mod signals;
mod source;
mod status;
mod systemd;
mod up;

pub use down::down;
pub use lend::lend;
pub use limit::limit;
pub use parts::be;
pub use source::Source;
pub use status::status;
pub use up::up;
