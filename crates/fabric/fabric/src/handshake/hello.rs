//! The messages that follow the Noise handshake: the identity of the initiator, and the target's
//! grant. They are parsed as hostile, because a host of the cluster can be compromised.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::common::{self, RegionBody, short};
use super::{Refusal, RefusalReason};
use crate::limits::{ANNOUNCED_MAX, Limits};
use crate::target::{Identity, Region, Tenant};

const TRANSFER_BYTES_LIMIT: u32 = 1 << 30;

const KIND_HELLO: u16 = 1;
const KIND_WELCOME: u16 = 2;
const KIND_REFUSAL: u16 = 3;

/// The identifier of a session. A host that presents it can resume the session.
pub type SessionId = [u8; 16];

/// Creates a random identifier of a session.
///
/// # Errors
/// If the system returns no random bytes.
pub fn new_session_id() -> Result<SessionId, RefusalReason> {
    let mut id: SessionId = [0; 16];
    rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())
        .map_err(|error| RefusalReason::NoRandomBytes(error.into()))?;
    Ok(id)
}

/// Why a message cannot be parsed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HelloError {
    /// The kind is not expected here.
    #[error("message kind {0} was not expected here")]
    Kind(u16),
    /// The message is too short or too long.
    #[error("a message of kind {kind} cannot have {found} bytes")]
    Length {
        /// The kind of the message.
        kind: u16,
        /// The length of the message.
        found: usize,
    },
    /// A number is out of bounds.
    #[error("{0} is out of bounds")]
    Field(&'static str),
}

/// The position from which an initiator resumes a session after its connection broke.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Resume {
    /// The session.
    pub session: SessionId,
    /// Number of answers that have arrived.
    pub answered: u64,
    /// Number of messages that have arrived.
    pub received: u64,
    /// Number of those messages that the initiator's user has received.
    pub taken: u64,
}

/// The first message of an initiator.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hello {
    /// The identity of the initiator.
    pub who: Identity,
    /// Whether the initiator requires encryption of all traffic.
    pub encrypt: bool,
    /// The session to resume, if any.
    pub resume: Option<Resume>,
}

/// The target's grant to an endpoint.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Welcome {
    /// The identifier of the session.
    pub session: SessionId,
    /// Number of requests of the session that are done.
    pub done: u64,
    /// Whether all traffic from here on is encrypted.
    pub encrypt: bool,
    /// The limits of the endpoint.
    pub limits: Limits,
    /// The regions. One whose own key is not for this endpoint has [`crate::Key`] zero.
    pub regions: Vec<Region>,
}

/// The target's answer to a hello.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Reply {
    /// The connection is accepted.
    Welcome(Welcome),
    /// The connection is refused.
    Refusal(Refusal),
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct HelloBody {
    kind: U16,
    host: U16,
    tenant: U32,
    epoch: U64,
    encrypt: u8,
    resumes: u8,
    reserved: [u8; 6],
    session: SessionId,
    answered: U64,
    received: U64,
    taken: U64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WelcomeBody {
    kind: U16,
    encrypt: u8,
    reserved: u8,
    regions: U32,
    session: SessionId,
    done: U64,
    queue_depth: U32,
    transfer_bytes_max: U32,
    message_bytes_max: U32,
    receive_depth: U32,
    local_regions_max: U32,
    reserved2: U32,
}

/// Encodes a hello.
#[must_use]
pub fn encode_hello(hello: &Hello) -> Vec<u8> {
    let resume = hello.resume.unwrap_or(Resume { session: [0; 16], answered: 0, received: 0, taken: 0 });
    let body = HelloBody {
        kind: KIND_HELLO.into(),
        host: hello.who.host.0.into(),
        tenant: hello.who.tenant.0.into(),
        epoch: hello.who.epoch.into(),
        encrypt: hello.encrypt.into(),
        resumes: hello.resume.is_some().into(),
        reserved: [0; 6],
        session: resume.session,
        answered: resume.answered.into(),
        received: resume.received.into(),
        taken: resume.taken.into(),
    };
    body.as_bytes().to_vec()
}

/// Parses a hello.
///
/// # Errors
/// If the bytes are not a hello, or a number in it is out of bounds.
pub fn parse_hello(bytes: &[u8]) -> Result<Hello, HelloError> {
    expect(bytes, KIND_HELLO)?;
    let body = HelloBody::ref_from_bytes(bytes)
        .map_err(|_| HelloError::Length { kind: KIND_HELLO, found: bytes.len() })?;
    let host = common::parse_host(body.host.get()).map_err(HelloError::Field)?;
    let resume = Resume {
        session: body.session,
        answered: body.answered.get(),
        received: body.received.get(),
        taken: body.taken.get(),
    };
    let resumes = flag(body.resumes, "the resume flag")?;
    Ok(Hello {
        who: Identity { host, epoch: body.epoch.get(), tenant: Tenant(body.tenant.get()) },
        encrypt: flag(body.encrypt, "the encryption flag")?,
        resume: resumes.then_some(resume),
    })
}

/// Encodes an answer. A reason that is too long is truncated.
#[must_use]
pub fn encode_reply(reply: &Reply) -> Vec<u8> {
    match reply {
        Reply::Welcome(welcome) => encode_welcome(welcome),
        Reply::Refusal(refusal) => [KIND_REFUSAL.to_le_bytes().as_slice(), &refusal.encode()].concat(),
    }
}

fn encode_welcome(welcome: &Welcome) -> Vec<u8> {
    let limits = &welcome.limits;
    let body = WelcomeBody {
        kind: KIND_WELCOME.into(),
        encrypt: welcome.encrypt.into(),
        reserved: 0,
        regions: short(welcome.regions.len()),
        session: welcome.session,
        done: welcome.done.into(),
        queue_depth: short(limits.queue_depth),
        transfer_bytes_max: limits.transfer_bytes_max.into(),
        message_bytes_max: limits.message_bytes_max.into(),
        receive_depth: short(limits.receive_depth),
        local_regions_max: short(limits.local_regions_max),
        reserved2: 0.into(),
    };
    let mut bytes = body.as_bytes().to_vec();
    common::put_regions(&mut bytes, &welcome.regions);
    bytes
}

/// Parses the target's answer.
///
/// # Errors
/// If the bytes are not an answer, or a number in it is out of bounds.
pub fn parse_reply(bytes: &[u8]) -> Result<Reply, HelloError> {
    match kind_of(bytes)? {
        KIND_WELCOME => parse_welcome(bytes).map(Reply::Welcome),
        KIND_REFUSAL => Refusal::parse(&bytes[2..])
            .map(Reply::Refusal)
            .ok_or(HelloError::Length { kind: KIND_REFUSAL, found: bytes.len() }),
        kind => Err(HelloError::Kind(kind)),
    }
}

fn parse_welcome(bytes: &[u8]) -> Result<Welcome, HelloError> {
    let length = HelloError::Length { kind: KIND_WELCOME, found: bytes.len() };
    let (head, tail) = WelcomeBody::ref_from_prefix(bytes).map_err(|_| length)?;
    let entries = <[RegionBody]>::ref_from_bytes(tail).map_err(|_| length)?;
    if entries.len() != head.regions.get() as usize || entries.len() > ANNOUNCED_MAX {
        return Err(length);
    }
    let limits = Limits {
        queue_depth: head.queue_depth.get() as usize,
        transfer_bytes_max: head.transfer_bytes_max.get(),
        message_bytes_max: head.message_bytes_max.get(),
        receive_depth: head.receive_depth.get() as usize,
        local_regions_max: head.local_regions_max.get() as usize,
    };
    if let Some(name) = limits_fault(&limits) {
        return Err(HelloError::Field(name));
    }
    Ok(Welcome {
        session: head.session,
        done: head.done.get(),
        encrypt: flag(head.encrypt, "the encryption flag")?,
        limits,
        regions: common::parse_regions(entries).map_err(HelloError::Field)?,
    })
}

/// The first limit that is out of bounds.
pub fn limits_fault(limits: &Limits) -> Option<&'static str> {
    let is_too_long = limits.transfer_bytes_max > TRANSFER_BYTES_LIMIT;
    limits.fault().map(|fault| fault.name).or(is_too_long.then_some("the size of transfers"))
}

fn kind_of(bytes: &[u8]) -> Result<u16, HelloError> {
    let kind = bytes.get(..2).ok_or(HelloError::Length { kind: 0, found: bytes.len() })?;
    Ok(u16::from_le_bytes([kind[0], kind[1]]))
}

fn expect(bytes: &[u8], kind: u16) -> Result<(), HelloError> {
    let found = kind_of(bytes)?;
    if found == kind { Ok(()) } else { Err(HelloError::Kind(found)) }
}

fn flag(byte: u8, name: &'static str) -> Result<bool, HelloError> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(HelloError::Field(name)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::target::Host;
    use crate::work::Key;

    fn hello() -> Hello {
        let who = Identity { host: Host(7), epoch: 1 << 40, tenant: Tenant(70) };
        Hello {
            who,
            encrypt: true,
            resume: Some(Resume { session: [9; 16], answered: 12, received: 3, taken: 2 }),
        }
    }

    fn welcome() -> Welcome {
        let limits = crate::tcp::TcpOptions::default().limits;
        let regions = vec![
            Region { base: 2 << 20, len: 100, key: Key(5) },
            Region { base: 6 << 20, len: 1, key: Key(0) },
        ];
        Welcome { session: [3; 16], done: 77, encrypt: false, limits, regions }
    }

    #[test]
    fn messages_parse_as_encoded() {
        assert_eq!(parse_hello(&encode_hello(&hello())), Ok(hello()));
        let plain = Hello { resume: None, encrypt: false, ..hello() };
        assert_eq!(parse_hello(&encode_hello(&plain)), Ok(plain));
        for reply in [Reply::Welcome(welcome()), Reply::Refusal(Refusal::other("no, because"))] {
            assert_eq!(parse_reply(&encode_reply(&reply)), Ok(reply));
        }
        let long = encode_reply(&Reply::Refusal(Refusal::other("ä".repeat(500))));
        assert_eq!(long.len(), 4 + common::REASON_BYTES_MAX);
    }

    #[test]
    fn impossible_numbers_are_refused() {
        let bad = Hello { who: Identity { host: Host(4096), ..hello().who }, ..hello() };
        assert_eq!(parse_hello(&encode_hello(&bad)), Err(HelloError::Field("the host number")));
        let mut overlapping = welcome();
        overlapping.regions[1].base = (2 << 20) + 99;
        let bytes = encode_reply(&Reply::Welcome(overlapping));
        assert_eq!(parse_reply(&bytes), Err(HelloError::Field("a region's address range")));
        let mut deep = welcome();
        deep.limits.queue_depth = 1 << 20;
        let bytes = encode_reply(&Reply::Welcome(deep));
        assert_eq!(parse_reply(&bytes), Err(HelloError::Field("the queue depth")));
        assert!(matches!(parse_reply(&encode_hello(&hello())), Err(HelloError::Kind(1))));
    }

    proptest! {
        #[test]
        fn any_bytes_parse_without_a_panic(
            mut bytes in prop::collection::vec(any::<u8>(), 0..200),
            flips in 0usize..3,
            at in any::<prop::sample::Index>(),
        ) {
            let _ = parse_hello(&bytes);
            let _ = parse_reply(&bytes);
            for mut valid in [encode_hello(&hello()), encode_reply(&Reply::Welcome(welcome()))] {
                for _ in 0..flips {
                    let at = at.index(valid.len());
                    valid[at] = bytes.pop().unwrap_or(0xff);
                }
                let _ = parse_hello(&valid);
                let _ = parse_reply(&valid);
                valid.truncate(at.index(valid.len()));
                prop_assert!(parse_hello(&valid).is_err());
            }
        }
    }
}
