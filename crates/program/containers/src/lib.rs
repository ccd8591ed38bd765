//! Containers in segments: maps, vectors and texts that move between processes, with all of their
//! contents, by one message (RaMP §2).
//!
//! A segment with containers has an allocator, a root, and a description of the root's type. All
//! three are in the segment, so another process can continue to use them.
//!
//! ```no_run
//! # use aquifer_client::segments::{Process, Pulling};
//! # use aquifer_containers::{Map, Owned, Text};
//! # use std::time::Duration;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let process = Process::open("first")?;
//! let mut words: Owned<Map<Text, u64>> = Owned::create(&process, 7, 64 << 20, Map::new)?;
//! let word = Text::new(words.allocator(), "water")?;
//! words.insert(word, 1)?;
//! words.connect("second")?;
//! // SAFETY: nothing was moved out of the segment.
//! unsafe { words.transfer() }.map_err(|failure| failure.error)?;
//!
//! // And in the other process:
//! let process = Process::open("second")?;
//! let timeout = Duration::from_secs(10);
//! let words = Owned::<Map<Text, u64>>::receive(&process, Pulling::Ahead, timeout)?;
//! assert_eq!(words.expect("it was handed over").get("water"), Some(&1));
//! # Ok(())
//! # }
//! ```
//!
//! Any type that is [`Migratable`] can be in a segment: a type without pointers to memory outside
//! of the segment. Both processes must be built by the same compiler, with the same version of this
//! crate and of their types. Otherwise opening the segment fails, with both descriptions in the
//! error.
//!
//! If the segment is full, the call returns an error; the process does not end. If a process dies,
//! the next one of its name receives the containers as they were at that moment, possibly in the
//! middle of a change.

mod allocator;
mod heap;
mod map;
mod migratable;
mod ordered_map;
mod owned;
mod text;
mod vector;

pub use allocator::{SegmentAllocator, SegmentFull};
pub use heap::{HeapFault, SegmentHeap};
pub use map::Map;
pub use migratable::{Description, Migratable};
pub use ordered_map::OrderedMap;
pub use owned::{Error, Owned, TransferFailure};
pub use text::Text;
pub use vector::Vector;

#[doc(hidden)]
pub mod private {
    pub use std::mem::offset_of;
}
