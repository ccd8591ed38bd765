//! A heap on this machine, which a program reads in its own address space: it maps the heap's bytes
//! and names, read-only. Requests go to the service over a socket.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use aquifer_channel::socket::{receive_soon, wait_readable};
use aquifer_fabric::{Memory, WorkError};
use rustix::net::{SendFlags, send};
use rustix::time::{ClockId, clock_gettime};

use crate::class::{Class, Classes, FRAME_BYTES};
use crate::client::{ClientError, HeapLink, REQUEST_TIMEOUT, read_time_max, slot_of};
use crate::header::{HEADER_BYTES, Header};
use crate::layout::Layout;
use crate::pointer::{BlockAddress, Pointer};
use crate::service::MESSAGE_BYTES_MAX;
use crate::slot::{ReadVerdict, verdict};
use crate::wire::{Answer, BlockRegion, Request};

/// Time for which a request polls for the answer before it sleeps.
const SPIN_TIME: Duration = Duration::from_micros(50);

/// Descriptors of a heap on the program's machine.
#[derive(Debug)]
pub struct SharedHeap {
    /// The socket for requests.
    pub socket: OwnedFd,
    /// The bytes of objects, to be mapped read-only.
    pub data: OwnedFd,
    /// The names of blocks, to be mapped read-only.
    pub names: OwnedFd,
}

/// The connection to a heap on this machine.
#[derive(Debug)]
pub(crate) struct SharedLink {
    socket: OwnedFd,
    data: Arc<Memory>,
    names: Arc<Memory>,
    layout: Layout,
    /// The numbers of the heap and of its node, which pointers into the heap contain.
    numbers: (u16, u16),
    classes: &'static Classes,
    message: Vec<u8>,
    /// Room for the longest answer.
    answer: Vec<u8>,
    /// The time of the last check that the service is alive.
    checked: Duration,
}

impl SharedLink {
    pub fn open(heap: SharedHeap) -> Result<Self, ClientError> {
        let SharedHeap { socket, data, names } = heap;
        // The service is trusted to truncate the memory only when it closes the heap.
        let map = |fd| Memory::whole_revocable_read_only(fd).map(Arc::new);
        let (data, names) = (map(data)?, map(names)?);
        let frames = u32::try_from(data.len() as u64 / FRAME_BYTES).map_err(io::Error::other)?;
        let layout = Layout::new(frames);
        if names.len() as u64 != layout.name_words() * 8 {
            return Err(ClientError::Answer);
        }
        let mut link = Self {
            socket,
            data,
            names,
            layout,
            numbers: (0, 0),
            classes: Classes::standard(),
            message: Vec::new(),
            answer: vec![0; MESSAGE_BYTES_MAX as usize],
            checked: now(),
        };
        let Answer::Opened(regions) = link.request(&Request::Open)? else { return Err(ClientError::Answer) };
        let BlockRegion { heap, node, .. } = *regions.first().ok_or(ClientError::Answer)?;
        link.numbers = (heap, node);
        Ok(link)
    }

    /// The class of a pointer's object, its block, and the offset of its slot; `None` if no object
    /// of this heap has the pointer.
    fn slot_of(&self, pointer: Pointer) -> Option<(Class, BlockAddress, u64)> {
        slot_of(self.classes, pointer).filter(|_| (pointer.heap, pointer.node) == self.numbers)
    }

    /// Checks once in a tick of the clock that the service is alive. If it has ended, another one
    /// may serve another heap, and this memory may be out of date.
    fn check_service(&mut self, now: Duration) -> Result<(), ClientError> {
        if now == self.checked {
            return Ok(());
        }
        self.checked = now;
        // No answer is due, so the socket is readable only if the connection has ended.
        match wait_readable(&[&self.socket], Duration::ZERO)? {
            true => Err(ClientError::Connection(WorkError::PeerGone)),
            false => Ok(()),
        }
    }

    /// The first byte of the memory that an address names; `None` if it names none.
    fn translate(&self, block: BlockAddress) -> Option<u64> {
        let word = self.layout.name_at(block) - crate::layout::NAMES;
        let at = usize::try_from(word * 8).ok().filter(|at| *at < self.names.len())?;
        self.names.load_u64(at).checked_sub(1)?.checked_mul(FRAME_BYTES)
    }
}

impl HeapLink for SharedLink {
    fn request(&mut self, request: &Request<'_>) -> Result<Answer<'_>, ClientError> {
        let gone = |()| ClientError::Connection(WorkError::PeerGone);
        self.message.clear();
        request.encode(&mut self.message);
        send(&self.socket, &self.message, SendFlags::NOSIGNAL).map_err(|_| gone(()))?;
        let received = receive_soon(&self.socket, &mut self.answer, SPIN_TIME, REQUEST_TIMEOUT);
        let len = match received.map_err(|_| gone(()))? {
            Some(0) => return Err(gone(())),
            Some(len) => len,
            None => return Err(ClientError::Timeout),
        };
        match Answer::decode(&self.answer[..len]) {
            Some(Answer::Refused(refused)) => Err(refused.into()),
            Some(answer) => Ok(answer),
            None => Err(ClientError::Answer),
        }
    }

    fn find(&mut self, pointer: Pointer) -> Result<Option<Pointer>, ClientError> {
        let Some((class, block, _)) = self.slot_of(pointer) else { return Ok(None) };
        self.check_service(now())?;
        let fits = |start: &u64| {
            start.checked_add(class.block_bytes()).is_some_and(|end| end <= self.data.len() as u64)
        };
        let Some(start) = self.translate(block).filter(fits) else { return Ok(None) };
        let header = |slot: u32| {
            let at = start + u64::from(slot) * u64::from(class.slot_bytes);
            Header::from_word(self.data.load_u64(usize::try_from(at).expect("the heap's memory is mapped")))
        };
        let slot = (0..class.slots()).find(|slot| header(*slot).number() == Some(pointer.number));
        let address = slot.map(|slot| block.at(u64::from(slot) * u64::from(class.slot_bytes)));
        Ok(address.map(|address| Pointer { address, ..pointer }))
    }

    fn direct_read(&mut self, pointer: Pointer, out: &mut [u8]) -> Result<ReadVerdict, ClientError> {
        let Some((class, block, offset)) = self.slot_of(pointer) else {
            return Ok(ReadVerdict::Elsewhere);
        };
        debug_assert!(out.len() <= class.payload_bytes() as usize, "the caller has checked the length");
        let began = now();
        self.check_service(began)?;
        let Some(start) = self.translate(block) else { return Ok(ReadVerdict::Elsewhere) };
        let end = start.checked_add(class.block_bytes()).filter(|end| *end <= self.data.len() as u64);
        if end.is_none() {
            return Ok(ReadVerdict::Elsewhere);
        }
        let at = usize::try_from(start + offset).expect("the heap's memory is mapped");
        let before = Header::from_word(self.data.load_u64(at));
        self.data.read(at + HEADER_BYTES as usize, out);
        // The bytes are read before the second header.
        fence(Ordering::Acquire);
        let after = Header::from_word(self.data.load_u64(at));
        let found = verdict(pointer.number, before, after);
        // Meanwhile the block may have been moved, and its memory allocated to another block.
        let has_moved = self.translate(block) != Some(start);
        if found == ReadVerdict::Valid && (has_moved || now().saturating_sub(began) > read_time_max(class)) {
            return Ok(ReadVerdict::Busy);
        }
        Ok(found)
    }
}

/// A coarse clock: cheap to read, exact to some milliseconds.
fn now() -> Duration {
    let time = clock_gettime(ClockId::MonotonicCoarse);
    Duration::try_from(time).unwrap_or_default()
}
