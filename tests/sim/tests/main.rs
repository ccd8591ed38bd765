//! The seeded simulators, one module each, and the exhaustive model of the pool's recovery.

mod blocks;
mod membership;
mod objects;
mod paging;
mod pool;
