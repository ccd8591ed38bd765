//! What the initiator of work sees: verbs, batches, completions, and the [`Endpoint`].

use std::sync::Arc;
use std::time::Duration;

use rustix::event::PollFd;

use crate::Memory;
pub use crate::limits::Limits;
use crate::target::Region;

/// Opens a range of the peer's memory: the key of a region or of a window (an rkey).
/// Zero is never a valid key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct Key(pub u32);

/// Names a piece of local memory registered with one endpoint (an lkey).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct LocalKey(pub u32);

/// A range of local registered memory, in bytes from the start of that memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LocalSlice {
    /// Which registered memory.
    pub key: LocalKey,
    /// First byte, from the start of that memory.
    pub offset: u64,
    /// Length in bytes; at most [`Limits::transfer_bytes_max`].
    pub len: u32,
}

/// An address in the peer's registered address space (see [`Region::base`]), with the key that opens it.
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
        /// Value it must have.
        expected: u64,
        /// Value it gets.
        desired: u64,
    },
    /// Add to the 8-byte, 8-aligned word at `remote`, wrapping. The completion carries the value before.
    FetchAdd {
        /// The word.
        remote: RemoteAddr,
        /// What is added.
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
    /// The caller's name for it, handed back in the completion.
    pub id: u64,
    /// What to do.
    pub verb: Verb,
    /// Whether success makes a completion. Failure always does.
    pub signalled: bool,
}

/// The end of one operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion {
    /// [`Work::id`].
    pub id: u64,
    /// For atomics the value found before; for the rest the number of bytes; or the cause of failure.
    pub outcome: Result<u64, WorkError>,
}

/// Why an operation failed. After any of these the endpoint is broken, as an RC queue pair would be,
/// except where said otherwise: later work completes with [`WorkError::Flushed`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum WorkError {
    /// The key is unknown, stale, another's, without this right, or does not cover the range.
    /// The endpoint stays usable: soft fabrics allow it, and callers on verbs reconnect.
    #[error("the peer refused the access: the key does not open this range for this")]
    RemoteAccess,
    /// The local slice is outside registered memory. Nothing was done; the endpoint stays usable.
    #[error("the local range is not registered memory")]
    LocalAccess,
    /// An atomic on an address that is not 8-aligned. Nothing was done; the endpoint stays usable.
    #[error("an atomic needs an 8-byte aligned address")]
    Misaligned,
    /// Longer than the limits allow. Nothing was done; the endpoint stays usable.
    #[error("the operation is longer than the limit")]
    TooLong,
    /// The receiver has no room for the message. Nothing was done; the endpoint stays usable.
    #[error("the peer's receive queue is full")]
    ReceiverNotReady,
    /// This host was fenced by the target: its lease is gone.
    #[error("the target has fenced this host")]
    Fenced,
    /// The peer is dead or unreachable. Whether the operation took effect is unknown.
    #[error("the peer is gone")]
    PeerGone,
    /// No answer in time. Whether the operation took effect is unknown.
    #[error("the peer did not answer in time")]
    Timeout,
    /// The peer is away, and may come back with its memory; the endpoint goes on then by itself ([`crate::reconnecting`]). Whether the operation took effect is
    /// unknown, but it takes effect no more.
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
        /// How many of the batch were posted.
        accepted: usize,
    },
}

/// Why an endpoint could not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum EndpointError {
    /// Nobody listens there, or it died while we connected.
    #[error("cannot reach {address}: {source}")]
    Unreachable {
        /// Where we tried to connect.
        address: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// The peer refused the connection, and says why.
    #[error("{address} refused the connection: {reason}")]
    Refused {
        /// Where we tried to connect.
        address: String,
        /// The peer's reason.
        reason: String,
    },
    /// The peer said something that this version cannot understand.
    #[error("{address} does not speak this protocol: {reason}")]
    Protocol {
        /// Where we tried to connect.
        address: String,
        /// What was wrong.
        reason: String,
    },
    /// The device does not take local memory.
    #[error(
        "{bytes} bytes of local memory cannot be registered with the RDMA device: {source} (is the limit of locked memory, ulimit -l, too low?)"
    )]
    Local {
        /// How long the memory is.
        bytes: usize,
        /// What the system said.
        source: std::io::Error,
    },
    /// Too many pieces of local memory.
    #[error("at most {limit} pieces of local memory can be registered with an endpoint")]
    TooManyLocal {
        /// The limit.
        limit: usize,
    },
}

impl EndpointError {
    /// Whether nobody answers there, or who does is about to end: another may be there soon.
    #[must_use]
    pub fn is_target_away(&self) -> bool {
        match self {
            Self::Unreachable { .. } => true,
            Self::Refused { reason, .. } => reason == crate::handshake::GOING_AWAY,
            Self::Protocol { .. } | Self::Local { .. } | Self::TooManyLocal { .. } => false,
        }
    }

    /// Whether who answers has shut this host out, for as long as it has this epoch.
    #[must_use]
    pub fn is_fence(&self) -> bool {
        matches!(self, Self::Refused { reason, .. } if crate::tables::is_fence_refusal(reason))
    }
}

/// A reliable connected queue pair. Operations of one endpoint take effect in the order of posting.
/// One thread uses an endpoint at a time; many endpoints work at once.
pub trait Endpoint: Send + std::fmt::Debug {
    /// Post a batch: one doorbell. Either all of it is accepted or a prefix
    /// ([`PostError::QueueFull`]). What is accepted will complete, come what may.
    fn post(&mut self, batch: &[Work]) -> Result<(), PostError>;

    /// Append up to `max` completions to `out`, without waiting; returns how many.
    fn poll(&mut self, out: &mut Vec<Completion>, max: usize) -> usize;

    /// Wait until [`Self::poll`] or [`Self::receive`] may find something, at most so long. Where everything is there as soon as it was
    /// posted, this returns at once.
    fn wait(&mut self, patience: Duration) {
        let _ = patience;
    }

    /// What to poll for until [`Self::poll`] may find something, or can go on with what was posted: to wait for several endpoints at once. None
    /// where there is nothing to wait for.
    fn poll_fd(&self) -> Option<PollFd<'_>> {
        None
    }

    /// Make local memory usable in [`LocalSlice`]s of this endpoint.
    ///
    /// # Errors
    /// [`EndpointError::TooManyLocal`] at [`Limits::local_regions_max`].
    fn register_local(&mut self, memory: Arc<Memory>) -> Result<LocalKey, EndpointError>;

    /// Take the oldest message from the peer, appending its bytes to `out`; false if there is none.
    fn receive(&mut self, out: &mut Vec<u8>) -> bool;

    /// The regions that the peer opens to everyone who may connect, as of the connection.
    fn regions(&self) -> &[Region];

    /// What this endpoint can bear.
    fn limits(&self) -> Limits;

    /// Whether the peer is known to be dead or the endpoint is broken.
    fn is_broken(&self) -> bool;

    /// Whether the peer is away and waited for ([`crate::reconnecting`]).
    fn is_away(&self) -> bool {
        false
    }

    /// What of it may yet take effect after it is dropped; `None` if nothing can.
    fn drain_handle(&self) -> Option<Box<dyn DrainHandle>> {
        None
    }
}

/// Operations of an endpoint that was given up: nobody hears of them any more, and some may yet be on their way.
pub trait DrainHandle: Send + std::fmt::Debug {
    /// Make sure that none takes effect from now on. The endpoint must be gone, or broken. May take as long as connecting does.
    ///
    /// # Errors
    /// If the peer does not answer: then nothing is known.
    fn drain(&mut self) -> Result<(), EndpointError>;
}
