//! A watch over etcd, which continues when its connection breaks.
//!
//! The watch stores a revision, and the keys whose changes of that revision it has returned.
//! With that it opens a new watch at any member, without a gap and without a repeated event,
//! because a key changes at most once in a revision.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Client, Error, EventType, GetOptions, WatchOptions, WatchResponse, WatchStream};
use tokio::time::{Instant, timeout_at};

use crate::keys::{end_of, lease_of, unsigned};
use crate::members::{CallError, Repetition};
use crate::{EtcdRuntime, EtcdState};
use aquifer_directory::{DirectoryError, Watch};
use aquifer_directory::{WatchEvent, WatchEventKind};

/// Most bytes of a message. etcd's own limit for requests bounds messages, 1.5 MiB by default.
pub(super) const MESSAGE_BYTES_MAX: usize = 32 << 20;
/// Longest wait of a call. The end of an unlimited wait cannot be computed.
const WAIT_MAX: Duration = Duration::from_secs(86_400);
/// The first revision with a change: revision 1 of etcd has none.
const FIRST_REVISION: u64 = 2;

/// The position of the next event of a watch.
#[derive(Clone, Debug)]
struct WatchPosition {
    /// All changes of smaller revisions have been returned.
    revision: u64,
    /// Keys whose changes of this revision have been returned.
    returned_keys: BTreeSet<String>,
}

impl WatchPosition {
    fn has_returned(&self, event: &WatchEvent) -> bool {
        event.revision < self.revision
            || (event.revision == self.revision && self.returned_keys.contains(&event.key))
    }

    fn record_returned(&mut self, event: &WatchEvent) {
        if event.revision > self.revision {
            self.revision = event.revision;
            self.returned_keys.clear();
        }
        self.returned_keys.insert(event.key.clone());
    }
}

type Opening = Pin<Box<dyn Future<Output = Result<WatchStream, DirectoryError>> + Send>>;

/// The connection of a watch.
enum WatchConnection {
    Open(WatchStream),
    Opening(Opening),
    Failed(DirectoryError),
}

/// A watch over etcd.
pub(super) struct EtcdWatch {
    state: Arc<EtcdState>,
    runtime: Arc<EtcdRuntime>,
    prefix: String,
    position: WatchPosition,
    connection: WatchConnection,
    /// Received events that have not been returned.
    received: VecDeque<WatchEvent>,
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
    /// Opens a watch on the keys of etcd that begin with `prefix`.
    pub fn start(
        state: Arc<EtcdState>,
        runtime: Arc<EtcdRuntime>,
        prefix: String,
        from_revision: u64,
    ) -> Result<Self, DirectoryError> {
        let revision = match from_revision {
            // A watch from now would begin at the state of one member, which may be behind. A read
            // returns the revision of the cluster.
            0 => runtime.block_on(state.revision())? + 1,
            from => from.max(FIRST_REVISION),
        };
        let stream = runtime.block_on(open(&state, &prefix, revision))?;
        let position = WatchPosition { revision, returned_keys: BTreeSet::new() };
        Ok(Self {
            state,
            runtime,
            prefix,
            position,
            connection: WatchConnection::Open(stream),
            received: VecDeque::new(),
        })
    }

    /// Waits for a message. Dropping the future at any point loses no event.
    async fn receive(&mut self) -> Result<(), DirectoryError> {
        let message = match &mut self.connection {
            WatchConnection::Opening(opening) => {
                let opened = opening.await;
                self.connection = opened.map_or_else(WatchConnection::Failed, WatchConnection::Open);
                return Ok(());
            }
            WatchConnection::Failed(error) => return Err(error.clone()),
            WatchConnection::Open(stream) => stream.message().await,
        };
        match message {
            Ok(Some(response)) if !response.canceled() => self.queue_events(&response),
            Ok(Some(response)) if response.compact_revision() > 0 => Err(DirectoryError::Compacted {
                asked: self.position.revision,
                oldest: unsigned(response.compact_revision())? + 1,
            }),
            Ok(Some(response)) => {
                self.reopen(response.cancel_reason());
                Ok(())
            }
            Ok(None) => {
                self.reopen("etcd ended the watch");
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
            "opening a watch again"
        );
        // The new watch reports these events again.
        self.received.clear();
        let (state, prefix, revision) =
            (Arc::clone(&self.state), self.prefix.clone(), self.position.revision);
        self.connection =
            WatchConnection::Opening(Box::pin(async move { open(&state, &prefix, revision).await }));
    }

    fn queue_events(&mut self, response: &WatchResponse) -> Result<(), DirectoryError> {
        let no_key = || DirectoryError::Protocol { why: "etcd reports an event without a key".to_owned() };
        for event in response.events() {
            let found = event.kv().ok_or_else(no_key)?;
            let kind = match event.event_type() {
                EventType::Put => {
                    WatchEventKind::Put { value: found.value().to_vec(), lease: lease_of(found)? }
                }
                EventType::Delete => WatchEventKind::Delete,
            };
            let key = self.state.keys.inner(found.key())?;
            self.received.push_back(WatchEvent { revision: unsigned(found.mod_revision())?, key, kind });
        }
        Ok(())
    }
}

impl Watch for EtcdWatch {
    fn next(&mut self, timeout: Duration) -> Result<Option<WatchEvent>, DirectoryError> {
        let end = Instant::now() + timeout.min(WAIT_MAX);
        let runtime = Arc::clone(&self.runtime);
        loop {
            while let Some(event) = self.received.pop_front() {
                if !self.position.has_returned(&event) {
                    self.position.record_returned(&event);
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

/// Opens a watch that reports all changes from `revision` on, if they are kept.
async fn open(state: &EtcdState, prefix: &str, revision: u64) -> Result<WatchStream, DirectoryError> {
    let (start, before) = (signed(revision)?, signed(revision - 1)?);
    // etcd would accept the compacted revision itself, and not report a deletion at it. A read of
    // the state before `revision` succeeds only if `revision` is greater than the compacted one.
    let probe_key = &state.keys.epoch;
    let options = GetOptions::new().with_revision(before).with_count_only();
    let read = |client: Client| {
        let options = options.clone();
        async move { client.kv_client().get(probe_key.as_str(), Some(options)).await }
    };
    match state.members.call(Repetition::Allowed, read).await {
        Ok(_) | Err(CallError::Future) => {}
        Err(CallError::Compacted) => {
            let oldest = compacted(state).await? + 1;
            return Err(DirectoryError::Compacted { asked: revision, oldest });
        }
        Err(answer) => return Err(answer.other()),
    }
    let options = WatchOptions::new().with_range(end_of(prefix)).with_start_revision(start).with_fragment();
    state
        .members
        .call_on_new_connection(|client| create(client, prefix, options.clone()))
        .await
        .map_err(CallError::other)
}

async fn create(client: Client, key: &str, options: WatchOptions) -> Result<WatchStream, Error> {
    let watcher = client.watch_client().max_decoding_message_size(MESSAGE_BYTES_MAX);
    let mut stream = { watcher }.watch(key, Some(options)).await?;
    match stream.message().await? {
        Some(response) if response.created() && !response.canceled() => Ok(stream),
        Some(response) => Err(Error::WatchError(response.cancel_reason().to_owned())),
        None => Err(Error::WatchError("etcd ended the watch".to_owned())),
    }
}

/// The last compacted revision, which etcd reports only to a watch of an older revision.
async fn compacted(state: &EtcdState) -> Result<u64, DirectoryError> {
    let options = WatchOptions::new().with_start_revision(1);
    let probe_key = &state.keys.epoch;
    let read = |client: Client| {
        let options = options.clone();
        async move {
            let mut stream = create(client, probe_key, options).await?;
            match stream.message().await? {
                Some(response) if response.compact_revision() > 0 => Ok(response.compact_revision()),
                _ => Err(Error::WatchError("etcd does not report its compacted revision".to_owned())),
            }
        }
    };
    unsigned(state.members.call_on_new_connection(read).await.map_err(CallError::other)?)
}

fn signed(revision: u64) -> Result<i64, DirectoryError> {
    i64::try_from(revision)
        .map_err(|_| DirectoryError::Protocol { why: format!("revision {revision} is too large") })
}
