//! What benches and demo share: a private cluster, measured programs, spreads, tables and pictures.

pub mod bytes;
pub mod child;
pub mod cluster;
pub mod draw;
pub mod interrupt;
pub mod lines;
pub mod other;
pub mod procs;
pub mod programs;
pub mod progress;
pub mod report;
pub mod server;
pub mod spread;
