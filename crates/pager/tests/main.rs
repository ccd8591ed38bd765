//! The pager: volumes, copies, and clients that are killed.

mod killed;
mod replicas;
mod volume;
