//! What etcd's errors mean for a call: is it answered, may it be asked again, or does nobody know?

use std::error::Error as _;

use etcd_client::Error;
use tonic::{Code, ConnectError, Status};

/// What a failed call comes to.
#[derive(Debug)]
pub(super) enum Failure {
    /// etcd has answered: no.
    Answer(No),
    /// It was not asked: another member may be.
    NotAsked(String),
    /// It may have done what was asked, or not.
    Unknown(String),
}

/// An answer that is an error.
#[derive(Debug)]
pub(super) enum No {
    /// It knows no such lease.
    LeaseGone,
    /// The revision is compacted.
    Compacted,
    /// The revision is yet to come.
    Future,
    /// It has no room.
    Full(String),
    /// It does not serve us.
    Refused(String),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match error {
            Error::GRpcStatus(status) => of_status(&status),
            // The client's own word for an answer with no life in it.
            Error::LeaseKeepAliveError(why) if why == "lease not found" => Self::Answer(No::LeaseGone),
            Error::TransportError(error) => Self::NotAsked(chain(&error)),
            Error::InvalidArgs(why) | Error::EndpointError(why) => Self::Answer(No::Refused(why)),
            other => Self::Unknown(other.to_string()),
        }
    }
}

fn of_status(status: &Status) -> Failure {
    let message = status.message();
    match status.code() {
        Code::NotFound if message.contains("lease not found") => Failure::Answer(No::LeaseGone),
        Code::OutOfRange if message.contains("has been compacted") => Failure::Answer(No::Compacted),
        Code::OutOfRange if message.contains("future revision") => Failure::Answer(No::Future),
        Code::ResourceExhausted if message.contains("space exceeded") => {
            Failure::Answer(No::Full(message.to_owned()))
        }
        // Both are said before anything is proposed to the other members.
        Code::ResourceExhausted if message.contains("too many requests") => {
            Failure::NotAsked(message.to_owned())
        }
        Code::Unavailable if message == "etcdserver: no leader" => Failure::NotAsked(message.to_owned()),
        _ if was_not_connected(status) => Failure::NotAsked(chain(status)),
        Code::Unavailable
        | Code::DeadlineExceeded
        | Code::Cancelled
        | Code::Unknown
        | Code::Internal
        | Code::Aborted
        | Code::DataLoss => Failure::Unknown(chain(status)),
        _ => Failure::Answer(No::Refused(message.to_owned())),
    }
}

fn was_not_connected(status: &Status) -> bool {
    let mut source = status.source();
    while let Some(error) = source {
        if error.is::<ConnectError>() {
            return true;
        }
        source = error.source();
    }
    false
}

/// The last cause is the one that says something: `connection refused`.
fn chain(error: &dyn std::error::Error) -> String {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_etcd_says_is_told_apart() {
        let told = |code, message: &str| Failure::from(Error::GRpcStatus(Status::new(code, message)));
        let gone = told(Code::NotFound, "etcdserver: requested lease not found");
        assert!(matches!(gone, Failure::Answer(No::LeaseGone)));
        let compacted = told(Code::OutOfRange, "etcdserver: mvcc: required revision has been compacted");
        assert!(matches!(compacted, Failure::Answer(No::Compacted)));
        let future = told(Code::OutOfRange, "etcdserver: mvcc: required revision is a future revision");
        assert!(matches!(future, Failure::Answer(No::Future)));
        let full = told(Code::ResourceExhausted, "etcdserver: mvcc: database space exceeded");
        assert!(matches!(full, Failure::Answer(No::Full(_))));
        for message in ["etcdserver: request timed out", "etcdserver: leader changed", "transport error"] {
            assert!(matches!(told(Code::Unavailable, message), Failure::Unknown(_)), "{message}");
        }
        assert!(matches!(told(Code::Unavailable, "etcdserver: no leader"), Failure::NotAsked(_)));
        let denied = told(Code::PermissionDenied, "etcdserver: permission denied");
        assert!(matches!(denied, Failure::Answer(No::Refused(_))));
    }
}
