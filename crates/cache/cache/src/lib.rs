//! `aquifer cache`: a server that speaks memcached's protocols.
//!
//! [`store`] has the items, and [`operations`] has the operations on them. [`protocol`] has words
//! and numbers, [`commands`] reads requests and writes replies, and [`server`] has the connections.

pub mod clock;
pub mod commands;
pub mod counters;
pub mod operations;
pub mod protocol;
pub mod server;
pub mod store;
pub mod tokens;
