//! Tests of the fabric's providers: a conformance suite over all of them, and tests of single
//! providers.

mod conformance;
mod handshake;
mod multiplex;
mod reconnecting;
mod shm;
mod sim;
mod tcp;
