//! The heap client that programs link. Uses the fabric, and no pool or directory.

mod connection;
mod device;
pub mod queue;
mod route;

use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use aquifer_channel::paths::agent_socket;
use aquifer_fabric::{BatchError, EndpointError, WorkError};

use crate::access::{AccessError, request_access};
use crate::class::{Class, Classes, OBJECT_BYTES_MAX, SLOT_BYTES_MAX};
use crate::pointer::{BlockAddress, Pointer};
use crate::slot::ReadVerdict;
use crate::wire::{Answer, Refused, Request};
use connection::BATCH_MAX;
pub(crate) use connection::Connection;
pub(crate) use route::HeapLink;
pub use route::{Connect, HeapRoute};

/// Longest wait for the answer to a request, or for a service that is being restarted.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Direct reads of a busy object before the service is asked to read it.
const TRIES_MAX: u32 = 16;
/// A direct read that takes longer is repeated: the version number could have wrapped around.
const READ_TIME_MAX: Duration = Duration::from_millis(10);
/// A direct read of a large object, or of a part of one, that takes longer is repeated. The limit
/// is greater than [`READ_TIME_MAX`] because 2^18 writes of a large object take longer.
const LARGE_READ_TIME_MAX: Duration = Duration::from_millis(500);
/// Bytes of an object in one message, at most.
const MESSAGE_PART_BYTES: u32 = SLOT_BYTES_MAX;
/// Longest pause before the next read of a large object that was changed during a read.
const BACKOFF_MAX: Duration = Duration::from_millis(10);

/// Most new connections that one read makes.
const RECONNECTIONS_MAX: u32 = 3;
/// Interval between two attempts to connect, or to repeat a request that a busy service refused.
const RECONNECT_INTERVAL: Duration = Duration::from_millis(20);

/// Why a request to a heap failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The service refused the request.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// The connection broke. The outcome of the request is unknown.
    #[error("the connection to the heap failed: {0}; whether the request was carried out is unknown")]
    Connection(#[from] WorkError),
    /// The service did not answer in time. The outcome of the request is unknown.
    #[error(
        "the service of heaps did not answer within {} s; whether the request was carried out is unknown",
        REQUEST_TIMEOUT.as_secs()
    )]
    Timeout,
    /// There is no connection, and none can be made.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// The answer is not valid, or not one to this request.
    #[error("the service of heaps gave an invalid answer: it is of another build")]
    Answer,
    /// The endpoint cannot be used for a heap.
    #[error("cannot prepare the connection to a heap: {0}")]
    Endpoint(#[from] EndpointError),
    /// The endpoint has room for too few operations.
    #[error("the connection has no room for {BATCH_MAX} operations at once")]
    TooShallow,
    /// There is no memory for the connection.
    #[error("no memory for the connection to a heap: {0}")]
    Memory(#[from] io::Error),
}

impl From<BatchError> for ClientError {
    fn from(error: BatchError) -> Self {
        match error {
            BatchError::Timeout => Self::Timeout,
            BatchError::Broken => Self::Connection(WorkError::PeerGone),
            BatchError::QueueFull(_) => Self::TooShallow,
        }
    }
}

/// Counts of direct reads by outcome.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ReadCounts {
    /// Direct reads that found the object.
    pub direct: u64,
    /// Direct reads of an object that was changed meanwhile.
    pub busy: u64,
    /// Pointers that had to be corrected.
    pub corrected: u64,
    /// Corrected pointers for which the client found the object without a request to the service.
    pub scanned: u64,
    /// Objects that the service has read.
    pub by_service: u64,
}

/// A read of a batch: see [`HeapClient::get_many`].
#[derive(Debug)]
pub struct DirectRead<'a> {
    /// The object.
    pub pointer: Pointer,
    /// The object's first bytes.
    pub out: &'a mut [u8],
    /// The outcome of the last read.
    pub verdict: ReadVerdict,
}

impl<'a> DirectRead<'a> {
    /// Creates a read of the first bytes of an object.
    #[must_use]
    pub fn new(pointer: Pointer, out: &'a mut [u8]) -> Self {
        Self { pointer, out, verdict: ReadVerdict::Busy }
    }
}

/// The longest time that a read of an object may take.
pub(crate) fn read_time_max(class: Class) -> Duration {
    if class.is_single() { LARGE_READ_TIME_MAX } else { READ_TIME_MAX }
}

/// The class of a pointer's object, its block, and the offset of its slot; `None` if no object has
/// the pointer.
pub(crate) fn slot_of(classes: &Classes, pointer: Pointer) -> Option<(Class, BlockAddress, u64)> {
    let class = classes.get(pointer.class)?;
    let (block, offset) = BlockAddress::containing(pointer.address)?;
    let is_slot = block.order == class.order
        && offset.is_multiple_of(u64::from(class.slot_bytes))
        && offset + u64::from(class.slot_bytes) <= class.block_bytes();
    is_slot.then_some((class, block, offset))
}

/// The heap of one tenant on one node.
///
/// If the connection breaks, such as when the service is restarted, the next call connects again.
/// Reads are then repeated. The outcome of other requests that were in flight is unknown.
pub struct HeapClient {
    connect: Connect,
    connection: Option<Box<dyn HeapLink>>,
    counts: ReadCounts,
    may_scan: bool,
}

impl std::fmt::Debug for HeapClient {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { connection, counts, .. } = self;
        formatter.debug_struct("HeapClient").field("connection", connection).field("counts", counts).finish()
    }
}

impl HeapClient {
    /// Opens the heap of this process' user, on a node, or on one that the agent chooses: one of
    /// this machine, if there is one.
    ///
    /// # Errors
    /// If there is no agent, or no such service, or it does not answer.
    pub fn connect(node: Option<u16>) -> Result<Self, ClientError> {
        Self::connect_at(agent_socket(), node)
    }

    /// Opens a heap as [`Self::connect`], with the agent at the socket `agent`.
    ///
    /// # Errors
    /// Those of [`Self::connect`].
    pub fn connect_at(agent: PathBuf, node: Option<u16>) -> Result<Self, ClientError> {
        Self::connect_along(agent, node, true)
    }

    /// Opens a heap as [`Self::connect_at`], over the network even if the heap is on this machine.
    ///
    /// # Errors
    /// Those of [`Self::connect`].
    pub fn connect_remotely(agent: PathBuf, node: Option<u16>) -> Result<Self, ClientError> {
        Self::connect_along(agent, node, false)
    }

    fn connect_along(agent: PathBuf, mut node: Option<u16>, may_share: bool) -> Result<Self, ClientError> {
        Self::connect_by(Box::new(move || {
            let (access, shared) = request_access(&agent, node)?;
            // Later connections must reach the same heap.
            node = Some(access.node);
            match shared.filter(|_| may_share) {
                Some(heap) => Ok(HeapRoute::Shared(heap)),
                None => access.route(),
            }
        }))
    }

    /// Opens the heap of the tenant of the endpoints that `connect` makes.
    ///
    /// # Errors
    /// If the service does not answer.
    pub fn connect_by(mut connect: Connect) -> Result<Self, ClientError> {
        let deadline = Instant::now() + REQUEST_TIMEOUT;
        let connection = loop {
            match connect()?.open() {
                // The service is still restoring heaps.
                Err(ClientError::Refused(Refused::Busy)) if Instant::now() < deadline => {
                    std::thread::sleep(RECONNECT_INTERVAL);
                }
                opened => break Some(opened?),
            }
        };
        Ok(Self { connect, connection, counts: ReadCounts::default(), may_scan: true })
    }

    /// Allocates an object of `bytes` bytes, all zeros.
    ///
    /// # Errors
    /// If the heap is full, the object too large, or the connection broken.
    pub fn allocate(&mut self, bytes: u32) -> Result<Pointer, ClientError> {
        self.request_pointer(&Request::Allocate { bytes }).map(|(pointer, _)| pointer)
    }

    /// Allocates an object with these bytes.
    ///
    /// # Errors
    /// If the heap is full, the object too large, or the connection broken.
    pub fn create(&mut self, contents: &[u8]) -> Result<Pointer, ClientError> {
        let bytes = object_bytes(contents)?;
        let first = &contents[..contents.len().min(MESSAGE_PART_BYTES as usize)];
        let (pointer, _) = self.request_pointer(&Request::Create { bytes, first })?;
        let written = self.write_parts(pointer, contents, first.len());
        if written.is_err() {
            let _ = self.free(pointer);
        }
        written.map(|()| pointer)
    }

    /// The root object of this user's heap: the first one that was asked for, of `bytes` bytes, all
    /// zeros. Programs find their other objects from there.
    ///
    /// # Errors
    /// If the heap is full, or the connection is broken.
    pub fn root(&mut self, bytes: u32) -> Result<Pointer, ClientError> {
        let request = Request::Root { bytes };
        let root = |client: &mut Self| client.repeat(|connection| connection.request_pointer(&request));
        Ok(self.retry_while_busy(root)?.0)
    }

    /// Frees an object.
    ///
    /// # Errors
    /// If there is no such object, or the connection is broken.
    pub fn free(&mut self, pointer: Pointer) -> Result<(), ClientError> {
        self.request_pointer(&Request::Free(pointer)).map(drop)
    }

    /// Replaces the first bytes of an object, and corrects the pointer. Returns whether the pointer
    /// names an old block, which can be released.
    ///
    /// A reader finds all of the new bytes or none. For more than 32 KiB the heap must have room
    /// for the object a second time.
    ///
    /// # Errors
    /// If there is no such object, it is smaller, or the connection is broken.
    pub fn write(&mut self, pointer: &mut Pointer, bytes: &[u8]) -> Result<bool, ClientError> {
        if bytes.len() > MESSAGE_PART_BYTES as usize {
            return self.write_large(pointer, bytes);
        }
        self.request_update(pointer, |pointer| Request::Write(pointer, bytes))
    }

    /// Replaces at most 32 KiB of an object from byte `offset` on, which is a multiple of 8, as
    /// [`Self::write`] does.
    ///
    /// # Errors
    /// Those of [`Self::write`].
    pub fn write_at(
        &mut self,
        pointer: &mut Pointer,
        offset: u32,
        bytes: &[u8],
    ) -> Result<bool, ClientError> {
        check_part(bytes)?;
        self.request_update(pointer, |pointer| Request::WriteAt { pointer, offset, bytes })
    }

    /// Replaces the first bytes of an object, at most 32 KiB, if its first word is `expected`.
    /// Clients that write an object only by this call, each time with another first word, never
    /// overwrite bytes that they have not read.
    ///
    /// # Errors
    /// [`Refused::Changed`] if the word differs; else those of [`Self::write`].
    pub fn write_if(
        &mut self,
        pointer: &mut Pointer,
        expected: u64,
        bytes: &[u8],
    ) -> Result<bool, ClientError> {
        check_part(bytes)?;
        self.request_update(pointer, |pointer| Request::WriteIf { pointer, expected, bytes })
    }

    /// Writes the bytes to a staged object, which then replaces this one.
    fn write_large(&mut self, pointer: &mut Pointer, bytes: &[u8]) -> Result<bool, ClientError> {
        let class = Classes::standard().get(pointer.class).ok_or(Refused::NoObject)?;
        if bytes.len() > class.payload_bytes() as usize {
            return Err(Refused::TooLarge.into());
        }
        let staged = self.allocate(class.payload_bytes())?;
        let written = self.write_parts(staged, bytes, 0).and_then(|()| {
            let bytes = u32::try_from(bytes.len()).expect("the bytes fit into the object");
            self.request_update(pointer, |pointer| Request::Replace { pointer, staged, bytes })
        });
        if written.is_err() {
            // If the replacement was made although the request failed, the staged object is gone.
            let _ = self.free(staged);
        }
        written
    }

    /// Writes bytes from `from` on, part by part.
    fn write_parts(&mut self, mut pointer: Pointer, bytes: &[u8], from: usize) -> Result<(), ClientError> {
        let part_bytes = MESSAGE_PART_BYTES as usize;
        for (offset, part) in (from..).step_by(part_bytes).zip(bytes[from..].chunks(part_bytes)) {
            let offset = u32::try_from(offset).expect("the offset is within the object");
            self.write_at(&mut pointer, offset, part)?;
        }
        Ok(())
    }

    fn request_update<'a>(
        &mut self,
        pointer: &mut Pointer,
        request: impl FnOnce(Pointer) -> Request<'a>,
    ) -> Result<bool, ClientError> {
        let (corrected, is_old) = self.request_pointer(&request(*pointer))?;
        *pointer = corrected;
        Ok(is_old)
    }

    /// Reads the first bytes of an object by the service, and corrects the pointer. Returns whether
    /// it names an old block.
    ///
    /// # Errors
    /// If there is no such object, or the connection is broken.
    pub fn read(&mut self, pointer: &mut Pointer, out: &mut [u8]) -> Result<bool, ClientError> {
        check_len(*pointer, out)?;
        self.counts.by_service += 1;
        let (corrected, is_old) =
            self.repeat(|connection| match connection.request(&Request::Read(*pointer))? {
                Answer::Bytes(corrected, is_old, bytes) => {
                    out.copy_from_slice(bytes.get(..out.len()).ok_or(ClientError::Answer)?);
                    Ok((corrected, is_old))
                }
                _ => Err(ClientError::Answer),
            })?;
        *pointer = corrected;
        Ok(is_old)
    }

    /// Asks the service where an object is now, and corrects the pointer. Returns whether it names
    /// an old block.
    ///
    /// # Errors
    /// If there is no such object, or the connection is broken.
    pub fn correct(&mut self, pointer: &mut Pointer) -> Result<bool, ClientError> {
        let request = Request::Correct(*pointer);
        let (corrected, is_old) = self.repeat(|connection| connection.request_pointer(&request))?;
        *pointer = corrected;
        Ok(is_old)
    }

    /// Replaces the pointer by one that names the object's present block (CoRM, section 3.3). No
    /// copy of the old pointer may be used any more.
    ///
    /// # Errors
    /// If there is no such object, or the connection is broken.
    pub fn release(&mut self, pointer: &mut Pointer) -> Result<(), ClientError> {
        *pointer = self.request_pointer(&Request::Release(*pointer))?.0;
        Ok(())
    }

    /// Reads the first bytes of an object one-sidedly. If it is elsewhere, the pointer is corrected
    /// first; if it stays busy for 16 reads, the service reads it.
    ///
    /// # Errors
    /// If there is no such object, it is smaller than `out`, or the connection is broken.
    /// [`Refused::Busy`] if an object of more than 32 KiB was changed during each of many reads.
    pub fn get(&mut self, pointer: &mut Pointer, out: &mut [u8]) -> Result<(), ClientError> {
        check_len(*pointer, out)?;
        let mut tries = 0;
        // Reading the clock costs as much as a direct read.
        let mut deadline = None;
        loop {
            let found = self.repeat(|connection| connection.direct_read(*pointer, out))?;
            if self.count_read(pointer, found)? {
                return Ok(());
            }
            tries += 1;
            if tries >= TRIES_MAX && found == ReadVerdict::Busy {
                let is_large = Classes::standard().get(pointer.class).is_some_and(Class::is_single);
                if !is_large {
                    return self.read(pointer, out).map(drop);
                }
                let now = Instant::now();
                if now >= *deadline.get_or_insert(now + REQUEST_TIMEOUT) {
                    return Err(Refused::Busy.into());
                }
                std::thread::sleep(BACKOFF_MAX.min(Duration::from_micros(10) * tries));
            }
        }
    }

    /// Reads several objects as [`Self::get`] does. The one-sided reads are in flight together.
    ///
    /// # Errors
    /// Errors of [`Self::get`]. Then no read is valid.
    pub fn get_many(&mut self, reads: &mut [DirectRead<'_>]) -> Result<(), ClientError> {
        reads.iter().try_for_each(|read| check_len(read.pointer, read.out))?;
        self.repeat(|connection| connection.direct_read_many(reads))?;
        for read in reads {
            if !self.count_read(&mut read.pointer, read.verdict)? {
                self.get(&mut read.pointer, read.out)?;
            }
            read.verdict = ReadVerdict::Valid;
        }
        Ok(())
    }

    /// Counts a direct read, and corrects the pointer if the object is elsewhere. Returns whether
    /// the read is valid.
    fn count_read(&mut self, pointer: &mut Pointer, found: ReadVerdict) -> Result<bool, ClientError> {
        match found {
            ReadVerdict::Valid => self.counts.direct += 1,
            ReadVerdict::Busy => {
                self.counts.busy += 1;
                std::thread::yield_now();
            }
            ReadVerdict::Elsewhere => {
                self.counts.corrected += 1;
                let found = if self.may_scan { self.repeat(|link| link.find(*pointer))? } else { None };
                // The scan may find the object at the old place, if it was moved back meanwhile.
                let found = found.filter(|found| found != pointer);
                self.counts.scanned += u64::from(found.is_some());
                *pointer = match found {
                    Some(found) => found,
                    None => {
                        self.correct(pointer)?;
                        *pointer
                    }
                };
            }
        }
        Ok(found == ReadVerdict::Valid)
    }

    /// Reads the first bytes of an object one-sidedly, once. `out` is valid only with
    /// [`ReadVerdict::Valid`].
    ///
    /// # Errors
    /// If the connection is broken.
    pub fn direct_read(&mut self, pointer: Pointer, out: &mut [u8]) -> Result<ReadVerdict, ClientError> {
        check_len(pointer, out)?;
        self.repeat(|connection| connection.direct_read(pointer, out))
    }

    /// Whether reads look for a moved object in its block first, one-sidedly, before they ask the
    /// service (§3.2.2). On by default. Over a network, blocks of more than 16 KiB are never
    /// scanned.
    pub fn set_scans(&mut self, may_scan: bool) {
        self.may_scan = may_scan;
    }

    /// Counts of direct reads by outcome.
    #[must_use]
    pub fn counts(&self) -> ReadCounts {
        self.counts
    }

    fn request_pointer(&mut self, request: &Request<'_>) -> Result<(Pointer, bool), ClientError> {
        self.retry_while_busy(|client| client.connected(|connection| connection.request_pointer(request)))
    }

    /// Repeats an operation while the service refuses it as busy: the service waits for its node.
    fn retry_while_busy<T>(
        &mut self,
        mut operation: impl FnMut(&mut Self) -> Result<T, ClientError>,
    ) -> Result<T, ClientError> {
        let mut deadline = None;
        loop {
            match operation(self) {
                Err(ClientError::Refused(Refused::Busy))
                    if Instant::now() < *deadline.get_or_insert_with(|| Instant::now() + REQUEST_TIMEOUT) =>
                {
                    std::thread::sleep(RECONNECT_INTERVAL);
                }
                result => return result,
            }
        }
    }

    /// Runs an operation, and repeats it if the connection breaks.
    fn repeat<T>(
        &mut self,
        mut operation: impl FnMut(&mut dyn HeapLink) -> Result<T, ClientError>,
    ) -> Result<T, ClientError> {
        for _ in 0..RECONNECTIONS_MAX {
            match self.connected(&mut operation) {
                Err(ClientError::Connection(_)) => {}
                result => return result,
            }
        }
        self.connected(operation)
    }

    /// Runs an operation over the connection, which is made again if it was broken.
    fn connected<T>(
        &mut self,
        operation: impl FnOnce(&mut dyn HeapLink) -> Result<T, ClientError>,
    ) -> Result<T, ClientError> {
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => self.reconnect()?,
        };
        let result = operation(&mut *connection);
        // The answer of a request that timed out could be mistaken for that of a later request.
        let is_broken =
            matches!(result, Err(ClientError::Connection(_) | ClientError::Timeout | ClientError::Answer));
        self.connection = (!is_broken).then_some(connection);
        result
    }

    /// Connects again. Waits for a service that is being restarted.
    fn reconnect(&mut self) -> Result<Box<dyn HeapLink>, ClientError> {
        let deadline = Instant::now() + REQUEST_TIMEOUT;
        loop {
            let opened = (self.connect)().map_err(ClientError::from).and_then(HeapRoute::open);
            match opened {
                Err(_) if Instant::now() < deadline => std::thread::sleep(RECONNECT_INTERVAL),
                opened => return opened,
            }
        }
    }
}

/// Checks that an object of the pointer's class has at least `out.len()` bytes.
fn check_len(pointer: Pointer, out: &[u8]) -> Result<(), ClientError> {
    let class = Classes::standard().get(pointer.class).ok_or(Refused::NoObject)?;
    match out.len() <= class.payload_bytes() as usize {
        true => Ok(()),
        false => Err(Refused::TooLarge.into()),
    }
}

/// Checks that bytes fit into one message.
fn check_part(bytes: &[u8]) -> Result<(), ClientError> {
    match bytes.len() <= MESSAGE_PART_BYTES as usize {
        true => Ok(()),
        false => Err(Refused::TooLarge.into()),
    }
}

fn object_bytes(contents: &[u8]) -> Result<u32, ClientError> {
    let bytes = u32::try_from(contents.len()).ok().filter(|bytes| *bytes <= OBJECT_BYTES_MAX);
    bytes.ok_or_else(|| Refused::TooLarge.into())
}
