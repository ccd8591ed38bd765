//! The messages in frames. Their format is in `docs/formats/directory.md`.
//!
//! The parsers read untrusted bytes.
//! They return `None` for bytes that are not exactly one message, and reserve memory only for
//! bytes that have arrived.

use std::time::Duration;

use crate::error::{DirectoryError, LimitKind};
use crate::model::{
    Compare, DirectoryEntry, KeyOperation, Lease, LeaseId, Listing, Transaction, TransactionOutcome,
    WatchEvent, WatchEventKind, limits,
};
use crate::mutation::Mutation;

/// The first bytes of a hello.
pub const MAGIC: [u8; 8] = *b"AQUIFDIR";
/// The version of the protocol.
pub const VERSION: u32 = 1;

/// A request of a client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DirectoryRequest {
    /// Calls [`crate::Directory::get`].
    Get(String),
    /// Calls [`crate::Directory::list`].
    List(String),
    /// Calls [`crate::Directory::transaction`].
    Transaction(Transaction),
    /// Calls [`crate::Directory::lease_grant`].
    Grant(Duration),
    /// Calls [`crate::Directory::lease_keep_alive`].
    KeepAlive(LeaseId),
    /// Calls [`crate::Directory::lease_revoke`].
    Revoke(LeaseId),
    /// Calls [`crate::Directory::watch`]. From then on the connection carries events only.
    Watch {
        /// The prefix.
        prefix: String,
        /// The first revision.
        from_revision: u64,
    },
}

/// A message of the server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DirectoryResponse {
    /// The answer to a request without a result.
    Done,
    /// The answer to [`DirectoryRequest::Get`].
    Entry(Option<DirectoryEntry>),
    /// The answer to [`DirectoryRequest::List`].
    Listing(Listing),
    /// The answer to [`DirectoryRequest::Transaction`].
    Outcome(TransactionOutcome),
    /// The answer to [`DirectoryRequest::Grant`].
    Lease(Lease),
    /// An event of a watch.
    Event(WatchEvent),
    /// The request or the watch failed.
    Error(DirectoryError),
}

/// Encodes a hello. A server adds the reason to refuse the client, or an empty text.
#[must_use]
pub fn hello(refusal: Option<&str>) -> Vec<u8> {
    let mut out = MessageWriter::default();
    out.0.extend_from_slice(&MAGIC);
    out.u32(VERSION);
    if let Some(why) = refusal {
        out.text(why);
    }
    out.0
}

/// Why a side refuses the hello of the other.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DirectoryHelloError {
    /// The client uses another protocol.
    #[error("the client does not use the protocol of Aquifer's directory")]
    ForeignClient,
    /// The server uses another protocol.
    #[error("the server is not Aquifer's directory")]
    ForeignServer,
    /// The hello of the client has the wrong length.
    #[error("the client's hello has the wrong length")]
    ClientLength,
    /// The hello of the server is incomplete.
    #[error("the server's hello is cut")]
    ServerLength,
    /// The client has another version of the protocol.
    #[error("the client has protocol version {0}, and the directory has version {VERSION}")]
    ClientVersion(u32),
    /// The server has another version of the protocol.
    #[error("the directory has protocol version {0}, and this program has version {VERSION}")]
    ServerVersion(u32),
    /// The server refuses the client, with this reason.
    #[error("{0}")]
    Refused(String),
}

/// Checks the hello of a client.
///
/// # Errors
/// The reason why the client is refused.
pub fn check_client_hello(bytes: &[u8]) -> Result<(), DirectoryHelloError> {
    let mut reader = MessageReader(bytes);
    if reader.raw(MAGIC.len()) != Some(&MAGIC) {
        return Err(DirectoryHelloError::ForeignClient);
    }
    match reader.u32() {
        Some(VERSION) if reader.0.is_empty() => Ok(()),
        Some(VERSION) | None => Err(DirectoryHelloError::ClientLength),
        Some(version) => Err(DirectoryHelloError::ClientVersion(version)),
    }
}

/// Checks the hello of a server.
///
/// # Errors
/// The reason why there is no connection.
pub fn check_server_hello(bytes: &[u8]) -> Result<(), DirectoryHelloError> {
    let mut reader = MessageReader(bytes);
    if reader.raw(MAGIC.len()) != Some(&MAGIC) {
        return Err(DirectoryHelloError::ForeignServer);
    }
    // A refusal is read in any version, because the version may be its reason.
    let version = reader.u32().ok_or(DirectoryHelloError::ServerLength)?;
    match reader.finish_with(MessageReader::text) {
        Some(why) if !why.is_empty() => Err(DirectoryHelloError::Refused(why)),
        _ if version != VERSION => Err(DirectoryHelloError::ServerVersion(version)),
        Some(_) => Ok(()),
        None => Err(DirectoryHelloError::ServerLength),
    }
}

impl DirectoryRequest {
    /// Encodes the message.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = MessageWriter::default();
        match self {
            Self::Get(key) => out.tag(1).text(key),
            Self::List(prefix) => out.tag(2).text(prefix),
            Self::Transaction(transaction) => out.tag(3).transaction(transaction),
            Self::Grant(ttl) => out.tag(4).u64(crate::clock::saturating_ms(*ttl)),
            Self::KeepAlive(id) => out.tag(5).u64(id.0),
            Self::Revoke(id) => out.tag(6).u64(id.0),
            Self::Watch { prefix, from_revision } => out.tag(7).text(prefix).u64(*from_revision),
        };
        out.0
    }

    /// Decodes a message; `None` if the bytes are not exactly one request.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        MessageReader(bytes).finish_with(|reader| {
            Some(match reader.u8()? {
                1 => Self::Get(reader.text()?),
                2 => Self::List(reader.text()?),
                3 => Self::Transaction(reader.transaction()?),
                4 => Self::Grant(Duration::from_millis(reader.u64()?)),
                5 => Self::KeepAlive(LeaseId(reader.u64()?)),
                6 => Self::Revoke(LeaseId(reader.u64()?)),
                7 => Self::Watch { prefix: reader.text()?, from_revision: reader.u64()? },
                _ => return None,
            })
        })
    }
}

impl DirectoryResponse {
    /// Encodes the message.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = MessageWriter::default();
        match self {
            Self::Done => out.tag(0),
            Self::Entry(None) => out.tag(1),
            Self::Entry(Some(entry)) => out.tag(2).entry(entry),
            Self::Listing(listing) => {
                out.tag(3).u64(listing.revision).count(listing.entries.len());
                listing.entries.iter().fold(&mut out, MessageWriter::entry)
            }
            Self::Outcome(TransactionOutcome::Committed { revision }) => out.tag(4).u64(*revision),
            Self::Outcome(TransactionOutcome::Conflict { key, version }) => {
                out.tag(5).text(key).u64(*version)
            }
            Self::Lease(lease) => out.tag(6).u64(lease.id.0).u64(lease.epoch),
            Self::Event(event) => out.tag(7).event(event),
            Self::Error(error) => out.tag(8).error(error),
        };
        out.0
    }

    /// Decodes a message; `None` if the bytes are not exactly one response.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        MessageReader(bytes).finish_with(|reader| {
            Some(match reader.u8()? {
                0 => Self::Done,
                1 => Self::Entry(None),
                2 => Self::Entry(Some(reader.entry()?)),
                3 => {
                    let revision = reader.u64()?;
                    let entries = reader.many(limits::LIST_ENTRIES_MAX, MessageReader::entry)?;
                    Self::Listing(Listing { revision, entries })
                }
                4 => Self::Outcome(TransactionOutcome::Committed { revision: reader.u64()? }),
                5 => Self::Outcome(TransactionOutcome::Conflict {
                    key: reader.text()?,
                    version: reader.u64()?,
                }),
                6 => Self::Lease(Lease { id: LeaseId(reader.u64()?), epoch: reader.u64()? }),
                7 => Self::Event(reader.event()?),
                8 => Self::Error(reader.error()?),
                _ => return None,
            })
        })
    }
}

/// Appends the parts of a message to bytes.
#[derive(Default)]
struct MessageWriter(Vec<u8>);

impl MessageWriter {
    fn tag(&mut self, tag: u8) -> &mut Self {
        self.0.push(tag);
        self
    }

    fn u32(&mut self, number: u32) -> &mut Self {
        self.0.extend_from_slice(&number.to_le_bytes());
        self
    }

    fn u64(&mut self, number: u64) -> &mut Self {
        self.0.extend_from_slice(&number.to_le_bytes());
        self
    }

    fn count(&mut self, count: usize) -> &mut Self {
        // A longer text does not fit into a frame, which is checked there.
        self.u32(u32::try_from(count).unwrap_or(u32::MAX))
    }

    fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.count(bytes.len());
        self.0.extend_from_slice(bytes);
        self
    }

    fn text(&mut self, text: &str) -> &mut Self {
        self.bytes(text.as_bytes())
    }

    fn lease(&mut self, lease: Option<LeaseId>) -> &mut Self {
        match lease {
            None => self.tag(0),
            Some(id) => self.tag(1).u64(id.0),
        }
    }

    fn entry(&mut self, entry: &DirectoryEntry) -> &mut Self {
        self.text(&entry.key).bytes(&entry.value).u64(entry.version).lease(entry.lease)
    }

    fn event(&mut self, event: &WatchEvent) -> &mut Self {
        self.u64(event.revision).text(&event.key);
        match &event.kind {
            WatchEventKind::Put { value, lease } => self.tag(1).bytes(value).lease(*lease),
            WatchEventKind::Delete => self.tag(2),
        }
    }

    fn transaction(&mut self, transaction: &Transaction) -> &mut Self {
        self.count(transaction.compares.len());
        for compare in &transaction.compares {
            self.text(&compare.key).u64(compare.version);
        }
        self.count(transaction.operations.len());
        for operation in &transaction.operations {
            match operation {
                KeyOperation::Put { key, value, lease } => self.tag(1).text(key).bytes(value).lease(*lease),
                KeyOperation::Delete { key } => self.tag(2).text(key),
            };
        }
        self
    }

    fn error(&mut self, error: &DirectoryError) -> &mut Self {
        match error {
            DirectoryError::LeaseGone(id) => self.tag(1).u64(id.0),
            DirectoryError::Compacted { asked, oldest } => self.tag(2).u64(*asked).u64(*oldest),
            DirectoryError::Limit { kind, got } => {
                let number = LimitKind::ALL.iter().position(|other| other == kind);
                self.tag(3).count(number.expect("ALL has all kinds")).u64(*got)
            }
            DirectoryError::InvalidKey { key, why } => self.tag(4).text(key).text(why),
            DirectoryError::ChangedTwice { key } => self.tag(5).text(key),
            DirectoryError::Storage { path, cause } => self.tag(6).text(path).text(cause),
            DirectoryError::Protocol { why } => self.tag(7).text(why),
            DirectoryError::Taken { key } => self.tag(8).text(key),
            DirectoryError::Format { path, why } => self.tag(9).text(path).text(why),
            DirectoryError::Unavailable { address, cause } => self.tag(10).text(address).text(cause),
            DirectoryError::Refused { address, why } => self.tag(11).text(address).text(why),
        }
    }
}

/// Reads the parts of a message, and keeps the bytes that remain.
struct MessageReader<'a>(&'a [u8]);

impl<'a> MessageReader<'a> {
    /// The result of `parse`, if it uses all bytes.
    fn finish_with<T>(mut self, parse: impl FnOnce(&mut Self) -> Option<T>) -> Option<T> {
        parse(&mut self).filter(|_| self.0.is_empty())
    }

    fn raw(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn u8(&mut self) -> Option<u8> {
        self.raw(1).map(|bytes| bytes[0])
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.raw(4)?.try_into().ok()?))
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.raw(8)?.try_into().ok()?))
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let count = usize::try_from(self.u32()?).ok()?;
        self.raw(count)
    }

    fn text(&mut self) -> Option<String> {
        std::str::from_utf8(self.bytes()?).ok().map(str::to_owned)
    }

    fn many<T>(&mut self, most: usize, parse: impl Fn(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let count = usize::try_from(self.u32()?).ok().filter(|count| *count <= most)?;
        (0..count).map(|_| parse(self)).collect()
    }

    fn lease(&mut self) -> Option<Option<LeaseId>> {
        match self.u8()? {
            0 => Some(None),
            1 => Some(Some(LeaseId(self.u64()?))),
            _ if Mutation::AcceptAnyLeaseTag.is_active() => Some(None),
            _ => None,
        }
    }

    fn entry(&mut self) -> Option<DirectoryEntry> {
        Some(DirectoryEntry {
            key: self.text()?,
            value: self.bytes()?.to_vec(),
            version: self.u64()?,
            lease: self.lease()?,
        })
    }

    fn event(&mut self) -> Option<WatchEvent> {
        let (revision, key) = (self.u64()?, self.text()?);
        let kind = match self.u8()? {
            1 => WatchEventKind::Put { value: self.bytes()?.to_vec(), lease: self.lease()? },
            2 => WatchEventKind::Delete,
            _ => return None,
        };
        Some(WatchEvent { revision, key, kind })
    }

    fn transaction(&mut self) -> Option<Transaction> {
        // The core checks the limit: one part more is read so that the core can refuse it.
        let most = limits::TRANSACTION_PARTS_MAX + 1;
        let compares =
            self.many(most, |reader| Some(Compare { key: reader.text()?, version: reader.u64()? }))?;
        let operations = self.many(most, |reader| {
            Some(match reader.u8()? {
                1 => KeyOperation::Put {
                    key: reader.text()?,
                    value: reader.bytes()?.to_vec(),
                    lease: reader.lease()?,
                },
                2 => KeyOperation::Delete { key: reader.text()? },
                _ => return None,
            })
        })?;
        Some(Transaction { compares, operations })
    }

    fn error(&mut self) -> Option<DirectoryError> {
        Some(match self.u8()? {
            1 => DirectoryError::LeaseGone(LeaseId(self.u64()?)),
            2 => DirectoryError::Compacted { asked: self.u64()?, oldest: self.u64()? },
            3 => {
                let number = usize::try_from(self.u32()?).ok()?;
                DirectoryError::Limit { kind: *LimitKind::ALL.get(number)?, got: self.u64()? }
            }
            4 => DirectoryError::InvalidKey { key: self.text()?, why: self.text()? },
            5 => DirectoryError::ChangedTwice { key: self.text()? },
            6 => DirectoryError::Storage { path: self.text()?, cause: self.text()? },
            7 => DirectoryError::Protocol { why: self.text()? },
            8 => DirectoryError::Taken { key: self.text()? },
            9 => DirectoryError::Format { path: self.text()?, why: self.text()? },
            10 => DirectoryError::Unavailable { address: self.text()?, cause: self.text()? },
            11 => DirectoryError::Refused { address: self.text()?, why: self.text()? },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod golden_tests;
