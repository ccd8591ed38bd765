//! The members of an etcd, one client each: chooses the member for a call, and repeats calls.

use std::fmt;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use etcd_client::{Certificate, Client, ConnectOptions, Error, Identity, TlsOptions};
use tokio::time::{Instant, timeout_at};

use crate::address::{EtcdAddress, TlsFiles};
use crate::failure::{CallFailure, ErrorAnswer};
use aquifer_directory::DirectoryError;

/// Longest time of a call.
pub(super) const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time in which a member must accept a connection, or else is skipped.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Interval of keep-alives on a connection, and the timeout of their answers.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(2);
/// Interval between two rounds over all members.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// Most shares into which the time of a call is divided.
///
/// A member has one share to answer a call that may be repeated, before the next member is tried.
const SHARES_MAX: u32 = 3;

/// Whether a call may be repeated if its effect is unknown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Repetition {
    /// The call has the same effect if it is made twice.
    Allowed,
    /// The call may be repeated only if it certainly had no effect.
    Forbidden,
}

struct EtcdMember {
    endpoint: String,
    client: Client,
    /// Whether the member has answered, and not failed since.
    is_serving: AtomicBool,
}

/// The known members.
pub(super) struct EtcdMembers {
    pub address: String,
    /// The key that is read to check that a member serves.
    probe_key: String,
    members: Vec<EtcdMember>,
    options: ConnectOptions,
    current: AtomicUsize,
}

impl fmt::Debug for EtcdMembers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdMembers").field("address", &self.address).finish_non_exhaustive()
    }
}

impl EtcdMembers {
    /// Creates the clients of the members of an address, without connecting.
    pub async fn new(
        address: &EtcdAddress,
        tls: &TlsFiles,
        probe_key: String,
    ) -> Result<Self, DirectoryError> {
        let refused = |why: String| DirectoryError::Refused { address: address.to_string(), why };
        let mut options = ConnectOptions::new()
            .with_connect_timeout(CONNECT_TIMEOUT)
            .with_keep_alive(KEEP_ALIVE_INTERVAL, KEEP_ALIVE_INTERVAL)
            .with_keep_alive_while_idle(true)
            .with_require_leader(true);
        if address.uses_tls {
            options = options.with_tls(tls_options(tls).map_err(|error| refused(error.to_string()))?);
        }
        let scheme = if address.uses_tls { "https" } else { "http" };
        let mut members = Vec::new();
        for member in &address.members {
            let endpoint = format!("{scheme}://{member}");
            let client = Client::connect([&endpoint], Some(options.clone()))
                .await
                .map_err(|error| refused(error.to_string()))?;
            members.push(EtcdMember { endpoint, client, is_serving: AtomicBool::new(false) });
        }
        let address = address.to_string();
        Ok(Self { address, probe_key, members, options, current: AtomicUsize::new(0) })
    }

    /// Calls one member after another, until one answers or [`CALL_TIMEOUT`] has passed.
    pub async fn call<T, F>(&self, repeat: Repetition, request: impl Fn(Client) -> F) -> Result<T, CallError>
    where
        F: Future<Output = Result<T, Error>>,
    {
        self.try_members(repeat, |member| request(self.members[member].client.clone())).await
    }

    /// Calls over a new connection. The call may be repeated.
    pub async fn call_on_new_connection<T, F>(&self, request: impl Fn(Client) -> F) -> Result<T, CallError>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let request = &request;
        self.try_members(Repetition::Allowed, |member| async move {
            let client =
                Client::connect([&self.members[member].endpoint], Some(self.options.clone())).await?;
            request(client).await
        })
        .await
    }

    async fn try_members<T, F>(
        &self,
        repeat: Repetition,
        request: impl Fn(usize) -> F,
    ) -> Result<T, CallError>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let count = self.members.len();
        let share = CALL_TIMEOUT / u32::try_from(count).unwrap_or(SHARES_MAX).min(SHARES_MAX);
        let end = Instant::now() + CALL_TIMEOUT;
        for attempt in 1.. {
            let member = self.current.load(Ordering::Relaxed) % count;
            let share_end = end.min(Instant::now() + share);
            let failure = match self.check_serving(member, share_end).await {
                Err(failure) => failure,
                Ok(()) => {
                    // A call that must not be repeated has all of the remaining time.
                    let until = if repeat == Repetition::Allowed { share_end } else { end };
                    match timeout_at(until, request(member)).await {
                        Ok(Ok(answer)) => return Ok(answer),
                        Ok(Err(error)) => CallFailure::from(error),
                        Err(_) => CallFailure::Unknown("no answer".to_owned()),
                    }
                }
            };
            let cause = match failure {
                CallFailure::Answer(answer) => return Err(self.call_error(answer)),
                CallFailure::Unknown(cause) if repeat == Repetition::Forbidden => {
                    self.skip(member);
                    return Err(CallError::Other(self.unavailable(&cause)));
                }
                CallFailure::Unknown(cause) | CallFailure::NotSent(cause) => cause,
            };
            self.skip(member);
            if attempt % count == 0 {
                tokio::time::sleep(RETRY_INTERVAL).await;
            }
            if Instant::now() >= end {
                return Err(CallError::Other(self.unavailable(&cause)));
            }
        }
        unreachable!("the attempts end with the time of the call")
    }

    /// Checks by a read that a member serves, so that a call that must not be repeated reaches it.
    async fn check_serving(&self, member: usize, end: Instant) -> Result<(), CallFailure> {
        let EtcdMember { client, is_serving, .. } = &self.members[member];
        if is_serving.load(Ordering::Relaxed) {
            return Ok(());
        }
        let mut kv = client.kv_client();
        match timeout_at(end, kv.get(self.probe_key.as_str(), None)).await {
            Ok(Ok(_)) => {
                is_serving.store(true, Ordering::Relaxed);
                Ok(())
            }
            Ok(Err(error)) => Err(match CallFailure::from(error) {
                CallFailure::Unknown(cause) => CallFailure::NotSent(cause),
                failure => failure,
            }),
            Err(_) => Err(CallFailure::NotSent("no answer".to_owned())),
        }
    }

    /// Selects the next member for further calls.
    fn skip(&self, member: usize) {
        self.members[member].is_serving.store(false, Ordering::Relaxed);
        let next = (member + 1) % self.members.len();
        // Fails if another thread has changed the member already.
        let _lost = self.current.compare_exchange(member, next, Ordering::Relaxed, Ordering::Relaxed);
    }

    fn call_error(&self, answer: ErrorAnswer) -> CallError {
        let address = self.address.clone();
        match answer {
            ErrorAnswer::LeaseGone => CallError::LeaseGone,
            ErrorAnswer::Compacted => CallError::Compacted,
            ErrorAnswer::Future => CallError::Future,
            ErrorAnswer::Full(cause) => CallError::Other(DirectoryError::Storage { path: address, cause }),
            ErrorAnswer::Refused(why) => CallError::Other(DirectoryError::Refused { address, why }),
        }
    }

    pub fn unavailable(&self, cause: &str) -> DirectoryError {
        DirectoryError::Unavailable { address: self.address.clone(), cause: cause.to_owned() }
    }
}

/// The error of a call, as its caller distinguishes it.
#[derive(Debug)]
pub(super) enum CallError {
    /// The lease does not exist.
    LeaseGone,
    /// The revision is compacted.
    Compacted,
    /// The revision is in the future.
    Future,
    /// Any other error.
    Other(DirectoryError),
}

impl CallError {
    /// The error of a call that names neither leases nor revisions.
    pub fn other(self) -> DirectoryError {
        match self {
            Self::Other(error) => error,
            answer => {
                DirectoryError::Protocol { why: format!("the answer does not match the request: {answer:?}") }
            }
        }
    }
}

/// Files for TLS that cannot be used.
#[derive(Debug, thiserror::Error)]
enum TlsFileError {
    #[error("{}: {error}", path.display())]
    Read { path: PathBuf, error: std::io::Error },
    #[error("etcds:// needs a file with the certificate of the authority that signed etcd's certificate")]
    NoAuthority,
    #[error("a client certificate needs a key, and a key needs a certificate")]
    HalfIdentity,
}

fn tls_options(files: &TlsFiles) -> Result<TlsOptions, TlsFileError> {
    let read = |path: &Path| {
        std::fs::read(path).map_err(|error| TlsFileError::Read { path: path.to_owned(), error })
    };
    let authority = files.ca.as_deref().ok_or(TlsFileError::NoAuthority)?;
    let options = TlsOptions::new().ca_certificate(Certificate::from_pem(read(authority)?));
    match (&files.certificate, &files.key) {
        (None, None) => Ok(options),
        (Some(certificate), Some(key)) => {
            Ok(options.identity(Identity::from_pem(read(certificate)?, read(key)?)))
        }
        _ => Err(TlsFileError::HalfIdentity),
    }
}
