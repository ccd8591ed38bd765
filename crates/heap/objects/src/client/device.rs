//! A connection to a heap whose memory a device serves: the client translates addresses itself, by
//! READs of the names. Requests go over another connection.
//!
//! A device keeps no order within a READ, and none between READs that are in flight together. So
//! a direct read is three rounds, each of which is over when the next begins: the header, the
//! bytes, and the header and the name again (decision 19).

use std::collections::HashMap;
use std::time::Instant;

use aquifer_fabric::{Endpoint, Key, RemoteAddr};

use super::connection::{Connection, HEADERS_AT, PAYLOAD_AT, PAYLOAD_BYTES, READS_MAX, SCAN_BYTES_MAX};
use super::{ClientError, DirectRead, HeapLink, read_time_max, slot_of};
use crate::class::{Class, Classes, FRAME_BYTES};
use crate::header::{HEADER_BYTES, Header};
use crate::layout::{Layout, NAMES};
use crate::pointer::{BlockAddress, Pointer};
use crate::slot::{ReadVerdict, verdict};
use crate::wire::{Answer, BlockRegion, Request};

/// Most places of blocks that are remembered.
const PLACES_MAX: usize = 1 << 16;

/// A connection to one tenant's heap, and an endpoint of the device that serves its memory.
#[derive(Debug)]
pub(crate) struct DeviceLink {
    control: Connection,
    reader: Connection,
    data: BlockRegion,
    names: BlockRegion,
    layout: Layout,
    /// The last known places of blocks. A stale place is detected by a second read of the name.
    places: HashMap<BlockAddress, u64>,
}

/// A part of an object to be read.
struct PartRead<'a> {
    pointer: Pointer,
    /// Bytes of the object before the part.
    skip: usize,
    out: &'a mut [u8],
    verdict: ReadVerdict,
    /// The object's place, as long as the read may still be valid.
    slot: Option<Slot>,
}

/// The place of an object.
#[derive(Clone, Copy)]
struct Slot {
    class: Class,
    block: BlockAddress,
    /// Offset in the block.
    offset: u64,
    /// The block's first byte in the heap's memory.
    start: u64,
    /// Whether `start` is remembered from an earlier read.
    is_remembered: bool,
    /// The header as read before the bytes.
    before: Header,
}

impl<'a> PartRead<'a> {
    fn new(pointer: Pointer, skip: usize, out: &'a mut [u8]) -> Self {
        Self { pointer, skip, out, verdict: ReadVerdict::Elsewhere, slot: None }
    }

    /// Ends the read.
    fn end(&mut self, verdict: ReadVerdict) {
        self.verdict = verdict;
        self.slot = None;
    }
}

impl DeviceLink {
    /// Opens the heap of the endpoints' tenant.
    pub fn open(control: Box<dyn Endpoint>, device: Box<dyn Endpoint>) -> Result<Self, ClientError> {
        let (mut control, reader) = (Connection::new(control)?, Connection::new(device)?);
        match control.request(&Request::OpenRaw)? {
            Answer::OpenedRaw { frames, data, names } => {
                let (layout, places) = (Layout::new(frames), HashMap::new());
                Ok(Self { control, reader, data, names, layout, places })
            }
            _ => Err(ClientError::Answer),
        }
    }

    /// Reads the parts that fit into the local memory. Returns the number of parts read.
    fn read_parts(&mut self, reads: &mut [PartRead<'_>]) -> Result<usize, ClientError> {
        let most = READS_MAX.min(self.reader.depth() / 2);
        let (mut count, mut bytes) = (0, 0);
        while count < reads.len().min(most) {
            bytes += reads[count].out.len().next_multiple_of(8);
            if bytes > PAYLOAD_BYTES && count > 0 {
                break;
            }
            count += 1;
        }
        let reads = &mut reads[..count];
        let began = Instant::now();
        self.find_slots(reads)?;
        self.read_first_headers(reads)?;
        self.read_bytes(reads)?;
        self.check(reads, began)?;
        let mut at = PAYLOAD_AT;
        for read in reads {
            if read.verdict == ReadVerdict::Valid {
                self.reader.copy(at, read.out);
            }
            at += read.out.len().next_multiple_of(8);
        }
        Ok(count)
    }

    /// Finds the places of the objects: remembered ones, or by READs of the names.
    fn find_slots(&mut self, reads: &mut [PartRead<'_>]) -> Result<(), ClientError> {
        for (place, read) in reads.iter_mut().enumerate() {
            let numbers = (self.data.heap, self.data.node);
            let is_here = (read.pointer.heap, read.pointer.node) == numbers;
            let Some((class, block, offset)) = slot_of(Classes::standard(), read.pointer).filter(|_| is_here)
            else {
                continue;
            };
            let start = self.places.get(&block).copied();
            if start.is_none() {
                let Some(name) = self.name_of(block) else { continue };
                self.reader.add_read(place as u64, HEADERS_AT + 16 * place, 8, name, 0);
            }
            let (is_remembered, start) = (start.is_some(), start.unwrap_or(0));
            read.slot = Some(Slot { class, block, offset, start, is_remembered, before: Header::FREE });
        }
        self.reader.complete()?;
        for (place, read) in reads.iter_mut().enumerate() {
            let Some(slot) = read.slot.as_mut().filter(|slot| !slot.is_remembered) else { continue };
            let is_done = self.reader.is_done(place as u64)?;
            let found = self.start_of(self.reader.word(HEADERS_AT + 16 * place), slot.class);
            match found.filter(|_| is_done) {
                Some(start) => {
                    slot.start = start;
                    let block = slot.block;
                    self.remember(block, start);
                }
                None => read.end(ReadVerdict::Elsewhere),
            }
        }
        Ok(())
    }

    fn read_first_headers(&mut self, reads: &mut [PartRead<'_>]) -> Result<(), ClientError> {
        for (place, read) in reads.iter().enumerate() {
            if let Some(slot) = read.slot {
                self.reader.add_read(place as u64, HEADERS_AT + 16 * place, 8, self.at(&slot), 0);
            }
        }
        self.reader.complete()?;
        for (place, read) in reads.iter_mut().enumerate() {
            let Some(slot) = &mut read.slot else { continue };
            slot.before = self.reader.header(HEADERS_AT + 16 * place);
            match verdict(read.pointer.number, slot.before, slot.before) {
                ReadVerdict::Valid => {}
                // The block may have moved: the next read reads its name.
                ReadVerdict::Elsewhere if slot.is_remembered => {
                    self.places.remove(&slot.block);
                    read.end(ReadVerdict::Busy);
                }
                found => read.end(found),
            }
        }
        Ok(())
    }

    fn read_bytes(&mut self, reads: &[PartRead<'_>]) -> Result<(), ClientError> {
        let mut at = PAYLOAD_AT;
        for (place, read) in reads.iter().enumerate() {
            if let Some(slot) = read.slot.filter(|_| !read.out.is_empty()) {
                let skip = HEADER_BYTES as usize + read.skip;
                self.reader.add_read(place as u64, at, read.out.len(), self.at(&slot), skip);
            }
            at += read.out.len().next_multiple_of(8);
        }
        self.reader.complete()
    }

    /// Reads the headers and the names again, and sets the verdicts of the reads.
    fn check(&mut self, reads: &mut [PartRead<'_>], began: Instant) -> Result<(), ClientError> {
        for (place, read) in reads.iter().enumerate() {
            if let Some(slot) = read.slot
                && let Some(name) = self.name_of(slot.block)
            {
                let at = HEADERS_AT + 16 * place;
                self.reader.add_read(place as u64, at, 8, self.at(&slot), 0);
                self.reader.add_read(place as u64, at + 8, 8, name, 0);
            }
        }
        self.reader.complete()?;
        let took = began.elapsed();
        for (place, read) in reads.iter_mut().enumerate() {
            let Some(slot) = read.slot else { continue };
            let at = HEADERS_AT + 16 * place;
            let is_done = self.reader.is_done(place as u64)?;
            let is_there = is_done && self.start_of(self.reader.word(at + 8), slot.class) == Some(slot.start);
            if !is_there {
                self.places.remove(&slot.block);
            }
            read.verdict = match verdict(read.pointer.number, slot.before, self.reader.header(at)) {
                ReadVerdict::Valid if !is_there || took > read_time_max(slot.class) => ReadVerdict::Busy,
                found => found,
            };
        }
        Ok(())
    }

    fn remember(&mut self, block: BlockAddress, start: u64) {
        if self.places.len() >= PLACES_MAX {
            self.places.clear();
        }
        self.places.insert(block, start);
    }

    /// The address of an object's slot.
    fn at(&self, slot: &Slot) -> RemoteAddr {
        RemoteAddr { addr: self.data.base + slot.start + slot.offset, key: Key(self.data.key) }
    }

    /// The address of a block's name; `None` if the heap has no such block.
    fn name_of(&self, block: BlockAddress) -> Option<RemoteAddr> {
        let word = self.layout.name_at(block) - NAMES;
        let addr = self.names.base + word * 8;
        (word < self.layout.name_words()).then_some(RemoteAddr { addr, key: Key(self.names.key) })
    }

    /// The first byte of the block that a name names; `None` if it names none.
    fn start_of(&self, name: u64, class: Class) -> Option<u64> {
        let start = name.checked_sub(1)?.checked_mul(FRAME_BYTES)?;
        let end = start.checked_add(class.block_bytes())?;
        (end <= u64::from(self.layout.frames_max()) * FRAME_BYTES).then_some(start)
    }
}

impl HeapLink for DeviceLink {
    fn request(&mut self, request: &Request<'_>) -> Result<Answer<'_>, ClientError> {
        self.control.request(request)
    }

    fn direct_read(&mut self, pointer: Pointer, out: &mut [u8]) -> Result<ReadVerdict, ClientError> {
        let mut first = None;
        for (number, part) in out.chunks_mut(PAYLOAD_BYTES).enumerate() {
            let mut reads = [PartRead::new(pointer, number * PAYLOAD_BYTES, part)];
            self.read_parts(&mut reads)?;
            let Some(slot) = reads[0].slot.filter(|_| reads[0].verdict == ReadVerdict::Valid) else {
                return Ok(reads[0].verdict);
            };
            // All parts are of one version.
            if *first.get_or_insert(slot.before) != slot.before {
                return Ok(ReadVerdict::Busy);
            }
        }
        Ok(ReadVerdict::Valid)
    }

    fn direct_read_many(&mut self, reads: &mut [DirectRead<'_>]) -> Result<(), ClientError> {
        let (large, mut small): (Vec<_>, Vec<_>) =
            reads.iter_mut().partition(|read| read.out.len() > PAYLOAD_BYTES);
        for read in large {
            read.verdict = self.direct_read(read.pointer, read.out)?;
        }
        let mut parts: Vec<PartRead<'_>> =
            small.iter_mut().map(|read| PartRead::new(read.pointer, 0, &mut *read.out)).collect();
        let mut done = 0;
        while done < parts.len() {
            done += self.read_parts(&mut parts[done..])?;
        }
        let verdicts: Vec<ReadVerdict> = parts.iter().map(|part| part.verdict).collect();
        for (read, verdict) in small.into_iter().zip(verdicts) {
            read.verdict = verdict;
        }
        Ok(())
    }

    fn find(&mut self, pointer: Pointer) -> Result<Option<Pointer>, ClientError> {
        let mut reads = [PartRead::new(pointer, 0, &mut [])];
        self.find_slots(&mut reads)?;
        let Some(slot) = reads[0].slot.filter(|slot| slot.class.block_bytes() <= SCAN_BYTES_MAX) else {
            return Ok(None);
        };
        let (class, first) = (slot.class, Slot { offset: 0, ..slot });
        let len = usize::try_from(class.block_bytes()).expect("scanned blocks are small");
        self.reader.add_read(0, PAYLOAD_AT, len, self.at(&first), 0);
        self.reader.complete()?;
        if !self.reader.is_done(0)? {
            return Ok(None);
        }
        let header = |slot: u32| self.reader.header(PAYLOAD_AT + (slot * class.slot_bytes) as usize);
        let found = (0..class.slots()).find(|slot| header(*slot).number() == Some(pointer.number));
        let address = found.map(|found| slot.block.at(u64::from(found * class.slot_bytes)));
        Ok(address.map(|address| Pointer { address, ..pointer }))
    }
}
