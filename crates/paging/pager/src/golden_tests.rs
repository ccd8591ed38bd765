//! Golden bytes of `docs/formats/paging.md`: page words, page table, slab records, mempool.
//! A changed golden file needs a new version there: that of the journal
//! (`crates/paging/faults`), which also stands for this memory.

use aquifer_fabric::{Key, Memory};
use aquifer_pool::{Extent, NodeClass, NodeId, SizeClass};
use aquifer_tests_support::golden;

use crate::copy_policy::{Backup, CopyPolicy};
use crate::integrity::page_crc;
use crate::mempool::{BLOCK_PAGES, BlockId, Mempool};
use crate::page::{Location, PAGE_BYTES, PageState, PageWord, Slot};
use crate::slabs::{REPLICAS_MAX, SLAB_PAGES_MAX, SLABS_MAX, SlabId, SlabSet};
use crate::table::{PAGES_MAX, PageTable};

fn again(memory: &Memory) -> Memory {
    let fd = memory.fd().try_clone_to_owned().expect("there are descriptors");
    Memory::whole(fd).expect("it is memory")
}

#[test]
fn golden_page_words() {
    let mut golden = golden!("page-words");
    let states = [
        ("zero", PageState::Zero),
        ("held", PageState::Held),
        ("leaving", PageState::Leaving),
        ("staged", PageState::Staged(Slot(0x0102_0304))),
        ("reclaimable", PageState::Reclaimable(Slot(0x0102_0304))),
        ("remote", PageState::Remote(Location(0x0102_0304))),
        ("doubtful", PageState::Doubtful),
        ("lost", PageState::Lost),
    ];
    let word = |bytes: [u8; 8]| PageWord(u64::from_le_bytes(bytes));
    for (name, state) in states {
        let bytes = PageWord::new(state).0.to_le_bytes();
        assert_eq!(word(bytes).state(), state, "{name}");
        golden.bytes(name, &bytes);
    }
    let copied = |state| PageWord::new(state).with_clean_copy(Some(Location(0x0102_0304)));
    let hot = (0..3).fold(PageWord::default(), |word, _| word.held(true));
    let words = [
        ("held with a copy", copied(PageState::Held)),
        ("leaving with a copy", copied(PageState::Leaving)),
        ("queued", PageWord::default().with_queued(true)),
        ("discarded", PageWord::new(PageState::Leaving).with_discarded()),
        ("held, cold", PageWord::default().held(false)),
        ("held, hot", hot),
        ("held, hot, after a round", hot.next_round().expect("it has rounds left")),
        ("leaving after 0x12345 blocks", hot.leaving(0x12345 << 6)),
        ("remote after 0x12345 blocks", hot.leaving(0x12345 << 6).with_state(PageState::Remote(Location(7)))),
    ];
    for (name, word) in words {
        golden.bytes(name, &word.0.to_le_bytes());
    }
    let read = |word_of: PageWord| word(word_of.0.to_le_bytes());
    assert_eq!(read(words[1].1).clean_copy(), Some(Location(0x0102_0304)));
    assert!(read(words[2].1).is_queued() && read(words[3].1).is_discarded());
    assert_eq!(read(words[7].1).departures_since(0x12346 << 6), 64);
    let location = Location::new(SlabId(0x0102), 0x0103);
    golden.text("page 0x103 of slab 0x102", &format!("{:#x}", location.0));
    assert_eq!((location.slab(), location.index()), (SlabId(0x0102), 0x0103));
    let slot = BlockId(0x0102).slot(0x3f);
    golden.text("slot 0x3f of block 0x102", &format!("{:#x} at {}", slot.0, slot.offset()));
    assert_eq!(slot.block(), (BlockId(0x0102), 0x3f));
    golden.check();
}

#[test]
fn golden_page_table() {
    let mut golden = golden!("page-table");
    let pages = [0, 511, 512, 0x1_2345_6789, PAGES_MAX - 1];
    let word = |page: u64| {
        PageWord::new(PageState::Remote(Location(u32::try_from(page % 7 + 1).expect("it is small"))))
    };
    let mut table = PageTable::new().expect("there is memory");
    for page in pages {
        table.set(page, word(page));
    }
    golden.memfd(table.memory().fd());
    golden.text("pages", &PAGES_MAX.to_string());
    golden.text("bytes", &table.memory().len().to_string());
    let mut recovered = PageTable::recover(again(table.memory())).expect("it is a table");
    for page in pages {
        assert_eq!(recovered.get(page), word(page));
    }
    assert_eq!(recovered.words(0, PAGES_MAX).len(), pages.len());
    golden.check();
}

#[test]
fn golden_slab_records() {
    let mut golden = golden!("slabs");
    let extent = |node, k| Extent {
        node: NodeId(node),
        addr: 0x0102_0304_0506_0000 + u64::from(node),
        class: SizeClass::new(k).expect("there is such a class"),
        key: Key(0x1112_1314),
    };
    let slabs = SlabSet::with_replicas(3).expect("there is memory");
    let (first, last) = (SlabId(0x0102), SlabId(SLABS_MAX - 1));
    slabs.publish(first, &[extent(1, 0), extent(0x0203, 0), extent(3, 0)], None);
    assert!(slabs.drop_replica(first, NodeId(3)));
    slabs.begin_replica(first, extent(4, 0), NodeClass::Memory);
    slabs.publish(last, &[extent(5, 9), extent(6, 9)], None);
    slabs.begin_free(last, 1, 0x2122_2324);
    let pages = [(first, 0), (last, 0), (last, 15), (last, 16), (last, SLAB_PAGES_MAX - 1)];
    for (number, (slab, index)) in (0..).zip(pages) {
        slabs.occupy(Location::new(slab, index), 0x3132_3330 + number);
    }
    slabs.retain(Location::new(last, 15));
    golden.memfd(slabs.memory().fd());
    golden.text("bytes", &slabs.memory().len().to_string());
    golden.text("slabs", &format!("{SLABS_MAX} of at most {SLAB_PAGES_MAX} pages, {REPLICAS_MAX} copies"));
    golden.bytes("checksum of 123456789", &page_crc(b"123456789").to_le_bytes());

    let recovered = SlabSet::recover(again(slabs.memory()), CopyPolicy::in_memory(3));
    let nodes = |slab| recovered.replicas(slab).iter().map(|copy| copy.node.0).collect::<Vec<_>>();
    assert_eq!((nodes(first), nodes(last)), (vec![1, 0x0203], vec![5]));
    assert_eq!(recovered.replicas(last).at(0), Some(extent(5, 9)));
    let left: Vec<_> = recovered
        .unfinished_replicas()
        .map(|left| (left.slab, left.place, left.extent, left.inline_log))
        .collect();
    assert_eq!(left, [(first, 2, extent(4, 0), 0), (last, 1, extent(6, 9), 0x2122_2324)]);
    assert_eq!(recovered.crc(Location::new(last, 16)), 0x3132_3333);
    golden.check();
}

#[test]
fn golden_backup_records() {
    let mut golden = golden!("backups");
    let extent = |node, k| Extent {
        node: NodeId(node),
        addr: 0x0102_0304_0506_0000 + u64::from(node),
        class: SizeClass::new(k).expect("there is such a class"),
        key: Key(0x1112_1314),
    };
    let policy = CopyPolicy { replicas: 2, backup: Backup::IfNeeded };
    golden.text("policy", &policy.encode().to_string());
    let slabs = SlabSet::with_policy(policy).expect("there is memory");
    let (first, last) = (SlabId(0x0102), SlabId(SLABS_MAX - 1));
    slabs.publish(first, &[extent(1, 0)], Some(extent(2, 0)));
    slabs.publish(last, &[], Some(extent(5, 9)));
    slabs.begin_replica(last, extent(6, 9), NodeClass::Disk);
    slabs.begin_free(last, 3, 0x2122_2324);
    slabs.occupy(Location::new(first, 0), 1);
    golden.memfd(slabs.memory().fd());
    let recovered = SlabSet::recover(again(slabs.memory()), policy);
    assert_eq!(recovered.replicas(first).backup(), Some(extent(2, 0)));
    assert_eq!((recovered.bytes().0, recovered.backup_bytes()), (4096, 4096));
    let left: Vec<_> = recovered.unfinished_replicas().map(|left| (left.place, left.inline_log)).collect();
    assert_eq!(left, [(3, 0x2122_2324), (4, 0)]);
    golden.check();
}

#[test]
fn golden_mempool() {
    let mut golden = golden!("mempool");
    golden.text("block", &format!("{BLOCK_PAGES} slots of {PAGE_BYTES} bytes"));
    let mempool = Mempool::new(3 * BLOCK_PAGES * PAGE_BYTES + 1).expect("there is memory");
    golden.text("bytes of three blocks", &mempool.memory().len().to_string());
    let recovered = Mempool::recover(again(mempool.memory()));
    assert_eq!(recovered.blocks(), 3);
    golden.check();
}
