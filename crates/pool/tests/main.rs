//! The pool: its formats, its machines, its client over real fabrics, threads in every order, killed processes.

#![expect(clippy::duplicate_mod, reason = "the suite of the client is compiled once for each fabric")]

mod begun;
mod client;
mod header;
mod interleavings;
mod killed;
mod machines;
mod words;
