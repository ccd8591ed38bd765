//! Tests of the pool: formats, state machines, clients over real fabrics, thread interleavings,
//! killed processes.

#![expect(clippy::duplicate_mod, reason = "the suite of the client is compiled once for each fabric")]

mod client;
mod header;
mod interleavings;
mod killed;
mod machines;
mod resumed_free;
mod words;
