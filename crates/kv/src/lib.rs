//! Key-value stores in heaps of objects: the example of what clients of [`aquifer_objects`] can
//! build without a server of their own.
//!
//! A store is a hash index of objects. Clients read it one-sidedly, and change it by conditional
//! writes. Several clients may use a store at once, and any of them may be killed at any time:
//! what one has begun is completed by the next one that meets it.
//!
//! - [`layout`]: the bytes of the objects. [`objects`]: what a store needs of a heap.
//! - [`store`]: the operations. [`index`]: buckets and where they are. [`catalog`]: the stores of a
//!   heap by their names. [`cache`]: where items were found last.

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
