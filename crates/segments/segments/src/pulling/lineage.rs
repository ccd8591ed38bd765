//! The copies of a segment.

use serde::{Deserialize, Serialize};

use aquifer_ownership::Life;

/// Copies that a segment may have. Before it moves on, the oldest must not be needed any more.
pub const LINKS_MAX: usize = 8;

/// A copy: the pages that were present at a host in one generation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct Link {
    /// The host.
    pub at: Life,
    /// The hand-over by which the host got the segment. The host that has allocated it has the
    /// generation of the tenant's `RangesRecord` at that time, and one that has restored it the
    /// number after the last of the record.
    pub generation: u64,
}

/// The copies of a segment, the newest first: that of its owner.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Lineage(Vec<Link>);

impl Lineage {
    /// A segment whose pages are all at its owner.
    #[must_use]
    pub fn whole(owner: Link) -> Self {
        Self(vec![owner])
    }

    /// These copies, the newest first.
    pub fn of(links: impl IntoIterator<Item = Link>) -> Self {
        Self(links.into_iter().collect())
    }

    /// The copies, the newest first.
    #[must_use]
    pub fn links(&self) -> &[Link] {
        &self.0
    }

    /// The copies after a hand-over; `None` if there would be too many.
    #[must_use]
    pub fn handed_to(&self, owner: Link) -> Option<Self> {
        (self.0.len() < LINKS_MAX)
            .then(|| Self(std::iter::once(owner).chain(self.0.iter().copied()).collect()))
    }
}
