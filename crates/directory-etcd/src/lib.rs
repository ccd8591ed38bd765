//! A directory for a cluster of machines: a real etcd, 3.4 or newer.
//!
//! Callers block; behind them one thread of a tokio runtime keeps the connections, and nothing else in Aquifer knows of it. Every
//! call has an end within seconds. A question whose answer was lost is asked again, of another member if there is one; a change
//! whose answer was lost never is, and gets [`DirectoryError::Unavailable`].
//!
//! Revisions are etcd's own and count the changes of all who use it. `docs/formats/directory.md` says where our keys are.

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

use aquifer_directory::Bound;
use aquifer_directory::clock::saturating_ms;
use aquifer_directory::core::check;
use aquifer_directory::{
    Compare, Entry, Lease, LeaseId, Listing, Operation, Transaction, TransactionOutcome, limits,
};
use aquifer_directory::{Directory, DirectoryError, Watch};

pub use address::{AddressError, EtcdAddress, TlsFiles};
use keys::{Keys, end_of, lease_number, unsigned};
use members::{Answer, Members, Repeat};
use watch::{EtcdWatch, MESSAGE_BYTES_MAX};

/// Entries that are read in one piece: with the longest values they fit the longest message.
const PAGE_ENTRIES: usize = 256;
/// How often a listing begins anew because its revision was compacted meanwhile.
const LIST_ATTEMPTS_MAX: u32 = 5;

/// What calls and watches share.
#[derive(Debug)]
struct Inner {
    members: Members,
    keys: Keys,
}

/// The thread that keeps the connections. When it goes, nobody waits for a name that is still being looked up.
#[derive(Debug)]
struct Threads(Option<Runtime>);

impl Threads {
    fn start() -> std::io::Result<Self> {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(1).thread_name("etcd").enable_all().build().map(|runtime| Self(Some(runtime)))
    }

    fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.0.as_ref().expect("it goes last").block_on(future)
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// A directory in an etcd.
pub struct Etcd {
    inner: Arc<Inner>,
    runtime: Arc<Threads>,
}

impl fmt::Debug for Etcd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Etcd").field("address", &self.inner.members.address).finish_non_exhaustive()
    }
}

/// Use the etcd at `address`; `tls` counts if it speaks TLS.
///
/// # Errors
/// No member answers within seconds, or none serves us; a file of `tls` cannot be used.
pub fn connect(address: &EtcdAddress, tls: &TlsFiles) -> Result<Etcd, DirectoryError> {
    let runtime = Threads::start().map_err(|error| DirectoryError::Unavailable {
        address: address.to_string(),
        cause: format!("no thread for its connections: {error}"),
    })?;
    let keys = Keys::new(&address.cluster);
    let members = runtime.block_on(Members::new(address, tls, keys.epoch.clone()))?;
    let inner = Arc::new(Inner { members, keys });
    runtime.block_on(inner.revision())?;
    Ok(Etcd { inner, runtime: Arc::new(runtime) })
}

impl Inner {
    async fn get(&self, key: &str, options: GetOptions) -> Result<GetResponse, Answer> {
        let ask = |client: Client| {
            let options = options.clone();
            async move {
                let kv = client.kv_client().max_decoding_message_size(MESSAGE_BYTES_MAX);
                { kv }.get(key, Some(options)).await
            }
        };
        self.members.call(Repeat::Free, ask).await
    }

    /// The revision of the last change of all.
    async fn revision(&self) -> Result<u64, DirectoryError> {
        let found = self.get(&self.keys.epoch, GetOptions::new().with_count_only()).await;
        revision_of(found.map_err(Answer::other)?.header())
    }

    async fn list(&self, prefix: &str) -> Result<Listing, DirectoryError> {
        let mut attempts = 1;
        loop {
            match self.list_once(prefix).await? {
                Some(listing) => return Ok(listing),
                None if attempts < LIST_ATTEMPTS_MAX => attempts += 1,
                None => return Err(self.members.unavailable("it compacts faster than it lists")),
            }
        }
    }

    /// A listing, in pages of one revision; `None` if that was compacted between two of them.
    async fn list_once(&self, prefix: &str) -> Result<Option<Listing>, DirectoryError> {
        let outer = self.keys.outer(prefix);
        let page = i64::try_from(PAGE_ENTRIES).expect("a page is short");
        let mut options = GetOptions::new().with_range(end_of(&outer)).with_limit(page);
        let (mut start, mut bytes) = (outer, 0);
        let mut listing: Option<Listing> = None;
        loop {
            let found = match self.get(&start, options.clone()).await {
                Err(Answer::Compacted) if listing.is_some() => return Ok(None),
                found => found.map_err(Answer::other)?,
            };
            let revision = revision_of(found.header())?;
            let so_far = listing.get_or_insert(Listing { revision, entries: Vec::new() });
            for found in found.kvs() {
                let entry = self.keys.entry(found)?;
                bytes += entry.key.len() + entry.value.len();
                check::limit(Bound::ListBytes, bytes, limits::LIST_BYTES_MAX)?;
                check::limit(Bound::ListEntries, so_far.entries.len() + 1, limits::LIST_ENTRIES_MAX)?;
                so_far.entries.push(entry);
            }
            match so_far.entries.last() {
                Some(last) if found.more() => {
                    // The next key in order.
                    start = format!("{}\0", self.keys.outer(&last.key));
                    let at = i64::try_from(so_far.revision).expect("it came as such a number");
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
        match self.members.call(Repeat::Never, ask).await {
            Ok(answer) if answer.succeeded() => {
                Ok(TransactionOutcome::Committed { revision: revision_of(answer.header())? })
            }
            Ok(answer) => conflict(&transaction.compares, &answer),
            Err(Answer::LeaseGone) => Err(DirectoryError::LeaseGone(self.which_is_gone(transaction).await?)),
            Err(answer) => Err(answer.other()),
        }
    }

    fn build(&self, transaction: &Transaction) -> Result<Txn, DirectoryError> {
        let mut compares = Vec::new();
        let mut looks = Vec::new();
        for compare in &transaction.compares {
            let key = self.keys.outer(&compare.key);
            // No key is ever at such a version; the comparison fails as it should.
            let version = i64::try_from(compare.version).unwrap_or(i64::MAX);
            compares.push(etcd_client::Compare::mod_revision(key.as_str(), CompareOp::Equal, version));
            looks.push(TxnOp::get(key, Some(GetOptions::new().with_keys_only())));
        }
        let mut operations = Vec::new();
        for operation in &transaction.operations {
            let key = self.keys.outer(operation.key());
            operations.push(match operation {
                Operation::Put { value, lease, .. } => {
                    let lease = lease.map_or(Ok(0), lease_number)?;
                    TxnOp::put(key, value.clone(), Some(PutOptions::new().with_lease(lease)))
                }
                Operation::Delete { .. } => TxnOp::delete(key, None),
            });
        }
        Ok(Txn::new().when(compares).and_then(operations).or_else(looks))
    }

    /// Which of a transaction's leases etcd does not know.
    async fn which_is_gone(&self, transaction: &Transaction) -> Result<LeaseId, DirectoryError> {
        let lease_of = |operation: &Operation| match operation {
            Operation::Put { lease, .. } => *lease,
            Operation::Delete { .. } => None,
        };
        let mut leases: Vec<_> = transaction.operations.iter().filter_map(lease_of).collect();
        leases.dedup();
        for id in leases.iter().copied().filter(|_| leases.len() > 1) {
            let number = lease_number(id)?;
            let ask = |client: Client| async move { client.lease_client().time_to_live(number, None).await };
            let life = self.members.call(Repeat::Free, ask).await.map_err(Answer::other)?;
            if life.ttl() <= 0 {
                return Ok(id);
            }
        }
        leases.first().copied().ok_or_else(|| DirectoryError::Protocol {
            why: "it misses a lease, and the transaction has none".to_owned(),
        })
    }

    async fn grant(&self, ttl: Duration) -> Result<Lease, DirectoryError> {
        check::ttl(saturating_ms(ttl))?;
        // etcd counts in seconds, and raises what is shorter than its elections take.
        let seconds = i64::try_from(ttl.as_millis().div_ceil(1000)).expect("it is an hour at most");
        let ask = |client: Client| async move { client.lease_client().grant(seconds, None).await };
        let granted = self.members.call(Repeat::Never, ask).await.map_err(Answer::other)?;
        let id = LeaseId(unsigned(granted.id())?);
        // Whoever was granted a lease before has changed this key before, so its revision was less. Twice does no harm.
        let epoch = self.keys.epoch.as_str();
        let ask = |client: Client| async move { client.kv_client().put(epoch, id.to_string(), None).await };
        let put = self.members.call(Repeat::Free, ask).await.map_err(Answer::other);
        match put.and_then(|put| revision_of(put.header())) {
            Ok(epoch) => Ok(Lease { id, epoch }),
            Err(error) => {
                // Else it ends by itself.
                let _left = self.revoke(id).await;
                Err(error)
            }
        }
    }

    async fn keep_alive(&self, id: LeaseId) -> Result<(), DirectoryError> {
        let number = lease_number(id)?;
        let ask = |client: Client| async move { client.lease_client().keep_alive(number).await.map(drop) };
        self.members.call(Repeat::Free, ask).await.map_err(|answer| gone_or_other(id, answer))
    }

    async fn revoke(&self, id: LeaseId) -> Result<(), DirectoryError> {
        let number = lease_number(id)?;
        let ask = |client: Client| async move { client.lease_client().revoke(number).await.map(drop) };
        self.members.call(Repeat::Never, ask).await.map_err(|answer| gone_or_other(id, answer))
    }
}

impl Directory for Etcd {
    fn get(&self, key: &str) -> Result<Option<Entry>, DirectoryError> {
        check::key(key)?;
        let outer = self.inner.keys.outer(key);
        let found =
            self.runtime.block_on(self.inner.get(&outer, GetOptions::new())).map_err(Answer::other)?;
        found.kvs().first().map(|found| self.inner.keys.entry(found)).transpose()
    }

    fn list(&self, prefix: &str) -> Result<Listing, DirectoryError> {
        check::prefix(prefix)?;
        self.runtime.block_on(self.inner.list(prefix))
    }

    fn transaction(&self, transaction: &Transaction) -> Result<TransactionOutcome, DirectoryError> {
        check::transaction(transaction)?;
        self.runtime.block_on(self.inner.transaction(transaction))
    }

    fn lease_grant(&self, ttl: Duration) -> Result<Lease, DirectoryError> {
        self.runtime.block_on(self.inner.grant(ttl))
    }

    fn lease_keep_alive(&self, id: LeaseId) -> Result<(), DirectoryError> {
        self.runtime.block_on(self.inner.keep_alive(id))
    }

    fn lease_revoke(&self, id: LeaseId) -> Result<(), DirectoryError> {
        self.runtime.block_on(self.inner.revoke(id))
    }

    fn watch(&self, prefix: &str, from_revision: u64) -> Result<Box<dyn Watch>, DirectoryError> {
        check::prefix(prefix)?;
        let (inner, runtime) = (Arc::clone(&self.inner), Arc::clone(&self.runtime));
        let outer = inner.keys.outer(prefix);
        Ok(Box::new(EtcdWatch::start(inner, runtime, outer, from_revision)?))
    }
}

/// The first compare that did not hold, by what etcd found instead.
fn conflict(compares: &[Compare], answer: &TxnResponse) -> Result<TransactionOutcome, DirectoryError> {
    for (compare, found) in compares.iter().zip(answer.op_responses()) {
        let TxnOpResponse::Get(found) = found else { break };
        let version = found.kvs().first().map_or(Ok(0), |found| unsigned(found.mod_revision()))?;
        if version != compare.version {
            return Ok(TransactionOutcome::Conflict { key: compare.key.clone(), version });
        }
    }
    Err(DirectoryError::Protocol { why: "it reports a conflict where there is none".to_owned() })
}

fn gone_or_other(id: LeaseId, answer: Answer) -> DirectoryError {
    match answer {
        Answer::LeaseGone => DirectoryError::LeaseGone(id),
        answer => answer.other(),
    }
}

fn revision_of(header: Option<&etcd_client::ResponseHeader>) -> Result<u64, DirectoryError> {
    let missing = || DirectoryError::Protocol { why: "it does not say its revision".to_owned() };
    unsigned(header.ok_or_else(missing)?.revision())
}
