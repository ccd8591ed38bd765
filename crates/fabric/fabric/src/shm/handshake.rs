//! The messages of the handshake, parsed as hostile.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::REGIONS_LIMIT;
use crate::handshake::Refusal;
use crate::handshake::common::{self, RegionBody, short};
use crate::limits::{ANNOUNCED_MAX, Limits};
use crate::mutation::Mutation;
use crate::target::{Identity, Region, Tenant};
use crate::work::Key;

/// First bytes of every handshake message.
pub const MAGIC: [u8; 8] = *b"AQFSHAKE";
/// The version of the handshake.
pub const VERSION: u16 = 3;
/// Bound of the bytes of a handshake message.
pub const MESSAGE_BYTES_MAX: usize = 4096;

const KIND_HELLO: u16 = 1;
const KIND_WELCOME: u16 = 2;
const KIND_REFUSAL: u16 = 3;
const KIND_REQUEST: u16 = 4;
const KIND_REGION: u16 = 5;
const KIND_NO_REGION: u16 = 6;

const FLAG_MOVABLE: u32 = 1;
const FLAG_WRITABLE: u32 = 2;

/// Why a handshake message cannot be parsed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HandshakeError {
    /// The message is of another protocol.
    #[error("the message does not begin as a fabric handshake does")]
    Magic,
    /// The message is of another version.
    #[error("the peer speaks handshake version {0}, this program speaks version {VERSION}")]
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

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RegionRequestBody {
    key: U32,
    reserved: U32,
    addr: U64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct ShmRegionBody {
    slot: U32,
    flags: U32,
    serial: U64,
    base: U64,
    len: U64,
    memory_len: U64,
    words_len: U64,
    words_at: U64,
    units: U64,
    unit_bytes: U64,
}

/// A request for the memory of the region in which a key opens an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RegionRequest {
    /// The key.
    pub key: Key,
    /// The address.
    pub addr: u64,
}

/// The memory of a region. The message carries the descriptor of the memory, then that of the words
/// of a translation table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ShmRegion {
    /// The slot of the region.
    pub slot: u32,
    /// The region's serial number, as in control memory.
    pub serial: u64,
    /// The region's first address.
    pub base: u64,
    /// The number of the region's addresses.
    pub len: u64,
    /// Bytes of the memory.
    pub memory_len: u64,
    /// Whether the memory can be mapped for writing.
    pub is_writable: bool,
    /// The translation table of a movable region.
    pub units: Option<ShmUnits>,
}

/// A translation table, whose words are in a memory of their own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ShmUnits {
    /// Bytes of the memory with the words.
    pub words_len: u64,
    /// Offset of the first word.
    pub words_at: u64,
    /// Number of units.
    pub units: u64,
    /// Bytes of a unit.
    pub unit_bytes: u64,
}

/// The target's grant to an endpoint. The message carries the descriptors of control memory and
/// mailbox.
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

/// Encodes a request for a region.
#[must_use]
pub fn encode_request(request: RegionRequest) -> Vec<u8> {
    let RegionRequest { key, addr } = request;
    let body = RegionRequestBody { key: key.0.into(), reserved: 0.into(), addr: addr.into() };
    [header(KIND_REQUEST).as_bytes(), body.as_bytes()].concat()
}

/// Parses a request for a region.
///
/// # Errors
/// If the bytes are not a request of this version.
pub fn parse_request(bytes: &[u8]) -> Result<RegionRequest, HandshakeError> {
    let (kind, body) = split_header(bytes)?;
    if kind != KIND_REQUEST {
        return Err(HandshakeError::Kind(kind));
    }
    let request: &RegionRequestBody = exact(bytes.len(), body)?;
    Ok(RegionRequest { key: Key(request.key.get()), addr: request.addr.get() })
}

/// Encodes the answer to a request for a region; `None` if the key opens nothing there.
#[must_use]
pub fn encode_region(region: Option<&ShmRegion>) -> Vec<u8> {
    let Some(region) = region else { return header(KIND_NO_REGION).as_bytes().to_vec() };
    let none = ShmUnits { words_len: 0, words_at: 0, units: 0, unit_bytes: 0 };
    let units = region.units.unwrap_or(none);
    let mut flags = 0;
    for (flag, is_set) in [(FLAG_MOVABLE, region.units.is_some()), (FLAG_WRITABLE, region.is_writable)] {
        flags |= flag * u32::from(is_set);
    }
    let body = ShmRegionBody {
        slot: region.slot.into(),
        flags: flags.into(),
        serial: region.serial.into(),
        base: region.base.into(),
        len: region.len.into(),
        memory_len: region.memory_len.into(),
        words_len: units.words_len.into(),
        words_at: units.words_at.into(),
        units: units.units.into(),
        unit_bytes: units.unit_bytes.into(),
    };
    [header(KIND_REGION).as_bytes(), body.as_bytes()].concat()
}

/// Parses the answer to a request for a region.
///
/// # Errors
/// If the bytes are not such an answer of this version, or a number in it is out of bounds.
pub fn parse_region(bytes: &[u8]) -> Result<Option<ShmRegion>, HandshakeError> {
    let (kind, body) = split_header(bytes)?;
    match kind {
        KIND_NO_REGION if body.is_empty() => return Ok(None),
        KIND_NO_REGION => {
            return Err(HandshakeError::Length { found: bytes.len(), expected: size_of::<Header>() });
        }
        KIND_REGION => {}
        _ => return Err(HandshakeError::Kind(kind)),
    }
    let region: &ShmRegionBody = exact(bytes.len(), body)?;
    let flags = region.flags.get();
    let units = ShmUnits {
        words_len: region.words_len.get(),
        words_at: region.words_at.get(),
        units: region.units.get(),
        unit_bytes: region.unit_bytes.get(),
    };
    let units = (flags & FLAG_MOVABLE != 0).then_some(units);
    let parsed = ShmRegion {
        slot: region.slot.get(),
        serial: region.serial.get(),
        base: region.base.get(),
        len: region.len.get(),
        memory_len: region.memory_len.get(),
        is_writable: flags & FLAG_WRITABLE != 0,
        units,
    };
    let is_range = parsed.len > 0 && parsed.base.checked_add(parsed.len).is_some();
    let is_long_enough = parsed.memory_len > 0 && (units.is_some() || parsed.memory_len == parsed.len);
    let is_region = (parsed.slot as usize) < REGIONS_LIMIT && parsed.serial != 0;
    match (is_region, is_range, is_long_enough) {
        (true, true, true) => Ok(Some(parsed)),
        (false, ..) => Err(HandshakeError::Field("the region's slot")),
        (_, false, _) => Err(HandshakeError::Field("the region's address range")),
        (.., false) => Err(HandshakeError::Field("the length of the region's memory")),
    }
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
    if regions > ANNOUNCED_MAX {
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
    // Every version begins with magic and version, so these are checked before the length.
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
