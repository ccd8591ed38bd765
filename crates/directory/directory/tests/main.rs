//! Tests of the directory's implementations: a suite for all, and tests for single ones.

mod conformance;
mod etcd;
mod restart;
mod simulated;
mod socket;
