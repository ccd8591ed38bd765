//! The seeded simulators, one module each, and the exhaustive model of the pool's recovery.

mod blocks;
mod objects;
mod paging;
mod pool;
