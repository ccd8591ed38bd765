//! Segments: memory that moves from process to process with the data structures in it, after RaMP
//! (Memon et al., *RaMP: A Lightweight RDMA Abstraction for Loosely Coupled Applications*, 2018).
//!
//! [`aquifer_ownership`] decides which host owns a segment, and [`pulling`] from which copy the
//! owner reads each page. [`host`] carries both out between hosts, and serves the programs that
//! have segments in their arena.

#![forbid(unsafe_code)]

#[cfg(test)]
mod golden_tests;
pub mod host;
pub mod mutation;
pub mod pulling;
