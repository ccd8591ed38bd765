//! Control memory: the connected and the fenced endpoints, and the ranges that keys open.
//!
//! The target writes keys and states; each endpoint writes only its own `active` word. An endpoint
//! makes `active` odd before it reads any key. To invalidate a key, the target clears the key's tag
//! and then waits until it has seen every `active` word even or changed. Both sides put a full
//! fence between their two steps, so at least one of them sees the other.
//!
//! The bytes are described in `docs/formats/fabric-shm.md`.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::time::{Duration, Instant};

use rustix::thread::{Timespec, futex};

use crate::Memory;
use crate::key_table::KeyTable;
use crate::keys::{KEYS_LIMIT, KeyGrant, split};
use crate::limits::ENDPOINTS_LIMIT;
use crate::memory::u64_from;
use crate::mutation::Mutation;
use crate::target::{Access, Host, Identity, Scope, Tenant};
use crate::work::Key;

const MAGIC: u64 = u64::from_le_bytes(*b"AQFSHCTL");
const VERSION: u32 = 2;
/// The last version without a region table. [`ControlMemory::open_to_retire`] opens it as well.
const VERSION_WITHOUT_REGIONS: u32 = 1;

const MAGIC_AT: usize = 0;
const VERSION_AT: usize = 8;
const ALIVE_AT: usize = 12;
const ENDPOINTS_AT: usize = 16;
const KEYS_AT: usize = 20;
const REGIONS_AT: usize = 24;
const STAMP_AT: usize = 64;
const CHANGES_AT: usize = 128;
/// The number of messages, which a sleeping target waits on, and the number of its waiting threads.
const ARRIVALS_AT: usize = 192;
const WAITING_AT: usize = 196;
/// A bit for each endpoint that has sent messages since the target last checked it.
const MAIL_AT: usize = 1024;
const _: () = assert!(MAIL_AT + ENDPOINTS_LIMIT / 8 <= ENDPOINT_TABLE_AT);

const ENDPOINT_TABLE_AT: usize = 4096;
const ENDPOINT_BYTES: usize = 128;
const STATE_IN: usize = 0;
const HOST_IN: usize = 4;
const TENANT_IN: usize = 8;
const PROCESS_IN: usize = 12;
const EPOCH_IN: usize = 16;
const ACTIVE_IN: usize = 64;

const KEY_BYTES: usize = 32;
const WORD_IN: usize = 0;
const BASE_IN: usize = 8;
const LEN_IN: usize = 16;
const SCOPE_IN: usize = 24;

const REGION_BYTES: usize = 32;
const SERIAL_IN: usize = 0;
/// The region's key table: offset of the entries, start and end of the data, all as offsets in the
/// region. Zeros if it has none.
const TABLE_IN: usize = 8;

/// Slot state: no endpoint uses the slot.
pub const FREE: u32 = 0;
/// Slot state: an endpoint uses the slot.
pub const OPEN: u32 = 1;
/// Slot state: the endpoint is fenced and may do nothing more.
pub const FENCED: u32 = 2;

/// Polls of a waiting thread before it yields the processor.
const SPINS: u32 = 200;
/// Yields of a waiting thread before it sleeps.
const YIELDS: u32 = 2000;
/// Sleep between two polls of a waiting thread, after its spins and yields.
const SLEEP_TIME: Duration = Duration::from_micros(50);

/// Why control memory of a target cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// No control memory has this size.
    #[error("the control memory has an impossible size")]
    Size,
    /// The memory cannot be mapped.
    #[error("control memory: {0}")]
    Memory(io::Error),
    /// The memory is not control memory.
    #[error("the control memory has a wrong magic number")]
    Magic,
    /// The control memory has another version.
    #[error("the control memory has version {0}, this program knows version {VERSION}")]
    Version(u32),
    /// The numbers of slots contradict the size.
    #[error("the tables of the control memory do not match its size")]
    Tables,
}

/// The mapped control memory of one target.
#[derive(Debug)]
pub struct ControlMemory {
    memory: Memory,
    endpoints: usize,
    keys: usize,
    regions: usize,
    /// All slots that endpoints have used are below this. Known to the target only.
    slots_used: AtomicUsize,
}

impl ControlMemory {
    /// Creates control memory with slots for `endpoints` endpoints, `regions` regions, and the keys
    /// of these regions and of `windows` windows.
    pub fn create(endpoints: usize, regions: usize, windows: usize) -> io::Result<Self> {
        let keys = regions + windows;
        let memory = Memory::create("aquifer-control", bytes(endpoints, keys, regions))?;
        let control = Self { memory, endpoints, keys, regions, slots_used: AtomicUsize::new(0) };
        control.u32(ENDPOINTS_AT).store(short(endpoints), Ordering::Relaxed);
        control.u32(KEYS_AT).store(short(keys), Ordering::Relaxed);
        control.u32(REGIONS_AT).store(short(regions), Ordering::Relaxed);
        control.u32(VERSION_AT).store(VERSION, Ordering::Relaxed);
        control.u32(ALIVE_AT).store(1, Ordering::Relaxed);
        control.memory.atomic_u64(MAGIC_AT).store(MAGIC, Ordering::Release);
        Ok(control)
    }

    /// Maps the control memory that a target sent.
    ///
    /// # Errors
    /// If the memory cannot be mapped, or is not control memory of this version.
    pub fn open(fd: OwnedFd, len: u64) -> Result<Self, ControlError> {
        Self::open_versions(fd, len, &[VERSION])
    }

    /// Maps the control memory of a target that died, which may be of an earlier version.
    ///
    /// # Errors
    /// If the memory cannot be mapped, or is not control memory.
    pub fn open_to_retire(fd: OwnedFd, len: u64) -> Result<Self, ControlError> {
        Self::open_versions(fd, len, &[VERSION, VERSION_WITHOUT_REGIONS])
    }

    fn open_versions(fd: OwnedFd, len: u64, versions: &[u32]) -> Result<Self, ControlError> {
        let longest = bytes(ENDPOINTS_LIMIT, KEYS_LIMIT, crate::REGIONS_LIMIT);
        let len = usize::try_from(len)
            .ok()
            .filter(|len| (ENDPOINT_TABLE_AT..=longest).contains(len))
            .ok_or(ControlError::Size)?;
        let memory = Memory::from_fd(fd, len).map_err(ControlError::Memory)?;
        if memory.atomic_u64(MAGIC_AT).load(Ordering::Acquire) != MAGIC {
            return Err(ControlError::Magic);
        }
        let version = memory.atomic_u32(VERSION_AT).load(Ordering::Relaxed);
        if !versions.contains(&version) {
            return Err(ControlError::Version(version));
        }
        let count = |at| memory.atomic_u32(at).load(Ordering::Relaxed) as usize;
        let (endpoints, keys, regions) = (count(ENDPOINTS_AT), count(KEYS_AT), count(REGIONS_AT));
        let possible = endpoints <= ENDPOINTS_LIMIT
            && keys <= KEYS_LIMIT
            && regions <= crate::REGIONS_LIMIT
            && (bytes(endpoints, keys, regions) == len || Mutation::TrustTableSizes.is_active());
        if !possible {
            return Err(ControlError::Tables);
        }
        Ok(Self { memory, endpoints, keys, regions, slots_used: AtomicUsize::new(endpoints) })
    }

    /// Closes the descriptor, and keeps the mapping: see [`Memory::without_fd`].
    pub fn without_fd(mut self) -> Self {
        self.memory = self.memory.without_fd();
        self
    }

    /// The descriptor of the memory, to be sent to initiators.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.memory.fd()
    }

    /// The size of the memory, in bytes.
    pub fn bytes(&self) -> u64 {
        u64_from(self.memory.len())
    }

    /// The number of slots for endpoints.
    pub fn endpoints(&self) -> usize {
        self.endpoints
    }

    /// Whether the target serves.
    #[inline]
    pub fn is_alive(&self) -> bool {
        self.u32(ALIVE_AT).load(Ordering::Relaxed) != 0
    }

    /// Marks the target as gone. Endpoints then begin no access.
    pub fn set_dead(&self) {
        self.u32(ALIVE_AT).store(0, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// A number that orders messages of different endpoints.
    pub fn next_stamp(&self) -> u64 {
        self.memory.atomic_u64(STAMP_AT).fetch_add(1, Ordering::Relaxed)
    }

    /// Assigns a slot to a new endpoint. The `active` word continues from the last endpoint's
    /// value, so no waiter takes a batch of the new endpoint for one of the old.
    pub fn open_slot(&self, slot: usize, who: Identity) {
        self.slots_used.fetch_max(slot + 1, Ordering::SeqCst);
        self.endpoint_u32(slot, HOST_IN).store(u32::from(who.host.0), Ordering::Relaxed);
        self.endpoint_u32(slot, TENANT_IN).store(who.tenant.0, Ordering::Relaxed);
        self.memory.atomic_u64(endpoint_at(slot, EPOCH_IN)).store(who.epoch, Ordering::Relaxed);
        self.endpoint_u32(slot, PROCESS_IN).store(0, Ordering::Relaxed);
        self.set_state(slot, OPEN);
    }

    /// Records the process of an endpoint, so that [`crate::shm::retire`] can check that it is
    /// alive.
    pub fn set_process(&self, slot: usize, pid: u32) {
        self.endpoint_u32(slot, PROCESS_IN).store(pid, Ordering::Relaxed);
    }

    /// The process id of an endpoint; 0 if unknown.
    pub fn process(&self, slot: usize) -> u32 {
        self.endpoint_u32(slot, PROCESS_IN).load(Ordering::Relaxed)
    }

    /// Frees the slot of an endpoint whose process has hung up. All its accesses have ended.
    pub fn free_slot(&self, slot: usize) {
        self.set_state(slot, FREE);
        let active = self.active(slot);
        let last = active.load(Ordering::Acquire);
        active.store((last | 1).wrapping_add(1), Ordering::Release);
    }

    /// Stores the state of a slot. Its endpoint sees it before anything that follows.
    pub fn set_state(&self, slot: usize, state: u32) {
        self.endpoint_u32(slot, STATE_IN).store(state, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// The state word of a slot.
    #[inline]
    pub fn state(&self, slot: usize) -> u32 {
        self.endpoint_u32(slot, STATE_IN).load(Ordering::Relaxed)
    }

    /// The word that is odd while an endpoint is inside a batch.
    #[inline]
    pub fn active(&self, slot: usize) -> &AtomicU64 {
        self.memory.atomic_u64(endpoint_at(slot, ACTIVE_IN))
    }

    /// Waits until an endpoint has ended its current batch or its slot was freed. Returns false if
    /// `timeout` ran out first.
    pub fn drain(&self, slot: usize, timeout: Option<Duration>) -> bool {
        let active = self.active(slot);
        let seen = active.load(Ordering::SeqCst);
        if seen & 1 == 0 {
            return true;
        }
        let begun = Instant::now();
        let mut rounds = 0_u32;
        let mut is_logged = false;
        while active.load(Ordering::SeqCst) == seen {
            rounds = rounds.saturating_add(1);
            if rounds < SPINS {
                std::hint::spin_loop();
                continue;
            }
            if rounds < SPINS + YIELDS {
                std::thread::yield_now();
                continue;
            }
            std::thread::sleep(SLEEP_TIME);
            if timeout.is_some_and(|timeout| begun.elapsed() > timeout) {
                return false;
            }
            if !is_logged && begun.elapsed() > Duration::from_secs(1) {
                is_logged = true;
                tracing::warn!(slot, "an endpoint has been inside one batch for a second; waiting for it");
            }
        }
        true
    }

    /// Publishes a region with its serial number, which is not 0, and its key table.
    pub fn publish_region(&self, region: usize, serial: u64, table: Option<&KeyTable>) {
        let words = table.map_or([0; 3], |table| [table.entries_at, table.data.start, table.data.end]);
        let at = self.region_at(region);
        for (at, word) in (at + TABLE_IN..).step_by(8).zip(words) {
            self.memory.atomic_u64(at).store(word, Ordering::Relaxed);
        }
        self.memory.atomic_u64(at + SERIAL_IN).store(serial, Ordering::Release);
    }

    /// Removes a region whose keys are all unbound. An endpoint unmaps the region before its next
    /// access. Drain before the slot is published again.
    pub fn remove_region(&self, region: usize) {
        self.memory.atomic_u64(self.region_at(region) + SERIAL_IN).store(0, Ordering::SeqCst);
        self.memory.atomic_u64(CHANGES_AT).fetch_add(1, Ordering::SeqCst);
    }

    /// The number of removals of regions. The `active` word of the calling endpoint must be odd.
    #[inline]
    pub fn removals(&self) -> u64 {
        self.memory.atomic_u64(CHANGES_AT).load(Ordering::Acquire)
    }

    /// The serial number of a region, by which a later one in the same slot is recognised; 0 if
    /// there is none.
    #[inline]
    pub fn serial(&self, region: usize) -> u64 {
        if region >= self.regions {
            return 0;
        }
        self.memory.atomic_u64(self.region_at(region) + SERIAL_IN).load(Ordering::Acquire)
    }

    /// The key table that the target published for a region.
    pub fn table(&self, region: usize) -> Option<KeyTable> {
        if self.serial(region) == 0 {
            return None;
        }
        let at = self.region_at(region) + TABLE_IN;
        let word = |number: usize| self.memory.atomic_u64(at + number * 8).load(Ordering::Acquire);
        let data = word(1)..word(2);
        (data.end != 0).then(|| KeyTable { entries_at: word(0), data })
    }

    /// The number of slots for regions.
    pub fn regions(&self) -> usize {
        self.regions
    }

    /// Announces a message of an endpoint, after it was put into the mailbox. Wakes the target only
    /// if it waits.
    pub fn announce_message(&self, slot: usize) {
        self.mail(slot / 64).fetch_or(1 << (slot % 64), Ordering::SeqCst);
        self.wake_waiting();
    }

    /// Wakes the threads in [`Self::wait_for_message`].
    pub fn wake_waiting(&self) {
        let arrivals = self.u32(ARRIVALS_AT);
        arrivals.fetch_add(1, Ordering::SeqCst);
        if self.u32(WAITING_AT).load(Ordering::SeqCst) > 0 {
            // Fails only for wrong arguments.
            let _ = futex::wake(arrivals, futex::Flags::empty(), u32::MAX >> 1);
        }
    }

    /// Calls `found` for each slot whose endpoint announced messages since the last call.
    pub fn drain_announced(&self, mut found: impl FnMut(usize)) {
        for word in 0..self.endpoints.div_ceil(64) {
            if self.mail(word).load(Ordering::Relaxed) == 0 {
                continue;
            }
            let mut bits = self.mail(word).swap(0, Ordering::SeqCst);
            while bits != 0 {
                let slot = word * 64 + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                if slot < self.endpoints {
                    found(slot);
                }
            }
        }
    }

    /// Whether an endpoint has announced messages.
    pub fn has_announced(&self) -> bool {
        (0..self.endpoints.div_ceil(64)).any(|word| self.mail(word).load(Ordering::SeqCst) != 0)
    }

    /// Sleeps until a message is announced, unless `has_message` says that there is one, for at
    /// most `timeout`.
    pub fn wait_for_message(&self, timeout: Option<Duration>, has_message: impl FnOnce() -> bool) {
        let waiting = self.u32(WAITING_AT);
        waiting.fetch_add(1, Ordering::SeqCst);
        let arrivals = self.u32(ARRIVALS_AT);
        let seen = arrivals.load(Ordering::SeqCst);
        if !has_message() {
            let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
            // Ends early if a message is announced or a signal comes; the caller checks again.
            let _ = futex::wait(arrivals, futex::Flags::empty(), seen, timeout.as_ref());
        }
        waiting.fetch_sub(1, Ordering::SeqCst);
    }

    #[inline]
    fn mail(&self, word: usize) -> &AtomicU64 {
        self.memory.atomic_u64(MAIL_AT + word * 8)
    }

    /// Waits for all accesses in flight at all endpoints. Accesses that begin later see what the
    /// caller changed before.
    pub fn drain_all(&self) {
        fence(Ordering::SeqCst);
        for slot in 0..self.slots_used.load(Ordering::SeqCst) {
            self.drain(slot, None);
        }
    }

    /// Makes a key valid. No endpoint may be reading its slot.
    pub fn bind(&self, key: Key, grant: &KeyGrant) {
        let (index, tag) = split(key);
        let at = self.key_at(index);
        self.memory.atomic_u64(at + BASE_IN).store(grant.base, Ordering::Relaxed);
        self.memory.atomic_u64(at + LEN_IN).store(grant.len, Ordering::Relaxed);
        let (kind, value) = match grant.scope {
            Scope::Anyone => (0, 0),
            Scope::Tenant(tenant) => (1, tenant.0),
            Scope::Host(host) => (2, u32::from(host.0)),
        };
        self.u32(at + SCOPE_IN).store(value, Ordering::Relaxed);
        let word = u64::from(tag)
            | u64::from(grant.access.read) << 32
            | u64::from(grant.access.write) << 33
            | u64::from(grant.access.atomic) << 34
            | kind << 40
            | u64_from(grant.region) << 48;
        self.memory.atomic_u64(at + WORD_IN).store(word, Ordering::Release);
    }

    /// Clears a key. Returns whether it was bound. Accesses may still be in flight; drain
    /// afterwards.
    pub fn unbind(&self, key: Key) -> bool {
        let (index, tag) = split(key);
        if index >= self.keys {
            return false;
        }
        let word = self.memory.atomic_u64(self.key_at(index) + WORD_IN);
        if tag == 0 || word.load(Ordering::Relaxed) & u64::from(u32::MAX) != u64::from(tag) {
            return false;
        }
        word.store(0, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        true
    }

    /// The grant of a valid key. The `active` word of the calling endpoint must be odd.
    #[inline]
    pub fn lookup(&self, key: Key) -> Option<KeyGrant> {
        let (index, tag) = split(key);
        if index >= self.keys || tag == 0 {
            return None;
        }
        let at = self.key_at(index);
        let word = self.memory.atomic_u64(at + WORD_IN).load(Ordering::Acquire);
        if word & u64::from(u32::MAX) != u64::from(tag) {
            return None;
        }
        let value = self.u32(at + SCOPE_IN).load(Ordering::Relaxed);
        let scope = match (word >> 40) & 0xFF {
            0 => Scope::Anyone,
            1 => Scope::Tenant(Tenant(value)),
            2 => Scope::Host(Host(u16::try_from(value).ok()?)),
            _ => return None,
        };
        Some(KeyGrant {
            base: self.memory.atomic_u64(at + BASE_IN).load(Ordering::Relaxed),
            len: self.memory.atomic_u64(at + LEN_IN).load(Ordering::Relaxed),
            access: Access {
                read: word & (1 << 32) != 0,
                write: word & (1 << 33) != 0,
                atomic: word & (1 << 34) != 0,
            },
            scope,
            region: usize::try_from(word >> 48).ok()?,
        })
    }

    #[inline]
    fn key_at(&self, index: usize) -> usize {
        ENDPOINT_TABLE_AT + self.endpoints * ENDPOINT_BYTES + index * KEY_BYTES
    }

    #[inline]
    fn region_at(&self, region: usize) -> usize {
        self.key_at(self.keys) + region * REGION_BYTES
    }

    #[inline]
    fn u32(&self, at: usize) -> &AtomicU32 {
        self.memory.atomic_u32(at)
    }

    #[inline]
    fn endpoint_u32(&self, slot: usize, field: usize) -> &AtomicU32 {
        self.u32(endpoint_at(slot, field))
    }
}

#[inline]
fn endpoint_at(slot: usize, field: usize) -> usize {
    ENDPOINT_TABLE_AT + slot * ENDPOINT_BYTES + field
}

fn bytes(endpoints: usize, keys: usize, regions: usize) -> usize {
    ENDPOINT_TABLE_AT + endpoints * ENDPOINT_BYTES + keys * KEY_BYTES + regions * REGION_BYTES
}

fn short(value: usize) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

#[cfg(test)]
#[path = "control_tests.rs"]
mod tests;
