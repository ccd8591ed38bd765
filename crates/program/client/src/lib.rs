//! Client library: extents of remote memory, and [`segments`], from the agent of this host.
//!
//! ```no_run
//! # fn main() -> Result<(), aquifer_client::Error> {
//! let mut session = aquifer_client::Session::open()?;
//! let extent = session.allocate(1 << 20)?;
//! session.write(&extent, 4096, b"far away")?;
//! let mut bytes = [0; 8];
//! session.read(&extent, 4096, &mut bytes)?;
//! assert_eq!(&bytes, b"far away");
//! session.free(extent)?;
//! # Ok(())
//! # }
//! ```
//!
//! Extents are freed when their session or their process ends.
//! If the agent is restarted, calls wait for the next agent, and the session continues.
//! An extent has one copy: if its memory node dies, its data is lost.

#![forbid(unsafe_code)]

mod error;
pub mod segments;
mod session;
mod statistics;
mod transfer;

pub use error::{Error, NoAgent};
pub use session::{Extent, MAX_EXTENT_BYTES, ReadJob, Session, WriteJob};
pub use statistics::Statistics;
