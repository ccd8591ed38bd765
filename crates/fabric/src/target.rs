//! What the owner of memory sees: regions, windows, fences, and the [`Target`].

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::Memory;
use crate::key_table::KeyTable;
use crate::work::Key;

/// A host of the cluster, as the directory numbers it: 1..=4095 (12 bits in the pool's logs). Zero is nobody.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct Host(pub u16);

impl Host {
    /// A memory node, at its own memory. The directory gives this number to nobody.
    pub const NODE: Self = Self(4095);
}

/// A tenant: whose memory it is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct Tenant(pub u32);

/// Who connects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Identity {
    /// The connecting host.
    pub host: Host,
    /// Fencing epoch of that host's lease. A target that fenced `(host, epoch)` refuses it and all earlier ones.
    pub epoch: u64,
    /// The tenant on whose behalf it acts.
    pub tenant: Tenant,
}

/// What a key allows.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Access {
    /// READ.
    pub read: bool,
    /// WRITE.
    pub write: bool,
    /// CAS and FAA.
    pub atomic: bool,
}

impl Access {
    /// READ only.
    pub const READ: Self = Self { read: true, write: false, atomic: false };
    /// READ and WRITE.
    pub const READ_WRITE: Self = Self { read: true, write: true, atomic: false };
    /// Everything.
    pub const ALL: Self = Self { read: true, write: true, atomic: true };
}

/// Who may use a key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Scope {
    /// Any endpoint that the target accepted.
    Anyone,
    /// Endpoints of this tenant.
    Tenant(Tenant),
    /// Endpoints of this host.
    Host(Host),
}

/// Registered memory (an MR) as its peers know it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Region {
    /// First address in the target's space. Regions never overlap.
    pub base: u64,
    /// Bytes.
    pub len: u64,
    /// Opens the whole region, or what comes before the data of its table of keys.
    pub key: Key,
}

/// A window to be bound (an MW).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WindowSpec {
    /// Addresses it opens, inside one region.
    pub range: Range<u64>,
    /// What it allows.
    pub access: Access,
    /// To whom.
    pub scope: Scope,
}

/// Why the target could not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// A limit was reached.
    #[error("the target already has {limit} {what}")]
    Full {
        /// What there is too much of, in the plural.
        what: &'static str,
        /// The limit.
        limit: usize,
    },
    /// The range is not inside one region.
    #[error("{start:#x}..{end:#x} is not inside one region")]
    OutOfRange {
        /// First address.
        start: u64,
        /// End address.
        end: u64,
    },
    /// A table of keys does not fit its region, or opens what is not aligned.
    #[error(
        "a table of keys for {start:#x}..{end:#x} of a region does not fit it: the range must be of whole 2 MiB, and have 544 entries for each"
    )]
    BadTable {
        /// First offset that it opens.
        start: u64,
        /// End offset.
        end: u64,
    },
    /// The key is not bound.
    #[error("key {0:?} is not bound")]
    NoSuchKey(Key),
    /// The system refused.
    #[error("{what}: {source}")]
    System {
        /// What was attempted.
        what: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
}

/// What a target has done for a tenant.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TenantCounters {
    /// Operations carried out, those included that were refused.
    pub operations: u64,
    /// Bytes read and written.
    pub bytes: u64,
}

/// The owner's side: registers memory, binds and invalidates keys, fences hosts, answers messages.
pub trait Target: Send + Sync + std::fmt::Debug {
    /// Register memory. Its [`Region`] is announced to endpoints that connect later; `scope` says who may use the region's own key.
    ///
    /// # Errors
    /// At the limit of regions.
    fn register(&self, memory: Arc<Memory>, access: Access, scope: Scope) -> Result<Region, TargetError> {
        self.register_with(memory, access, scope, None, None)
    }

    /// As [`Target::register`], of memory that holds a table of keys for its last part. The region's own key opens what comes before that part.
    /// Memory that outlived an earlier target, as all that this one has, is known to its users by the `key` that it had there, at the same address.
    ///
    /// # Errors
    /// As [`Target::register`]; if the table is not inside; if no such region can have had that key.
    fn register_with(
        &self,
        memory: Arc<Memory>,
        access: Access,
        scope: Scope,
        table: Option<KeyTable>,
        key: Option<Key>,
    ) -> Result<Region, TargetError>;

    /// Whoever got at these addresses by a key that a table no longer has when this is called, is out when this returns: no access of
    /// theirs is under way, and none will begin.
    fn expel(&self, range: Range<u64>);

    /// Bind a window and return its fresh key, random in its free bits.
    ///
    /// # Errors
    /// At the limit of windows; if the range is not inside one region.
    fn bind(&self, window: &WindowSpec) -> Result<Key, TargetError>;

    /// Kill a key. When this returns no access through it is under way and none will begin.
    ///
    /// # Errors
    /// If the key is not bound.
    fn invalidate(&self, key: Key) -> Result<(), TargetError>;

    /// Fence a host: when this returns no operation of its endpoints of `epoch` or earlier is under way and none will
    /// begin; they get [`crate::WorkError::Fenced`], and cannot connect again. An endpoint that connects fences all earlier epochs of its
    /// host by that: there is one agent on a host, and it is the newest.
    fn fence(&self, host: Host, epoch: u64);

    /// Take the oldest message from any endpoint: who sent it, and its bytes appended to `out`.
    fn receive(&self, out: &mut Vec<u8>) -> Option<Identity>;

    /// Send a message to every endpoint of a host; returns how many took it.
    fn send(&self, to: Host, message: &[u8]) -> usize;

    /// What tells of accesses that could outlive the target's process, to be kept with memory that does: whoever opens that memory anew retires it first
    /// ([`crate::shm::retire`]). `None` where no access can.
    fn control(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Endpoints that are connected now, and those whose connection broke a moment ago.
    fn endpoints(&self) -> usize;

    /// What was done for each tenant since the target began, as far as it knows: endpoints that reach the memory by themselves do not tell.
    fn tenant_counters(&self) -> Vec<(Tenant, TenantCounters)> {
        Vec::new()
    }
}
