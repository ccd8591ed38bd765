//! Tests of the file of a disk node.

use super::*;

const DATA_AT: u64 = 1 << 21;
const PAGES: usize = 200;

fn store() -> DiskStore {
    let bytes = (PAGES * PAGE_BYTES) as u64;
    DiskStore::create(&std::env::temp_dir(), DATA_AT, bytes).expect("there is room")
}

fn page_at(page: usize) -> u64 {
    DATA_AT + (page * PAGE_BYTES) as u64
}

fn stamped(pages: usize, stamp: u8) -> Vec<u8> {
    (0..pages * PAGE_BYTES).map(|at| stamp.wrapping_add(u8::try_from(at % 251).unwrap())).collect()
}

fn read(store: &DiskStore, page: usize, pages: usize) -> Result<Vec<u8>, WorkError> {
    let mut out = vec![0xee; pages * PAGE_BYTES];
    store.read(page_at(page), &mut out).map(|()| out)
}

#[test]
fn pages_are_read_as_they_were_written() {
    let store = store();
    assert_eq!(read(&store, 0, PAGES).unwrap(), vec![0; PAGES * PAGE_BYTES], "nothing was written yet");
    // Across two bounds of stripes.
    store.write(page_at(60), &mut stamped(80, 1)).unwrap();
    store.write(page_at(100), &mut stamped(3, 7)).unwrap();
    let mut expected = vec![0; PAGES * PAGE_BYTES];
    expected[60 * PAGE_BYTES..140 * PAGE_BYTES].copy_from_slice(&stamped(80, 1));
    expected[100 * PAGE_BYTES..103 * PAGE_BYTES].copy_from_slice(&stamped(3, 7));
    assert!(read(&store, 0, PAGES).unwrap() == expected);
    let mut part = [0; 5000];
    store.read(page_at(99) + 4000, &mut part).unwrap();
    assert!(part == expected[99 * PAGE_BYTES + 4000..][..5000], "a READ need not be aligned");
    store.clear(page_at(70)..page_at(100));
    expected[70 * PAGE_BYTES..100 * PAGE_BYTES].fill(0);
    assert!(read(&store, 0, PAGES).unwrap() == expected);
}

#[test]
fn accesses_beyond_the_data_are_refused() {
    let store = store();
    for (page, pages) in [(PAGES, 1), (PAGES - 1, 2), (usize::from(u16::MAX), 1)] {
        assert_eq!(read(&store, page, pages), Err(WorkError::RemoteAccess), "page {page}");
        assert_eq!(store.write(page_at(page), &mut stamped(pages, 1)), Err(WorkError::RemoteAccess));
    }
    assert_eq!(store.write(DATA_AT - 4096, &mut stamped(1, 1)), Err(WorkError::RemoteAccess));
    assert_eq!(store.write(page_at(1) + 8, &mut stamped(1, 1)), Err(WorkError::Misaligned));
    assert_eq!(store.write(page_at(1), &mut [1; 100]), Err(WorkError::Misaligned));
    assert_eq!(store.errors(), 0, "these are no errors of the disk");
}

#[test]
fn the_file_has_no_name_and_no_plain_bytes() {
    use std::os::unix::fs::MetadataExt;
    let store = store();
    let plain = vec![b'p'; 4 * PAGE_BYTES];
    store.write(page_at(3), &mut plain.clone()).unwrap();
    store.write(page_at(10), &mut plain.clone()).unwrap();
    let metadata = store.file.metadata().unwrap();
    assert_eq!(metadata.nlink(), 0, "nothing is left when the last process has closed the file");
    assert!(metadata.blocks() * 512 >= (PAGES * PAGE_BYTES) as u64, "the room is reserved");
    let mut found = vec![0; PAGES * PAGE_BYTES];
    store.file.read_exact_at(&mut found, 0).unwrap();
    assert!(!found.windows(8).any(|bytes| bytes == b"pppppppp"));
    let (one, other) = (3 * PAGE_BYTES..7 * PAGE_BYTES, 10 * PAGE_BYTES..14 * PAGE_BYTES);
    assert!(found[one] != found[other], "equal pages do not look equal");
}

#[test]
fn a_damaged_page_is_an_error_of_its_reader() {
    let store = store();
    store.write(page_at(0), &mut stamped(4, 1)).unwrap();
    let mut old = vec![0; PAGE_BYTES];
    store.file.read_exact_at(&mut old, PAGE_BYTES as u64).unwrap();
    store.write(page_at(1), &mut stamped(1, 2)).unwrap();
    // A write that the disk has lost: the page has the bytes of an earlier write.
    store.file.write_all_at(&old, PAGE_BYTES as u64).unwrap();
    // A page in the place of another.
    store.file.read_exact_at(&mut old, 0).unwrap();
    store.file.write_all_at(&old, 2 * PAGE_BYTES as u64).unwrap();
    // A flipped bit.
    let mut byte = [0];
    store.file.read_exact_at(&mut byte, 3 * PAGE_BYTES as u64 + 77).unwrap();
    store.file.write_all_at(&[byte[0] ^ 4], 3 * PAGE_BYTES as u64 + 77).unwrap();
    for page in [1, 2, 3] {
        assert_eq!(read(&store, page, 1), Err(WorkError::Storage), "page {page}");
    }
    assert_eq!(store.errors(), 3);
    assert!(read(&store, 0, 1).unwrap() == stamped(1, 1), "other pages are intact");
    store.write(page_at(1), &mut stamped(1, 5)).unwrap();
    assert!(read(&store, 1, 1).unwrap() == stamped(1, 5), "it is whole again after a write");
}

#[test]
fn a_disk_that_ends_is_an_error_of_the_access() {
    let store = store();
    store.write(page_at(0), &mut stamped(2, 1)).unwrap();
    store.file.set_len(PAGE_BYTES as u64).unwrap();
    assert_eq!(read(&store, 1, 1), Err(WorkError::Storage));
    assert!(read(&store, 0, 1).unwrap() == stamped(1, 1));
}

#[test]
fn the_next_process_finds_everything() {
    let store = store();
    store.write(page_at(5), &mut stamped(9, 3)).unwrap();
    let nonce = store.seals.next_nonces(0);
    let [file, seals] = store.fds().map(|fd| fd.try_clone_to_owned().unwrap());
    drop(store);
    let store = DiskStore::open(file, seals).unwrap();
    assert!(read(&store, 5, 9).unwrap() == stamped(9, 3));
    assert_eq!(store.seals.next_nonces(0), nonce, "no nonce is used twice");
    let [file, _] = store.fds().map(|fd| fd.try_clone_to_owned().unwrap());
    let other = aquifer_fabric::Memory::create("other", 8192).unwrap();
    assert!(DiskStore::open(file, other.fd().try_clone_to_owned().unwrap()).is_err());
}

#[test]
fn concurrent_accesses_of_a_page_are_never_torn() {
    const ROUNDS: usize = 300;
    let store = store();
    std::thread::scope(|scope| {
        for stamp in 1..=2u8 {
            let store = &store;
            scope.spawn(move || {
                for _ in 0..ROUNDS {
                    store.write(page_at(63), &mut vec![stamp; 2 * PAGE_BYTES]).unwrap();
                }
            });
        }
        for _ in 0..ROUNDS {
            let pages = read(&store, 63, 2).unwrap();
            for page in pages.chunks_exact(PAGE_BYTES) {
                assert!(page.iter().all(|byte| *byte == page[0]), "a page is torn");
            }
        }
    });
}
