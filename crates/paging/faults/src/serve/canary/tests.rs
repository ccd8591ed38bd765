use std::os::fd::{FromRawFd, OwnedFd};

use super::*;
use crate::kernel::FillStop;

/// A userfaultfd of this process.
fn own_uffd() -> Option<Userfaultfd> {
    // SAFETY: creates a descriptor.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
    let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0)?;
    // SAFETY: nothing else owns the descriptor.
    let uffd = Userfaultfd::from(unsafe { OwnedFd::from_raw_fd(fd) });
    uffd.enable().ok()?;
    Some(uffd)
}

/// A page of this process that is missing and registered.
pub(crate) fn registered_page(uffd: &Userfaultfd) -> PageNumber {
    // SAFETY: a new mapping, which is never unmapped.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            PAGE_BYTES,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    assert_ne!(address, libc::MAP_FAILED);
    let page = address as u64 / PAGE_BYTES as u64;
    uffd.register(page, page + 1).unwrap();
    page
}

/// A canary in this process that is not filled yet.
pub(crate) fn missing_canary() -> Option<(Userfaultfd, Canary)> {
    let uffd = own_uffd()?;
    let page = registered_page(&uffd);
    let canary = Canary { page, number: 0x0123_4567_89ab_cdef, nonce: new_nonce().unwrap() };
    Some((uffd, canary))
}

#[test]
fn a_waiting_thread_reads_the_number_that_identifies_its_process() {
    let Some(uffd) = own_uffd() else {
        return aquifer_tests_support::skip("no userfaultfd that reports forks");
    };
    let page = registered_page(&uffd);
    let memory = std::fs::File::open("/proc/self/mem").unwrap();
    let canary = Canary { page, number: 0x0123_4567_89ab_cdef, nonce: [7; 16] };
    assert!(!canary.is_in(&memory), "a missing canary is not waited for");
    let address = usize::try_from(page).unwrap() * PAGE_BYTES;
    // SAFETY: the address is mapped as long as the process lives.
    let reader = std::thread::spawn(move || unsafe { (address as *const u64).read_volatile() });
    assert_eq!(canary.fill(&uffd).stop, None);
    assert_eq!(reader.join().unwrap(), canary.number);
    assert!(canary.is_in(&memory));
    let others = [Canary { number: 1, ..canary }, Canary { nonce: [8; 16], ..canary }];
    for other in others {
        assert_eq!(other.fill(&uffd).stop, Some(FillStop::Exists), "the first fill stays");
        assert!(!other.is_in(&memory));
    }
}

#[test]
fn is_registered_recognises_registered_pages_and_changes_nothing() {
    let Some(uffd) = own_uffd() else {
        return aquifer_tests_support::skip("no userfaultfd that reports forks");
    };
    let page = registered_page(&uffd);
    assert_eq!(uffd.is_registered(page), Some(true));
    let canary = Canary { page, number: 1, nonce: [7; 16] };
    assert_eq!(canary.fill(&uffd).stop, None, "it was missing still");
    assert_eq!(uffd.is_registered(page), Some(true), "also with a page");
    let local = [0_u64; 1];
    assert_eq!(uffd.is_registered(local.as_ptr() as u64 / PAGE_BYTES as u64), Some(false), "a stack");
    assert_eq!(uffd.is_registered(1 << 22), Some(false), "nothing is mapped there");
}

#[test]
fn pages_of_connect_back_requests_follow_the_canary_and_the_proof() {
    let canary = Canary { page: 100, number: 1, nonce: [0; 16] };
    assert!(!canary.is_connect_back(99) && !canary.is_connect_back(100));
    let proofs: Vec<Canary> = canary.of_proof(2).unwrap().collect();
    assert!(!canary.is_connect_back(proofs[0].page) && proofs[0].nonce != canary.nonce);
    let pages: Vec<u64> = proofs.iter().map(|proof| proof.page).collect();
    assert_eq!(pages, [101, 109, 108, 107, 106, 105, 104], "all but those of two requests");
    assert!(pages.iter().all(|page| canary.pages().contains(page)));
    assert!(canary.pages().skip(2).all(|page| canary.is_connect_back(page)));
    assert!(!canary.is_connect_back(canary.pages().end) && !canary.is_connect_back(u64::MAX));
}
