//! The redb file of a directory. Its tables are described in `docs/formats/directory.md`.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use redb::{
    Database, DatabaseError, Durability, ReadableDatabase, ReadableTable, TableDefinition, TableError,
};

use rustix::fs::FallocateFlags;

use crate::DirectoryError;
use crate::core::{Core, Delta, RowChange, StoredValue};
use crate::engine::DeltaStore;
use crate::model::LeaseId;

/// The version of the file. Other versions are refused.
pub const FORMAT: u64 = 1;

const HEAD: TableDefinition<'_, &str, u64> = TableDefinition::new("aquifer-directory");
/// The table from key to version, lease (0 for none) and value.
const ENTRIES: TableDefinition<'_, &str, (u64, u64, &[u8])> = TableDefinition::new("entries");
/// The table from lease to its time to live in milliseconds.
const LEASES: TableDefinition<'_, u64, u64> = TableDefinition::new("leases");

/// Bytes of redb's cache, which is small because the core holds the whole directory in memory.
const CACHE_BYTES: usize = 8 << 20;

/// A redb file that holds a directory.
#[derive(Debug)]
pub(super) struct RedbStore {
    /// The open file; `None` if it could not be opened again after an error.
    database: Option<Database>,
    path: PathBuf,
    /// Bytes of the file that have space on the disk.
    reserved: u64,
}

impl RedbStore {
    /// Opens or creates the file, checks all of it, and restores the core from it.
    pub(super) fn open(path: &Path, now_ms: u64) -> Result<(Self, Core), DirectoryError> {
        let file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path);
        let file = file.map_err(|error| storage(path, &error))?;
        let length = file.metadata().map_err(|error| storage(path, &error))?.len();
        let mut database = open_database(file).map_err(|error| match error {
            DatabaseError::DatabaseAlreadyOpen => {
                storage(path, &"another process has it open; stop that process, or choose another file")
            }
            error => unusable(path, &error),
        })?;
        if length > 0 && !database.check_integrity().map_err(|error| unusable(path, &error))? {
            return Err(format(path, "it is damaged: its checksums do not match".to_owned()));
        }
        let mut store = Self { database: Some(database), path: path.to_owned(), reserved: 0 };
        if length == 0 {
            store.create().map_err(|error| storage(path, &error))?;
            store.reserve();
            return Ok((store, Core::new()));
        }
        store.reserve();
        let core = store.load(now_ms)?;
        Ok((store, core))
    }

    fn database(&self) -> Result<&Database, redb::Error> {
        self.database.as_ref().ok_or(redb::Error::PreviousIo)
    }

    /// Reserves space on the disk for the whole file: redb makes it longer than it is used, so that
    /// small changes can be written to a full disk.
    fn reserve(&mut self) {
        let file = OpenOptions::new().write(true).open(&self.path);
        let reserved = file.and_then(|file| {
            let length = file.metadata()?.len();
            if length > self.reserved {
                rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 0, length)?;
            }
            Ok(length)
        });
        match reserved {
            Ok(length) => self.reserved = length,
            // Not every file system can reserve space.
            Err(error) => tracing::debug!(%error, "cannot reserve disk space for the directory's file"),
        }
    }

    /// Opens the file again, and writes the whole state. redb refuses further work after an error.
    fn rewrite(&mut self, core: &Core) -> Result<(), redb::Error> {
        self.database = None;
        let file = OpenOptions::new().read(true).write(true).open(&self.path)?;
        let database = self.database.insert(open_database(file)?);
        let mut transaction = database.begin_write()?;
        transaction.set_durability(Durability::Immediate)?;
        {
            let mut head = transaction.open_table(HEAD)?;
            head.insert("format", FORMAT)?;
            head.insert("revision", core.revision())?;
            head.insert("epoch", core.epoch())?;
            let mut entries = transaction.open_table(ENTRIES)?;
            entries.retain(|_, _| false)?;
            for (key, record) in core.entries() {
                let lease = record.lease.map_or(0, |id| id.0);
                entries.insert(key, (record.version, lease, record.value.as_slice()))?;
            }
            let mut leases = transaction.open_table(LEASES)?;
            leases.retain(|_, _| false)?;
            for (id, ttl_ms) in core.leases() {
                leases.insert(id.0, ttl_ms)?;
            }
        }
        transaction.commit()?;
        Ok(())
    }

    fn create(&self) -> Result<(), redb::Error> {
        let transaction = self.database()?.begin_write()?;
        {
            let mut head = transaction.open_table(HEAD)?;
            head.insert("format", FORMAT)?;
            head.insert("revision", 0)?;
            head.insert("epoch", 0)?;
            transaction.open_table(ENTRIES)?;
            transaction.open_table(LEASES)?;
        }
        transaction.commit()?;
        Ok(())
    }

    fn load(&self, now_ms: u64) -> Result<Core, DirectoryError> {
        self.check_version()?;
        let (revision, epoch, leases, entries) = self.rows().map_err(|error| unusable(&self.path, &error))?;
        Core::restore(revision, epoch, leases, entries, now_ms)
            .map_err(|why| format(&self.path, why.to_string()))
    }

    fn check_version(&self) -> Result<(), DirectoryError> {
        let read = || -> Result<Option<u64>, redb::Error> {
            let transaction = self.database()?.begin_read()?;
            let head = match transaction.open_table(HEAD) {
                Err(TableError::TableDoesNotExist(_)) => return Ok(None),
                head => head?,
            };
            Ok(head.get("format")?.map(|version| version.value()))
        };
        match read().map_err(|error| unusable(&self.path, &error))? {
            Some(FORMAT) => Ok(()),
            Some(version) => {
                let why = format!("it has version {version}, and this program reads version {FORMAT} only");
                Err(format(&self.path, why))
            }
            None => Err(format(&self.path, "it is the database of another program".to_owned())),
        }
    }

    #[expect(clippy::type_complexity, reason = "one part for each table")]
    fn rows(&self) -> Result<(u64, u64, Vec<(LeaseId, u64)>, Vec<(String, StoredValue)>), redb::Error> {
        let transaction = self.database()?.begin_read()?;
        let head = transaction.open_table(HEAD)?;
        let number = |name| -> Result<u64, redb::Error> {
            head.get(name)?
                .map(|value| value.value())
                .ok_or(redb::Error::Corrupted(format!("\"{name}\" is missing")))
        };
        let mut leases = Vec::new();
        for row in transaction.open_table(LEASES)?.iter()? {
            let (id, ttl_ms) = row?;
            leases.push((LeaseId(id.value()), ttl_ms.value()));
        }
        let mut entries = Vec::new();
        for row in transaction.open_table(ENTRIES)?.iter()? {
            let (key, row) = row?;
            let (version, lease, value) = row.value();
            let lease = (lease != 0).then_some(LeaseId(lease));
            entries.push((key.value().to_owned(), StoredValue { value: value.to_vec(), version, lease }));
        }
        Ok((number("revision")?, number("epoch")?, leases, entries))
    }

    fn write(&self, delta: &Delta) -> Result<(), redb::Error> {
        let mut transaction = self.database()?.begin_write()?;
        transaction.set_durability(Durability::Immediate)?;
        {
            let mut head = transaction.open_table(HEAD)?;
            head.insert("revision", delta.revision)?;
            head.insert("epoch", delta.epoch)?;
            let mut entries = transaction.open_table(ENTRIES)?;
            let mut leases = transaction.open_table(LEASES)?;
            for change in &delta.changes {
                match change {
                    RowChange::Put { key, record } => {
                        let lease = record.lease.map_or(0, |id| id.0);
                        entries.insert(key.as_str(), (record.version, lease, record.value.as_slice()))?;
                    }
                    RowChange::Delete { key } => drop(entries.remove(key.as_str())?),
                    RowChange::Grant { id, ttl_ms } => drop(leases.insert(id.0, *ttl_ms)?),
                    RowChange::End { id } => drop(leases.remove(id.0)?),
                }
            }
        }
        transaction.commit()?;
        Ok(())
    }
}

impl DeltaStore for RedbStore {
    fn commit(&mut self, delta: &Delta) -> Result<(), DirectoryError> {
        self.write(delta).map_err(|error| storage(&self.path, &error))?;
        self.reserve();
        Ok(())
    }

    fn reset(&mut self, core: &Core) -> Result<(), DirectoryError> {
        self.rewrite(core).map_err(|error| storage(&self.path, &error))
    }
}

fn open_database(file: File) -> Result<Database, DatabaseError> {
    let mut builder = Database::builder();
    builder.set_cache_size(CACHE_BYTES);
    builder.create_file(file)
}

fn storage(path: &Path, cause: &dyn std::fmt::Display) -> DirectoryError {
    DirectoryError::Storage { path: path.display().to_string(), cause: cause.to_string() }
}

fn format(path: &Path, why: String) -> DirectoryError {
    let why = format!("{why}; move the file away to start with an empty directory");
    DirectoryError::Format { path: path.display().to_string(), why }
}

fn unusable(path: &Path, error: &dyn std::fmt::Display) -> DirectoryError {
    format(path, error.to_string())
}
