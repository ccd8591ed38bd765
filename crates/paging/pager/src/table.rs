//! The page table: a radix tree from page number to [`PageWord`], in memory that can outlive the
//! daemon.
//!
//! Four levels of 512 entries cover 2^36 pages (256 TiB), as the page tables of x86-64 do. A tree
//! node is 4 KiB of one sparse memfd. Links are node numbers, not pointers, so that another process
//! can map the table. Format: `docs/formats/paging.md`, "Page table".

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use aquifer_fabric::Memory;

use crate::mutation::Mutation;
use crate::page::{PageNumber, PageWord};

const ENTRIES: u64 = 512;
const LEVEL_BITS: u32 = 9;
const LEVELS: u32 = 4;
const NODE_BYTES: usize = 4096;
/// Page numbers are below this.
pub const PAGES_MAX: u64 = 1 << (LEVELS * LEVEL_BITS);
/// Tree nodes of the largest table: enough for the words of 2 TiB of pages.
const NODES_MAX: u32 = 1 << 20;
/// Largest size to which the owner may let a table grow, in bytes. A move of all pages, which has
/// old and new leaves for a moment, must still have room.
pub const TABLE_BYTES_MAX: usize = NODES_MAX as usize / 2 * NODE_BYTES;
const ROOT: u32 = 0;
const NO_LEAF: u64 = u64::MAX;

/// Why a page table cannot be created or recovered.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    /// The system gave no memory.
    #[error("the system has no memory for a page table: {0}")]
    System(#[from] std::io::Error),
    /// The recovered memory does not contain a page table.
    #[error(
        "the page table of an earlier agent is damaged: tree node {node} is out of range or linked twice"
    )]
    Damaged {
        /// The tree node that is linked wrongly.
        node: u64,
    },
}

/// The page table of one volume. One thread uses it at a time.
#[derive(Debug)]
pub struct PageTable {
    memory: Arc<Memory>,
    used: u32,
    free: Vec<u32>,
    /// Tag and tree node of the leaf that was used last, because faults have locality.
    recent_leaf: (u64, u32),
    before_store: Option<fn()>,
}

impl PageTable {
    /// An empty table: every page is zero.
    ///
    /// # Errors
    /// If the system gives no address space for the table.
    pub fn new() -> Result<Self, TableError> {
        let memory = Memory::create("aquifer-page-table", NODES_MAX as usize * NODE_BYTES)?;
        Ok(Self::over(memory))
    }

    /// Recovers the table that an earlier agent left in `memory`. Which tree nodes are in use
    /// follows from the links.
    ///
    /// # Errors
    /// If the links are not a tree.
    pub fn recover(memory: Memory) -> Result<Self, TableError> {
        // An access to another tree node would be outside of the memory.
        let nodes = u32::try_from(memory.len() / NODE_BYTES).unwrap_or(u32::MAX).min(NODES_MAX);
        if nodes == 0 {
            return Err(TableError::Damaged { node: ROOT.into() });
        }
        let mut table = Self::over(memory);
        let mut seen = vec![ROOT];
        let mut level = vec![ROOT];
        for _ in 0..LEVELS - 1 {
            let mut next = Vec::new();
            for link in level.iter().flat_map(|node| (0..ENTRIES).map(|index| table.load(*node, index))) {
                if link != 0 {
                    let node = u32::try_from(link).ok().filter(|node| *node < nodes);
                    next.push(node.ok_or(TableError::Damaged { node: link })?);
                }
                // More links than tree nodes: one of them is linked twice, perhaps many times.
                if next.len() > NODES_MAX as usize {
                    return Err(TableError::Damaged { node: ROOT.into() });
                }
            }
            seen.extend(&next);
            level = next;
        }
        seen.sort_unstable();
        if let Some(twice) = seen.windows(2).find(|pair| pair[0] == pair[1])
            && !Mutation::AcceptLinkedTwice.is_active()
        {
            return Err(TableError::Damaged { node: twice[0].into() });
        }
        table.used = seen.last().expect("the root") + 1;
        let mut known = seen.iter().copied().peekable();
        table.free = (0..table.used).filter(|node| known.next_if_eq(node).is_none()).collect();
        Ok(table)
    }

    fn over(memory: Memory) -> Self {
        let memory = Arc::new(memory);
        Self { memory, used: 1, free: Vec::new(), recent_leaf: (NO_LEAF, 0), before_store: None }
    }

    /// Sets a hook that is called before each store, so that a test can stop the agent between any
    /// two stores.
    pub fn before_store(&mut self, hook: fn()) {
        self.before_store = Some(hook);
    }

    /// The memory of the table, from which another process can recover it.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// The word of a page.
    #[must_use]
    pub fn get(&mut self, page: PageNumber) -> PageWord {
        match self.leaf(page) {
            Some(leaf) => PageWord(self.load(leaf, page % ENTRIES)),
            None => PageWord::default(),
        }
    }

    /// Stores the word of a page.
    pub fn set(&mut self, page: PageNumber, word: PageWord) {
        if word == PageWord::default() {
            if let Some(leaf) = self.leaf(page) {
                self.store(leaf, page % ENTRIES, 0);
            }
            return;
        }
        let leaf = self.leaf_or_new(page);
        self.store(leaf, page % ENTRIES, word.0);
    }

    /// Calls `visit` for each page of `start..end` whose word is not 0, in ascending order, and
    /// stores the word that it returns. Frees leaves that became empty.
    pub fn update_range(
        &mut self,
        start: PageNumber,
        end: PageNumber,
        mut visit: impl FnMut(PageNumber, PageWord) -> PageWord,
    ) {
        let mut page = start;
        while page < end {
            let leaf_end = (page / ENTRIES + 1) * ENTRIES;
            let stop = leaf_end.min(end);
            let Some(leaf) = self.leaf(page) else {
                page = self.skip_absent(page).max(leaf_end);
                continue;
            };
            for number in page..stop {
                let old = self.load(leaf, number % ENTRIES);
                if old != 0 {
                    let new = visit(number, PageWord(old)).0;
                    if new != old {
                        self.store(leaf, number % ENTRIES, new);
                    }
                }
            }
            let whole = page.is_multiple_of(ENTRIES) && stop == leaf_end;
            if whole && (0..ENTRIES).all(|index| self.load(leaf, index) == 0) {
                self.release_leaf(page, leaf);
            }
            page = stop;
        }
    }

    /// The next leaf of the table at or after page `from`, as the range of its pages that are not
    /// below `from`. `None` after the last leaf.
    pub fn next_part(&mut self, from: PageNumber) -> Option<(PageNumber, PageNumber)> {
        let mut page = from / ENTRIES * ENTRIES;
        while page < PAGES_MAX {
            if self.leaf(page).is_some() {
                return Some((page.max(from), page + ENTRIES));
            }
            page = self.skip_absent(page).max(page + ENTRIES);
        }
        None
    }

    /// The pages of `start..end` whose word is not 0, in ascending order.
    pub fn words(&mut self, start: PageNumber, end: PageNumber) -> Vec<(PageNumber, PageWord)> {
        let mut words = Vec::new();
        self.update_range(start, end, |page, word| {
            words.push((page, word));
            word
        });
        words
    }

    /// Bytes of memory that the tree nodes in use occupy.
    #[must_use]
    pub fn bytes(&self) -> usize {
        (self.used as usize - self.free.len()) * NODE_BYTES
    }

    fn load(&self, node: u32, index: u64) -> u64 {
        self.memory.atomic_u64(Self::offset(node, index)).load(Relaxed)
    }

    fn store(&self, node: u32, index: u64, value: u64) {
        if let Some(hook) = self.before_store {
            hook();
        }
        self.memory.atomic_u64(Self::offset(node, index)).store(value, Relaxed);
    }

    fn offset(node: u32, index: u64) -> usize {
        node as usize * NODE_BYTES + usize::try_from(index).expect("below 512") * 8
    }

    fn index(page: PageNumber, level: u32) -> u64 {
        page >> (level * LEVEL_BITS) & (ENTRIES - 1)
    }

    fn leaf(&mut self, page: PageNumber) -> Option<u32> {
        let tag = page / ENTRIES;
        if self.recent_leaf.0 == tag {
            return Some(self.recent_leaf.1);
        }
        assert!(page < PAGES_MAX, "page {page:#x} is outside any address space");
        let mut node = ROOT;
        for level in [3, 2, 1] {
            node = self.child(node, Self::index(page, level))?;
        }
        self.recent_leaf = (tag, node);
        Some(node)
    }

    fn child(&self, node: u32, index: u64) -> Option<u32> {
        let link = self.load(node, index);
        (link != 0).then(|| u32::try_from(link).expect("links are node numbers"))
    }

    fn leaf_or_new(&mut self, page: PageNumber) -> u32 {
        if let Some(leaf) = self.leaf(page) {
            return leaf;
        }
        let mut node = ROOT;
        for level in [3, 2, 1] {
            let index = Self::index(page, level);
            node = self.child(node, index).unwrap_or_else(|| {
                let fresh = self.new_node();
                self.store(node, index, u64::from(fresh));
                fresh
            });
        }
        self.recent_leaf = (page / ENTRIES, node);
        node
    }

    fn new_node(&mut self) -> u32 {
        if let Some(node) = self.free.pop() {
            return node;
        }
        let nodes = self.memory.len() / NODE_BYTES;
        assert!((self.used as usize) < nodes, "a page table holds at most {nodes} nodes");
        self.used += 1;
        self.used - 1
    }

    fn release_leaf(&mut self, page: PageNumber, leaf: u32) {
        let mut node = ROOT;
        for level in [3, 2] {
            node = self.child(node, Self::index(page, level)).expect("the leaf was reached through it");
        }
        self.store(node, Self::index(page, 1), 0);
        self.recent_leaf = (NO_LEAF, 0);
        self.free.push(leaf);
    }

    /// The first page after `page` that may have a leaf. Skips absent subtrees.
    fn skip_absent(&self, page: PageNumber) -> PageNumber {
        let mut node = ROOT;
        for level in [3, 2, 1] {
            match self.child(node, Self::index(page, level)) {
                Some(next) => node = next,
                None => return ((page >> (level * LEVEL_BITS)) + 1) << (level * LEVEL_BITS),
            }
        }
        page
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::page::{PageState, Slot};

    fn staged(slot: u32) -> PageWord {
        PageWord::new(PageState::Staged(Slot(slot)))
    }

    #[test]
    fn a_new_table_is_all_zero_pages() {
        let mut table = PageTable::new().unwrap();
        assert_eq!(table.get(0), PageWord::default());
        assert_eq!(table.get(PAGES_MAX - 1), PageWord::default());
    }

    #[test]
    fn emptied_leaves_are_freed() {
        let mut table = PageTable::new().unwrap();
        let empty = table.bytes();
        for page in 0..5000 {
            table.set(page, staged(1));
        }
        let full = table.bytes();
        table.update_range(0, 1 << 30, |_, _| PageWord::default());
        assert!(table.bytes() < full);
        assert!(table.bytes() <= empty + 2 * NODE_BYTES, "only inner nodes remain");
        assert_eq!(table.get(77), PageWord::default());
    }

    #[test]
    fn next_part_visits_all_leaves_in_order() {
        let mut table = PageTable::new().unwrap();
        assert_eq!(table.next_part(0), None);
        let pages = [3, 700, 1 << 20, PAGES_MAX - 1];
        pages.iter().for_each(|page| table.set(*page, staged(1)));
        let mut found = Vec::new();
        let mut from = 0;
        while let Some((start, end)) = table.next_part(from) {
            found.extend(table.words(start, end).into_iter().map(|(page, _)| page));
            from = end;
        }
        assert_eq!(found, pages);
        assert_eq!(table.next_part(701), Some((701, 1024)), "the rest of a leaf");
    }

    fn reopened(table: &PageTable) -> Result<PageTable, TableError> {
        let fd = table.memory().fd().try_clone_to_owned().unwrap();
        PageTable::recover(Memory::from_fd(fd, table.memory().len()).unwrap())
    }

    #[test]
    fn a_table_is_recovered_from_its_memory() {
        let mut table = PageTable::new().unwrap();
        for page in [0, 511, 512, 1 << 20, PAGES_MAX - 1] {
            table.set(page, staged(u32::try_from(page & 0xff).unwrap() + 1));
        }
        table.update_range(512, 1024, |_, _| PageWord::default());
        let mut again = reopened(&table).unwrap();
        assert_eq!(again.bytes(), table.bytes(), "free tree nodes are free again");
        assert_eq!(
            again.words(0, PAGES_MAX),
            [(0, staged(1)), (511, staged(256)), (1 << 20, staged(1)), (PAGES_MAX - 1, staged(256))]
        );
        again.set(600, staged(9));
        assert_eq!(again.get(600), staged(9));
        assert_eq!(again.get(PAGES_MAX - 1), staged(256), "no tree node is allocated twice");
    }

    #[test]
    fn links_outside_of_the_memory_are_refused() {
        let memory = || Memory::create("short", 4 * NODE_BYTES).unwrap();
        for (link, is_inside) in [(3, true), (4, false)] {
            let short = memory();
            short.atomic_u64(0).store(link, Relaxed);
            assert_eq!(PageTable::recover(short).is_ok(), is_inside, "link {link}");
        }
        assert!(PageTable::recover(Memory::create("tiny", 8).unwrap()).is_err());
    }

    #[test]
    fn links_that_multiply_are_refused_soon() {
        let memory = Memory::create("wide", 4 * NODE_BYTES).unwrap();
        for (at, node) in (0..3 * NODE_BYTES).step_by(8).map(|at| (at, at / NODE_BYTES + 1)) {
            memory.atomic_u64(at).store(node as u64, Relaxed);
        }
        assert!(matches!(PageTable::recover(memory), Err(TableError::Damaged { .. })));
    }

    #[test]
    fn links_that_are_no_tree_are_refused() {
        for link in [u64::from(ROOT), u64::from(NODES_MAX), u64::MAX] {
            let mut table = PageTable::new().unwrap();
            table.set(0, staged(1));
            table.store(1, 3, if link == 0 { 2 } else { link });
            assert!(matches!(reopened(&table), Err(TableError::Damaged { .. })), "link {link}");
        }
    }

    /// Pages at the start, in the middle and at the end of the table.
    fn any_page() -> impl Strategy<Value = PageNumber> {
        let middle = 1u64 << 27;
        prop_oneof![0u64..3000, (PAGES_MAX - 2000)..PAGES_MAX, middle..middle + 600]
    }

    proptest! {
        #[test]
        fn it_is_a_map(operations in prop::collection::vec((0u64..3, any_page(), 0u64..1500), 1..200)) {
            let mut table = PageTable::new().unwrap();
            let mut model = BTreeMap::new();
            for (what, page, length) in operations {
                if what < 2 {
                    let word = staged(u32::try_from(page & 0xffff).unwrap());
                    table.set(page, word);
                    model.insert(page, word);
                } else {
                    let end = (page + length).min(PAGES_MAX);
                    let mut seen = Vec::new();
                    table.update_range(page, end, |number, word| {
                        seen.push((number, word));
                        PageWord::default()
                    });
                    let expected = model.range(page..end).map(|(number, word)| (*number, *word));
                    let expected: Vec<_> = expected.collect();
                    prop_assert_eq!(seen, expected);
                    model.retain(|number, _| !(page..end).contains(number));
                }
            }
            for (page, word) in &model {
                prop_assert_eq!(table.get(*page), *word);
            }
        }
    }
}
