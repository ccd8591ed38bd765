//! A watch over etcd, which outlives the connection that it comes by.
//!
//! It knows where it stands: a revision, and those keys whose changes of that revision it has given out. So it can be taken up again, at
//! any member, without a gap and without a change told twice: within one revision a key changes once.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Client, Error, EventType, GetOptions, WatchOptions, WatchResponse, WatchStream};
use tokio::time::{Instant, timeout_at};

use crate::keys::{end_of, lease_of, unsigned};
use crate::members::{Answer, Repeat};
use crate::{Inner, Threads};
use aquifer_directory::{DirectoryError, Watch};
use aquifer_directory::{Event, EventKind};

/// What etcd tells in one piece is bounded by its own limit for requests, 1.5 MiB unless it was raised.
pub(super) const MESSAGE_BYTES_MAX: usize = 32 << 20;
/// A watcher may wait for ever; the sum of now and for ever does not exist.
const WAIT_MAX: Duration = Duration::from_secs(86_400);
/// etcd's first revision is 1, and is of no change.
const FIRST_REVISION: u64 = 2;

/// What comes next.
#[derive(Clone, Debug)]
struct Position {
    /// Changes of earlier revisions have been given out, all of them.
    revision: u64,
    /// Keys whose changes of this very revision have been given out.
    told: BTreeSet<String>,
}

impl Position {
    fn has_told(&self, event: &Event) -> bool {
        event.revision < self.revision || (event.revision == self.revision && self.told.contains(&event.key))
    }

    fn tell(&mut self, event: &Event) {
        if event.revision > self.revision {
            self.revision = event.revision;
            self.told.clear();
        }
        self.told.insert(event.key.clone());
    }
}

type Opening = Pin<Box<dyn Future<Output = Result<WatchStream, DirectoryError>> + Send>>;

enum Wire {
    Open(WatchStream),
    Opening(Opening),
    Over(DirectoryError),
}

pub(super) struct EtcdWatch {
    inner: Arc<Inner>,
    runtime: Arc<Threads>,
    prefix: String,
    position: Position,
    wire: Wire,
    /// Received, and not yet given out.
    received: VecDeque<Event>,
}

impl fmt::Debug for EtcdWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdWatch")
            .field("prefix", &self.prefix)
            .field("position", &self.position)
            .finish_non_exhaustive()
    }
}

impl EtcdWatch {
    /// Watch the keys that begin with `prefix`, as they are in etcd.
    pub fn start(
        inner: Arc<Inner>,
        runtime: Arc<Threads>,
        prefix: String,
        from_revision: u64,
    ) -> Result<Self, DirectoryError> {
        let revision = match from_revision {
            // What etcd calls now may lie behind, if we ask a slow member; so it is found out by a read, which may not.
            0 => runtime.block_on(inner.revision())? + 1,
            from => from.max(FIRST_REVISION),
        };
        let stream = runtime.block_on(open(&inner, &prefix, revision))?;
        let position = Position { revision, told: BTreeSet::new() };
        Ok(Self { inner, runtime, prefix, position, wire: Wire::Open(stream), received: VecDeque::new() })
    }

    /// Wait for more. May be dropped at any point: nothing is lost by it.
    async fn receive(&mut self) -> Result<(), DirectoryError> {
        let message = match &mut self.wire {
            Wire::Opening(opening) => {
                let opened = opening.await;
                self.wire = opened.map_or_else(Wire::Over, Wire::Open);
                return Ok(());
            }
            Wire::Over(error) => return Err(error.clone()),
            Wire::Open(stream) => stream.message().await,
        };
        match message {
            Ok(Some(response)) if !response.canceled() => self.take(&response),
            Ok(Some(response)) if response.compact_revision() > 0 => Err(DirectoryError::Compacted {
                asked: self.position.revision,
                oldest: unsigned(response.compact_revision())? + 1,
            }),
            Ok(Some(response)) => {
                self.reopen(response.cancel_reason());
                Ok(())
            }
            Ok(None) => {
                self.reopen("it ended the watch");
                Ok(())
            }
            Err(error) => {
                self.reopen(&error.to_string());
                Ok(())
            }
        }
    }

    fn reopen(&mut self, cause: &str) {
        tracing::debug!(
            prefix = self.prefix,
            revision = self.position.revision,
            cause,
            "a watch is taken up again"
        );
        // Whatever was received is received again.
        self.received.clear();
        let (inner, prefix, revision) =
            (Arc::clone(&self.inner), self.prefix.clone(), self.position.revision);
        self.wire = Wire::Opening(Box::pin(async move { open(&inner, &prefix, revision).await }));
    }

    fn take(&mut self, response: &WatchResponse) -> Result<(), DirectoryError> {
        let garbage = || DirectoryError::Protocol { why: "an event without a key".to_owned() };
        for event in response.events() {
            let found = event.kv().ok_or_else(garbage)?;
            let kind = match event.event_type() {
                EventType::Put => EventKind::Put { value: found.value().to_vec(), lease: lease_of(found)? },
                EventType::Delete => EventKind::Delete,
            };
            let key = self.inner.keys.inner(found.key())?;
            self.received.push_back(Event { revision: unsigned(found.mod_revision())?, key, kind });
        }
        Ok(())
    }
}

impl Watch for EtcdWatch {
    fn next(&mut self, timeout: Duration) -> Result<Option<Event>, DirectoryError> {
        let end = Instant::now() + timeout.min(WAIT_MAX);
        let runtime = Arc::clone(&self.runtime);
        loop {
            while let Some(event) = self.received.pop_front() {
                if !self.position.has_told(&event) {
                    self.position.tell(&event);
                    return Ok(Some(event));
                }
            }
            match runtime.block_on(async { timeout_at(end, self.receive()).await }) {
                Ok(received) => received?,
                Err(_) => return Ok(None),
            }
        }
    }
}

/// Have all changes from `revision` on sent to us, if they are kept.
async fn open(inner: &Inner, prefix: &str, revision: u64) -> Result<WatchStream, DirectoryError> {
    let (start, before) = (signed(revision)?, signed(revision - 1)?);
    // etcd would begin at the very revision that was compacted, and know nothing of a key that was deleted in it. The state before
    // `revision` can be read only if that lies later.
    let probe = &inner.keys.epoch;
    let options = GetOptions::new().with_revision(before).with_count_only();
    let look = |client: Client| {
        let options = options.clone();
        async move { client.kv_client().get(probe.as_str(), Some(options)).await }
    };
    match inner.members.call(Repeat::Free, look).await {
        Ok(_) | Err(Answer::Future) => {}
        Err(Answer::Compacted) => {
            let oldest = compacted(inner).await? + 1;
            return Err(DirectoryError::Compacted { asked: revision, oldest });
        }
        Err(answer) => return Err(answer.other()),
    }
    let options = WatchOptions::new().with_range(end_of(prefix)).with_start_revision(start).with_fragment();
    inner.members.call_apart(|client| create(client, prefix, options.clone())).await.map_err(Answer::other)
}

async fn create(client: Client, key: &str, options: WatchOptions) -> Result<WatchStream, Error> {
    let watcher = client.watch_client().max_decoding_message_size(MESSAGE_BYTES_MAX);
    let mut stream = { watcher }.watch(key, Some(options)).await?;
    match stream.message().await? {
        Some(response) if response.created() && !response.canceled() => Ok(stream),
        Some(response) => Err(Error::WatchError(response.cancel_reason().to_owned())),
        None => Err(Error::WatchError("it ended the watch".to_owned())),
    }
}

/// The revision that was compacted last; etcd says so only to a watch that comes too late.
async fn compacted(inner: &Inner) -> Result<u64, DirectoryError> {
    let options = WatchOptions::new().with_start_revision(1);
    let probe = &inner.keys.epoch;
    let look = |client: Client| {
        let options = options.clone();
        async move {
            let mut stream = create(client, probe, options).await?;
            match stream.message().await? {
                Some(response) if response.compact_revision() > 0 => Ok(response.compact_revision()),
                _ => Err(Error::WatchError("it does not tell what it has compacted".to_owned())),
            }
        }
    };
    unsigned(inner.members.call_apart(look).await.map_err(Answer::other)?)
}

fn signed(revision: u64) -> Result<i64, DirectoryError> {
    i64::try_from(revision)
        .map_err(|_| DirectoryError::Protocol { why: format!("there will never be a revision {revision}") })
}
