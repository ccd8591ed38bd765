//! The heap service: answers the requests of clients.
//!
//! A heap has one lock so far, and all its requests are answered in the threads of the target.
//! Direct reads need neither.

use std::collections::HashMap;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use aquifer_fabric::{MessageHandler, Scope, Sender, Target, TargetError, Tenant};

use crate::bytes::HeapBytes;
use crate::class::{Class, ClassId, Classes};
use crate::header::ObjectNumber;
use crate::heap::{Heap, HeapError, HeapSettings, HeapUsage, Located};
use crate::id::IdMode;
use crate::layout::slot_word;
use crate::ledger::Ledger;
use crate::pointer::Pointer;
use crate::slot::{LockRefused, Words};
use crate::wire::{Answer, BlockRegion, Refused, Request};

/// Why a heap cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenHeapError {
    /// The tenant has a heap.
    #[error("user {} has a heap already", .0.0)]
    Exists(Tenant),
    /// There is no memory for it.
    #[error("cannot create the memory of a heap: {0}")]
    Memory(#[from] io::Error),
    /// The target refuses its regions.
    #[error("cannot register a heap: {0}")]
    Register(#[from] TargetError),
}

/// The heaps of a node.
#[derive(Debug)]
pub struct HeapService {
    node: u16,
    heaps: Mutex<HashMap<Tenant, TenantHeap>>,
}

impl HeapService {
    /// A service without heaps, on the node with this number.
    #[must_use]
    pub fn new(node: u16) -> Self {
        Self { node, heaps: Mutex::default() }
    }

    /// Opens a heap of at most `frames` frames for a tenant, which only its endpoints can read.
    ///
    /// # Errors
    /// If the tenant has one, or the system or the target refuses.
    pub fn open(&self, target: &dyn Target, tenant: Tenant, frames: u32) -> Result<(), OpenHeapError> {
        let mut heaps = self.lock();
        if heaps.contains_key(&tenant) {
            return Err(OpenHeapError::Exists(tenant));
        }
        let number = u16::try_from(heaps.len()).map_err(io::Error::other)?;
        let bytes = HeapBytes::create(frames)?;
        let regions = bytes.register(target, Scope::Tenant(tenant), None)?;
        let regions = regions.iter().map(|region| BlockRegion {
            base: region.base,
            key: region.key.0,
            heap: number,
            node: self.node,
        });
        let regions = regions.collect();
        let settings = HeapSettings {
            classes: Classes::standard().clone(),
            mode: IdMode::Numbers,
            may_split: false,
            workers: 1,
            frames_max: frames,
        };
        let heap = Heap::new(settings);
        let layout = bytes.layout();
        let ledger = Ledger::create(bytes, layout);
        heaps.insert(tenant, TenantHeap { heap, ledger, regions, next: ObjectNumber::FIRST.get() });
        Ok(())
    }

    /// Compacts a tenant's heap by at most `merges_max` merges of each class. Returns how many
    /// there were.
    pub fn compact(&self, tenant: Tenant, merges_max: u64) -> u64 {
        let mut heaps = self.lock();
        let Some(TenantHeap { heap, ledger, .. }) = heaps.get_mut(&tenant) else { return 0 };
        let classes: Vec<ClassId> = heap.classes().iter().map(|(id, _)| id).collect();
        classes.into_iter().map(|class| heap.compact(class, merges_max, ledger)).sum()
    }

    /// What a tenant's heap holds, and the bytes that its memory takes; `None` if it has none.
    #[must_use]
    pub fn usage(&self, tenant: Tenant) -> Option<(HeapUsage, u64)> {
        let heaps = self.lock();
        let TenantHeap { heap, ledger, .. } = heaps.get(&tenant)?;
        Some((heap.usage(), ledger.words.allocated_bytes().ok()?.0))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Tenant, TenantHeap>> {
        self.heaps.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl MessageHandler for HeapService {
    fn handle(&self, from: Sender, message: &[u8], answer: &mut Vec<u8>) {
        let mut heaps = self.lock();
        let (heap, request) = (heaps.get_mut(&from.who.tenant), Request::decode(message));
        let mut read = Vec::new();
        let result = match (heap, request) {
            (Some(heap), Some(request)) => heap.answer(request, &mut read),
            (None, Some(_)) => Err(Refused::NoObject),
            (_, None) => Err(Refused::Invalid),
        };
        result.unwrap_or_else(Answer::Refused).encode(answer);
    }
}

/// The heap of one tenant.
#[derive(Debug)]
struct TenantHeap {
    heap: Heap,
    ledger: Ledger<HeapBytes>,
    regions: Vec<BlockRegion>,
    /// The next object number.
    next: u64,
}

/// An object that a request names.
#[derive(Clone, Copy, Debug)]
struct Named {
    found: Located,
    class: Class,
    /// Its first word.
    at: u64,
    /// The pointer with the slot where it is.
    pointer: Pointer,
}

impl TenantHeap {
    fn answer<'a>(&mut self, request: Request<'_>, read: &'a mut Vec<u8>) -> Result<Answer<'a>, Refused> {
        match request {
            Request::Open => Ok(Answer::Opened(self.regions.clone())),
            Request::Allocate { bytes } => Ok(Answer::Pointer(self.allocate(bytes)?, false)),
            Request::Free(pointer) => self.free(pointer),
            Request::Read(pointer) => {
                let named = self.named(pointer)?;
                read.resize(named.class.payload_bytes() as usize, 0);
                self.ledger.words.read(named.at, read);
                Ok(Answer::Bytes(named.pointer, named.found.is_old, read))
            }
            Request::Write(pointer, bytes) => self.write(pointer, bytes),
            Request::Correct(pointer) => {
                let named = self.named(pointer)?;
                Ok(Answer::Pointer(named.pointer, named.found.is_old))
            }
            Request::Release(pointer) => {
                let named = self.named(pointer)?;
                let id = pointer.number.get();
                let address = self.heap.release(pointer.address, id, &mut self.ledger).map_err(refused)?;
                Ok(Answer::Pointer(Pointer { address, ..named.pointer }, false))
            }
        }
    }

    fn allocate(&mut self, bytes: u32) -> Result<Pointer, Refused> {
        let class = self.heap.classes().class_for(bytes).ok_or(Refused::TooLarge)?;
        let shape = self.heap.classes().get(class).ok_or(Refused::TooLarge)?;
        self.ledger.reserve_number(self.next);
        let next = &mut self.next;
        let mut draw = || std::mem::replace(next, *next + 1);
        let allocated = self.heap.allocate(0, class, &mut draw, &mut self.ledger).map_err(refused)?;
        let number = ObjectNumber::new(allocated.id).ok_or(Refused::Full)?;
        let zeros = vec![0; shape.payload_bytes() as usize / 8];
        self.ledger.create_object(slot_word(allocated.frames, allocated.slot, shape), number, &zeros);
        let BlockRegion { heap, node, .. } = self.regions[0];
        Ok(Pointer { node, heap, class, address: allocated.address, number })
    }

    fn free<'a>(&mut self, pointer: Pointer) -> Result<Answer<'a>, Refused> {
        let named = self.named(pointer)?;
        self.ledger.free_object(named.at, pointer.number).map_err(busy)?;
        self.heap.free(pointer.address, pointer.number.get(), &mut self.ledger).map_err(refused)?;
        Ok(Answer::Pointer(named.pointer, false))
    }

    fn write<'a>(&mut self, pointer: Pointer, bytes: &[u8]) -> Result<Answer<'a>, Refused> {
        let named = self.named(pointer)?;
        if bytes.len() > named.class.payload_bytes() as usize {
            return Err(Refused::TooLarge);
        }
        let mut payload = Vec::with_capacity(bytes.len().div_ceil(8));
        for (word, part) in (named.at + 1..).zip(bytes.chunks(8)) {
            // The rest of the last word stays.
            let mut whole = if part.len() < 8 { self.ledger.words.load(word).to_le_bytes() } else { [0; 8] };
            whole[..part.len()].copy_from_slice(part);
            payload.push(u64::from_le_bytes(whole));
        }
        self.ledger.write_object(named.at, pointer.number, &payload).map_err(busy)?;
        Ok(Answer::Pointer(named.pointer, named.found.is_old))
    }

    fn named(&self, pointer: Pointer) -> Result<Named, Refused> {
        let found = self.heap.locate(pointer.address, pointer.number.get()).map_err(refused)?;
        let class = self.heap.classes().get(pointer.class).ok_or(Refused::NoObject)?;
        let BlockRegion { heap, node, .. } = self.regions[0];
        let is_of_class = self.heap.class_of(found.block) == Some(pointer.class);
        if !is_of_class || (pointer.heap, pointer.node) != (heap, node) {
            return Err(Refused::NoObject);
        }
        let at = slot_word(found.frames, found.slot, class);
        Ok(Named { found, class, at, pointer: Pointer { address: found.address, ..pointer } })
    }
}

fn refused(error: HeapError) -> Refused {
    match error {
        HeapError::Full => Refused::Full,
        HeapError::NoObject | HeapError::NoClass => Refused::NoObject,
    }
}

fn busy(refused: LockRefused) -> Refused {
    match refused {
        LockRefused::Busy => Refused::Busy,
        LockRefused::Elsewhere => Refused::NoObject,
    }
}
