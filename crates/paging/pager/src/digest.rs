//! Digests of the pages that this sender wrote: an unchanged page need not be written again.
//!
//! A CRC is not sufficient: if two versions of a page had the same CRC, the newer would be lost. A
//! digest is a universal hash (the fingerprint of UMASH) under random parameters that never leave
//! this process. Two different pages have the same digest with a probability below 2^-83, also if
//! an attacker chose them: see decision 8.

use crate::page::Location;
use crate::slabs::SlabId;

/// The digest of a page; 0 means unknown.
pub(crate) type Digest = u128;

/// Computes digests under parameters that are random.
pub(crate) struct Digester(umash::Params);

impl std::fmt::Debug for Digester {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Digester")
    }
}

impl Digester {
    pub fn new() -> Self {
        Self(umash::Params::new())
    }

    pub fn digest(&self, page: &[u8]) -> Digest {
        let fingerprint = self.0.fingerprinter(0).write(page).digest();
        u128::from(fingerprint.hash()) << 64 | u128::from(fingerprint.secondary())
    }
}

/// The digests of the pages on memory nodes.
///
/// After a restart of the agent all digests are unknown.
#[derive(Debug, Default)]
pub(crate) struct Digests {
    /// Indexed by slab and by page in the slab.
    slabs: Vec<Vec<Digest>>,
}

impl Digests {
    /// The digest of the bytes that were written to a location, if it is known.
    pub fn get(&self, location: Location) -> Option<Digest> {
        let digests = self.slabs.get(location.slab().0 as usize)?;
        digests.get(location.index() as usize).copied().filter(|digest| *digest != 0)
    }

    /// Stores the digest of the bytes that are written to a location; 0 if it is not computed.
    pub fn set(&mut self, location: Location, digest: Digest) {
        let (slab, index) = (location.slab().0 as usize, location.index() as usize);
        if digest == 0 && self.get(location).is_none() {
            return;
        }
        if self.slabs.len() <= slab {
            self.slabs.resize_with(slab + 1, Vec::new);
        }
        let digests = &mut self.slabs[slab];
        if digests.len() <= index {
            digests.resize(index + 1, 0);
        }
        digests[index] = digest;
    }

    /// Forgets the digests of a slab that has no readable replica any more.
    pub fn forget(&mut self, slab: SlabId) {
        if let Some(digests) = self.slabs.get_mut(slab.0 as usize) {
            digests.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn different_pages_have_different_digests() {
        let digester = Digester::new();
        let mut page = vec![7u8; 4096];
        let digest = digester.digest(&page);
        assert_eq!(digester.digest(&page), digest);
        for at in [0, 1, 15, 16, 2047, 4095] {
            page[at] ^= 1;
            assert_ne!(digester.digest(&page), digest, "byte {at}");
            page[at] ^= 1;
        }
        assert_ne!(Digester::new().digest(&page), digest, "each process has its own key");
    }

    #[test]
    fn forgotten_and_overwritten_digests_are_unknown() {
        let mut digests = Digests::default();
        let (one, other) = (Location::new(SlabId(2), 5), Location::new(SlabId(2), 6));
        assert_eq!(digests.get(one), None);
        digests.set(other, 0);
        digests.set(one, 77);
        assert_eq!((digests.get(one), digests.get(other)), (Some(77), None));
        digests.set(one, 0);
        assert_eq!(digests.get(one), None);
        digests.set(other, 78);
        digests.forget(SlabId(2));
        assert_eq!(digests.get(other), None);
    }
}
