//! The records of a cache in the directory, and the transactions that change them.
//!
//! `docs/formats/directory.md` lists the keys, and `docs/formats/cache-peers.md` the fields.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use aquifer_cache::store::hash::HashSecret;
use aquifer_directory::names::{self, decode, encode};
use aquifer_directory::{
    Compare, Directory, DirectoryEntry, DirectoryError, KeyOperation, Lease, Transaction, Watch,
};
use aquifer_ownership::transaction::carry_out;
use aquifer_ownership::{Change, Life, SegmentRecord};
use serde::{Deserialize, Serialize};

/// Largest number of servers of a cache.
pub const SERVERS_MAX: u16 = 1024;
/// Attempts at a transaction whose records other servers change at the same time.
const ATTEMPTS_MAX: u32 = 64;
/// Largest number of partitions that one transaction claims.
const CLAIMS_MAX: usize = 32;

/// Settings that all servers of a cache share, at `caches/NAME/settings`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CacheSettings {
    /// Number of partitions.
    pub partitions: usize,
    /// Whether items have cas numbers.
    pub has_cas: bool,
    /// Random number that the first server writes. It distinguishes caches of the same name in
    /// different directories.
    pub id: u64,
    /// Secret of the hash that maps keys to partitions, random, from the first server.
    pub hash_secret: HashSecret,
}

/// The version of [`SettingsRecord`].
const SETTINGS_VERSION: u32 = 2;

/// The record at `caches/NAME/settings`. A server of version 1, which has another hash, cannot read
/// it and does not join.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct SettingsRecord {
    pub(crate) version: u32,
    pub(crate) cache: CacheSettings,
}

impl SettingsRecord {
    pub(crate) fn new(cache: CacheSettings) -> Self {
        Self { version: SETTINGS_VERSION, cache }
    }
}

/// The version of a settings record. Records of version 1 have no such field.
#[derive(Deserialize)]
struct VersionOfSettings {
    #[serde(default = "first_version")]
    version: u32,
}

const fn first_version() -> u32 {
    1
}

/// A server, at `caches/NAME/servers/NUMBER` while its lease lasts.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ServerRecord {
    /// The number of the server.
    pub server: u16,
    /// Fencing epoch of the lease.
    pub epoch: u64,
    /// TCP address for connections of other servers.
    pub address: SocketAddr,
    /// TCP address at which other servers read the memory of partitions that move.
    pub memory_address: SocketAddr,
    /// Boot identity of the server's machine; empty if [`Self::memory_socket`] is not used.
    pub machine: String,
    /// Path of the socket at which servers of the same machine read the memory of partitions that
    /// move; may be empty.
    pub memory_socket: String,
    /// Addresses for clients.
    pub clients: Vec<String>,
    /// Bytes of memory for items and their index.
    pub memory_bytes: u64,
    /// Whether the server drains: it gets no partitions, and hands its own over.
    #[serde(default)]
    pub drains: bool,
}

impl ServerRecord {
    /// Returns the life of the server: its number and the epoch of its lease.
    #[must_use]
    pub fn life(&self) -> Life {
        Life { host: self.server, epoch: self.epoch }
    }
}

/// Why a server cannot join a cache.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// The directory refused or did not answer.
    #[error("the server cannot join the cache \"{name}\": {source}")]
    Directory {
        /// The name of the cache.
        name: String,
        /// The error of the directory.
        source: DirectoryError,
    },
    /// The servers of the cache have other options.
    #[error(
        "the servers of the cache \"{name}\" have {} partitions, with{} cas numbers: start this one \
         with the same options",
        settings.partitions,
        if settings.has_cas { "" } else { "out" }
    )]
    Settings {
        /// The name of the cache.
        name: String,
        /// The settings of the cache.
        settings: CacheSettings,
    },
    /// The cache has running servers of an earlier version, with another hash.
    #[error(
        "the cache \"{name}\" has servers of an earlier version of aquifer, which place keys by another \
         hash: stop all of them first, or start this server with another --name"
    )]
    EarlierServers {
        /// The name of the cache.
        name: String,
    },
    /// The settings have an unknown version.
    #[error(
        "the settings of the cache \"{name}\" have version {version}, but this server knows version \
         {SETTINGS_VERSION}: use the version of aquifer that the other servers have"
    )]
    Version {
        /// The name of the cache.
        name: String,
        /// The version.
        version: u32,
    },
    /// All numbers of servers are used.
    #[error("the cache \"{0}\" already has {SERVERS_MAX} servers, which is the limit")]
    Full(String),
}

/// Kind and number of a record of the cache, by its key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CacheKey {
    /// A server.
    Server(u16),
    /// A partition.
    Partition(usize),
}

/// A claim of an unowned partition.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Claim {
    /// The partition.
    pub partition: usize,
    /// The partition's record, by which it has no owner; `None` if it has no record. The claim
    /// fails if the record has changed.
    pub record: Option<SegmentRecord>,
}

/// The records of one cache.
#[derive(Debug)]
pub struct Registry {
    directory: Arc<dyn Directory>,
    name: String,
}

impl Registry {
    /// A registry of the cache with this name.
    #[must_use]
    pub fn new(directory: Arc<dyn Directory>, name: &str) -> Self {
        Self { directory, name: name.to_owned() }
    }

    /// The directory.
    #[must_use]
    pub fn directory(&self) -> &Arc<dyn Directory> {
        &self.directory
    }

    /// The prefix of all keys.
    #[must_use]
    pub fn prefix(&self) -> String {
        format!("{}{}/", names::CACHES, self.name)
    }

    fn server_key(&self, server: u16) -> String {
        format!("{}servers/{server}", self.prefix())
    }

    fn partition_key(&self, partition: usize) -> String {
        format!("{}partitions/{partition}", self.prefix())
    }

    /// Parses the key of a server's or a partition's record; `None` for other keys.
    #[must_use]
    pub fn parse_key(&self, key: &str) -> Option<CacheKey> {
        let (kind, number) = key.strip_prefix(&self.prefix())?.split_once('/')?;
        match kind {
            "servers" => number.parse().ok().map(CacheKey::Server),
            "partitions" => number.parse().ok().map(CacheKey::Partition),
            _ => None,
        }
    }

    fn settings_key(&self) -> String {
        format!("{}settings", self.prefix())
    }

    /// Writes `own` as the settings of the cache if it has none, and compares them otherwise.
    /// Returns the settings of the cache. Settings of an earlier version are replaced if no server
    /// runs.
    ///
    /// # Errors
    /// [`JoinError`] if the cache has settings with which this server cannot join, or if a request
    /// to the directory fails.
    pub fn join(&self, own: &CacheSettings) -> Result<CacheSettings, JoinError> {
        let key = self.settings_key();
        let name = || self.name.clone();
        let failed = |source| JoinError::Directory { name: name(), source };
        for _ in 0..ATTEMPTS_MAX {
            let entry = self.directory.get(&key).map_err(failed)?;
            if let Some(entry) = &entry {
                match decode::<VersionOfSettings>(entry).map_err(failed)?.version {
                    1 if !self.servers().map_err(failed)?.is_empty() => {
                        return Err(JoinError::EarlierServers { name: name() });
                    }
                    1 => {
                        tracing::info!("replacing the settings of an earlier version: the cache begins empty")
                    }
                    SETTINGS_VERSION => {
                        let settings = decode::<SettingsRecord>(entry).map_err(failed)?.cache;
                        if (settings.partitions, settings.has_cas) != (own.partitions, own.has_cas) {
                            return Err(JoinError::Settings { name: name(), settings });
                        }
                        return Ok(settings);
                    }
                    version => return Err(JoinError::Version { name: name(), version }),
                }
            }
            let version = entry.map_or(0, |entry| entry.version);
            let replace = Transaction {
                compares: vec![Compare::version(&key, version)],
                operations: vec![KeyOperation::put(&key, encode(&SettingsRecord::new(own.clone())), None)],
            };
            if self.directory.transaction(&replace).map_err(failed)?.is_committed() {
                return Ok(own.clone());
            }
        }
        Err(failed(DirectoryError::Taken { key }))
    }

    /// Returns the settings of the cache; `None` if no server has ever joined.
    ///
    /// # Errors
    /// Errors of the directory.
    pub fn settings(&self) -> Result<Option<CacheSettings>, DirectoryError> {
        let entry = self.directory.get(&self.settings_key())?;
        Ok(entry.map(|entry| decode::<SettingsRecord>(&entry)).transpose()?.map(|record| record.cache))
    }

    /// Adds the record of a server under its lease. The server gets the number of `record` if that
    /// is not 0 and free, and otherwise the first free number.
    ///
    /// # Errors
    /// Errors of the directory, or [`JoinError::Full`].
    pub fn add_server(&self, record: &ServerRecord, lease: Lease) -> Result<ServerRecord, JoinError> {
        let failed = |source| JoinError::Directory { name: self.name.clone(), source };
        let used = self.servers().map_err(failed)?;
        let last = (record.server != 0).then_some(record.server);
        let free = (1..=SERVERS_MAX).filter(|number| Some(*number) != last);
        for server in last.into_iter().chain(free).filter(|number| !used.contains_key(number)) {
            let record = ServerRecord { server, epoch: lease.epoch, ..record.clone() };
            let key = self.server_key(server);
            let add = Transaction {
                compares: vec![Compare::absent(&key)],
                operations: vec![KeyOperation::put(&key, encode(&record), Some(lease.id))],
            };
            if self.directory.transaction(&add).map_err(failed)?.is_committed() {
                return Ok(record);
            }
        }
        Err(JoinError::Full(self.name.clone()))
    }

    /// Replaces the record of a server whose lease lasts.
    ///
    /// # Errors
    /// Errors of the directory, or [`DirectoryError::Taken`] if the lease has ended.
    pub fn update_server(&self, record: &ServerRecord) -> Result<(), DirectoryError> {
        let key = self.server_key(record.server);
        for _ in 0..ATTEMPTS_MAX {
            let Some(entry) = self.directory.get(&key)? else { break };
            if decode::<ServerRecord>(&entry)?.epoch != record.epoch {
                break;
            }
            let compares = vec![Compare::version(&key, entry.version)];
            let operations = vec![KeyOperation::put(&key, encode(record), entry.lease)];
            if self.directory.transaction(&Transaction { compares, operations })?.is_committed() {
                return Ok(());
            }
        }
        Err(DirectoryError::Taken { key })
    }

    /// Lists the servers, by number.
    ///
    /// # Errors
    /// Errors of the directory.
    pub fn servers(&self) -> Result<BTreeMap<u16, ServerRecord>, DirectoryError> {
        let listing = self.directory.list(&format!("{}servers/", self.prefix()))?;
        let records = listing.entries.iter().map(decode::<ServerRecord>);
        records.map(|record| record.map(|record| (record.server, record))).collect()
    }

    /// Lists all entries of the cache, and returns the revision of the listing.
    ///
    /// # Errors
    /// Errors of the directory.
    pub fn list(&self) -> Result<(Vec<DirectoryEntry>, u64), DirectoryError> {
        let listing = self.directory.list(&self.prefix())?;
        Ok((listing.entries, listing.revision))
    }

    /// Watches all entries of the cache.
    ///
    /// # Errors
    /// Errors of the directory.
    pub fn watch(&self, from_revision: u64) -> Result<Box<dyn Watch>, DirectoryError> {
        self.directory.watch(&self.prefix(), from_revision)
    }

    /// Reads the record of a partition, and whether the lease of `other` lasts. Returns `None` if
    /// the partition has no record.
    ///
    /// # Errors
    /// Errors of the directory.
    pub fn observe(
        &self,
        partition: usize,
        other: Option<Life>,
    ) -> Result<Option<(SegmentRecord, bool)>, DirectoryError> {
        // The lease is read first: a target that confirms and then dies is seen to have confirmed.
        let lives = other.map_or(Ok(true), |life| self.life_of(life, &mut Vec::new()))?;
        let Some(entry) = self.directory.get(&self.partition_key(partition))? else { return Ok(None) };
        Ok(Some((decode(&entry)?, lives)))
    }

    /// Carries out a transaction of a hand-over. Returns whether it was carried out.
    ///
    /// # Errors
    /// Errors of the directory. The transaction may have been carried out.
    pub fn carry_out(&self, partition: usize, change: &Change) -> Result<bool, DirectoryError> {
        let key = self.partition_key(partition);
        carry_out(&*self.directory, &key, change, |life, compares| self.life_of(life, compares))
    }

    /// Claims partitions that no server owns. Returns the claimed partitions and their generations.
    ///
    /// A partition has no owner if it has no record, or if the lease of its owner has ended, and it
    /// has no intent or one whose target's lease has ended or is `own`. A target must not have
    /// received a partition that it claims.
    ///
    /// # Errors
    /// Errors of the directory. Some partitions may have been claimed.
    pub fn claim(&self, own: Life, claims: &[Claim]) -> Result<Vec<(usize, u64)>, DirectoryError> {
        let mut claimed = Vec::new();
        for claims in claims.chunks(CLAIMS_MAX) {
            claimed.extend(self.claim_some(own, claims)?);
        }
        Ok(claimed)
    }

    fn claim_some(&self, own: Life, claims: &[Claim]) -> Result<Vec<(usize, u64)>, DirectoryError> {
        let mut compares = Vec::new();
        let mut lives: BTreeMap<Life, bool> = BTreeMap::new();
        if !self.life_of(own, &mut compares)? {
            return Ok(Vec::new());
        }
        let (mut operations, mut claimed) = (Vec::new(), Vec::new());
        for Claim { partition, record: seen } in claims {
            let key = self.partition_key(*partition);
            let entry = self.directory.get(&key)?;
            let record = entry.as_ref().map(decode::<SegmentRecord>).transpose()?;
            if record != *seen {
                continue;
            }
            let mut is_dead = |life: Life| -> Result<bool, DirectoryError> {
                if let Some(lives) = lives.get(&life) {
                    return Ok(!lives);
                }
                let lives_now = life != own && self.life_of(life, &mut compares)?;
                lives.insert(life, lives_now);
                Ok(!lives_now)
            };
            let generation = match &record {
                None => 1,
                Some(record) => {
                    let is_lost = is_dead(record.owner)?
                        && record
                            .intent
                            .map_or(Ok(true), |to| if to == own { Ok(true) } else { is_dead(to) })?;
                    if !is_lost {
                        continue;
                    }
                    // Plus 2, so that the number of a hand-over that has begun is not used again.
                    record.generation + 2
                }
            };
            compares.push(Compare::version(&key, entry.map_or(0, |entry| entry.version)));
            operations.push(KeyOperation::put(&key, encode(&SegmentRecord::new(own, generation)), None));
            claimed.push((*partition, generation));
        }
        let transaction = Transaction { compares, operations };
        if claimed.is_empty() || !self.directory.transaction(&transaction)?.is_committed() {
            return Ok(Vec::new());
        }
        Ok(claimed)
    }

    /// Whether a life lasts. Adds a compare to `compares`, so that a transaction fails if that has
    /// changed.
    fn life_of(&self, life: Life, compares: &mut Vec<Compare>) -> Result<bool, DirectoryError> {
        let key = self.server_key(life.host);
        let entry = self.directory.get(&key)?;
        let compare = Compare::version(&key, entry.as_ref().map_or(0, |entry| entry.version));
        if !compares.contains(&compare) {
            compares.push(compare);
        }
        let record = entry.map(|entry| decode::<ServerRecord>(&entry)).transpose()?;
        Ok(record.is_some_and(|record| record.epoch == life.epoch))
    }
}
