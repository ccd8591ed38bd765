//! A hostile user against the agent of root. These tests need root: they fail without it.

mod control;
mod descriptors;
mod exhaustion;
mod identity;
mod stranger;
mod user;
