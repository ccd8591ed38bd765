//! How the pages of a segment follow their owner, on touch and ahead of it (RaMP §3.2).
//!
//! Each host through which a segment has passed has a copy of it. A page is *present* in the copy
//! of a host that has allocated the segment or has pulled the page. The newest copy in which a page
//! is present has its current bytes, so a segment can be handed over before all of it is pulled.
//!
//! - [`lineage`] lists the copies, the newest first.
//! - [`puller`] decides which READ comes next, as a state machine.

pub mod lineage;
pub mod puller;

pub use lineage::{Lineage, Link};
pub use puller::{Puller, ReadEnd, ReadMode, ReadOrder, Step};
