//! The reasons for which targets refuse endpoints.

use std::fmt;
use std::io;

use super::common;
use crate::target::{Host, Tenant};

/// Codes of refusals, by the action that an initiator can take. The numbers are part of the
/// protocol.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u16)]
pub enum RefusalCode {
    /// The request is wrong, and every later attempt fails.
    Other = 0,
    /// The target is about to end. Its successor may serve.
    GoingAway = 1,
    /// The target has not yet closed the old connection of the session. Try again shortly.
    TryAgain = 2,
    /// The target has fenced this host up to the epoch that it presented: its lease has ended.
    Fenced = 3,
    /// The target lacks endpoints or memory. Its memory is intact, and a later attempt may succeed.
    NoRoom = 4,
    /// The session to resume is not known, and no connection of it is left.
    SessionEnded = 5,
    /// The cluster keys differ, or the ticket is not accepted.
    WrongKey = 6,
    /// The ticket has expired. The program needs another.
    TicketExpired = 7,
}

impl RefusalCode {
    const ALL: [Self; 8] = [
        Self::Other,
        Self::GoingAway,
        Self::TryAgain,
        Self::Fenced,
        Self::NoRoom,
        Self::SessionEnded,
        Self::WrongKey,
        Self::TicketExpired,
    ];
}

/// A refusal, as the target sends it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refusal {
    /// The code, which says what the initiator can do.
    pub code: RefusalCode,
    /// The reason, for people.
    pub reason: String,
}

impl Refusal {
    /// Creates a refusal that no later attempt changes.
    #[must_use]
    pub fn other(reason: impl Into<String>) -> Self {
        Self { code: RefusalCode::Other, reason: reason.into() }
    }

    /// The code and the reason, which is truncated if it is too long.
    pub(crate) fn encode(&self) -> Vec<u8> {
        [&(self.code as u16).to_le_bytes(), common::reason_bytes(&self.reason)].concat()
    }

    /// Parses an encoded refusal. An unknown code is read as
    /// [`RefusalCode::Other`].
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let (code, reason) = bytes.split_first_chunk::<2>()?;
        let code = u16::from_le_bytes(*code);
        let known = RefusalCode::ALL.into_iter().find(|known| *known as u16 == code);
        Some(Self { code: known.unwrap_or(RefusalCode::Other), reason: common::parse_reason(reason) })
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

/// Why a target refuses an endpoint. The text is sent to the initiator.
#[derive(Debug, thiserror::Error)]
pub enum RefusalReason {
    /// The target is about to end.
    #[error("the target is going away")]
    GoingAway,
    /// The old connection of the session is still open.
    #[error("the old connection of the session is being closed; try again")]
    TryAgain,
    /// The host is fenced.
    #[error("host {} is fenced up to epoch {fenced}, it has {epoch}", host.0)]
    Fenced {
        /// The host.
        host: Host,
        /// The greatest fenced epoch.
        fenced: u64,
        /// The epoch that the endpoint presented.
        epoch: u64,
    },
    /// All slots are in use.
    #[error("{0} endpoints are connected already")]
    Full(usize),
    /// The tenant has reached its limit of endpoints.
    #[error("tenant {} has {limit} endpoints already, which is its limit", tenant.0)]
    TenantFull {
        /// The tenant.
        tenant: Tenant,
        /// The limit of each tenant.
        limit: usize,
    },
    /// The session to resume is not known.
    #[error("the session does not exist or has ended")]
    UnknownSession,
    /// The answers or messages at the position are not kept any more.
    #[error("the session cannot be resumed from this position")]
    ResumePosition,
    /// The system returns no random bytes for a session's identifier.
    #[error("the target has no random bytes: {0}")]
    NoRandomBytes(io::Error),
    /// The ticket has expired.
    #[error("the ticket expired {0} s ago")]
    TicketExpired(u64),
    /// The hello presents another identity than the ticket.
    #[error("the ticket is for another tenant, host or epoch")]
    OtherIdentity,
    /// The user of the peer is unknown.
    #[error("the user id of the peer is unknown: {0}")]
    UnknownUser(io::Error),
    /// Another user than the permitted one connects.
    #[error("user {uid} may not connect, only user {allowed}")]
    OtherUser {
        /// The user that connects.
        uid: u32,
        /// The permitted user.
        allowed: u32,
    },
    /// The hello does not parse.
    #[error(transparent)]
    Hello(#[from] crate::shm::handshake::HandshakeError),
    /// An earlier agent of the host does not end an access.
    #[error("an earlier agent of host {} is still in the middle of an access", .0.0)]
    StalledAccess(Host),
    /// There is no memory for a mailbox.
    #[error("the target has no memory for a mailbox: {0}")]
    NoMailbox(io::Error),
    /// The welcome cannot be sent.
    #[error("the welcome cannot be sent: {0}")]
    WelcomeNotSent(io::Error),
}

impl RefusalReason {
    /// The code of the refusal.
    #[must_use]
    pub fn code(&self) -> RefusalCode {
        match self {
            Self::GoingAway => RefusalCode::GoingAway,
            Self::TryAgain => RefusalCode::TryAgain,
            Self::Fenced { .. } => RefusalCode::Fenced,
            Self::Full(_)
            | Self::TenantFull { .. }
            | Self::NoRandomBytes(_)
            | Self::StalledAccess(_)
            | Self::NoMailbox(_) => RefusalCode::NoRoom,
            Self::TicketExpired(_) => RefusalCode::TicketExpired,
            Self::OtherIdentity => RefusalCode::WrongKey,
            Self::UnknownSession | Self::ResumePosition => RefusalCode::SessionEnded,
            Self::UnknownUser(_) | Self::OtherUser { .. } | Self::Hello(_) | Self::WelcomeNotSent(_) => {
                RefusalCode::Other
            }
        }
    }

    /// The refusal to send to the initiator.
    #[must_use]
    pub fn to_refusal(&self) -> Refusal {
        Refusal { code: self.code(), reason: self.to_string() }
    }
}
