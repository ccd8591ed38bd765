//! Runs one target under libFuzzer: the one that `AQUIFER_FUZZ_TARGET` names.
//!
//! With `AQUIFER_FUZZ_MUTATION=1` the mutation of its parser is active.

#![no_main]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::LazyLock;

use aquifer_tests_fuzz::{TARGETS, Target, find};
use libfuzzer_sys::fuzz_target;

/// Most bytes of one allocation. A parser that trusts a length asks for more.
const ALLOCATION_BYTES_MAX: usize = 16 << 20;

struct BoundedAllocator;

impl BoundedAllocator {
    fn check(bytes: usize) {
        if bytes > ALLOCATION_BYTES_MAX {
            eprintln!("an allocation of {bytes} bytes");
            std::process::abort();
        }
    }
}

// SAFETY: all calls go to the system's allocator with the caller's arguments.
unsafe impl GlobalAlloc for BoundedAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::check(layout.size());
        // SAFETY: the caller's guarantee.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        Self::check(layout.size());
        // SAFETY: the caller's guarantee.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        Self::check(bytes);
        // SAFETY: the caller's guarantee.
        unsafe { System.realloc(block, layout, bytes) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller's guarantee.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: BoundedAllocator = BoundedAllocator;

static TARGET: LazyLock<&Target> = LazyLock::new(|| {
    let name = std::env::var("AQUIFER_FUZZ_TARGET").unwrap_or_default();
    find(&name).unwrap_or_else(|| {
        let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
        eprintln!("AQUIFER_FUZZ_TARGET is \"{name}\", and must be one of: {}", names.join(", "));
        std::process::exit(2)
    })
});
static IS_MUTATED: LazyLock<bool> =
    LazyLock::new(|| std::env::var_os("AQUIFER_FUZZ_MUTATION").is_some_and(|value| value == "1"));

fuzz_target!(|bytes: &[u8]| {
    if *IS_MUTATED {
        (TARGET.with_mutation)(&mut || {
            (TARGET.run)(bytes);
        });
    } else {
        (TARGET.run)(bytes);
    }
});
