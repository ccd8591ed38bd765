//! Writes to a segment are tracked, and each is reported once.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::Relaxed;

use aquifer_arena::{ARENA_START, Arena, Mapping, WrittenPages};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

const PAGE: usize = 4096;

fn memory(bytes: usize) -> OwnedFd {
    let fd = memfd_create("aquifer-test", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, bytes as u64).unwrap();
    fd
}

fn drain(written: &WrittenPages) -> Vec<usize> {
    let mut pages = Vec::new();
    written.drain_written(|range| pages.extend(range.step_by(PAGE).map(|at| at / PAGE))).unwrap();
    pages
}

#[test]
fn pages_written_since_the_previous_call_are_reported_once() {
    let arena = Arena::reserve().unwrap();
    // More ranges than one call of the kernel reports.
    let pages = 2048;
    let mut mapping = Mapping::new(&arena, ARENA_START, pages * PAGE, memory(pages * PAGE)).unwrap();
    let write = |mapping: &Mapping<'_>, page: usize| mapping.words()[page * PAGE / 8 + 7].store(1, Relaxed);
    write(&mapping, 5);
    let written = WrittenPages::watch(&mapping).unwrap();
    assert!(drain(&written).contains(&5), "written before the watch");
    assert_eq!(drain(&written), []);
    // Pages that exist, and others that do not; each second one, and a run.
    let mut expected: Vec<usize> = (0..1200).step_by(2).chain(1500..1600).collect();
    expected.iter().for_each(|page| write(&mapping, *page));
    let read: u64 = (1300..1400).map(|page| mapping.words()[page * PAGE / 8].load(Relaxed)).sum();
    assert_eq!(read, 0);
    assert_eq!(drain(&written), expected);
    assert_eq!(drain(&written), []);
    // The kernel writes, too.
    let (source, sink) =
        std::io::pipe().map(|(read, write)| (OwnedFd::from(read), OwnedFd::from(write))).unwrap();
    rustix::io::write(&sink, b"by the kernel").unwrap();
    let start = std::ptr::with_exposed_provenance_mut::<u8>(mapping.address() + 9 * PAGE);
    // SAFETY: the range is in the mapping, and nothing else refers to it.
    let page = unsafe { std::slice::from_raw_parts_mut(start, 100) };
    rustix::io::read(&source, page).unwrap();
    expected = vec![9];
    assert_eq!(drain(&written), expected);
    drop(written);
    mapping.withdraw().unwrap();
    mapping.restore().unwrap();
    assert_eq!(mapping.words()[9 * PAGE / 8].load(Relaxed), u64::from_le_bytes(*b"by the k"));
}
