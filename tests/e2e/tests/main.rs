//! End-to-end tests: real programs on real clusters.
//!
//! Each subject has a module. Tests in a module `long` run in `make test-long` only.

mod agent_restart;
mod bad_input;
mod behaviour;
mod chaos;
mod check;
mod checker;
mod children;
mod core_dump;
mod etcd;
mod examples;
mod extents;
mod fabric_check;
mod failures;
mod fairness;
mod full_keeper;
mod golden;
mod heap_stress;
mod heaps;
mod hostile;
mod keeper_steps;
mod kv;
mod languages;
mod large;
mod leases;
mod lend;
mod limit;
mod malloc;
mod many;
mod metrics;
mod network;
mod node_restart;
mod postgres;
mod programs;
mod replicas;
mod segments;
mod soak;
mod sparse;
mod supervisor;
mod swap;
mod tenants;
mod unpaged;
mod unusual;
mod users;
mod versions;
