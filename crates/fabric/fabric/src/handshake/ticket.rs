//! Tickets: permissions by which programs connect without the cluster's key.
//!
//! A member of the cluster issues a ticket for one tenant, host and service, and passes the ticket
//! and its secret to the program. A target derives the secret from its own key, so it needs no list
//! of tickets. The program's endpoints have the identity in the ticket.

use std::fmt;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use aquifer_secure_channel::ClusterKey;
use snow::params::HashChoice;
use snow::resolvers::{CryptoResolver, RingResolver};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::RefusalReason;
use super::common;
use crate::mutation::Mutation;
use crate::target::{Host, Identity, Tenant};

/// Bytes of a ticket in a handshake.
pub const TICKET_BYTES: usize = size_of::<TicketBody>();
/// Label that separates the secrets of tickets from other values derived from the cluster's key.
const LABEL: &[u8] = b"aquifer ticket 1";

/// A permission to connect, for one tenant of one host, to one kind of target.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Ticket {
    /// The tenant on whose behalf endpoints act.
    pub tenant: Tenant,
    /// The host of the program.
    pub host: Host,
    /// The epoch of the host's lease. A fence of the host ends the ticket.
    pub epoch: u64,
    /// The expiry of the ticket, in seconds since 1970. It ends no session that has begun.
    pub expiry_s: u64,
    /// The kind of targets that accept the ticket.
    pub service: u8,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct TicketBody {
    service: u8,
    reserved: u8,
    host: U16,
    tenant: U32,
    epoch: U64,
    expiry_s: U64,
}

impl Ticket {
    /// Encodes the ticket.
    #[must_use]
    pub fn encode(&self) -> [u8; TICKET_BYTES] {
        let body = TicketBody {
            service: self.service,
            reserved: 0,
            host: self.host.0.into(),
            tenant: self.tenant.0.into(),
            epoch: self.epoch.into(),
            expiry_s: self.expiry_s.into(),
        };
        let mut bytes = [0; TICKET_BYTES];
        bytes.copy_from_slice(body.as_bytes());
        bytes
    }

    /// Parses a ticket; `None` if the host number is out of bounds or a reserved byte is not 0.
    #[must_use]
    pub fn parse(bytes: &[u8; TICKET_BYTES]) -> Option<Self> {
        let body = TicketBody::ref_from_bytes(bytes).ok()?;
        let host = common::parse_host(body.host.get()).ok().filter(|_| body.reserved == 0)?;
        Some(Self {
            tenant: Tenant(body.tenant.get()),
            host,
            epoch: body.epoch.get(),
            expiry_s: body.expiry_s.get(),
            service: body.service,
        })
    }

    /// The secret that proves the ticket: HMAC-SHA-256, by the cluster's key, of a label and the
    /// ticket's bytes.
    ///
    /// # Panics
    /// Never: the library has SHA-256.
    #[must_use]
    pub fn secret(&self, key: &ClusterKey) -> TicketSecret {
        let mut secret = [0; 32];
        let hash = RingResolver.resolve_hash(&HashChoice::SHA256);
        hash.expect("the library has SHA-256").hmac(&key.0, &[LABEL, &self.encode()].concat(), &mut secret);
        TicketSecret(secret)
    }

    /// The identity of the endpoints that connect with the ticket.
    #[must_use]
    pub fn identity(&self) -> Identity {
        Identity { host: self.host, epoch: self.epoch, tenant: self.tenant }
    }
}

/// The secret of a ticket.
#[derive(Clone, PartialEq, Eq)]
pub struct TicketSecret(pub [u8; 32]);

impl fmt::Debug for TicketSecret {
    /// Omits the secret, so that it stays out of logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TicketSecret(..)")
    }
}

/// The credential by which an initiator proves its right to connect.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Credential {
    /// The cluster's key: a member of the cluster, which may present any identity.
    Member(ClusterKey),
    /// A ticket and its secret.
    Ticket(Ticket, TicketSecret),
}

impl Credential {
    pub(super) fn psk(&self) -> &[u8; 32] {
        match self {
            Self::Member(key) => &key.0,
            Self::Ticket(_, secret) => &secret.0,
        }
    }

    pub(super) fn ticket(&self) -> Option<Ticket> {
        match self {
            Self::Member(_) => None,
            Self::Ticket(ticket, _) => Some(*ticket),
        }
    }

    /// The bytes that present the credential in the handshake.
    pub(super) fn presented(&self) -> Vec<u8> {
        match self {
            Self::Member(_) => vec![KIND_MEMBER],
            Self::Ticket(ticket, _) => [&[KIND_TICKET][..], &ticket.encode()].concat(),
        }
    }
}

/// The only byte of a member's credential.
pub(super) const KIND_MEMBER: u8 = 0;
/// The first byte of a ticket's credential. The ticket follows.
pub(super) const KIND_TICKET: u8 = 1;

/// The initiators that a target admits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Admission {
    /// Members of the cluster.
    #[default]
    Members,
    /// Holders of a ticket for this service.
    Tickets(u8),
    /// Members, and holders of a ticket for this service.
    MembersAndTickets(u8),
}

impl Admission {
    pub(super) fn has_members(self) -> bool {
        matches!(self, Self::Members | Self::MembersAndTickets(_))
    }

    pub(super) fn has_service(self, service: u8) -> bool {
        match self {
            Self::Members => false,
            Self::Tickets(admitted) | Self::MembersAndTickets(admitted) => {
                service == admitted || Mutation::AcceptAnyService.is_active()
            }
        }
    }
}

/// Checks that a proven ticket has not expired, and that an initiator presents the ticket's
/// identity.
///
/// # Errors
/// [`RefusalReason::TicketExpired`] or [`RefusalReason::OtherIdentity`].
pub fn check_ticket(ticket: &Ticket, identity: Identity, clock: &UnixClock) -> Result<(), RefusalReason> {
    if identity != ticket.identity() {
        return Err(RefusalReason::OtherIdentity);
    }
    match clock.now_s().checked_sub(ticket.expiry_s) {
        Some(since_s) => Err(RefusalReason::TicketExpired(since_s)),
        None => Ok(()),
    }
}

/// A clock that returns the seconds since 1970.
#[derive(Clone)]
pub struct UnixClock(Arc<dyn Fn() -> u64 + Send + Sync>);

impl UnixClock {
    /// Creates a clock that calls a function.
    pub fn new(now_s: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        Self(Arc::new(now_s))
    }

    /// The time, in seconds since 1970.
    #[must_use]
    pub fn now_s(&self) -> u64 {
        (self.0)()
    }
}

impl Default for UnixClock {
    /// The system's clock.
    fn default() -> Self {
        Self::new(|| SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()))
    }
}

impl fmt::Debug for UnixClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UnixClock(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICKET: Ticket =
        Ticket { tenant: Tenant(70), host: Host(7), epoch: 1 << 40, expiry_s: 1_800_000_000, service: 3 };

    #[test]
    fn tickets_parse_as_encoded() {
        assert_eq!(Ticket::parse(&TICKET.encode()), Some(TICKET));
        for (at, value) in [(1, 1), (3, 0x10)] {
            let mut bytes = TICKET.encode();
            bytes[at] = value;
            assert_eq!(Ticket::parse(&bytes), None);
        }
        let without_host = Ticket { host: Host(0), ..TICKET };
        assert_eq!(Ticket::parse(&without_host.encode()), None);
    }

    #[test]
    fn each_field_and_the_key_change_the_secret() {
        let key = ClusterKey([5; 32]);
        let others = [
            Ticket { tenant: Tenant(71), ..TICKET },
            Ticket { host: Host(8), ..TICKET },
            Ticket { epoch: TICKET.epoch + 1, ..TICKET },
            Ticket { expiry_s: TICKET.expiry_s + 1, ..TICKET },
            Ticket { service: 4, ..TICKET },
        ];
        let secret = TICKET.secret(&key);
        assert!(others.iter().all(|other| other.secret(&key) != secret));
        assert_ne!(TICKET.secret(&ClusterKey([6; 32])), secret);
        assert_ne!(secret.0, key.0);
        assert_eq!(format!("{secret:?}"), "TicketSecret(..)");
    }

    /// Test case 2 of RFC 4231.
    #[test]
    fn the_hash_is_hmac_sha_256() {
        let mut out = [0; 32];
        let mut hash = RingResolver.resolve_hash(&HashChoice::SHA256).unwrap();
        hash.hmac(b"Jefe", b"what do ya want for nothing?", &mut out);
        assert_eq!(out[..8], [0x5b, 0xdc, 0xc1, 0x46, 0xbf, 0x60, 0x75, 0x4e]);
        assert_eq!(out[28..], [0x64, 0xec, 0x38, 0x43]);
    }
}
