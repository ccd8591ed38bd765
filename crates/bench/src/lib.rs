//! What programs that measure have in common: [`support`], and their errors. The binary
//! `aquifer-bench` uses it, and `aquifer-research`.

pub mod error;
pub mod support;

pub use error::BenchError;
