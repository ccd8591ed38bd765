//! Tests of the pager: volumes, replicas, and agents that are killed.

mod killed;
mod moves;
mod replicas;
mod volume;
