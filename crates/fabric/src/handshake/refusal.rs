//! The reasons for which targets refuse endpoints.

use std::io;

use crate::target::Host;

/// The refusal of a target that is about to end. It is part of the protocol between builds.
pub(crate) const GOING_AWAY: &str = "the target is going away";
/// The refusal of a target that has not yet closed the old connection of a session. Initiators
/// compare this text, so it is part of the protocol between builds.
pub(crate) const TRY_AGAIN: &str = "try again: the old connection is being closed";
/// The text by which initiators recognise the refusal of a fenced host. It is part of the protocol
/// between builds.
const FENCED: &str = "is fenced up to epoch";

/// Whether a refusal says that the host is fenced.
pub fn is_fence_refusal(refusal: &str) -> bool {
    refusal.contains(FENCED)
}

/// Why a target refuses an endpoint. The text is sent to the initiator.
#[derive(Debug, thiserror::Error)]
pub enum RefusalReason {
    /// The target is about to end.
    #[error("{GOING_AWAY}")]
    GoingAway,
    /// The old connection of the session is still open.
    #[error("{TRY_AGAIN}")]
    TryAgain,
    /// The host is fenced.
    #[error("host {} {FENCED} {fenced}, it has {epoch}", host.0)]
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
    /// The session to resume is not known.
    #[error("the session does not exist or has ended")]
    UnknownSession,
    /// The answers or messages at the position are not kept any more.
    #[error("the session cannot be resumed from this position")]
    ResumePosition,
    /// The system gives no random bytes for a session's identifier.
    #[error("the target has no random bytes: {0}")]
    NoRandomBytes(io::Error),
    /// The user of the peer cannot be found out.
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
