//! The members of an etcd, one client each: which one is asked, what is asked again, and until when.

use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use etcd_client::{Certificate, Client, ConnectOptions, Error, Identity, TlsOptions};
use tokio::time::{Instant, timeout_at};

use crate::address::{EtcdAddress, TlsFiles};
use crate::failure::{Failure, No};
use aquifer_directory::DirectoryError;

/// Every call is answered, or has failed, by then.
pub(super) const CALL_TIME: Duration = Duration::from_secs(5);
/// A member that does not let us connect by then is passed over.
const CONNECT_TIME: Duration = Duration::from_secs(1);
/// A connection on which nothing is heard is asked for a sign of life so often, and given up after as long again.
const SIGN_OF_LIFE_TIME: Duration = Duration::from_secs(2);
/// Between two rounds over all members.
const PAUSE: Duration = Duration::from_millis(50);
/// Members are given this share of a call's time, if there are that many, before the next one is tried.
const SHARES_MAX: u32 = 3;

/// Whether a call may be made twice.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Repeat {
    /// Twice is as once.
    Free,
    /// Only as long as it surely was not carried out.
    Never,
}

struct Member {
    endpoint: String,
    client: Client,
    /// It has answered, and not failed since.
    is_proven: AtomicBool,
}

/// All known members.
pub(super) struct Members {
    pub address: String,
    /// A key that may be read to see whether a member serves.
    probe: String,
    members: Vec<Member>,
    options: ConnectOptions,
    current: AtomicUsize,
}

impl fmt::Debug for Members {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Members").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Members {
    /// Nobody is connected to yet.
    pub async fn new(address: &EtcdAddress, tls: &TlsFiles, probe: String) -> Result<Self, DirectoryError> {
        let refused = |why: String| DirectoryError::Refused { address: address.to_string(), why };
        let mut options = ConnectOptions::new()
            .with_connect_timeout(CONNECT_TIME)
            .with_keep_alive(SIGN_OF_LIFE_TIME, SIGN_OF_LIFE_TIME)
            .with_keep_alive_while_idle(true)
            .with_require_leader(true);
        if address.tls {
            options = options.with_tls(tls_options(tls).map_err(refused)?);
        }
        let scheme = if address.tls { "https" } else { "http" };
        let mut members = Vec::new();
        for member in &address.members {
            let endpoint = format!("{scheme}://{member}");
            let client = Client::connect([&endpoint], Some(options.clone()))
                .await
                .map_err(|error| refused(error.to_string()))?;
            members.push(Member { endpoint, client, is_proven: AtomicBool::new(false) });
        }
        let address = address.to_string();
        Ok(Self { address, probe, members, options, current: AtomicUsize::new(0) })
    }

    /// Ask, one member after another, until one answers or [`CALL_TIME`] is over.
    pub async fn call<T, F>(&self, repeat: Repeat, question: impl Fn(Client) -> F) -> Result<T, Answer>
    where
        F: Future<Output = Result<T, Error>>,
    {
        self.each(repeat, |member| question(self.members[member].client.clone())).await
    }

    /// As [`Members::call`], over a connection of its own. It may be made twice.
    pub async fn call_apart<T, F>(&self, question: impl Fn(Client) -> F) -> Result<T, Answer>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let question = &question;
        self.each(Repeat::Free, |member| async move {
            let client =
                Client::connect([&self.members[member].endpoint], Some(self.options.clone())).await?;
            question(client).await
        })
        .await
    }

    async fn each<T, F>(&self, repeat: Repeat, question: impl Fn(usize) -> F) -> Result<T, Answer>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let count = self.members.len();
        let share = CALL_TIME / u32::try_from(count).unwrap_or(SHARES_MAX).min(SHARES_MAX);
        let end = Instant::now() + CALL_TIME;
        for attempt in 1.. {
            let member = self.current.load(Ordering::Relaxed) % count;
            let share_end = end.min(Instant::now() + share);
            let failure = match self.prove(member, share_end).await {
                Err(failure) => failure,
                Ok(()) => {
                    // What is asked once only may take all the time there is.
                    let until = if repeat == Repeat::Free { share_end } else { end };
                    match timeout_at(until, question(member)).await {
                        Ok(Ok(answer)) => return Ok(answer),
                        Ok(Err(error)) => Failure::from(error),
                        Err(_) => Failure::Unknown("it does not answer".to_owned()),
                    }
                }
            };
            let cause = match failure {
                Failure::Answer(no) => return Err(self.answer(no)),
                Failure::Unknown(cause) if repeat == Repeat::Never => {
                    self.pass_over(member);
                    return Err(Answer::Error(self.unavailable(&cause)));
                }
                Failure::Unknown(cause) | Failure::NotAsked(cause) => cause,
            };
            self.pass_over(member);
            if attempt % count == 0 {
                tokio::time::sleep(PAUSE).await;
            }
            if Instant::now() >= end {
                return Err(Answer::Error(self.unavailable(&cause)));
            }
        }
        unreachable!("there is always another attempt, until the time is over")
    }

    /// Make sure that a member serves, before it is asked what must not be asked twice.
    async fn prove(&self, member: usize, end: Instant) -> Result<(), Failure> {
        let Member { client, is_proven, .. } = &self.members[member];
        if is_proven.load(Ordering::Relaxed) {
            return Ok(());
        }
        let mut kv = client.kv_client();
        match timeout_at(end, kv.get(self.probe.as_str(), None)).await {
            Ok(Ok(_)) => {
                is_proven.store(true, Ordering::Relaxed);
                Ok(())
            }
            Ok(Err(error)) => Err(match Failure::from(error) {
                Failure::Unknown(cause) => Failure::NotAsked(cause),
                failure => failure,
            }),
            Err(_) => Err(Failure::NotAsked("it does not answer".to_owned())),
        }
    }

    /// The next one is asked from now on.
    fn pass_over(&self, member: usize) {
        self.members[member].is_proven.store(false, Ordering::Relaxed);
        let next = (member + 1) % self.members.len();
        // Unless another caller has done so.
        let _lost = self.current.compare_exchange(member, next, Ordering::Relaxed, Ordering::Relaxed);
    }

    fn answer(&self, no: No) -> Answer {
        let address = self.address.clone();
        match no {
            No::LeaseGone => Answer::LeaseGone,
            No::Compacted => Answer::Compacted,
            No::Future => Answer::Future,
            No::Full(cause) => Answer::Error(DirectoryError::Storage { path: address, cause }),
            No::Refused(why) => Answer::Error(DirectoryError::Refused { address, why }),
        }
    }

    pub fn unavailable(&self, cause: &str) -> DirectoryError {
        DirectoryError::Unavailable { address: self.address.clone(), cause: cause.to_owned() }
    }
}

/// What a call got that is not what was asked for.
#[derive(Debug)]
pub(super) enum Answer {
    /// It knows no such lease.
    LeaseGone,
    /// The revision is compacted.
    Compacted,
    /// The revision is yet to come.
    Future,
    /// Something else.
    Error(DirectoryError),
}

impl Answer {
    /// The error, where neither leases nor revisions were spoken of.
    pub fn other(self) -> DirectoryError {
        match self {
            Self::Error(error) => error,
            answer => DirectoryError::Protocol { why: format!("it does not fit the question: {answer:?}") },
        }
    }
}

fn tls_options(files: &TlsFiles) -> Result<TlsOptions, String> {
    let read =
        |path: &std::path::Path| std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()));
    let ca = files.ca.as_deref().ok_or("etcds:// needs the certificate of who signed etcd's, as a file")?;
    let options = TlsOptions::new().ca_certificate(Certificate::from_pem(read(ca)?));
    Ok(match (&files.certificate, &files.key) {
        (None, None) => options,
        (Some(certificate), Some(key)) => {
            options.identity(Identity::from_pem(read(certificate)?, read(key)?))
        }
        _ => return Err("a certificate of our own needs its key, and a key its certificate".to_owned()),
    })
}
