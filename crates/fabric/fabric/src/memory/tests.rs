//! Tests of shared memory.

use std::panic::AssertUnwindSafe;

use super::*;

#[test]
fn contents_are_read_as_written() {
    let memory = Memory::create("test", 10_000).unwrap();
    for (offset, len) in [(0, 8), (8, 256), (9_990, 10), (1, 300), (4_096, 4_096)] {
        let bytes: Vec<u8> = (0..len).map(|at| u8::try_from(at % 251).unwrap()).collect();
        memory.write(offset, &bytes);
        let mut seen = vec![0; len];
        memory.read(offset, &mut seen);
        assert_eq!(seen, bytes, "{len} bytes at {offset}");
    }
    memory.atomic_u64(16).store(0, Ordering::SeqCst);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| (0..100).for_each(|_| _ = memory.atomic_u64(16).fetch_add(1, Ordering::SeqCst)));
        }
    });
    assert_eq!(memory.atomic_u64(16).load(Ordering::SeqCst), 200);
}

#[cfg(not(miri))]
#[test]
fn bytes_and_words_are_shared_between_mappings() {
    let one = Memory::create("test", 10_000).unwrap();
    let two = Memory::from_fd(one.fd().try_clone_to_owned().unwrap(), 10_000).unwrap();
    one.write(9_990, b"0123456789");
    let mut seen = [0; 10];
    two.read(9_990, &mut seen);
    assert_eq!(&seen, b"0123456789");
    one.atomic_u64(8).store(7, Ordering::SeqCst);
    assert_eq!(two.atomic_u64(8).fetch_add(1, Ordering::SeqCst), 7);
    assert_eq!(one.atomic_u32(8).load(Ordering::SeqCst), 8);
    one.punch(0, 10_000).unwrap();
    two.read(9_990, &mut seen);
    assert_eq!(seen, [0; 10]);
}

#[cfg(not(miri))]
#[test]
fn pages_are_returned_to_the_system_unless_a_device_has_pinned_them() {
    let memory = Memory::create("test", 16 * 4096).unwrap();
    assert_eq!(memory.next_allocated(0).unwrap(), None);
    memory.write(5 * 4096 + 7, &[9]);
    assert_eq!(memory.next_allocated(4096).unwrap(), Some(5 * 4096));
    assert_eq!(memory.next_allocated(6 * 4096).unwrap(), None);
    assert!(memory.release_pages(5 * 4096, 4096).unwrap());
    assert_eq!(memory.allocated_bytes().unwrap(), 0);
    memory.write(5 * 4096, &[9]);
    memory.pin();
    assert!(memory.is_pinned() && !memory.release_pages(5 * 4096, 4096).unwrap());
    assert_eq!(memory.allocated_bytes().unwrap(), 4096);
}

#[cfg(not(miri))]
#[test]
fn read_only_memory_is_read_and_never_written() {
    let memory = Memory::create("test", 4096).unwrap();
    let read_only = Memory::from_fd_read_only(memory.read_only_fd().unwrap(), 4096).unwrap();
    memory.atomic_u64(8).store(7, Ordering::SeqCst);
    let mut seen = [0; 8];
    read_only.read(8, &mut seen);
    assert_eq!((u64::from_le_bytes(seen), read_only.load_u64(8)), (7, 7));
    assert!(memory.is_writable() && !read_only.is_writable());
    for write in [
        |memory: &Memory| memory.write(0, &[1]),
        |memory: &Memory| memory.atomic_u64(0).store(1, Ordering::SeqCst),
        |memory: &Memory| memory.atomic_u32(0).store(1, Ordering::SeqCst),
        |memory: &Memory| drop(memory.punch(0, 4096)),
    ] {
        let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| write(&read_only)));
        assert!(outcome.is_err(), "a check panics, and there is no fault");
    }
    let again = read_only.read_only_fd().unwrap();
    assert!(Memory::from_fd(again, 4096).is_err(), "the system refuses a writable mapping");
    let own = memory.fd().try_clone_to_owned().unwrap();
    assert!(Memory::from_fd_read_only(own, 4097).is_err(), "the length is checked as for other memory");
    memory.write(0, b"stays writable");
}

#[cfg(not(miri))]
#[test]
fn memory_that_is_short_or_may_shrink_is_refused() {
    let sealed = Memory::create("test", 4096).unwrap();
    let too_long = Memory::from_fd(sealed.fd().try_clone_to_owned().unwrap(), 4097);
    assert!(too_long.unwrap_err().to_string().contains("4097 are needed"));
    let open = rustix::fs::memfd_create("open", MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&open, 4096).unwrap();
    assert!(Memory::from_fd(open, 4096).unwrap_err().to_string().contains("shrinking"));
    let pipe = rustix::pipe::pipe().unwrap().0;
    assert!(Memory::from_fd(pipe, 4096).unwrap_err().to_string().contains("not a memfd"));
    assert!(Memory::create("empty", 0).is_err());
    assert!(rustix::fs::ftruncate(sealed.fd(), 1).is_err());
}

#[test]
#[should_panic(expected = "outside of memory")]
fn an_overflowing_range_is_caught() {
    Memory::create("test", 4096).unwrap().read(usize::MAX, &mut [0; 2]);
}

#[test]
#[should_panic(expected = "outside of memory")]
fn one_byte_past_the_end_is_caught() {
    Memory::create("test", 4096).unwrap().write(4089, &[0; 8]);
}

#[test]
#[should_panic(expected = "not a multiple of 8")]
fn a_misaligned_word_is_caught() {
    let memory = Memory::create("test", 4096).unwrap();
    memory.atomic_u64(4).store(1, Ordering::Relaxed);
}
