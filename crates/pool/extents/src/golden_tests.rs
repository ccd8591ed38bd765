//! Golden bytes of `docs/formats/ipc.md`: the book of a session.
//! A changed golden file needs a new version there (the seventh byte of the magic).

use aquifer_fabric::{Key, Memory};
use aquifer_pool::{Extent, NodeId, SizeClass};
use aquifer_tests_support::golden;

use crate::book::{Book, BookEntry, EXTENTS_MAX, ExtentState};

#[test]
fn golden_book() {
    let mut golden = golden!("book");
    let extent = |node| Extent {
        node: NodeId(node),
        addr: 0x0102_0304_0506_0000,
        class: SizeClass::SECTION,
        key: Key(0x1112_1314),
    };
    let entries = [
        (0, BookEntry { extent: extent(1), state: ExtentState::Stocked, request: u64::MAX }),
        (1, BookEntry { extent: extent(0x0203), state: ExtentState::InUse, request: 0x2122_2324_2526_2728 }),
        (3, BookEntry { extent: extent(2), state: ExtentState::Freeing(0x3132_3334), request: 5 }),
        (EXTENTS_MAX - 1, BookEntry { extent: extent(3), state: ExtentState::InUse, request: 6 }),
    ];
    let book = Book::new().expect("there is memory");
    for (number, BookEntry { extent, state, request }) in &entries {
        book.insert(*number, extent, *state, *request);
    }
    book.insert(4, &extent(4), ExtentState::InUse, 7);
    book.remove(4);
    book.set_done_requests(0x4142_4344_4546_4748);
    golden.memfd(book.memory().fd());
    golden.text("bytes", &book.memory().len().to_string());

    let fd = book.memory().fd().try_clone_to_owned().expect("there are descriptors");
    let recovered =
        Book::recover(Memory::whole(fd).expect("the descriptor is a memfd")).expect("the memory is a book");
    assert_eq!(recovered.entries().collect::<Vec<_>>(), entries);
    assert_eq!((recovered.done_requests(), recovered.end()), (0x4142_4344_4546_4748, EXTENTS_MAX));
    golden.check();
}
