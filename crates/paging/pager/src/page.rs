//! The page word: one 64-bit word that says where the newest bytes of a page are.
//!
//! A volume's page table holds one word for each page that is not a zero page without flags:
//!
//! ```text
//! bits  0..4   state
//! bit   4      queued: the resident queue has an entry for the page
//! bit   5      discarded: the program gave the page up while it was leaving
//! bits  6..8   heat
//! bits  8..12  rounds of the resident queue for which the page still stays
//! bits 12..32  departures of the volume when the page left, in units of 64
//! bits 32..64  payload: slot of the mempool, or location on memory nodes
//! ```
//!
//! Format: `docs/formats/paging.md`, "Page word".

use crate::mempool::BLOCK_PAGES;

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;

/// The number of a page in its volume. For a program's memory it is the address divided by
/// [`PAGE_BYTES`].
pub type PageNumber = u64;

/// The number of a page-sized slot of the mempool.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct Slot(pub u32);

/// A page-sized place on memory nodes: the number of a slab and of a page in it (see `slabs`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct Location(pub u32);

/// The place of the newest bytes of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PageState {
    /// Nowhere: the page reads as zeros and uses no memory.
    Zero,
    /// Resident in the program.
    Held,
    /// Moved out of the program, not yet in the mempool.
    Leaving,
    /// In the mempool, not yet acknowledged by memory nodes.
    Staged(Slot),
    /// In the mempool and, with the same bytes, on memory nodes. The slot may be reclaimed at any
    /// time.
    Reclaimable(Slot),
    /// Only on memory nodes.
    Remote(Location),
    /// The program gave the page up, and the kernel may not have dropped it yet.
    ///
    /// The page must not be evicted before the program has faulted on it again.
    Doubtful,
    /// Nowhere: the last readable replica is gone. A read raises SIGBUS.
    Lost,
}

/// A [`PageState`] with its flags, as stored in the page table.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PageWord(pub u64);

const STATE_MASK: u64 = 0xf;
const HELD: u64 = 1;
const LEAVING: u64 = 2;
/// Held or leaving, with the location of a clean copy as payload.
const HELD_WITH_COPY: u64 = 8;
const LEAVING_WITH_COPY: u64 = 9;
const QUEUED: u64 = 1 << 4;
const DISCARDED: u64 = 1 << 5;
const HEAT_SHIFT: u32 = 6;
const HEAT_MASK: u64 = 3 << HEAT_SHIFT;
const ROUNDS_SHIFT: u32 = 8;
const ROUNDS_MASK: u64 = 0xf << ROUNDS_SHIFT;
/// The hottest pages stay for 2^`HEAT_MAX` - 1 rounds longer than cold ones.
const HEAT_MAX: u64 = 3;
const DEPARTURES_SHIFT: u32 = 12;
const DEPARTURES_MASK: u64 = 0xf_ffff << DEPARTURES_SHIFT;
/// Departures are recorded in units of this many pages.
const DEPARTURES_UNIT: u64 = BLOCK_PAGES as u64;
const PAYLOAD_SHIFT: u32 = 32;

impl PageWord {
    /// A word without flags.
    #[must_use]
    pub fn new(state: PageState) -> Self {
        let (number, payload) = match state {
            PageState::Zero => (0, 0),
            PageState::Held => (HELD, 0),
            PageState::Leaving => (LEAVING, 0),
            PageState::Staged(slot) => (3, slot.0),
            PageState::Reclaimable(slot) => (4, slot.0),
            PageState::Remote(location) => (5, location.0),
            PageState::Doubtful => (6, 0),
            PageState::Lost => (7, 0),
        };
        Self(number | u64::from(payload) << PAYLOAD_SHIFT)
    }

    /// The place of the page.
    ///
    /// # Panics
    /// If this module cannot have written the word: the page table is corrupt.
    #[must_use]
    pub fn state(self) -> PageState {
        let payload = u32::try_from(self.0 >> PAYLOAD_SHIFT).expect("32 bits remain");
        match self.0 & STATE_MASK {
            0 => PageState::Zero,
            HELD | HELD_WITH_COPY => PageState::Held,
            LEAVING | LEAVING_WITH_COPY => PageState::Leaving,
            3 => PageState::Staged(Slot(payload)),
            4 => PageState::Reclaimable(Slot(payload)),
            5 => PageState::Remote(Location(payload)),
            6 => PageState::Doubtful,
            7 => PageState::Lost,
            state => panic!("the page table has a word with unknown state {state}: {:#x}", self.0),
        }
    }

    /// The clean copy: the location from which a held or leaving page was read, and which it still
    /// references.
    ///
    /// Whether that location still has the page's bytes is for the sender to determine.
    #[must_use]
    pub fn clean_copy(self) -> Option<Location> {
        let location = Location(u32::try_from(self.0 >> PAYLOAD_SHIFT).expect("32 bits remain"));
        matches!(self.0 & STATE_MASK, HELD_WITH_COPY | LEAVING_WITH_COPY).then_some(location)
    }

    /// The word of a held or leaving page with this clean copy, or without one.
    #[must_use]
    pub fn with_clean_copy(self, copy: Option<Location>) -> Self {
        let number = match (self.0 & STATE_MASK, copy.is_some()) {
            (HELD | HELD_WITH_COPY, false) => HELD,
            (HELD | HELD_WITH_COPY, true) => HELD_WITH_COPY,
            (LEAVING | LEAVING_WITH_COPY, false) => LEAVING,
            (LEAVING | LEAVING_WITH_COPY, true) => LEAVING_WITH_COPY,
            (state, _) => panic!("a page in state {state} cannot have a clean copy"),
        };
        let flags = self.0 & !(u64::MAX << PAYLOAD_SHIFT | STATE_MASK);
        Self(number | flags | copy.map_or(0, |location| u64::from(location.0) << PAYLOAD_SHIFT))
    }

    /// The word with another state and without a clean copy.
    ///
    /// *Queued* is kept. Heat and departures are kept only for a page that is not resident.
    /// *Discarded* ends with the state that it belongs to.
    #[must_use]
    pub fn with_state(self, state: PageState) -> Self {
        let kept = match state {
            PageState::Leaving | PageState::Staged(_) | PageState::Reclaimable(_) | PageState::Remote(_) => {
                QUEUED | HEAT_MASK | DEPARTURES_MASK
            }
            _ => QUEUED,
        };
        Self(Self::new(state).0 | self.0 & kept)
    }

    /// The word of the page as it leaves, where `departures` pages of the volume have left before
    /// it.
    #[must_use]
    pub fn leaving(self, departures: u64) -> Self {
        let left = (departures / DEPARTURES_UNIT) << DEPARTURES_SHIFT & DEPARTURES_MASK;
        Self(self.with_state(PageState::Leaving).0 & !DEPARTURES_MASK | left)
            .with_clean_copy(self.clean_copy())
    }

    /// The approximate number of pages that have left since this one did.
    ///
    /// The count is modulo 2^26: after more departures than that the result is too small.
    #[must_use]
    pub fn departures_since(self, departures: u64) -> u64 {
        let left = (self.0 & DEPARTURES_MASK) >> DEPARTURES_SHIFT;
        ((departures / DEPARTURES_UNIT).wrapping_sub(left) & (DEPARTURES_MASK >> DEPARTURES_SHIFT))
            * DEPARTURES_UNIT
    }

    /// The word of the page when it becomes resident.
    ///
    /// If the page `returned_soon` after its eviction, its heat increases, and it stays for more
    /// rounds of the resident queue. Otherwise it is cold.
    #[must_use]
    pub fn held(self, returned_soon: bool) -> Self {
        let heat = if returned_soon { (((self.0 & HEAT_MASK) >> HEAT_SHIFT) + 1).min(HEAT_MAX) } else { 0 };
        let rounds = (1 << heat) - 1;
        Self(Self::new(PageState::Held).0 | QUEUED | heat << HEAT_SHIFT | rounds << ROUNDS_SHIFT)
    }

    /// The word with one round less to stay, or `None` if the page must leave now.
    #[must_use]
    pub fn next_round(self) -> Option<Self> {
        (self.0 & ROUNDS_MASK != 0).then_some(Self(self.0.wrapping_sub(1 << ROUNDS_SHIFT)))
    }

    /// Whether the resident queue has an entry for the page.
    #[must_use]
    pub fn is_queued(self) -> bool {
        self.0 & QUEUED != 0
    }

    /// The word with the *queued* flag set or cleared.
    #[must_use]
    pub fn with_queued(self, queued: bool) -> Self {
        Self(if queued { self.0 | QUEUED } else { self.0 & !QUEUED })
    }

    /// Whether the program gave the page up while it was [`PageState::Leaving`].
    #[must_use]
    pub fn is_discarded(self) -> bool {
        self.0 & DISCARDED != 0
    }

    /// The word with the *discarded* flag: the bytes that are leaving are not needed.
    #[must_use]
    pub fn with_discarded(self) -> Self {
        Self(self.0 | DISCARDED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_keeps_state_and_flags_apart() {
        for state in [
            PageState::Zero,
            PageState::Held,
            PageState::Leaving,
            PageState::Staged(Slot(u32::MAX)),
            PageState::Reclaimable(Slot(7)),
            PageState::Remote(Location(u32::MAX)),
            PageState::Doubtful,
            PageState::Lost,
        ] {
            let word = PageWord::new(state);
            assert_eq!(word.state(), state);
            assert_eq!(word.with_queued(true).with_discarded().state(), state);
            assert!(!word.with_discarded().with_state(PageState::Held).is_discarded());
            assert!(word.with_queued(true).with_state(PageState::Held).is_queued());
            assert_eq!(word.held(true).with_state(state).with_queued(false).state(), state);
        }
    }

    #[test]
    fn a_held_page_may_have_a_clean_copy() {
        let word = PageWord::default().held(true);
        assert_eq!(word.clean_copy(), None);
        for location in [Location(0), Location(u32::MAX)] {
            let held = word.with_clean_copy(Some(location));
            assert_eq!(
                (held.state(), held.clean_copy(), held.is_queued()),
                (PageState::Held, Some(location), true)
            );
            assert_eq!(held.next_round().map(PageWord::clean_copy), Some(Some(location)));
            let leaving = held.with_queued(false).leaving(64);
            assert_eq!((leaving.state(), leaving.clean_copy()), (PageState::Leaving, Some(location)));
            assert_eq!(leaving.with_discarded().clean_copy(), Some(location));
            assert_eq!(leaving.with_state(PageState::Staged(Slot(3))).clean_copy(), None);
            assert_eq!(held.with_clean_copy(None), word);
        }
    }

    #[test]
    fn pages_that_keep_coming_back_stay_longer() {
        let mut word = PageWord::default().held(false);
        for rounds in [0, 1, 3, 7, 7] {
            let mut stays = 0;
            while let Some(next) = word.next_round() {
                word = next;
                stays += 1;
            }
            assert_eq!(stays, rounds);
            word = word.with_state(PageState::Leaving).with_state(PageState::Staged(Slot(1))).held(true);
        }
        let cold = word.with_state(PageState::Remote(Location(1))).held(false);
        assert_eq!(cold.next_round(), None, "one that had been gone for long begins anew");
        assert_eq!(
            word.with_state(PageState::Zero).with_queued(false),
            PageWord::default(),
            "a zero page costs nothing"
        );
    }

    #[test]
    fn a_page_that_is_not_resident_remembers_when_it_left() {
        let grain = DEPARTURES_UNIT;
        for before in [0, 5 * grain, (1 << 20) * grain - grain, 7 << 40] {
            let word = PageWord::default().held(false).leaving(before);
            let word =
                word.with_state(PageState::Staged(Slot(1))).with_state(PageState::Remote(Location(u32::MAX)));
            assert_eq!(word.state(), PageState::Remote(Location(u32::MAX)));
            assert_eq!(word.departures_since(before), 0);
            assert_eq!(word.departures_since(before + 3 * grain), 3 * grain);
            let again = word.held(true).leaving(before + 9 * grain);
            assert_eq!(again.departures_since(before + 9 * grain), 0, "the last time counts");
        }
    }

    #[test]
    fn zero_is_the_empty_word() {
        assert_eq!(PageWord::default(), PageWord::new(PageState::Zero));
    }
}
