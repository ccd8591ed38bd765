//! The lineage: the copies of a segment from which its owner pulls missing pages.

use serde::{Deserialize, Serialize};

use aquifer_ownership::Life;

/// Maximum number of copies of a segment. A segment with this number of copies is not handed over
/// before its owner has pulled all pages.
pub const LINKS_MAX: usize = 8;

/// A copy: the pages that were present at a host in one generation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct Link {
    /// The host.
    pub at: Life,
    /// The number of the hand-over by which the host received the segment; for the host that has
    /// allocated it, the number with which its record began.
    pub generation: u64,
}

/// The copies of a segment, the newest first. The first is the owner's.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Lineage(Vec<Link>);

impl Lineage {
    /// The lineage of a segment whose pages are all present at its owner.
    #[must_use]
    pub fn whole(owner: Link) -> Self {
        Self(vec![owner])
    }

    /// A lineage of the given copies, which must be ordered from the newest.
    pub fn of(links: impl IntoIterator<Item = Link>) -> Self {
        Self(links.into_iter().collect())
    }

    /// The copies, the newest first.
    #[must_use]
    pub fn links(&self) -> &[Link] {
        &self.0
    }

    /// The lineage after a hand-over; `None` if it would have more than [`LINKS_MAX`] copies.
    #[must_use]
    pub fn handed_to(&self, owner: Link) -> Option<Self> {
        (self.0.len() < LINKS_MAX)
            .then(|| Self(std::iter::once(owner).chain(self.0.iter().copied()).collect()))
    }
}
