//! What runs in virtual machines: over RDMA devices, and between two machines. `make test-long`
//! runs it.

mod runner;
mod two_machines;
mod verbs;
