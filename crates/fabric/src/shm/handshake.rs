//! The messages of the handshake, parsed as hostile.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::REGIONS_LIMIT;
use crate::handshake::Refusal;
use crate::handshake::common::{self, RegionBody, short};
use crate::limits::Limits;
use crate::mutation::Mutation;
use crate::target::{Identity, Region, Tenant};

/// First bytes of every handshake message.
pub const MAGIC: [u8; 8] = *b"AQFSHAKE";
/// The version of the handshake.
pub const VERSION: u16 = 2;
/// Bound of the bytes of a handshake message.
pub const MESSAGE_BYTES_MAX: usize = 4096;

const KIND_HELLO: u16 = 1;
const KIND_WELCOME: u16 = 2;
const KIND_REFUSAL: u16 = 3;

/// Why a handshake message cannot be parsed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HandshakeError {
    /// The message is of another protocol.
    #[error("the message does not begin as a fabric handshake does")]
    Magic,
    /// The message is of another version.
    #[error("it speaks handshake version {0}, this program speaks version {VERSION}")]
    Version(u16),
    /// The kind is not expected here.
    #[error("message kind {0} was not expected here")]
    Kind(u16),
    /// The message is too short or too long.
    #[error("the message has {found} bytes, it should have {expected}")]
    Length {
        /// The length of the message.
        found: usize,
        /// The length that its kind requires.
        expected: usize,
    },
    /// A number is out of bounds.
    #[error("{0} is out of bounds")]
    Field(&'static str),
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Header {
    magic: [u8; 8],
    version: U16,
    kind: U16,
    reserved: U32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct ShmHelloBody {
    host: U16,
    reserved: U16,
    tenant: U32,
    epoch: U64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct ShmWelcomeBody {
    slot: U32,
    regions: U32,
    queue_depth: U32,
    transfer_bytes_max: U32,
    message_bytes_max: U32,
    receive_depth: U32,
    local_regions_max: U32,
    reserved: U32,
    control_len: U64,
    mailbox_len: U64,
}

/// What a target grants to an endpoint. Its descriptors come with it: control memory, mailbox, then
/// one for each region.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ShmWelcome {
    /// The endpoint's slot in control memory.
    pub slot: u32,
    /// The limits of the endpoint.
    pub limits: Limits,
    /// Bytes of control memory.
    pub control_len: u64,
    /// Bytes of the mailbox.
    pub mailbox_len: u64,
    /// The regions. One whose own key is not for this endpoint has [`crate::Key`] zero.
    pub regions: Vec<Region>,
}

/// The target's answer to a hello.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ShmReply {
    /// The connection is accepted.
    Welcome(ShmWelcome),
    /// The connection is refused.
    Refusal(Refusal),
}

/// Encodes a hello.
#[must_use]
pub fn encode_hello(who: Identity) -> Vec<u8> {
    let body = ShmHelloBody {
        host: who.host.0.into(),
        reserved: 0.into(),
        tenant: who.tenant.0.into(),
        epoch: who.epoch.into(),
    };
    [header(KIND_HELLO).as_bytes(), body.as_bytes()].concat()
}

/// Parses a hello.
///
/// # Errors
/// If the bytes are not a hello of this version, or the host number is out of bounds.
pub fn parse_hello(bytes: &[u8]) -> Result<Identity, HandshakeError> {
    let (kind, body) = split_header(bytes)?;
    if kind != KIND_HELLO {
        return Err(HandshakeError::Kind(kind));
    }
    let hello: &ShmHelloBody = exact(bytes.len(), body)?;
    let host = common::parse_host(hello.host.get()).map_err(HandshakeError::Field)?;
    Ok(Identity { host, epoch: hello.epoch.get(), tenant: Tenant(hello.tenant.get()) })
}

/// Encodes an answer. A reason that is too long is truncated.
#[must_use]
pub fn encode_reply(reply: &ShmReply) -> Vec<u8> {
    match reply {
        ShmReply::Welcome(welcome) => encode_welcome(welcome),
        ShmReply::Refusal(refusal) => [header(KIND_REFUSAL).as_bytes(), &refusal.encode()].concat(),
    }
}

fn encode_welcome(welcome: &ShmWelcome) -> Vec<u8> {
    let limits = &welcome.limits;
    let body = ShmWelcomeBody {
        slot: welcome.slot.into(),
        regions: short(welcome.regions.len()),
        queue_depth: short(limits.queue_depth),
        transfer_bytes_max: limits.transfer_bytes_max.into(),
        message_bytes_max: limits.message_bytes_max.into(),
        receive_depth: short(limits.receive_depth),
        local_regions_max: short(limits.local_regions_max),
        reserved: 0.into(),
        control_len: welcome.control_len.into(),
        mailbox_len: welcome.mailbox_len.into(),
    };
    let mut bytes = [header(KIND_WELCOME).as_bytes(), body.as_bytes()].concat();
    common::put_regions(&mut bytes, &welcome.regions);
    bytes
}

/// Parses the target's answer.
///
/// # Errors
/// If the bytes are not an answer of this version, or a number in it is out of bounds.
pub fn parse_reply(bytes: &[u8]) -> Result<ShmReply, HandshakeError> {
    let (kind, body) = split_header(bytes)?;
    match kind {
        KIND_WELCOME => parse_welcome(bytes.len(), body).map(ShmReply::Welcome),
        KIND_REFUSAL => {
            let expected = size_of::<Header>() + 2;
            let refusal = Refusal::parse(body);
            refusal.map(ShmReply::Refusal).ok_or(HandshakeError::Length { found: bytes.len(), expected })
        }
        _ => Err(HandshakeError::Kind(kind)),
    }
}

fn parse_welcome(found: usize, body: &[u8]) -> Result<ShmWelcome, HandshakeError> {
    let length = |expected| HandshakeError::Length { found, expected };
    let fixed = size_of::<Header>() + size_of::<ShmWelcomeBody>();
    let (head, tail) = ShmWelcomeBody::ref_from_prefix(body).map_err(|_| length(fixed))?;
    // A target without regions is valid: it can exchange messages.
    let regions = head.regions.get() as usize;
    if regions > REGIONS_LIMIT {
        return Err(HandshakeError::Field("the number of regions"));
    }
    let expected = fixed + regions * size_of::<RegionBody>();
    let entries = <[RegionBody]>::ref_from_bytes(tail).map_err(|_| length(expected))?;
    if entries.len() != regions && !Mutation::TrustRegionCount.is_active() {
        return Err(length(expected));
    }
    let limits = Limits {
        queue_depth: head.queue_depth.get() as usize,
        transfer_bytes_max: head.transfer_bytes_max.get(),
        message_bytes_max: head.message_bytes_max.get(),
        receive_depth: head.receive_depth.get() as usize,
        local_regions_max: head.local_regions_max.get() as usize,
    };
    if let Some(fault) = limits.fault() {
        return Err(HandshakeError::Field(fault.name));
    }
    Ok(ShmWelcome {
        slot: head.slot.get(),
        limits,
        control_len: head.control_len.get(),
        mailbox_len: head.mailbox_len.get(),
        regions: common::parse_regions(entries).map_err(HandshakeError::Field)?,
    })
}

fn header(kind: u16) -> Header {
    Header { magic: MAGIC, version: VERSION.into(), kind: kind.into(), reserved: 0.into() }
}

fn split_header(bytes: &[u8]) -> Result<(u16, &[u8]), HandshakeError> {
    // Every version begins with magic and version, so these errors are found before a wrong length.
    let length = HandshakeError::Length { found: bytes.len(), expected: size_of::<Header>() };
    if bytes.len() >= 8 && bytes[..8] != MAGIC {
        return Err(HandshakeError::Magic);
    }
    let (header, body) = Header::ref_from_prefix(bytes).map_err(|_| length)?;
    if header.version.get() != VERSION {
        return Err(HandshakeError::Version(header.version.get()));
    }
    Ok((header.kind.get(), body))
}

fn exact<T: FromBytes + Immutable + KnownLayout + Unaligned>(
    found: usize,
    body: &[u8],
) -> Result<&T, HandshakeError> {
    let expected = size_of::<Header>() + size_of::<T>();
    T::ref_from_bytes(body).map_err(|_| HandshakeError::Length { found, expected })
}
