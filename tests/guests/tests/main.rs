//! Tests in virtual machines: over RDMA devices, and between two machines; run by `make test-long`.

mod runner;
mod swap;
mod two_machines;
mod verbs;
