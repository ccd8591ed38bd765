//! What can go wrong with the pool, each a sentence for the person who reads it.

use aquifer_fabric::{EndpointError, Host, WorkError};

use crate::client::NodeId;
use crate::layout::{HEADER_BYTES, SECTIONS_MAX, VERSION};
use crate::op::WordAt;
use crate::word::IllegalWord;

/// Why a region is not one that this version can use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FormatError {
    /// Too short for a header.
    #[error("it is only {bytes} bytes long, and the header alone takes {HEADER_BYTES}")]
    Cut {
        /// Its length.
        bytes: usize,
    },
    /// It does not begin with the magic number.
    #[error("it does not begin with the pool's magic number: it is not a pool's memory")]
    Magic,
    /// Another version wrote it.
    #[error(
        "its format is version {version} and this program reads version {VERSION} only: run the same version everywhere"
    )]
    Version {
        /// The version found.
        version: u32,
    },
    /// The header was damaged.
    #[error("its header's checksum is wrong: the header was damaged")]
    Checksum,
    /// No section, or too many.
    #[error("it would have {sections} sections of 2 MiB, and there must be 1 to {SECTIONS_MAX}")]
    Sections {
        /// The number asked for or found.
        sections: u64,
    },
    /// The node's number does not fit.
    #[error("its node number {node} is above 65535")]
    Node {
        /// The number found.
        node: u32,
    },
    /// Something that this version does not have.
    #[error("byte {at} of its header is not what version {VERSION} prescribes")]
    Unknown {
        /// Offset of the first such byte.
        at: usize,
    },
    /// The node says that it is another.
    #[error("its header names it node {found}")]
    OtherNode {
        /// The number in the header.
        found: u16,
    },
    /// The node opened no region to us.
    #[error("the node opens no memory to this host")]
    NoRegion,
    /// The registered memory is shorter than the header says.
    #[error("its header speaks of {needed} bytes, but only {found} are registered")]
    TooShort {
        /// Bytes that the header implies.
        needed: u64,
        /// Bytes of the region.
        found: u64,
    },
}

/// Why the pool could not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// No free extent of that size.
    #[error("node {} has no free extent of {bytes} bytes: free some, or add a node", node.0)]
    Full {
        /// The node.
        node: NodeId,
        /// Bytes asked for.
        bytes: u64,
    },
    /// The node died, or shut us out. What was under way may or may not have happened.
    #[error("node {} cannot be used any more: {cause}", node.0)]
    NodeGone {
        /// The node.
        node: NodeId,
        /// How the fabric put it.
        cause: WorkError,
    },
    /// The node is away, and may come back with its memory. What was under way may or may not have happened, and happens no more.
    #[error("node {} is away", node.0)]
    Away {
        /// The node.
        node: NodeId,
    },
    /// The node was never added, or was removed.
    #[error("node {} is not connected: add it first", node.0)]
    NoSuchNode {
        /// The node.
        node: NodeId,
    },
    /// The node is there already.
    #[error("node {} is connected already", node.0)]
    NodeExists {
        /// The node.
        node: NodeId,
    },
    /// At the limit of nodes.
    #[error("a client connects to at most {limit} nodes")]
    TooManyNodes {
        /// The limit.
        limit: usize,
    },
    /// The extent is not allocated: it was freed before, or never was one. Nothing was changed.
    #[error("{bytes} bytes at {addr:#x} of node {} are not an allocated extent: freed twice, or never allocated", node.0)]
    NotAllocated {
        /// The node.
        node: NodeId,
        /// The extent's address.
        addr: u64,
        /// The extent's size.
        bytes: u64,
    },
    /// The extent belongs to another host. Nothing was changed.
    #[error("the extent at {addr:#x} of node {} belongs to host {}", node.0, owner.0)]
    NotOurs {
        /// The node.
        node: NodeId,
        /// The extent's address.
        addr: u64,
        /// Whose it is.
        owner: Host,
    },
    /// Others changed the same words so often that we gave up. Nothing of ours is half done but, after a free, a
    /// span that stays closed.
    #[error("node {} is too busy: gave up after {attempts} lost races", node.0)]
    Busy {
        /// The node.
        node: NodeId,
        /// How often another was faster.
        attempts: u32,
    },
    /// A control word is impossible.
    #[error("the metadata of node {} is damaged: {at} is {word:#018x}: {cause}", node.0)]
    Damaged {
        /// The node.
        node: NodeId,
        /// Which word.
        at: WordAt,
        /// What it holds.
        word: u64,
        /// What is wrong with it.
        cause: Damage,
    },
    /// The node's memory has a format that we cannot use.
    #[error("the memory of node {} cannot be used: {cause}", node.0)]
    Format {
        /// The node.
        node: NodeId,
        /// What is wrong.
        cause: FormatError,
    },
    /// The endpoint could not be set up.
    #[error("node {}: {cause}", node.0)]
    Endpoint {
        /// The node.
        node: NodeId,
        /// What the fabric said.
        cause: EndpointError,
    },
    /// Local memory for replies could not be had.
    #[error("no memory for the replies of node {}: {cause}", node.0)]
    LocalMemory {
        /// The node.
        node: NodeId,
        /// What the system said.
        cause: std::io::Error,
    },
}

/// What is wrong with a control word.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
pub enum Damage {
    /// It cannot be one.
    #[error(transparent)]
    Illegal(#[from] IllegalWord),
    /// A span that only this host may change was changed by another.
    #[error("a span that only its opener or closer may change was changed by another")]
    Intruder,
}

impl PoolError {
    /// Whether it says something of one word only, and of the node nothing.
    pub(crate) const fn is_of_one_word(&self) -> bool {
        matches!(self, Self::Damaged { .. } | Self::Busy { .. })
    }
}
