//! Key-value stores in heaps of objects: an example of a data structure that clients of
//! [`aquifer_objects`] build without a server of their own.
//!
//! A store is a hash index of objects. Clients read it one-sidedly, and change it by conditional
//! writes. Several clients may use a store at once, and any of them may be killed at any time: the
//! next client that finds an unfinished operation completes it.
//!
//! - [`layout`]: the bytes of the objects. [`objects`]: the interface to a heap.
//! - [`store`]: the operations. [`index`]: the buckets and the table of their pointers.
//!   [`catalog`]: the stores of a heap by name. [`cache`]: the pointers of items that were found.

#![forbid(unsafe_code)]

pub mod cache;
pub mod catalog;
pub mod index;
pub mod layout;
pub mod mutation;
pub mod objects;
pub mod store;

pub use objects::{Objects, Written};
pub use store::{KvError, KvStore};
