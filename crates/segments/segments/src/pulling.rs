//! How the pages of a segment follow their owner, on touch and ahead of it (RAMP §3.2).
//!
//! Each host through which a segment has passed has a copy of it, in which some pages are
//! *present*: they were there when it handed the segment over, or it has pulled them. The newest
//! copy in which a page is present is the right one, so a segment can move on while it is pulled.
//!
//! - [`lineage`] names these copies, the newest first.
//! - [`puller`] decides which READ comes next, as a state machine.

pub mod lineage;
pub mod puller;

pub use lineage::{Lineage, Link};
pub use puller::{Puller, ReadEnd, ReadMode, ReadOrder, Step};
