//! A connection to a heap over a network.

use std::sync::Arc;
use std::time::Instant;

use aquifer_fabric::batch::{Batch, receive_until};
use aquifer_fabric::{Endpoint, Key, LocalKey, LocalSlice, Memory, RemoteAddr, Verb, WorkError};

use super::{ClientError, DirectRead, HeapLink, REQUEST_TIMEOUT, read_time_max, slot_of};
use crate::class::{Class, Classes};
use crate::header::{HEADER_BYTES, Header};
use crate::pointer::Pointer;
use crate::slot::{ReadVerdict, verdict};
use crate::wire::{Answer, BlockRegion, HEAD_BYTES, Refused, Request};

/// Operations of one direct read.
pub(super) const BATCH_MAX: usize = 3;
/// Most objects of one batch.
pub(super) const READS_MAX: usize = 64;

/// Bytes of the largest block that is read to find an object in it. A request is faster than the
/// READ of a larger one.
pub(super) const SCAN_BYTES_MAX: u64 = 16 << 10;

/// Local memory: a message to send, then two headers for each object of a batch, then the bytes.
pub(super) const HEADERS_AT: usize = 64 << 10;
pub(super) const PAYLOAD_AT: usize = HEADERS_AT + READS_MAX * 16;
pub(super) const PAYLOAD_BYTES: usize = 512 << 10;
const MEMORY_BYTES: usize = (PAYLOAD_AT + PAYLOAD_BYTES).next_multiple_of(4096);

/// A connection to one tenant's heap.
#[derive(Debug)]
pub(crate) struct Connection {
    endpoint: Box<dyn Endpoint>,
    memory: Arc<Memory>,
    local: LocalKey,
    regions: Vec<BlockRegion>,
    classes: &'static Classes,
    answer: Vec<u8>,
    batch: Batch,
}

impl Connection {
    /// Opens the heap of the endpoint's tenant.
    pub fn open(endpoint: Box<dyn Endpoint>) -> Result<Self, ClientError> {
        let mut connection = Self::new(endpoint)?;
        match connection.request(&Request::Open)? {
            Answer::Opened(regions) => connection.regions = regions,
            _ => return Err(ClientError::Answer),
        }
        Ok(connection)
    }

    /// Prepares a connection that has opened no heap.
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
            batch: Batch::new(),
        })
    }

    /// The class of a pointer's object, and where its slot is; `None` if no object has it.
    fn place(&self, pointer: Pointer) -> Option<(Class, RemoteAddr)> {
        let (class, block, offset) = slot_of(self.classes, pointer)?;
        let region = self.regions.get(usize::from(block.order))?;
        // A pointer to an object of another heap finds nothing here.
        if (region.heap, region.node) != (pointer.heap, pointer.node) {
            return None;
        }
        let addr = region.base + u64::from(block.number) * class.address_bytes() + offset;
        Some((class, RemoteAddr { addr, key: Key(region.key) }))
    }

    /// Adds a READ of `len` bytes, from `skip` bytes behind `remote`, to the batch.
    pub(super) fn add_read(&mut self, id: u64, to: usize, len: usize, remote: RemoteAddr, skip: usize) {
        let len = u32::try_from(len).expect("the part fits into the memory");
        let local = LocalSlice { key: self.local, offset: to as u64, len };
        let remote = RemoteAddr { addr: remote.addr + skip as u64, ..remote };
        self.batch.push(id, Verb::Read { local, remote });
    }

    /// Runs the batch. [`Self::is_done`] returns the outcome of each operation.
    pub(super) fn complete(&mut self) -> Result<(), ClientError> {
        Ok(self.batch.run(&mut *self.endpoint, Instant::now() + REQUEST_TIMEOUT)?)
    }

    /// Whether operation `id` succeeded; false if no block has its address.
    pub(super) fn is_done(&self, id: u64) -> Result<bool, ClientError> {
        match self.batch.failure_of(id) {
            None => Ok(true),
            Some(WorkError::RemoteAccess) => Ok(false),
            Some(error) => Err(error.into()),
        }
    }

    /// The header that was read to a place of the local memory.
    pub(super) fn header(&self, at: usize) -> Header {
        Header::from_word(self.word(at))
    }

    /// The word that was read to a place of the local memory.
    pub(super) fn word(&self, at: usize) -> u64 {
        self.memory.load_u64(at)
    }

    /// Copies bytes that were read to a place of the local memory.
    pub(super) fn copy(&self, at: usize, out: &mut [u8]) {
        self.memory.read(at, out);
    }

    /// Most operations in flight.
    pub(super) fn depth(&self) -> usize {
        self.endpoint.limits().queue_depth
    }

    /// Reads an object that is larger than the local memory, part by part. Each part is between two
    /// reads of the header, so the time limit holds for a part and not for the whole read.
    fn read_in_parts(&mut self, pointer: Pointer, out: &mut [u8]) -> Result<ReadVerdict, ClientError> {
        let Some((class, remote)) = self.place(pointer) else { return Ok(ReadVerdict::Elsewhere) };
        let mut first = None;
        for (at, part) in out.chunks_mut(PAYLOAD_BYTES).enumerate() {
            let skip = HEADER_BYTES as usize + at * PAYLOAD_BYTES;
            self.add_read(0, HEADERS_AT, 8, remote, 0);
            self.add_read(0, PAYLOAD_AT, part.len(), remote, skip);
            self.add_read(0, HEADERS_AT + 8, 8, remote, 0);
            let began = Instant::now();
            self.complete()?;
            let found = self.judge(0, pointer, began.elapsed())?;
            let before = *first.get_or_insert(self.header(HEADERS_AT));
            if found != ReadVerdict::Valid {
                return Ok(found);
            }
            if before != self.header(HEADERS_AT) || began.elapsed() > read_time_max(class) {
                return Ok(ReadVerdict::Busy);
            }
            self.memory.read(PAYLOAD_AT, part);
        }
        Ok(ReadVerdict::Valid)
    }

    /// Reads the first of `reads`, up to the size of a batch. Returns the number of objects read.
    fn read_batch(&mut self, reads: &mut [DirectRead<'_>]) -> Result<usize, ClientError> {
        let most = READS_MAX.min(self.endpoint.limits().queue_depth / BATCH_MAX);
        let mut used = 0;
        let mut count = 0;
        for read in reads.iter_mut().take(most) {
            let bytes = read.out.len().next_multiple_of(8);
            if used + bytes > PAYLOAD_BYTES {
                break;
            }
            read.verdict = ReadVerdict::Elsewhere;
            if let Some((class, remote)) = self.place(read.pointer) {
                let len = read.out.len();
                debug_assert!(len <= class.payload_bytes() as usize, "the caller has checked the length");
                let (id, headers_at) = (count as u64, HEADERS_AT + 16 * count);
                // In this order: the bytes between the two headers.
                self.add_read(id, headers_at, 8, remote, 0);
                self.add_read(id, PAYLOAD_AT + used, len, remote, HEADER_BYTES as usize);
                self.add_read(id, headers_at + 8, 8, remote, 0);
                read.verdict = ReadVerdict::Valid;
            }
            used += bytes;
            count += 1;
        }
        let began = Instant::now();
        self.complete()?;
        let took = began.elapsed();
        let mut at = PAYLOAD_AT;
        for (place, read) in reads[..count].iter_mut().enumerate() {
            if read.verdict == ReadVerdict::Valid {
                read.verdict = self.judge(place, read.pointer, took)?;
            }
            if read.verdict == ReadVerdict::Valid {
                self.memory.read(at, read.out);
            }
            at += read.out.len().next_multiple_of(8);
        }
        Ok(count)
    }

    /// The verdict on the read at a place of the batch.
    fn judge(
        &self,
        place: usize,
        pointer: Pointer,
        took: std::time::Duration,
    ) -> Result<ReadVerdict, ClientError> {
        // No block has this address any more.
        if !self.is_done(place as u64)? {
            return Ok(ReadVerdict::Elsewhere);
        }
        let class = self.classes.get(pointer.class).expect("the batch has only objects with a class");
        if took > read_time_max(class) {
            return Ok(ReadVerdict::Busy);
        }
        let headers_at = HEADERS_AT + 16 * place;
        Ok(verdict(pointer.number, self.header(headers_at), self.header(headers_at + 8)))
    }
}

impl HeapLink for Connection {
    fn request(&mut self, request: &Request<'_>) -> Result<Answer<'_>, ClientError> {
        let mut message = Vec::with_capacity(HEAD_BYTES);
        request.encode(&mut message);
        let limit = self.endpoint.limits().message_bytes_max as usize;
        if message.len() > limit.min(HEADERS_AT) {
            return Err(Refused::TooLarge.into());
        }
        self.memory.write(0, &message);
        let len = u32::try_from(message.len()).expect("the message is within the limit");
        let local = LocalSlice { key: self.local, offset: 0, len };
        self.batch.push(0, Verb::Send { local });
        self.complete()?;
        if let Some(error) = self.batch.failure_of(0) {
            return Err(error.into());
        }
        self.answer.clear();
        receive_until(&mut *self.endpoint, &mut self.answer, Instant::now() + REQUEST_TIMEOUT)?;
        match Answer::decode(&self.answer) {
            Some(Answer::Refused(refused)) => Err(refused.into()),
            Some(answer) => Ok(answer),
            None => Err(ClientError::Answer),
        }
    }

    fn direct_read(&mut self, pointer: Pointer, out: &mut [u8]) -> Result<ReadVerdict, ClientError> {
        if out.len() > PAYLOAD_BYTES {
            return self.read_in_parts(pointer, out);
        }
        let mut reads = [DirectRead::new(pointer, out)];
        self.read_batch(&mut reads)?;
        Ok(reads[0].verdict)
    }

    fn find(&mut self, pointer: Pointer) -> Result<Option<Pointer>, ClientError> {
        let Some((class, block, offset)) = slot_of(self.classes, pointer) else { return Ok(None) };
        let Some((_, remote)) = self.place(pointer).filter(|_| class.block_bytes() <= SCAN_BYTES_MAX) else {
            return Ok(None);
        };
        let len = usize::try_from(class.block_bytes()).expect("scanned blocks are small");
        let first = RemoteAddr { addr: remote.addr - offset, ..remote };
        self.add_read(0, PAYLOAD_AT, len, first, 0);
        self.complete()?;
        if !self.is_done(0)? {
            return Ok(None);
        }
        let header = |slot: u32| self.header(PAYLOAD_AT + (slot * class.slot_bytes) as usize);
        let slot = (0..class.slots()).find(|slot| header(*slot).number() == Some(pointer.number));
        Ok(slot.map(|slot| Pointer { address: block.at(u64::from(slot * class.slot_bytes)), ..pointer }))
    }

    fn direct_read_many(&mut self, mut reads: &mut [DirectRead<'_>]) -> Result<(), ClientError> {
        while let Some(first) = reads.first_mut() {
            let done = if first.out.len() > PAYLOAD_BYTES {
                first.verdict = self.read_in_parts(first.pointer, first.out)?;
                1
            } else {
                self.read_batch(reads)?
            };
            reads = &mut reads[done..];
        }
        Ok(())
    }
}
