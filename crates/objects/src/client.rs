//! The client of a heap: what programs link. It knows the fabric, and no pool or directory.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_channel::paths::agent_socket;
use aquifer_fabric::{
    Completion, Endpoint, EndpointError, Key, LocalKey, LocalSlice, Memory, PostError, RemoteAddr, Verb,
    Work, WorkError,
};

use crate::access::{AccessError, request_access};
use crate::class::{Class, Classes};
use crate::header::{HEADER_BYTES, Header};
use crate::pointer::{BlockAddress, Pointer};
use crate::shared::{SharedHeap, SharedLink};
use crate::slot::{ReadVerdict, verdict};
use crate::wire::{Answer, BlockRegion, HEAD_BYTES, Refused, Request};

/// Operations of one direct read.
const BATCH_MAX: usize = 3;
/// Longest wait for an answer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);
/// Direct reads of a busy object before the service reads it.
const TRIES_MAX: u32 = 16;
/// A read that has taken longer is done again: versions could have passed through all numbers.
pub(crate) const READ_TIME_MAX: Duration = Duration::from_millis(10);

/// Connections that a read makes, at most.
const RECONNECTIONS_MAX: u32 = 3;
/// Interval at which a client that waits looks whether its connection is broken.
const BROKEN_CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// Pause between two attempts to connect.
const RECONNECT_PAUSE: Duration = Duration::from_millis(20);

/// The local memory: a message to send, two headers, and the bytes of an object.
const BEFORE_AT: usize = 64 << 10;
const AFTER_AT: usize = BEFORE_AT + 8;
const PAYLOAD_AT: usize = BEFORE_AT + 64;
const MEMORY_BYTES: usize = 128 << 10;

/// Why a request to a heap failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The service refused it.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// The connection broke. The outcome of the request is unknown.
    #[error("the connection to the heap failed: {0}; whether the request was carried out is unknown")]
    Connection(#[from] WorkError),
    /// The service did not answer in time. The outcome of the request is unknown.
    #[error(
        "the heap did not answer within {} s; whether the request was carried out is unknown",
        PATIENCE.as_secs()
    )]
    Silent,
    /// There is no connection, and none can be made.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// The service answered something else.
    #[error("the heap gave an invalid answer")]
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

/// How often direct reads succeeded and failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ReadCounts {
    /// Direct reads that found the object.
    pub direct: u64,
    /// Direct reads of an object that was changed meanwhile.
    pub busy: u64,
    /// Pointers that had to be corrected.
    pub corrected: u64,
    /// Objects that the service has read.
    pub by_service: u64,
}

/// Makes a connection to the service.
pub type Connect = Box<dyn FnMut() -> Result<HeapRoute, AccessError> + Send>;

/// How a client reaches a heap.
#[derive(Debug)]
pub enum HeapRoute {
    /// Over a network.
    Remote(Box<dyn Endpoint>),
    /// On this machine.
    Shared(SharedHeap),
}

impl HeapRoute {
    fn open(self) -> Result<Box<dyn HeapLink>, ClientError> {
        Ok(match self {
            Self::Remote(endpoint) => Box::new(Connection::open(endpoint)?),
            Self::Shared(heap) => Box::new(SharedLink::open(heap)?),
        })
    }
}

/// A connection to a heap.
pub(crate) trait HeapLink: Send + std::fmt::Debug {
    /// Sends a request and waits for the answer.
    fn request(&mut self, request: &Request<'_>) -> Result<Answer<'_>, ClientError>;

    /// Reads an object one-sidedly, once.
    fn direct_read(&mut self, pointer: Pointer, out: &mut [u8]) -> Result<ReadVerdict, ClientError>;

    /// Sends a request whose answer is a pointer.
    fn request_pointer(&mut self, request: &Request<'_>) -> Result<(Pointer, bool), ClientError> {
        match self.request(request)? {
            Answer::Pointer(pointer, is_old) => Ok((pointer, is_old)),
            _ => Err(ClientError::Answer),
        }
    }
}

/// The class of a pointer's object, its block, and the offset of its slot; `None` if no object has
/// the pointer.
pub(crate) fn slot_of(classes: &Classes, pointer: Pointer) -> Option<(Class, BlockAddress, u64)> {
    let class = classes.get(pointer.class)?;
    let (block, offset) = BlockAddress::containing(pointer.address)?;
    let is_slot = block.order == class.order
        && offset % u64::from(class.slot_bytes) == 0
        && offset + u64::from(class.slot_bytes) <= class.block_bytes();
    is_slot.then_some((class, block, offset))
}

/// The heap of one tenant on one node.
///
/// If the connection breaks, such as when the service is restarted, the next call makes another.
/// Reads are then repeated. Of other requests that were on their way, the outcome is unknown.
pub struct HeapClient {
    connect: Connect,
    connection: Option<Box<dyn HeapLink>>,
    counts: ReadCounts,
}

impl std::fmt::Debug for HeapClient {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { connection, counts, .. } = self;
        formatter.debug_struct("HeapClient").field("connection", connection).field("counts", counts).finish()
    }
}

/// A connection to one tenant's heap.
#[derive(Debug)]
pub(crate) struct Connection {
    endpoint: Box<dyn Endpoint>,
    memory: Arc<Memory>,
    local: LocalKey,
    regions: Vec<BlockRegion>,
    classes: &'static Classes,
    answer: Vec<u8>,
    completions: Vec<Completion>,
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

    /// As [`Self::connect`], with the agent at this socket.
    ///
    /// # Errors
    /// Those of [`Self::connect`].
    pub fn connect_at(agent: PathBuf, node: Option<u16>) -> Result<Self, ClientError> {
        Self::connect_along(agent, node, true)
    }

    /// As [`Self::connect_at`], over the network even if the heap is on this machine.
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
                None => access.connect().map(HeapRoute::Remote),
            }
        }))
    }

    /// Opens the heap of the tenant of the endpoints that `connect` makes.
    ///
    /// # Errors
    /// If the service does not answer.
    pub fn connect_by(mut connect: Connect) -> Result<Self, ClientError> {
        let deadline = Instant::now() + PATIENCE;
        let connection = loop {
            match connect()?.open() {
                // It is still restoring heaps.
                Err(ClientError::Refused(Refused::Busy)) if Instant::now() < deadline => {
                    std::thread::sleep(RECONNECT_PAUSE);
                }
                opened => break Some(opened?),
            }
        };
        Ok(Self { connect, connection, counts: ReadCounts::default() })
    }

    /// Allocates an object of `bytes` bytes, all zeros.
    ///
    /// # Errors
    /// If the heap is full, the object too large, or the connection broken.
    pub fn allocate(&mut self, bytes: u32) -> Result<Pointer, ClientError> {
        self.request_pointer(&Request::Allocate { bytes }).map(|(pointer, _)| pointer)
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
    /// # Errors
    /// If there is no such object, it is smaller, or the connection is broken.
    pub fn write(&mut self, pointer: &mut Pointer, bytes: &[u8]) -> Result<bool, ClientError> {
        let (corrected, is_old) = self.request_pointer(&Request::Write(*pointer, bytes))?;
        *pointer = corrected;
        Ok(is_old)
    }

    /// Reads the first bytes of an object by the service, and corrects the pointer. Returns whether
    /// it names an old block.
    ///
    /// # Errors
    /// If there is no such object, or the connection is broken.
    ///
    /// # Panics
    /// If the object's class is smaller than `out`.
    pub fn read(&mut self, pointer: &mut Pointer, out: &mut [u8]) -> Result<bool, ClientError> {
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

    /// Replaces all pointers to an object by one that names its present block (§3.3). No other copy
    /// of the old pointer may be used any more.
    ///
    /// # Errors
    /// If there is no such object, or the connection is broken.
    pub fn release(&mut self, pointer: &mut Pointer) -> Result<(), ClientError> {
        *pointer = self.request_pointer(&Request::Release(*pointer))?.0;
        Ok(())
    }

    /// Reads the first bytes of an object one-sidedly. If it is elsewhere, the pointer is corrected
    /// first; if it is busy for long, the service reads it.
    ///
    /// # Errors
    /// If there is no such object, or the connection is broken.
    ///
    /// # Panics
    /// If the object's class is smaller than `out`.
    pub fn get(&mut self, pointer: &mut Pointer, out: &mut [u8]) -> Result<(), ClientError> {
        for _ in 0..TRIES_MAX {
            match self.direct_read(*pointer, out)? {
                ReadVerdict::Valid => {
                    self.counts.direct += 1;
                    return Ok(());
                }
                ReadVerdict::Busy => {
                    self.counts.busy += 1;
                    std::thread::yield_now();
                }
                ReadVerdict::Elsewhere => {
                    self.counts.corrected += 1;
                    let request = Request::Correct(*pointer);
                    *pointer = self.repeat(|connection| connection.request_pointer(&request))?.0;
                }
            }
        }
        self.read(pointer, out).map(drop)
    }

    /// Reads the first bytes of an object one-sidedly, once. `out` is valid only with
    /// [`ReadVerdict::Valid`].
    ///
    /// # Errors
    /// If the connection is broken.
    ///
    /// # Panics
    /// If the object's class is smaller than `out`.
    pub fn direct_read(&mut self, pointer: Pointer, out: &mut [u8]) -> Result<ReadVerdict, ClientError> {
        self.repeat(|connection| connection.direct_read(pointer, out))
    }

    /// How direct reads went.
    #[must_use]
    pub fn counts(&self) -> ReadCounts {
        self.counts
    }

    fn request_pointer(&mut self, request: &Request<'_>) -> Result<(Pointer, bool), ClientError> {
        self.connected(|connection| connection.request_pointer(request))
    }

    /// Runs an operation that may be repeated when the connection breaks.
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

    /// Runs an operation over the connection, or over another one if it was broken.
    fn connected<T>(
        &mut self,
        operation: impl FnOnce(&mut dyn HeapLink) -> Result<T, ClientError>,
    ) -> Result<T, ClientError> {
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => self.reconnect()?,
        };
        let result = operation(&mut *connection);
        // An answer that was not waited for could be taken for a later one.
        let is_broken =
            matches!(result, Err(ClientError::Connection(_) | ClientError::Silent | ClientError::Answer));
        self.connection = (!is_broken).then_some(connection);
        result
    }

    /// Makes another connection. Waits for a service that is being restarted.
    fn reconnect(&mut self) -> Result<Box<dyn HeapLink>, ClientError> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let opened = (self.connect)().map_err(ClientError::from).and_then(HeapRoute::open);
            match opened {
                Err(_) if Instant::now() < deadline => std::thread::sleep(RECONNECT_PAUSE),
                opened => return opened,
            }
        }
    }
}

impl Connection {
    /// A connection that has opened no heap.
    pub fn new(mut endpoint: Box<dyn Endpoint>) -> Result<Self, ClientError> {
        if endpoint.limits().queue_depth < BATCH_MAX {
            return Err(ClientError::TooShallow);
        }
        let memory = Arc::new(Memory::private("aquifer-heap-client", MEMORY_BYTES)?);
        let local = endpoint.register_local(Arc::clone(&memory))?;
        Ok(Self {
            endpoint,
            memory,
            local,
            regions: Vec::new(),
            classes: Classes::standard(),
            answer: Vec::new(),
            completions: Vec::new(),
        })
    }

    fn open(endpoint: Box<dyn Endpoint>) -> Result<Self, ClientError> {
        let mut connection = Self::new(endpoint)?;
        match connection.request(&Request::Open)? {
            Answer::Opened(regions) => connection.regions = regions,
            _ => return Err(ClientError::Answer),
        }
        Ok(connection)
    }

    /// The class of a pointer's object, and where its slot is; `None` if no object has it.
    fn place(&self, pointer: Pointer) -> Option<(Class, RemoteAddr)> {
        let (class, block, offset) = slot_of(self.classes, pointer)?;
        let region = self.regions.get(usize::from(block.order))?;
        let addr = region.base + u64::from(block.number) * class.block_bytes() + offset;
        Some((class, RemoteAddr { addr, key: Key(region.key) }))
    }

    /// Posts a batch and waits for its last completion, or for the first that failed.
    fn complete(&mut self, batch: &[Work], last: u64) -> Result<u64, ClientError> {
        match self.endpoint.post(batch) {
            Ok(()) => {}
            Err(PostError::QueueFull { .. }) => unreachable!("one batch is in flight at a time"),
        }
        let deadline = Instant::now() + PATIENCE;
        let mut outcome = Ok(0);
        loop {
            self.completions.clear();
            self.endpoint.poll(&mut self.completions, batch.len());
            for completion in &self.completions {
                if outcome.is_ok() {
                    outcome = completion.outcome;
                }
                if completion.id == last {
                    return outcome.map_err(ClientError::from);
                }
            }
            if self.completions.is_empty() {
                self.wait(deadline)?;
            }
        }
    }

    fn wait(&mut self, deadline: Instant) -> Result<(), ClientError> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ClientError::Silent);
        }
        // An endpoint that breaks does not wake the thread that waits for a message.
        if self.endpoint.is_broken() {
            return Err(ClientError::Connection(WorkError::PeerGone));
        }
        self.endpoint.wait(left.min(BROKEN_CHECK_INTERVAL));
        Ok(())
    }
}

impl HeapLink for Connection {
    fn request(&mut self, request: &Request<'_>) -> Result<Answer<'_>, ClientError> {
        let mut message = Vec::with_capacity(HEAD_BYTES);
        request.encode(&mut message);
        let limit = self.endpoint.limits().message_bytes_max as usize;
        if message.len() > limit.min(BEFORE_AT) {
            return Err(Refused::TooLarge.into());
        }
        self.memory.write(0, &message);
        let len = u32::try_from(message.len()).expect("it is within the limit");
        let local = LocalSlice { key: self.local, offset: 0, len };
        self.complete(&[Work { id: 3, verb: Verb::Send { local }, signalled: true }], 3)?;
        let deadline = Instant::now() + PATIENCE;
        self.answer.clear();
        while !self.endpoint.receive(&mut self.answer) {
            self.wait(deadline)?;
        }
        match Answer::decode(&self.answer) {
            Some(Answer::Refused(refused)) => Err(refused.into()),
            Some(answer) => Ok(answer),
            None => Err(ClientError::Answer),
        }
    }

    fn direct_read(&mut self, pointer: Pointer, out: &mut [u8]) -> Result<ReadVerdict, ClientError> {
        let Some((class, remote)) = self.place(pointer) else { return Ok(ReadVerdict::Elsewhere) };
        assert!(out.len() <= class.payload_bytes() as usize, "the object has fewer than {} bytes", out.len());
        let slice = |offset: usize, len: usize| LocalSlice {
            key: self.local,
            offset: offset as u64,
            len: u32::try_from(len).expect("an object is small"),
        };
        let read = |id, local, skip: u64, signalled| {
            let remote = RemoteAddr { addr: remote.addr + skip, ..remote };
            Work { id, verb: Verb::Read { local, remote }, signalled }
        };
        // In this order: the bytes between the two headers.
        let batch = [
            read(0, slice(BEFORE_AT, 8), 0, false),
            read(1, slice(PAYLOAD_AT, out.len()), HEADER_BYTES.into(), false),
            read(2, slice(AFTER_AT, 8), 0, true),
        ];
        let began = Instant::now();
        match self.complete(&batch, 2) {
            Ok(_) => {}
            // No block has this address any more.
            Err(ClientError::Connection(WorkError::RemoteAccess)) => return Ok(ReadVerdict::Elsewhere),
            Err(error) => return Err(error),
        }
        if began.elapsed() > READ_TIME_MAX {
            return Ok(ReadVerdict::Busy);
        }
        let header = |at| Header::from_word(self.memory.load_u64(at));
        let found = verdict(pointer.number, header(BEFORE_AT), header(AFTER_AT));
        if found == ReadVerdict::Valid {
            self.memory.read(PAYLOAD_AT, out);
        }
        Ok(found)
    }
}
