//! Parts that the binaries `aquifer-bench` and `aquifer-research` share: [`support`], and errors.

pub mod error;
pub mod support;

pub use error::BenchError;
