//! Golden bytes of `docs/formats/paging.md`: the journal.
//! A changed golden file needs a new version there (the second word of the journal).

use std::sync::atomic::Ordering::Relaxed;

use aquifer_pager::Memory;
use aquifer_tests_support::golden;

use crate::areas::{Area, Areas};
use crate::journal::{Journal, PersistentRanges};
use crate::kernel::UffdMessage;

const READER_AT: usize = 8;
const MESSAGES_AT: usize = 64;

fn reopen(journal: &Journal) -> Memory {
    let fd = journal.memory().fd().try_clone_to_owned().expect("there are descriptors");
    Memory::whole(fd).expect("it is a memfd")
}

/// A message in the format of the kernel.
fn message(kind: u8, words: [u64; 3]) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes[0] = kind;
    for (target, word) in bytes[8..].chunks_exact_mut(8).zip(words) {
        target.copy_from_slice(&word.to_ne_bytes());
    }
    bytes
}

#[test]
fn golden_journal() {
    let mut golden = golden!("journal");
    let (fork, remap, remove, unmap) = (0x13, 0x14, 0x15, 0x16);
    let fresh = Journal::new().expect("there is memory");
    assert_eq!(fresh.memory().atomic_u32(READER_AT).load(Relaxed), std::process::id());
    let messages = [
        message(remove, [0x1000, 0x3000, 0]),
        message(remap, [0x4000, 0x5000, 0x2000]),
        message(unmap, [0x6000, 0x8000, 0]),
        message(fork, [77, 0, 0]),
    ];
    for (position, bytes) in messages.iter().enumerate() {
        fresh.memory().write(MESSAGES_AT + 32 * position, bytes);
    }
    let (journal, contents) = Journal::recover(reopen(&fresh)).expect("it is a journal");
    let wanted = [
        UffdMessage::Remove { start: 1, end: 3 },
        UffdMessage::Remap { from: 4, to: 5, pages: 2 },
        UffdMessage::Unmap { start: 6, end: 8 },
        UffdMessage::Fork(77),
    ];
    assert_eq!(contents.unapplied.into_iter().map(|(_, message)| message).collect::<Vec<_>>(), wanted);

    let pending_unmaps = [Area { start: 0x0102, end: 0x0304 }, Area { start: 0x1112, end: 0x1314 }];
    let mut removed = Areas::default();
    removed.insert(Area { start: 0x2122_2324_2526, end: 0x2122_2324_2528 });
    journal.event_applied(0, PersistentRanges { pending_unmaps: &pending_unmaps, removed: &removed });
    journal.begin_remap(1);
    // More ranges than fit.
    let many: Vec<Area> = (0..125).map(|number| Area { start: 2 * number, end: 2 * number + 1 }).collect();
    let ranges = PersistentRanges { pending_unmaps: &many, removed: &Areas::default() };
    journal.memory().atomic_u32(READER_AT).store(0x3132_3334, Relaxed);
    let mut before = vec![0; journal.memory().len()];
    journal.memory().read(0, &mut before);
    golden.memory(&before);
    golden.text("bytes", &before.len().to_string());

    let copy = Memory::create("copy", before.len()).expect("there is memory");
    copy.write(0, &before);
    let (recovered, contents) = Journal::recover(copy).expect("it is a journal");
    assert_eq!((contents.reader_pid, contents.remapping, recovered.sequence()), (0x3132_3334, Some(0), 1));
    assert_eq!(contents.pending_unmaps.as_deref(), Some(&pending_unmaps[..]));
    let found = contents.removed.expect("there is room").iter().collect::<Vec<_>>();
    assert_eq!(found, removed.iter().collect::<Vec<_>>());
    assert_eq!(contents.unapplied.iter().map(|(position, _)| *position).collect::<Vec<_>>(), [1, 2, 3]);

    journal.persist_ranges(ranges);
    let count = journal.memory().atomic_u32(4096 + 4).load(Relaxed);
    golden.text("places of 125, of which there is room for 124", &count.to_string());
    let (_, contents) = Journal::recover(reopen(&journal)).expect("it is a journal");
    assert_eq!(contents.pending_unmaps, None);
    golden.check();
}
