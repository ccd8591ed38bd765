//! The server of a partition: this one or another one.

use std::sync::atomic::{AtomicU64, Ordering};

const KIND_MASK: u64 = 3;
const SERVER_SHIFT: u32 = 2;
const GENERATION_SHIFT: u32 = 18;

/// A server of the cluster that has a partition.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// The number of the server.
    pub server: u16,
    /// The generation since which the server has the partition, below 2^46.
    pub generation: u64,
}

/// The server of a partition, as this server knows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Presence {
    /// The partition is on this server: requests are served.
    Here,
    /// The partition is on this server and about to leave: requests wait.
    Leaving,
    /// The partition is on another server: requests are forwarded.
    Elsewhere(Place),
    /// No server is known to have the partition: requests wait.
    Unknown,
}

/// A presence that threads read while another thread changes it.
#[derive(Debug)]
pub struct PresenceCell(AtomicU64);

impl PresenceCell {
    /// A cell with [`Presence::Here`].
    #[must_use]
    pub const fn here() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Whether the presence is [`Presence::Here`].
    #[inline]
    pub fn is_here(&self) -> bool {
        self.0.load(Ordering::Acquire) == 0
    }

    /// The presence.
    #[inline]
    pub fn get(&self) -> Presence {
        let word = self.0.load(Ordering::Acquire);
        match word & KIND_MASK {
            0 => Presence::Here,
            1 => Presence::Leaving,
            2 => Presence::Elsewhere(Place {
                server: u16::try_from(word >> SERVER_SHIFT & u64::from(u16::MAX)).expect("16 bits"),
                generation: word >> GENERATION_SHIFT,
            }),
            _ => Presence::Unknown,
        }
    }

    /// Replaces the presence.
    pub fn set(&self, presence: Presence) {
        self.0.store(word_of(presence), Ordering::Release);
    }

    /// Sets the presence to `place` if that is newer than the known one; returns whether it was.
    pub fn learn(&self, place: Place) -> bool {
        loop {
            let known = self.get();
            let is_newer = match known {
                Presence::Here | Presence::Leaving => false,
                Presence::Elsewhere(known) => place.generation > known.generation,
                Presence::Unknown => true,
            };
            if !is_newer {
                return false;
            }
            let (old, new) = (word_of(known), word_of(Presence::Elsewhere(place)));
            if self.0.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return true;
            }
        }
    }
}

fn word_of(presence: Presence) -> u64 {
    match presence {
        Presence::Here => 0,
        Presence::Leaving => 1,
        Presence::Elsewhere(Place { server, generation }) => {
            2 | u64::from(server) << SERVER_SHIFT | generation << GENERATION_SHIFT
        }
        Presence::Unknown => 3,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_newer_places_are_learnt() {
        let cell = PresenceCell::here();
        let place = |server, generation| Place { server, generation };
        assert!(!cell.learn(place(1, 9)), "a partition of this server stays");
        for presence in [
            Presence::Here,
            Presence::Leaving,
            Presence::Unknown,
            Presence::Elsewhere(place(65_535, 1 << 45)),
        ] {
            cell.set(presence);
            assert_eq!(cell.get(), presence);
        }
        cell.set(Presence::Unknown);
        assert!(cell.learn(place(1, 5)) && !cell.learn(place(2, 5)) && cell.learn(place(2, 6)));
        assert_eq!(cell.get(), Presence::Elsewhere(place(2, 6)));
    }
}
