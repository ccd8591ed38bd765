//! The words, numbers and frames of memcached's protocols.
//!
//! This module knows neither items nor connections. Where the documents of the protocols leave a
//! choice, it follows memcached 1.6.18.

pub mod base64;
pub mod binary;
pub mod meta;
pub mod number;
pub mod words;
