//! Errors of the pool. Each message is a sentence for the user.

use aquifer_fabric::{EndpointError, Host, WorkError};

use crate::client::NodeId;
use crate::layout::{HEADER_BYTES, SECTIONS_MAX, VERSION};
use crate::op::WordAt;
use crate::word::IllegalWord;

/// Why this version cannot use a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FormatError {
    /// The region is too short for a header.
    #[error("the region has only {bytes} bytes, fewer than the {HEADER_BYTES} of a header")]
    Cut {
        /// Bytes of the region.
        bytes: usize,
    },
    /// The region does not begin with the magic number.
    #[error("the region does not begin with the pool's magic number: it is not a pool's memory")]
    Magic,
    /// Another version wrote the header.
    #[error(
        "the region's format is version {version}, and this program reads only version {VERSION}: \
         run the same version everywhere"
    )]
    Version {
        /// The version found.
        version: u32,
    },
    /// The header was damaged.
    #[error("the checksum of the region's header is wrong: the header was damaged")]
    Checksum,
    /// The number of sections is not allowed.
    #[error("{sections} sections of 2 MiB are not supported: a node has 1 to {SECTIONS_MAX}")]
    Sections {
        /// The number requested or found.
        sections: u64,
    },
    /// The node's number is too large.
    #[error("the node number {node} in the region's header is above 65535")]
    Node {
        /// The number found.
        node: u32,
    },
    /// A byte of the header differs from the bytes that this version writes.
    #[error("byte {at} of the region's header is not as version {VERSION} prescribes")]
    Unknown {
        /// Offset of the first such byte.
        at: usize,
    },
    /// The header names another node.
    #[error("the region's header is of node {found}")]
    OtherNode {
        /// The number in the header.
        found: u16,
    },
    /// The header is of a disk node, and the memory of another, or the reverse.
    #[error("the header is of another class of nodes than the memory")]
    OtherClass,
    /// The node has registered no region for this host.
    #[error("the node opens no memory to this host")]
    NoRegion,
    /// The region is shorter than its header describes.
    #[error("the region's header describes {needed} bytes, but only {found} are registered")]
    TooShort {
        /// Bytes that the header describes.
        needed: u64,
        /// Bytes of the region.
        found: u64,
    },
}

/// Why an operation of a client failed.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// The node has no free extent of the size.
    #[error("node {} has no free extent of {bytes} bytes: free some, or add a node", node.0)]
    Full {
        /// The node.
        node: NodeId,
        /// Bytes requested.
        bytes: u64,
    },
    /// The node died, or has fenced this host. An operation in flight may or may not have taken
    /// effect.
    #[error("node {} cannot be used any more: {cause}", node.0)]
    NodeGone {
        /// The node.
        node: NodeId,
        /// The error of the fabric.
        cause: WorkError,
    },
    /// The node is away, and may return with its memory. An operation in flight may or may not have
    /// taken effect, and does not take effect later.
    #[error("node {} is away: its process has ended, and may return with its memory", node.0)]
    Away {
        /// The node.
        node: NodeId,
    },
    /// The client does not have the node: it was not added, or was removed.
    #[error("node {} is not connected: add it first", node.0)]
    NoSuchNode {
        /// The node.
        node: NodeId,
    },
    /// The client has the node already.
    #[error("node {} is connected already", node.0)]
    NodeExists {
        /// The node.
        node: NodeId,
    },
    /// The client has reached its limit of nodes.
    #[error("a client connects to at most {limit} nodes")]
    TooManyNodes {
        /// The limit.
        limit: usize,
    },
    /// The extent is not allocated: it was freed before, or never allocated. Nothing was changed.
    #[error(
        "{bytes} bytes at {addr:#x} of node {} are not an allocated extent: \
         freed twice, or never allocated",
        node.0
    )]
    NotAllocated {
        /// The node.
        node: NodeId,
        /// The extent's address.
        addr: u64,
        /// The extent's size.
        bytes: u64,
    },
    /// The extent is another host's. Nothing was changed.
    #[error("the extent at {addr:#x} of node {} belongs to host {}", node.0, owner.0)]
    NotOurs {
        /// The node.
        node: NodeId,
        /// The extent's address.
        addr: u64,
        /// The host that owns it.
        owner: Host,
    },
    /// The operation lost too many races for the same words. No change is half done, except that a
    /// free may leave a span closed that is not empty in its section's word.
    #[error("node {} is too busy: the operation lost {attempts} races; try again later", node.0)]
    Busy {
        /// The node.
        node: NodeId,
        /// Races lost.
        attempts: u32,
    },
    /// A control word is illegal.
    #[error("the metadata of node {} is damaged: {at} is {word:#018x}: {cause}", node.0)]
    Damaged {
        /// The node.
        node: NodeId,
        /// The place of the word.
        at: WordAt,
        /// The word.
        word: u64,
        /// The reason why the word is illegal.
        cause: Damage,
    },
    /// The node's memory has a format that this version cannot use.
    #[error("the memory of node {} cannot be used: {cause}", node.0)]
    Format {
        /// The node.
        node: NodeId,
        /// The reason.
        cause: FormatError,
    },
    /// The endpoint could not be set up, or could not drain operations.
    #[error("the connection to node {} failed: {cause}", node.0)]
    Endpoint {
        /// The node.
        node: NodeId,
        /// The error of the fabric.
        cause: EndpointError,
    },
    /// Local memory for replies could not be allocated.
    #[error("cannot allocate memory for the replies of node {}: {cause}", node.0)]
    LocalMemory {
        /// The node.
        node: NodeId,
        /// The error of the system.
        cause: std::io::Error,
    },
}

/// Why a control word is illegal.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
pub enum Damage {
    /// The word is not one that this version writes.
    #[error(transparent)]
    Illegal(#[from] IllegalWord),
    /// Another client changed a word that only the client that opens or closes the span may change.
    #[error("it was changed by another client than the one that opens or closes the span")]
    UnexpectedWriter,
}

impl PoolError {
    /// Whether the error concerns a single word, so that other parts of the node can be used.
    pub(crate) const fn is_of_one_word(&self) -> bool {
        matches!(self, Self::Damaged { .. } | Self::Busy { .. })
    }
}
