//! Servers of one cache in one process, with a real directory, real sockets and real memory.

mod checker;
mod faults;
mod harness;
mod keeping;
mod leases;
mod moves;
mod owners;
mod settings;
