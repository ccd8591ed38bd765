//! A hostile user against the agent of root. These tests need root: they fail without it.

mod cache;
mod changed_user;
mod control;
mod descriptors;
mod exhaustion;
mod identity;
mod page_cache;
mod segments;
mod stranger;
mod user;
