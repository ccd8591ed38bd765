//! The initiator's interface: verbs, batches, completions, and the [`Endpoint`].

use std::sync::Arc;
use std::time::Duration;

use rustix::event::PollFd;

use crate::Memory;
use crate::handshake::{Refusal, RefusalCode};
pub use crate::limits::Limits;
use crate::target::Region;

/// A key that opens a range of the peer's memory: the rkey of a region or of a window. Zero is
/// never a valid key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct Key(pub u32);

/// A handle of local memory that is registered with one endpoint (an lkey).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct LocalKey(pub u32);

/// A range of local registered memory, in bytes from the start of that memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LocalSlice {
    /// The registered memory.
    pub key: LocalKey,
    /// First byte, counted from the start of that memory.
    pub offset: u64,
    /// Length in bytes; at most [`Limits::transfer_bytes_max`].
    pub len: u32,
}

/// An address in the peer's registered address space, with the key that opens it. [`Region::base`]
/// is the first address of a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RemoteAddr {
    /// Address in the peer's space, in bytes.
    pub addr: u64,
    /// Key of the region or window that covers it.
    pub key: Key,
}

/// One operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verb {
    /// Copy `local.len` bytes from `remote` to `local`.
    Read {
        /// Destination.
        local: LocalSlice,
        /// Source.
        remote: RemoteAddr,
    },
    /// Copy `local.len` bytes from `local` to `remote`.
    Write {
        /// Source. It must not change until the completion.
        local: LocalSlice,
        /// Destination.
        remote: RemoteAddr,
    },
    /// If the 8-byte, 8-aligned word at `remote` equals `expected`, store `desired`.
    /// The completion carries the value found.
    CompareSwap {
        /// The word.
        remote: RemoteAddr,
        /// The value that the word must have.
        expected: u64,
        /// The new value.
        desired: u64,
    },
    /// Add to the 8-byte, 8-aligned word at `remote`, wrapping. The completion carries the value
    /// before.
    FetchAdd {
        /// The word.
        remote: RemoteAddr,
        /// The number to add.
        add: u64,
    },
    /// Deliver a message to the peer's receive queue; at most [`Limits::message_bytes_max`] bytes.
    Send {
        /// The message.
        local: LocalSlice,
    },
}

/// One posted operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Work {
    /// An identifier chosen by the caller, which the completion contains.
    pub id: u64,
    /// The operation.
    pub verb: Verb,
    /// Whether success produces a completion. Failure always does.
    pub signalled: bool,
}

/// The completion of one operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion {
    /// [`Work::id`].
    pub id: u64,
    /// The value found before an atomic, the number of bytes of any other operation, or the cause
    /// of the failure.
    pub outcome: Result<u64, WorkError>,
}

/// Why an operation failed.
///
/// Unless a variant says otherwise, the endpoint is broken afterwards, as an RC queue pair would
/// be. Later work then completes with [`WorkError::Flushed`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum WorkError {
    /// The key is unknown or stale, belongs to another tenant or host, lacks this right, or does
    /// not cover the range. The endpoint stays usable; on verbs it reconnects by itself.
    #[error("the peer refused the access: the key does not permit it")]
    RemoteAccess,
    /// The local slice is outside registered memory. Nothing was done; the endpoint stays usable.
    #[error("the local range is not registered memory")]
    LocalAccess,
    /// The address of an atomic is not 8-byte aligned. Nothing was done; the endpoint stays usable.
    #[error("an atomic needs an 8-byte aligned address")]
    Misaligned,
    /// The operation is longer than the limits allow. Nothing was done; the endpoint stays usable.
    #[error("the operation is longer than the limit")]
    TooLong,
    /// The receiver has no room for the message. Nothing was done; the endpoint stays usable.
    #[error("the peer's receive queue is full")]
    ReceiverNotReady,
    /// The peer keeps the bytes on a disk, and could not read or write them; those of a WRITE may
    /// be lost. The endpoint stays usable.
    #[error("the peer could not read or write its disk")]
    Storage,
    /// The target has fenced this host: its lease has ended.
    #[error("the target has fenced this host")]
    Fenced,
    /// The peer is dead or unreachable. Whether the operation took effect is unknown.
    #[error("the peer is gone")]
    PeerGone,
    /// The peer did not answer in time. Whether the operation took effect is unknown.
    #[error("the peer did not answer in time")]
    Timeout,
    /// The peer is away and may return with its memory; then the endpoint resumes by itself (see
    /// [`crate::reconnecting`]). Whether the operation took effect is unknown. It will not take
    /// effect later.
    #[error("the peer is away")]
    Away,
    /// An earlier operation broke the endpoint; this one was not done.
    #[error("not done: an earlier operation broke the endpoint")]
    Flushed,
}

/// Why a batch was not accepted in full.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PostError {
    /// The queue is full. The first `accepted` items were posted; poll, then post the rest.
    #[error("the send queue is full: {accepted} items of the batch were accepted")]
    QueueFull {
        /// Number of operations of the batch that were posted.
        accepted: usize,
    },
}

/// Why an endpoint cannot connect or register memory.
#[derive(Debug, thiserror::Error)]
pub enum EndpointError {
    /// No target listens at the address, or it ended during the handshake.
    #[error("cannot reach {address}: {source}")]
    Unreachable {
        /// The target's address.
        address: String,
        /// The error of the system.
        source: std::io::Error,
    },
    /// The target refused the connection, with a reason.
    #[error("{address} refused the connection: {refusal}")]
    Refused {
        /// The target's address.
        address: String,
        /// The target's answer.
        refusal: Refusal,
    },
    /// The peer sent something that this version cannot parse.
    #[error("{address} does not speak this protocol: {reason}")]
    Protocol {
        /// The target's address.
        address: String,
        /// The violation.
        reason: String,
    },
    /// The device cannot register the local memory.
    #[error(
        "cannot register {bytes} bytes of local memory with the RDMA device: {source}; \
         is the limit of locked memory (ulimit -l) too low?"
    )]
    Local {
        /// The length of the memory.
        bytes: usize,
        /// The error of the system.
        source: std::io::Error,
    },
    /// Local memory was mapped read-only, and READs store bytes there.
    #[error("local memory must be writable")]
    ReadOnlyLocal,
    /// The endpoint has reached its limit of registered memories.
    #[error("the endpoint already has {limit} local memories, which is the limit")]
    TooManyLocal {
        /// The limit.
        limit: usize,
    },
}

impl EndpointError {
    /// Whether no target serves at the address now: none listens, or it is going away. A later
    /// attempt may succeed.
    #[must_use]
    pub fn is_target_away(&self) -> bool {
        match self {
            Self::Unreachable { .. } => true,
            Self::Refused { refusal, .. } => refusal.code == RefusalCode::GoingAway,
            Self::Protocol { .. } | Self::Local { .. } | Self::ReadOnlyLocal | Self::TooManyLocal { .. } => {
                false
            }
        }
    }

    /// Whether this machine or the target lacks descriptors, memory or endpoints, or is too busy to
    /// answer. The target's memory may be intact, and a later attempt may succeed.
    #[must_use]
    pub fn is_lack_of_room(&self) -> bool {
        match self {
            Self::Unreachable { source, .. } | Self::Local { source, .. } => is_lack_of_room(source),
            Self::Refused { refusal, .. } => refusal.code == RefusalCode::NoRoom,
            Self::Protocol { .. } | Self::ReadOnlyLocal | Self::TooManyLocal { .. } => false,
        }
    }

    /// Whether the target did not answer in time.
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        use std::io::ErrorKind::{TimedOut, WouldBlock};
        // A socket with a timeout reports `WouldBlock`.
        matches!(self, Self::Unreachable { source, .. } if [TimedOut, WouldBlock].contains(&source.kind()))
    }

    /// Whether every later attempt fails as well, unless a person changes settings: the cluster
    /// keys or the versions differ.
    #[must_use]
    pub fn is_lasting(&self) -> bool {
        match self {
            Self::Refused { refusal, .. } => {
                matches!(refusal.code, RefusalCode::Other | RefusalCode::WrongKey)
            }
            Self::Protocol { .. } => true,
            _ => false,
        }
    }

    /// Whether the target has fenced this host up to the epoch that it presented.
    #[must_use]
    pub fn is_fence(&self) -> bool {
        matches!(self, Self::Refused { refusal, .. } if refusal.code == RefusalCode::Fenced)
    }
}

/// Whether an error of the system reports a lack of resources, or a timeout.
pub(crate) fn is_lack_of_room(error: &std::io::Error) -> bool {
    use rustix::io::Errno;
    const LACKS: [Errno; 8] = [
        Errno::MFILE,
        Errno::NFILE,
        Errno::NOMEM,
        Errno::NOBUFS,
        Errno::AGAIN,
        Errno::TIMEDOUT,
        Errno::ADDRNOTAVAIL,
        Errno::TOOMANYREFS,
    ];
    let kinds = [std::io::ErrorKind::TimedOut, std::io::ErrorKind::WouldBlock];
    Errno::from_io_error(error).is_some_and(|errno| LACKS.contains(&errno)) || kinds.contains(&error.kind())
}

/// A reliable connected queue pair.
///
/// Operations of one endpoint take effect in the order of posting. One thread at a time uses an
/// endpoint; many endpoints work concurrently.
pub trait Endpoint: Send + std::fmt::Debug {
    /// Posts a batch with one doorbell. Either the whole batch is accepted or a prefix of it
    /// ([`PostError::QueueFull`]). Every accepted operation completes.
    fn post(&mut self, batch: &[Work]) -> Result<(), PostError>;

    /// Appends up to `max` completions to `out` without waiting. Returns their number.
    fn poll(&mut self, out: &mut Vec<Completion>, max: usize) -> usize;

    /// Waits until [`Self::poll`] or [`Self::receive`] may find something, for at most `timeout`.
    /// Returns at once where operations complete while they are posted.
    fn wait(&mut self, timeout: Duration) {
        let _ = timeout;
    }

    /// A descriptor that becomes ready when [`Self::poll`] may find a completion or can make
    /// progress, to wait for several endpoints together. `None` where there is nothing to
    /// wait for.
    fn poll_fd(&self) -> Option<PollFd<'_>> {
        None
    }

    /// Registers local memory, so that [`LocalSlice`]s of this endpoint can name it.
    ///
    /// # Errors
    /// [`EndpointError::TooManyLocal`] at [`Limits::local_regions_max`];
    /// [`EndpointError::ReadOnlyLocal`] if the memory is not writable.
    fn register_local(&mut self, memory: Arc<Memory>) -> Result<LocalKey, EndpointError>;

    /// Takes the oldest message from the peer and appends it to `out`. Returns false if there is
    /// none.
    fn receive(&mut self, out: &mut Vec<u8>) -> bool;

    /// The regions that the target had when this endpoint connected. A region whose own key is not
    /// for this endpoint has [`Key`] zero.
    fn regions(&self) -> &[Region];

    /// The limits that the target granted.
    fn limits(&self) -> Limits;

    /// Whether the peer is known to be gone, or the endpoint is broken.
    fn is_broken(&self) -> bool;

    /// Whether the peer is away and the endpoint waits for it (see [`crate::reconnecting`]).
    fn is_away(&self) -> bool {
        false
    }

    /// Treats the peer as away, because it does not answer: all operations in flight end with
    /// [`WorkError::Away`], and the endpoint reconnects. They may take effect until it is connected
    /// again, and not later.
    ///
    /// Only a [`crate::reconnecting::ReconnectingEndpoint`] on which operations do not wait for the
    /// peer supports this call; for other endpoints it does nothing.
    fn treat_as_away(&mut self) {}

    /// A handle that drains operations still in flight after the endpoint is dropped. `None` if
    /// none can be in flight.
    fn drain_handle(&self) -> Option<Box<dyn DrainHandle>> {
        None
    }
}

/// Drains operations of an endpoint that was dropped or is broken: their outcome is not reported
/// any more, and some may not have reached the target yet.
pub trait DrainHandle: Send + std::fmt::Debug {
    /// Makes sure that none of the operations takes effect later. The endpoint must have been
    /// dropped or be broken. May take as long as connecting does.
    ///
    /// # Errors
    /// If the target does not answer. Then operations may still take effect.
    fn drain(&mut self) -> Result<(), EndpointError>;
}
