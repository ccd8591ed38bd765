//! Classifies etcd's errors: an answer, a call without effect, or a call with an unknown effect.

use std::error::Error as _;

use etcd_client::Error;
use tonic::{Code, ConnectError, Status};

/// The class of a failed call.
#[derive(Debug)]
pub(super) enum CallFailure {
    /// etcd answered with an error.
    Answer(ErrorAnswer),
    /// The call had no effect, and may be repeated at another member.
    NotSent(String),
    /// The call may have had an effect.
    Unknown(String),
}

/// An error that etcd answers.
#[derive(Debug)]
pub(super) enum ErrorAnswer {
    /// The lease does not exist.
    LeaseGone,
    /// The revision is compacted.
    Compacted,
    /// The revision is in the future.
    Future,
    /// The space of etcd is exhausted.
    Full(String),
    /// The call is refused by etcd.
    Refused(String),
}

impl From<Error> for CallFailure {
    fn from(error: Error) -> Self {
        match error {
            Error::GRpcStatus(status) => of_status(&status),
            // `etcd-client` reports an answer without a time to live by this text.
            Error::LeaseKeepAliveError(why) if why == "lease not found" => {
                Self::Answer(ErrorAnswer::LeaseGone)
            }
            Error::TransportError(error) => Self::NotSent(innermost_cause(&error)),
            Error::InvalidArgs(why) | Error::EndpointError(why) => Self::Answer(ErrorAnswer::Refused(why)),
            other => Self::Unknown(other.to_string()),
        }
    }
}

fn of_status(status: &Status) -> CallFailure {
    let message = status.message();
    match status.code() {
        Code::NotFound if message.contains("lease not found") => CallFailure::Answer(ErrorAnswer::LeaseGone),
        Code::OutOfRange if message.contains("has been compacted") => {
            CallFailure::Answer(ErrorAnswer::Compacted)
        }
        Code::OutOfRange if message.contains("future revision") => CallFailure::Answer(ErrorAnswer::Future),
        Code::ResourceExhausted if message.contains("space exceeded") => {
            CallFailure::Answer(ErrorAnswer::Full(message.to_owned()))
        }
        // etcd reports this and the next error before it proposes anything to the other members.
        Code::ResourceExhausted if message.contains("too many requests") => {
            CallFailure::NotSent(message.to_owned())
        }
        Code::Unavailable if message == "etcdserver: no leader" => CallFailure::NotSent(message.to_owned()),
        _ if was_not_connected(status) => CallFailure::NotSent(innermost_cause(status)),
        Code::Unavailable
        | Code::DeadlineExceeded
        | Code::Cancelled
        | Code::Unknown
        | Code::Internal
        | Code::Aborted
        | Code::DataLoss => CallFailure::Unknown(innermost_cause(status)),
        _ => CallFailure::Answer(ErrorAnswer::Refused(message.to_owned())),
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

/// The innermost cause of an error, such as `connection refused`.
fn innermost_cause(error: &dyn std::error::Error) -> String {
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
    fn errors_of_etcd_are_classified() {
        let failure = |code, message: &str| CallFailure::from(Error::GRpcStatus(Status::new(code, message)));
        let gone = failure(Code::NotFound, "etcdserver: requested lease not found");
        assert!(matches!(gone, CallFailure::Answer(ErrorAnswer::LeaseGone)));
        let compacted = failure(Code::OutOfRange, "etcdserver: mvcc: required revision has been compacted");
        assert!(matches!(compacted, CallFailure::Answer(ErrorAnswer::Compacted)));
        let future = failure(Code::OutOfRange, "etcdserver: mvcc: required revision is a future revision");
        assert!(matches!(future, CallFailure::Answer(ErrorAnswer::Future)));
        let full = failure(Code::ResourceExhausted, "etcdserver: mvcc: database space exceeded");
        assert!(matches!(full, CallFailure::Answer(ErrorAnswer::Full(_))));
        for message in ["etcdserver: request timed out", "etcdserver: leader changed", "transport error"] {
            assert!(matches!(failure(Code::Unavailable, message), CallFailure::Unknown(_)), "{message}");
        }
        assert!(matches!(failure(Code::Unavailable, "etcdserver: no leader"), CallFailure::NotSent(_)));
        let denied = failure(Code::PermissionDenied, "etcdserver: permission denied");
        assert!(matches!(denied, CallFailure::Answer(ErrorAnswer::Refused(_))));
    }
}
