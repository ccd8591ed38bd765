//! The fabric's providers: one conformance suite over all of them, and what only one of them does.

mod conformance;
mod handshake;
mod reconnecting;
mod shm;
mod sim;
mod tcp;
