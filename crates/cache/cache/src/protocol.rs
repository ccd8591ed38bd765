//! The words, numbers and frames of memcached's protocols.
//!
//! This module knows neither items nor connections. What the protocol's documents leave open is as
//! memcached 1.6.18 has it.

pub mod base64;
pub mod binary;
pub mod meta;
pub mod number;
pub mod words;
