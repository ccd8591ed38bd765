//! The directory's providers: one conformance suite over all of them, and what only one of them does.

mod conformance;
mod etcd;
mod restart;
mod simulated;
mod socket;
