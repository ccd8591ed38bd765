//! A session that checks its extents: reads must return the data of the last write.

use std::collections::HashMap;

use aquifer_client::{Extent, Session};

use crate::Cluster;

/// The session allocates while it has fewer extents than this.
const HELD_MAX: usize = 40;
/// The session allocates while it has fewer bytes than this. With one more allocation it stays
/// below 64 MiB, the smallest quota that a test gives a user.
const HELD_BYTES_MAX: u64 = 32 << 20;

/// A generator of pseudorandom numbers (xorshift).
#[derive(Debug)]
pub struct Random(pub u64);

impl Random {
    /// A number below `bound`.
    ///
    /// # Panics
    /// Only where `usize` has less than 31 bits.
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 33).expect("31 bits") % bound
    }
}

/// The data of an extent: a stamp at the start and at the end of each page.
///
/// # Panics
/// If the extent's size is not a multiple of a page.
#[must_use]
pub fn stamped(extent: &Extent, stamp: u64) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(extent.bytes()).expect("small")];
    for (page, chunk) in (0u64..).zip(bytes.chunks_mut(4096)) {
        let word = (stamp << 20 ^ page).to_le_bytes();
        chunk[..8].copy_from_slice(&word);
        chunk[4088..].copy_from_slice(&word);
    }
    bytes
}

/// A session, and the expected data of its extents.
#[derive(Debug)]
pub struct Checked {
    /// The session.
    pub session: Session,
    /// The stamp in each extent.
    pub held: HashMap<Extent, u64>,
    random: Random,
    stamp: u64,
}

impl Checked {
    /// Opens a session at a cluster's agent. `seed` determines its operations.
    ///
    /// # Panics
    /// If the agent refuses it.
    #[must_use]
    pub fn open(cluster: &Cluster, seed: u64) -> Self {
        let session = Session::open_at(cluster.agent_socket()).expect("a session");
        Self { session, held: HashMap::new(), random: Random(seed | 1), stamp: seed << 10 }
    }

    fn held_bytes(&self) -> u64 {
        self.held.keys().map(Extent::bytes).sum()
    }

    /// Allocates, writes, or reads and frees extents.
    ///
    /// # Panics
    /// If an operation fails, or data differ from those of the last write.
    pub fn turn(&mut self) {
        match self.random.below(8) {
            0..=3 if self.held.len() < HELD_MAX && self.held_bytes() < HELD_BYTES_MAX => {
                let is_large = self.random.below(12) == 0;
                let bytes = if is_large {
                    (2 << 20) + 1 + self.random.below(5 << 20) as u64
                } else {
                    4096 << self.random.below(10)
                };
                let count = 1 + self.random.below(3);
                for extent in self.session.allocate_many(bytes, count).expect("there is room") {
                    assert!(!self.held.contains_key(&extent), "{extent:?} was allocated twice");
                    self.write(extent);
                }
            }
            4 => {
                let chosen = self.random.below(self.held.len().max(1));
                if let Some(extent) = self.held.keys().nth(chosen).copied() {
                    self.write(extent);
                }
            }
            _ => {
                let chosen = self.random.below(self.held.len().max(1));
                let Some((extent, stamp)) = self.held.iter().nth(chosen).map(|(at, stamp)| (*at, *stamp))
                else {
                    return;
                };
                self.verify(extent, stamp);
                if self.random.below(2) == 0 {
                    self.held.remove(&extent);
                    self.session.free(extent).expect("it is ours");
                }
            }
        }
    }

    fn write(&mut self, extent: Extent) {
        self.stamp += 1;
        self.session.write(&extent, 0, &stamped(&extent, self.stamp)).expect("it is ours");
        self.held.insert(extent, self.stamp);
    }

    fn verify(&mut self, extent: Extent, stamp: u64) {
        let mut bytes = vec![0; usize::try_from(extent.bytes()).expect("small")];
        self.session.read(&extent, 0, &mut bytes).expect("it is ours");
        assert!(bytes == stamped(&extent, stamp), "{extent:?} differs from the last write");
    }

    /// Reads and checks all extents.
    ///
    /// # Panics
    /// If data differ from those of the last write.
    pub fn verify_all(&mut self) {
        for (extent, stamp) in self.held.clone() {
            self.verify(extent, stamp);
        }
    }
}
