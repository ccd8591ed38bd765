//! One-sided operations between reliable connected endpoints: READ, WRITE, compare-and-swap,
//! fetch-and-add, and messages.
//!
//! The interface has the shape of RDMA verbs, so that a network card fits behind it. Work is
//! *posted* in batches, *completions* are polled, and an error is a completion with a cause. A key
//! opens a range of the peer's memory.
//!
//! Providers: [`shm`] (processes of one machine), [`tcp`] (a software RNIC), RDMA devices (the
//! crate `aquifer_fabric_verbs`) and [`sim`] (virtual time, for tests).
//!
//! This crate does not know what the memory is used for.

mod address;
pub mod alias;
pub mod background;
pub mod batch;
pub mod control;
mod forward;
#[cfg(test)]
mod golden_tests;
pub mod handshake;
pub mod inbox;
pub mod key_table;
pub mod keys;
pub mod limits;
mod locals;
pub mod memory;
pub mod multiplex;
mod mutation;
pub mod page_store;
pub mod reconnecting;
mod registration;
pub mod sessions;
pub mod shm;
pub mod sim;
pub mod tables;
pub mod target;
pub mod tcp;
pub mod unit_map;
pub mod wake;
pub mod work;

pub use address::{FabricAddress, FabricAddressError, VerbsProvider, WITHOUT_VERBS};
pub use alias::AliasMapping;
pub use batch::{Batch, BatchError};
pub use handshake::{Admission, ClusterKey, Ticket, TicketSecret, UnixClock};
pub use key_table::{KeyEntry, KeyTable};
pub use keys::{REGIONS_LIMIT, WINDOWS_LIMIT};
pub use memory::Memory;
pub use mutation::Mutation;
pub use page_store::{PageStore, StoredPages};
pub use registration::Registration;
pub use rustix::event::PollFd;
pub use target::{
    Access, EndpointNumber, Host, Identity, MessageHandler, Region, Scope, Sender, Target, TargetError,
    Tenant, TenantCounters, WindowSpec,
};
pub use unit_map::UnitMap;
pub use work::{
    Completion, DrainHandle, Endpoint, EndpointError, Key, Limits, LocalKey, LocalSlice, PostError,
    RemoteAddr, Verb, Work, WorkError,
};
