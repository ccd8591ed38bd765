//! Parts that the benches and the demo share: private clusters, measured programs, spreads, tables
//! and pictures.

pub mod allocation_trace;
pub mod benches;
pub mod bytes;
pub mod child;
pub mod cluster;
pub mod draw;
pub mod folder;
pub mod interrupt;
pub mod lines;
pub mod one_sided_array;
pub mod processbench;
pub mod procs;
pub mod programs;
pub mod progress;
pub mod random;
pub mod report;
pub mod server;
pub mod serving;
pub mod spread;
