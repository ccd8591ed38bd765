//! A directory in etcd 3.4 or newer, for a cluster of machines.
//!
//! Calls block.
//! One thread of a tokio runtime keeps the connections, and no other crate uses tokio for etcd.
//! Each call returns within seconds.
//! A read whose answer was lost is repeated, at another member if there is one.
//! A change whose answer was lost is not repeated: it returns [`DirectoryError::Unavailable`].
//!
//! Revisions are etcd's own, and count the changes of all its users.
//! `docs/formats/directory.md` describes the keys in etcd.

#![forbid(unsafe_code)]

mod address;
mod failure;
#[cfg(test)]
mod golden_tests;
mod keys;
mod members;
mod watch;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{
    Client, CompareOp, GetOptions, GetResponse, PutOptions, Txn, TxnOp, TxnOpResponse, TxnResponse,
};
use tokio::runtime::Runtime;

use aquifer_directory::LimitKind;
use aquifer_directory::check;
use aquifer_directory::clock::saturating_ms;
use aquifer_directory::{
    Compare, DirectoryEntry, KeyOperation, Lease, LeaseId, Listing, Transaction, TransactionOutcome, limits,
};
use aquifer_directory::{Directory, DirectoryError, Watch};

pub use address::{AddressError, EtcdAddress, TlsFiles};
use keys::{EtcdKeys, end_of, lease_number, unsigned};
use members::{CallError, EtcdMembers, Repetition};
use watch::{EtcdWatch, MESSAGE_BYTES_MAX};

/// Most entries that one request reads. With the longest values they fit into the longest message.
const PAGE_ENTRIES: usize = 256;
/// Attempts of a listing, which starts again if its revision is compacted between two pages.
const LIST_ATTEMPTS_MAX: u32 = 5;

/// The state that calls and watches share.
#[derive(Debug)]
struct EtcdState {
    members: EtcdMembers,
    keys: EtcdKeys,
}

/// The runtime with the thread that keeps the connections.
///
/// The drop of the runtime does not wait for blocking calls, such as the resolution of a name.
#[derive(Debug)]
struct EtcdRuntime(Option<Runtime>);

impl EtcdRuntime {
    fn start() -> std::io::Result<Self> {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(1).thread_name("etcd").enable_all().build().map(|runtime| Self(Some(runtime)))
    }

    fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.0.as_ref().expect("the runtime is removed only in drop").block_on(future)
    }
}

impl Drop for EtcdRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// A directory in etcd.
pub struct EtcdDirectory {
    state: Arc<EtcdState>,
    runtime: Arc<EtcdRuntime>,
}

impl fmt::Debug for EtcdDirectory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdDirectory").field("address", &self.state.members.address).finish_non_exhaustive()
    }
}

/// Connects to the etcd at `address`, with the files `tls` if the address requires TLS.
///
/// # Errors
/// [`DirectoryError::Unavailable`] if no member answers in time.
/// [`DirectoryError::Refused`] if etcd refuses, or a file of `tls` cannot be used.
pub fn connect(address: &EtcdAddress, tls: &TlsFiles) -> Result<EtcdDirectory, DirectoryError> {
    let runtime = EtcdRuntime::start().map_err(|error| DirectoryError::Unavailable {
        address: address.to_string(),
        cause: format!("cannot start the thread for connections: {error}"),
    })?;
    let keys = EtcdKeys::new(&address.cluster);
    let members = runtime.block_on(EtcdMembers::new(address, tls, keys.epoch.clone()))?;
    let state = Arc::new(EtcdState { members, keys });
    runtime.block_on(state.revision())?;
    Ok(EtcdDirectory { state, runtime: Arc::new(runtime) })
}

impl EtcdState {
    async fn get(&self, key: &str, options: GetOptions) -> Result<GetResponse, CallError> {
        let ask = |client: Client| {
            let options = options.clone();
            async move {
                let kv = client.kv_client().max_decoding_message_size(MESSAGE_BYTES_MAX);
                { kv }.get(key, Some(options)).await
            }
        };
        self.members.call(Repetition::Allowed, ask).await
    }

    /// The revision of etcd's last change.
    async fn revision(&self) -> Result<u64, DirectoryError> {
        let found = self.get(&self.keys.epoch, GetOptions::new().with_count_only()).await;
        revision_of(found.map_err(CallError::other)?.header())
    }

    async fn list(&self, prefix: &str) -> Result<Listing, DirectoryError> {
        let mut attempts = 1;
        loop {
            match self.list_once(prefix).await? {
                Some(listing) => return Ok(listing),
                None if attempts < LIST_ATTEMPTS_MAX => attempts += 1,
                None => {
                    return Err(self
                        .members
                        .unavailable("etcd compacts revisions faster than it lists keys"));
                }
            }
        }
    }

    /// A listing, in pages of one revision; `None` if the revision was compacted between two pages.
    async fn list_once(&self, prefix: &str) -> Result<Option<Listing>, DirectoryError> {
        let outer = self.keys.outer(prefix);
        let page = i64::try_from(PAGE_ENTRIES).expect("PAGE_ENTRIES fits i64");
        let mut options = GetOptions::new().with_range(end_of(&outer)).with_limit(page);
        let (mut start, mut bytes) = (outer, 0);
        let mut listing: Option<Listing> = None;
        loop {
            let found = match self.get(&start, options.clone()).await {
                Err(CallError::Compacted) if listing.is_some() => return Ok(None),
                found => found.map_err(CallError::other)?,
            };
            let revision = revision_of(found.header())?;
            let so_far = listing.get_or_insert(Listing { revision, entries: Vec::new() });
            for found in found.kvs() {
                let entry = self.keys.entry(found)?;
                bytes += entry.key.len() + entry.value.len();
                check::limit(LimitKind::ListBytes, bytes, limits::LIST_BYTES_MAX)?;
                check::limit(LimitKind::ListEntries, so_far.entries.len() + 1, limits::LIST_ENTRIES_MAX)?;
                so_far.entries.push(entry);
            }
            match so_far.entries.last() {
                Some(last) if found.more() => {
                    // The smallest key after the last one.
                    start = format!("{}\0", self.keys.outer(&last.key));
                    let at = i64::try_from(so_far.revision).expect("the revision was received as an i64");
                    options = options.with_revision(at);
                }
                _ => return Ok(listing),
            }
        }
    }

    async fn transaction(&self, transaction: &Transaction) -> Result<TransactionOutcome, DirectoryError> {
        let built = self.build(transaction)?;
        let ask = |client: Client| {
            let built = built.clone();
            async move { client.kv_client().txn(built).await }
        };
        match self.members.call(Repetition::Forbidden, ask).await {
            Ok(answer) if answer.succeeded() => {
                Ok(TransactionOutcome::Committed { revision: revision_of(answer.header())? })
            }
            Ok(answer) => conflict(&transaction.compares, &answer),
            Err(CallError::LeaseGone) => {
                Err(DirectoryError::LeaseGone(self.find_ended_lease(transaction).await?))
            }
            Err(answer) => Err(answer.other()),
        }
    }

    fn build(&self, transaction: &Transaction) -> Result<Txn, DirectoryError> {
        let mut compares = Vec::new();
        let mut reads = Vec::new();
        for compare in &transaction.compares {
            let key = self.keys.outer(&compare.key);
            // No key has a greater version than i64::MAX, so the compare fails.
            let version = i64::try_from(compare.version).unwrap_or(i64::MAX);
            compares.push(etcd_client::Compare::mod_revision(key.as_str(), CompareOp::Equal, version));
            reads.push(TxnOp::get(key, Some(GetOptions::new().with_keys_only())));
        }
        let mut operations = Vec::new();
        for operation in &transaction.operations {
            let key = self.keys.outer(operation.key());
            operations.push(match operation {
                KeyOperation::Put { value, lease, .. } => {
                    let lease = lease.map_or(Ok(0), lease_number)?;
                    TxnOp::put(key, value.clone(), Some(PutOptions::new().with_lease(lease)))
                }
                KeyOperation::Delete { .. } => TxnOp::delete(key, None),
            });
        }
        Ok(Txn::new().when(compares).and_then(operations).or_else(reads))
    }

    /// The lease of a transaction that etcd does not know.
    async fn find_ended_lease(&self, transaction: &Transaction) -> Result<LeaseId, DirectoryError> {
        let lease_of = |operation: &KeyOperation| match operation {
            KeyOperation::Put { lease, .. } => *lease,
            KeyOperation::Delete { .. } => None,
        };
        let mut leases: Vec<_> = transaction.operations.iter().filter_map(lease_of).collect();
        leases.dedup();
        for id in leases.iter().copied().filter(|_| leases.len() > 1) {
            let number = lease_number(id)?;
            let ask = |client: Client| async move { client.lease_client().time_to_live(number, None).await };
            let life = self.members.call(Repetition::Allowed, ask).await.map_err(CallError::other)?;
            if life.ttl() <= 0 {
                return Ok(id);
            }
        }
        leases.first().copied().ok_or_else(|| DirectoryError::Protocol {
            why: "etcd reports an unknown lease, and the transaction has no lease".to_owned(),
        })
    }

    async fn grant(&self, ttl: Duration) -> Result<Lease, DirectoryError> {
        check::ttl(saturating_ms(ttl))?;
        // etcd counts in seconds, and raises a time to live that is shorter than an election.
        let seconds =
            i64::try_from(ttl.as_millis().div_ceil(1000)).expect("a time to live is at most an hour");
        let ask = |client: Client| async move { client.lease_client().grant(seconds, None).await };
        let granted = self.members.call(Repetition::Forbidden, ask).await.map_err(CallError::other)?;
        let id = LeaseId(unsigned(granted.id())?);
        // Each grant changes this key after the lease exists. The revision of the change is greater
        // than that of every earlier grant, also if the call is repeated.
        let epoch = self.keys.epoch.as_str();
        let ask = |client: Client| async move { client.kv_client().put(epoch, id.to_string(), None).await };
        let put = self.members.call(Repetition::Allowed, ask).await.map_err(CallError::other);
        match put.and_then(|put| revision_of(put.header())) {
            Ok(epoch) => Ok(Lease { id, epoch }),
            Err(error) => {
                // If this fails, the lease ends at its deadline.
                let _left = self.revoke(id).await;
                Err(error)
            }
        }
    }

    async fn keep_alive(&self, id: LeaseId) -> Result<(), DirectoryError> {
        let number = lease_number(id)?;
        let ask = |client: Client| async move { client.lease_client().keep_alive(number).await.map(drop) };
        self.members.call(Repetition::Allowed, ask).await.map_err(|error| lease_error(id, error))
    }

    async fn revoke(&self, id: LeaseId) -> Result<(), DirectoryError> {
        let number = lease_number(id)?;
        let ask = |client: Client| async move { client.lease_client().revoke(number).await.map(drop) };
        self.members.call(Repetition::Forbidden, ask).await.map_err(|error| lease_error(id, error))
    }
}

impl Directory for EtcdDirectory {
    fn get(&self, key: &str) -> Result<Option<DirectoryEntry>, DirectoryError> {
        check::key(key)?;
        let outer = self.state.keys.outer(key);
        let found =
            self.runtime.block_on(self.state.get(&outer, GetOptions::new())).map_err(CallError::other)?;
        found.kvs().first().map(|found| self.state.keys.entry(found)).transpose()
    }

    fn list(&self, prefix: &str) -> Result<Listing, DirectoryError> {
        check::prefix(prefix)?;
        self.runtime.block_on(self.state.list(prefix))
    }

    fn transaction(&self, transaction: &Transaction) -> Result<TransactionOutcome, DirectoryError> {
        check::transaction(transaction)?;
        self.runtime.block_on(self.state.transaction(transaction))
    }

    fn lease_grant(&self, ttl: Duration) -> Result<Lease, DirectoryError> {
        self.runtime.block_on(self.state.grant(ttl))
    }

    fn lease_keep_alive(&self, id: LeaseId) -> Result<(), DirectoryError> {
        self.runtime.block_on(self.state.keep_alive(id))
    }

    fn lease_revoke(&self, id: LeaseId) -> Result<(), DirectoryError> {
        self.runtime.block_on(self.state.revoke(id))
    }

    fn watch(&self, prefix: &str, from_revision: u64) -> Result<Box<dyn Watch>, DirectoryError> {
        check::prefix(prefix)?;
        let (state, runtime) = (Arc::clone(&self.state), Arc::clone(&self.runtime));
        let outer = state.keys.outer(prefix);
        Ok(Box::new(EtcdWatch::start(state, runtime, outer, from_revision)?))
    }
}

/// The conflict of a transaction: the first compare that did not hold.
fn conflict(compares: &[Compare], answer: &TxnResponse) -> Result<TransactionOutcome, DirectoryError> {
    for (compare, found) in compares.iter().zip(answer.op_responses()) {
        let TxnOpResponse::Get(found) = found else { break };
        let version = found.kvs().first().map_or(Ok(0), |found| unsigned(found.mod_revision()))?;
        if version != compare.version {
            return Ok(TransactionOutcome::Conflict { key: compare.key.clone(), version });
        }
    }
    Err(DirectoryError::Protocol { why: "etcd reports a conflict, and all compares hold".to_owned() })
}

fn lease_error(id: LeaseId, error: CallError) -> DirectoryError {
    match error {
        CallError::LeaseGone => DirectoryError::LeaseGone(id),
        error => error.other(),
    }
}

fn revision_of(header: Option<&etcd_client::ResponseHeader>) -> Result<u64, DirectoryError> {
    let missing = || DirectoryError::Protocol { why: "an answer has no revision".to_owned() };
    unsigned(header.ok_or_else(missing)?.revision())
}
