//! The interface of the owner of memory: regions, windows, fences, and the [`Target`].

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use crate::Memory;
use crate::registration::Registration;
use crate::work::Key;

/// The number of a host of the cluster, 1..=4095: the pool's logs have 12 bits for it. Zero is not
/// a host.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct Host(pub u16);

impl Host {
    /// A memory node that accesses its own memory. The directory never assigns this number.
    pub const NODE: Self = Self(4095);
    /// A memory node that holds part of its own memory for heaps of objects. The directory never
    /// assigns this number.
    pub const HEAPS: Self = Self(4094);
}

/// A tenant: the user that owns extents and keys.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct Tenant(pub u32);

/// The identity that an endpoint presents when it connects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Identity {
    /// The connecting host.
    pub host: Host,
    /// The epoch of the host's lease. A target that has fenced an epoch of the host refuses that
    /// epoch and all smaller ones.
    pub epoch: u64,
    /// The tenant on whose behalf the endpoint acts.
    pub tenant: Tenant,
}

/// The number of an endpoint. A target never reuses a number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct EndpointNumber(pub u64);

/// The endpoint that sent a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sender {
    /// The endpoint's identity.
    pub who: Identity,
    /// The endpoint's number, for [`Target::reply`].
    pub endpoint: EndpointNumber,
}

/// The operations that a key allows.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Access {
    /// READ.
    pub read: bool,
    /// WRITE.
    pub write: bool,
    /// Compare-and-swap and fetch-and-add.
    pub atomic: bool,
}

impl Access {
    /// READ only.
    pub const READ: Self = Self { read: true, write: false, atomic: false };
    /// READ and WRITE.
    pub const READ_WRITE: Self = Self { read: true, write: true, atomic: false };
    /// All operations.
    pub const ALL: Self = Self { read: true, write: true, atomic: true };
}

/// The endpoints that may use a key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Scope {
    /// Any endpoint that the target accepted.
    Anyone,
    /// Endpoints of this tenant.
    Tenant(Tenant),
    /// Endpoints of this host.
    Host(Host),
}

/// A registered memory region (MR), as its peers see it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Region {
    /// First address in the target's address space. Regions never overlap.
    pub base: u64,
    /// Length in bytes.
    pub len: u64,
    /// A key that opens the whole region, or the part before the data if the region has a key
    /// table.
    pub key: Key,
}

/// The description of a window (MW) that is to be bound.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WindowSpec {
    /// The addresses that the window opens. They are inside one region.
    pub range: Range<u64>,
    /// The operations that the window allows.
    pub access: Access,
    /// The endpoints that may use the window.
    pub scope: Scope,
}

/// Why a target cannot carry out a request of its owner.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// A limit was reached.
    #[error("the target already has {limit} {what}, which is the limit")]
    Full {
        /// The name of the limited things, in the plural.
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
    /// The key table does not fit its region, or covers a range that is not aligned.
    #[error(
        "the key table for {start:#x}..{end:#x} does not fit its region: \
         the range must consist of whole 2 MiB with 544 entries each"
    )]
    BadTable {
        /// First offset of the covered range.
        start: u64,
        /// End offset of the covered range.
        end: u64,
    },
    /// A translation table does not fit its memory, or has too many addresses.
    #[error(
        "a translation table of {units} units of {unit_bytes} bytes does not fit: units have 4 KiB to \
         128 MiB, the words are inside their memory, and a region has less than 64 TiB of addresses"
    )]
    BadUnits {
        /// The number of units.
        units: u64,
        /// The length of a unit.
        unit_bytes: u64,
    },
    /// Memory that was mapped read-only cannot be registered for writing.
    #[error("the memory was mapped read-only: it can be registered for READ only")]
    ReadOnly,
    /// The provider has no such function.
    #[error("{provider} does not support {what}")]
    Unsupported {
        /// The function.
        what: &'static str,
        /// The provider.
        provider: &'static str,
    },
    /// The key is not bound.
    #[error("key {0:?} is not bound")]
    NoSuchKey(Key),
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// The failed action.
        what: &'static str,
        /// The error of the system.
        source: std::io::Error,
    },
}

/// The operations that a target has carried out for one tenant.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TenantCounters {
    /// Number of operations, refused ones included.
    pub operations: u64,
    /// Bytes read and written.
    pub bytes: u64,
}

/// The owner's end: registers memory, binds and invalidates keys, fences hosts, exchanges messages.
///
/// Operations of one endpoint are done in the order of posting, as other threads of the owner see
/// it. Two READs of one endpoint, in one batch or in several, never find the memory in the opposite
/// order: the second never finds older bytes than the first. The bytes of one READ are
/// read in any order.
pub trait Target: Send + Sync + std::fmt::Debug {
    /// Registers memory without key table and translation. See [`Self::register_as`].
    ///
    /// # Errors
    /// At the limit of regions.
    fn register(&self, memory: Arc<Memory>, access: Access, scope: Scope) -> Result<Region, TargetError> {
        self.register_as(Registration::plain(memory, access, scope))
    }

    /// Registers memory. Endpoints that connect later receive the [`Region`].
    ///
    /// # Errors
    /// At the limit of regions; if the key table or the map does not fit; if the key is in use or
    /// is not a region's; if the provider has no translation.
    fn register_as(&self, new: Registration) -> Result<Region, TargetError>;

    /// Removes a region: invalidates its key, all windows in it and the keys of its key table. When
    /// this returns, no access to the region is in flight, none will begin, and the target does not
    /// refer to its memory any more. `region` is the key that the region was registered under, even
    /// if it was invalidated.
    ///
    /// # Errors
    /// If no region has the key.
    fn deregister(&self, region: Key) -> Result<(), TargetError>;

    /// Waits until no access is in flight in a range that began before the call.
    ///
    /// Keys must have been removed from a key table, or words of a translation table changed,
    /// before the call. When it returns, no access by the removed keys or the old words is in
    /// flight, and none will begin.
    fn expel(&self, range: Range<u64>);

    /// Binds a window and returns its fresh key. The key's free bits are random.
    ///
    /// # Errors
    /// At the limit of windows; if the range is not inside one region.
    fn bind(&self, window: &WindowSpec) -> Result<Key, TargetError>;

    /// Invalidates a key. When this returns, no access by the key is in flight, and none will
    /// begin.
    ///
    /// # Errors
    /// If the key is not bound.
    fn invalidate(&self, key: Key) -> Result<(), TargetError>;

    /// Fences a host up to an epoch.
    ///
    /// When this returns, no operation of the fenced endpoints is in flight, and none will begin.
    /// Their operations fail with [`crate::WorkError::Fenced`], and they cannot connect again. An
    /// endpoint that connects fences all smaller epochs of its host: a host has one agent, and it
    /// has the greatest epoch.
    fn fence(&self, host: Host, epoch: u64);

    /// Takes the oldest message of all endpoints and appends it to `out`. Returns the sender.
    fn receive(&self, out: &mut Vec<u8>) -> Option<Sender>;

    /// Waits until [`Self::receive`] may find a message, for at most `timeout`. Does not poll.
    fn wait(&self, timeout: Duration);

    /// Sends a message to one endpoint. Returns false if the endpoint is gone or fenced, or has no
    /// room for the message.
    fn reply(&self, to: EndpointNumber, message: &[u8]) -> bool;

    /// Sends a message to every endpoint of a host. Returns the number of endpoints that had room
    /// for it.
    fn send(&self, to: Host, message: &[u8]) -> usize;

    /// Memory that records accesses which may outlive the target's process. It must be kept with
    /// memory that outlives the process, and passed to [`crate::shm::retire`] before another target
    /// opens that memory. `None` where no access can outlive the process.
    fn control(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// The number of connected endpoints, including those whose connection broke a moment ago and
    /// may resume.
    fn endpoints(&self) -> usize;

    /// Counters of each tenant since the target began. Empty where endpoints access the memory by
    /// themselves.
    fn tenant_counters(&self) -> Vec<(Tenant, TenantCounters)> {
        Vec::new()
    }
}

/// Answers messages in the thread of a target that receives them.
///
/// A message is answered without a wake-up of another thread, and the answer is sent to the
/// endpoint that sent it. Meanwhile the thread serves no other endpoint, so a handler must not wait
/// for the target, such as in [`Target::invalidate`].
pub trait MessageHandler: Send + Sync + std::fmt::Debug {
    /// Handles a message of an initiator, and appends the answer to `answer`, which is empty.
    fn handle(&self, from: Sender, message: &[u8], answer: &mut Vec<u8>);
}
