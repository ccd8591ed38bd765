//! Heaps of objects in remote memory (CoRM).
//!
//! A heap belongs to one tenant and lives on one node. Its objects are in *slots* of *blocks*; a
//! block has slots of one *size class*. Clients read objects one-sidedly by their virtual address.
//! Compaction moves the objects of an emptier block into a fuller one of the same class. Afterwards
//! the virtual block address of the emptier block names the memory of the fuller one, so the old
//! pointers stay valid.
//!
//! The core is pure: state without system calls, clock, threads or random numbers of its own.
//!
//! - [`mod@pointer`], [`header`]: the words that clients and the heap exchange.
//! - [`slot`]: the order of loads and stores that makes reads valid.
//! - [`class`]: sizes of slots and blocks.
//! - [`block`]: which objects are in a block. [`space`]: addresses and memory of blocks.
//! - [`local`]: the blocks of one worker. [`heap`]: all of a heap.
//! - [`packing`]: which blocks are merged into which.
//! - [`layout`], [`ledger`], [`recovery`]: the words of a heap, and how it is restored from them.
//!
//! Around it:
//!
//! - [`bytes`]: the memory of a heap. [`service`]: answers to the requests of clients, which
//!   [`wire`] encodes. [`client`]: what programs link, and [`access`]: how it finds the service.
//!   [`shared`]: a heap on the program's own machine.

#![forbid(unsafe_code)]

pub mod access;
pub mod block;
pub mod bytes;
pub mod class;
pub mod client;
#[cfg(test)]
mod golden_tests;
pub mod header;
pub mod heap;
pub mod layout;
pub mod ledger;
pub mod local;
pub mod mutation;
pub mod operator;
pub mod packing;
pub mod pointer;
pub mod recovery;
pub mod service;
pub mod shared;
pub mod slot;
pub mod space;
pub mod wire;

pub use mutation::Mutation;
