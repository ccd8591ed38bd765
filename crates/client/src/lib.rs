//! What programs link to have memory of the cluster in so many words: extents, from the agent of their host.
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
//! What a session has ends with it, or with its process. If the agent is restarted a session goes on: calls wait for it meanwhile. If a memory node dies,
//! what was there is gone: extents are not kept twice.

mod error;
mod session;
mod statistics;
mod transfer;

pub use error::Error;
pub use session::{Extent, MAX_EXTENT_BYTES, ReadJob, Session, WriteJob};
pub use statistics::Statistics;
