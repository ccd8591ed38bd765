//! The owner's end: passes its memory once to each connection, and then only changes keys.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use rustix::process::{Signal, pidfd_send_signal};

use super::ShmOptions;
use super::acceptor::ShmAcceptor;
use super::handshake::{RegionRequest, ShmRegion, ShmUnits};
use super::inboxes::Inboxes;
use super::mailbox::MessageRing;
use super::socket::{self, PeerProcess};
use crate::control::{ControlMemory, FENCED};
use crate::handshake::RefusalReason;
use crate::keys::admits;
use crate::memory::u64_from;
use crate::registration::Registration;
use crate::tables::{RegisteredRegion, TargetTables};
use crate::target::{
    EndpointNumber, Host, Identity, Region, Sender, Target, TargetError, Tenant, WindowSpec,
};
use crate::unit_map::RegionMemory;
use crate::wake::WakeFd;
use crate::work::Key;

/// Longest time for which a stopping target waits for a batch in flight. The peers' mappings
/// remain.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// Time after which a fenced endpoint with an access in flight counts as stalled. An access takes
/// microseconds.
const STALL_TIME: Duration = Duration::from_secs(1);
/// The interval at which an awaited endpoint is checked.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A target that offers memory to processes of this machine.
pub struct ShmTarget {
    shared: Arc<ShmShared>,
    thread: Option<JoinHandle<()>>,
    path: PathBuf,
    inode: u64,
}

pub(super) struct ShmShared {
    pub(super) options: ShmOptions,
    pub(super) control: ControlMemory,
    pub(super) state: Mutex<ShmTargetState>,
    pub(super) wake: WakeFd,
    pub(super) stop: AtomicBool,
}

pub(super) struct ShmTargetState {
    /// The connected endpoints by slot.
    pub(super) peers: Vec<Option<ShmPeer>>,
    /// The slots that were used before and are free. The smallest is used first.
    free_slots: BinaryHeap<Reverse<usize>>,
    /// The slots of connected endpoints.
    slots: HashMap<EndpointNumber, usize>,
    of_tenant: HashMap<Tenant, usize>,
    last_number: u64,
    pub(super) inboxes: Inboxes,
    pub(super) tables: TargetTables,
}

pub(super) struct ShmPeer {
    pub(super) who: Identity,
    pub(super) endpoint: EndpointNumber,
    pub(super) socket: Arc<OwnedFd>,
    /// The peer's process; `None` if it is this process or could not be opened.
    pub(super) process: Option<Arc<PeerProcess>>,
    pub(super) outbox: MessageRing,
}

/// A fenced endpoint that may be in the middle of an access.
pub(super) struct FencedEndpoint {
    pub(super) slot: usize,
    pub(super) who: Identity,
    pub(super) socket: Arc<OwnedFd>,
    process: Option<Arc<PeerProcess>>,
}

impl ShmTarget {
    /// Offers memory at a Unix socket to which only one user can connect.
    ///
    /// # Errors
    /// If an option is out of bounds, another process listens at `path`, or the system refuses.
    pub fn listen(path: &Path, options: ShmOptions) -> Result<Self, TargetError> {
        let system = |what, source| TargetError::System { what, source };
        options.check()?;
        let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        let control = ControlMemory::create(options.endpoints_max, options.regions_max, options.windows_max)
            .map_err(|e| system("cannot create control memory", e))?;
        let wake = WakeFd::new().map_err(|e| system("cannot create an eventfd", e))?;
        // Peers have the memory mapped, so keys need not resist attacks. They must only not match
        // by accident.
        let secret = RandomState::new().hash_one(path);
        let state = ShmTargetState {
            peers: Vec::new(),
            free_slots: BinaryHeap::new(),
            slots: HashMap::new(),
            of_tenant: HashMap::new(),
            last_number: 0,
            inboxes: Inboxes::new(options.endpoints_max),
            tables: TargetTables::new(options.regions_max, options.windows_max, secret),
        };
        let (listener, inode) = socket::listen(path).map_err(|e| system("cannot listen", named(e)))?;
        let state = Mutex::new(state);
        let stop = AtomicBool::new(false);
        let shared = Arc::new(ShmShared { options, control, state, wake, stop });
        let thread_shared = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("fabric-target".into())
            .spawn(move || ShmAcceptor::new(thread_shared, listener).run())
            .map_err(|e| system("cannot start the target's thread", e))?;
        Ok(Self { shared, thread: Some(thread), path: path.to_owned(), inode })
    }
}

impl Drop for ShmTarget {
    fn drop(&mut self) {
        self.shared.control.set_dead();
        for slot in 0..self.shared.control.endpoints() {
            self.shared.control.drain(slot, Some(DRAIN_TIMEOUT));
        }
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.wake.wake();
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            debug_assert!(ended.is_ok(), "the target's thread panicked");
        }
        // Another target may have replaced the socket in the meantime.
        if std::fs::symlink_metadata(&self.path).is_ok_and(|file| file.ino() == self.inode) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl std::fmt::Debug for ShmTarget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ShmTarget")
            .field("path", &self.path)
            .field("options", &self.shared.options)
            .finish_non_exhaustive()
    }
}

impl ShmShared {
    /// Fences a host up to an epoch, and returns its endpoints. No access begins at them any more;
    /// one may be in flight.
    pub(super) fn begin_fence(&self, host: Host, epoch: u64) -> Vec<FencedEndpoint> {
        let mut state = self.lock();
        state.tables.fence(host, epoch);
        let is_fenced = |peer: &ShmPeer| peer.who.host == host && peer.who.epoch <= epoch;
        let peers = state.peers.iter().enumerate();
        let fenced = peers.filter_map(|(slot, peer)| {
            let ShmPeer { who, socket, process, .. } = peer.as_ref().filter(|peer| is_fenced(peer))?;
            Some(FencedEndpoint { slot, who: *who, socket: Arc::clone(socket), process: process.clone() })
        });
        let fenced: Vec<_> = fenced.collect();
        for FencedEndpoint { slot, .. } in &fenced {
            self.control.set_state(*slot, FENCED);
        }
        fenced
    }

    /// Waits until a fenced endpoint has no access in flight. A stalled process is killed. Returns
    /// false if `timeout` ran out first.
    pub(super) fn await_drained(&self, fenced: &FencedEndpoint, timeout: Option<Duration>) -> bool {
        let begun = Instant::now();
        let mut was_ended = false;
        while !self.control.drain(fenced.slot, Some(DRAIN_POLL_INTERVAL)) {
            // The slot may belong to another endpoint meanwhile.
            if socket::is_hung_up(&fenced.socket) {
                return true;
            }
            if begun.elapsed() > STALL_TIME && !std::mem::replace(&mut was_ended, true) {
                self.kill_stalled(fenced);
            }
            if timeout.is_some_and(|timeout| begun.elapsed() > timeout) {
                return false;
            }
        }
        true
    }

    /// Kills the process of a stalled endpoint, whose access would otherwise take effect after the
    /// fence. Does nothing if an endpoint of the process is not fenced.
    fn kill_stalled(&self, fenced: &FencedEndpoint) {
        let Identity { host, epoch, .. } = fenced.who;
        let Some(process) = fenced.process.as_ref().filter(|process| self.is_all_fenced(process)) else {
            tracing::warn!(host = host.0, epoch, "a fenced host stalls in the middle of an access");
            return;
        };
        match pidfd_send_signal(&process.pidfd, Signal::KILL) {
            Ok(()) => tracing::warn!(
                host = host.0,
                epoch,
                "a fenced host stalled in the middle of an access; killed its process"
            ),
            Err(error) => tracing::warn!(
                host = host.0,
                epoch,
                %error,
                "a fenced host stalls in the middle of an access, and its process cannot be killed"
            ),
        }
    }

    /// Whether all endpoints of a process are fenced.
    fn is_all_fenced(&self, process: &PeerProcess) -> bool {
        let state = self.lock();
        let mut others = state.peers.iter().flatten().filter(|peer| !state.tables.is_fenced(peer.who));
        !others.any(|peer| peer.process.as_ref().is_some_and(|other| other.pid == process.pid))
    }

    /// Puts a message into the ring to an endpoint. Returns false if there is no room.
    fn put(&self, peer: &mut ShmPeer, message: &[u8]) -> bool {
        let limit = self.options.limits.message_bytes_max;
        let len = u32::try_from(message.len()).ok().filter(|&len| len <= limit);
        len.is_some_and(|len| {
            // SAFETY: pointer and length of a slice, and its length is within the limit.
            let put = unsafe { peer.outbox.put(0, message.as_ptr(), len) };
            put == Ok(true)
        })
    }

    fn register(&self, new: Registration) -> Result<Region, TargetError> {
        Ok(self.lock().tables.register(&self.control, new)?.1)
    }

    /// The region in which a key opens an address to the endpoint in a slot, and its memory.
    pub(super) fn region<'a>(
        &self,
        state: &'a ShmTargetState,
        slot: usize,
        request: RegionRequest,
    ) -> Option<(ShmRegion, &'a RegionMemory)> {
        let who = state.peers.get(slot)?.as_ref()?.who;
        let RegionRequest { key, addr } = request;
        let grant = if key.is_table_key() {
            state.tables.table_grant(who, key, addr)
        } else {
            self.control.lookup(key).filter(|grant| admits(grant.scope, who))
        };
        let grant = grant.filter(|_| !state.tables.is_fenced(who))?;
        let RegisteredRegion { memory, region, serial, .. } = state.tables.regions.get(&grant.region)?;
        let units = memory.map.as_ref().map(|map| ShmUnits {
            words_len: u64_from(map.words.len()),
            words_at: u64_from(map.at),
            units: map.units,
            unit_bytes: map.unit_bytes,
        });
        let region = ShmRegion {
            slot: u32::try_from(grant.region).ok()?,
            serial: *serial,
            base: region.base,
            len: region.len,
            memory_len: u64_from(memory.memory.len()),
            is_writable: grant.access.write || grant.access.atomic,
            units,
        };
        Some((region, memory))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, ShmTargetState> {
        self.state.lock()
    }
}

impl Target for ShmTarget {
    fn register_as(&self, new: Registration) -> Result<Region, TargetError> {
        new.check_is_in_memory("the shared-memory provider")?;
        self.shared.register(new)
    }

    fn deregister(&self, region: Key) -> Result<(), TargetError> {
        let removed = self.shared.lock().tables.begin_deregister(&self.shared.control, region)?;
        self.shared.control.drain_all();
        self.shared.lock().tables.end_deregister(removed);
        Ok(())
    }

    fn bind(&self, window: &WindowSpec) -> Result<Key, TargetError> {
        self.shared.lock().tables.bind(&self.shared.control, window)
    }

    fn invalidate(&self, key: Key) -> Result<(), TargetError> {
        // Only one of several callers may clear the key and release its slot.
        self.shared.lock().tables.begin_invalidate(&self.shared.control, key)?;
        self.shared.control.drain_all();
        self.shared.lock().tables.end_invalidate(key);
        Ok(())
    }

    fn expel(&self, _range: Range<u64>) {
        self.shared.control.drain_all();
    }

    fn fence(&self, host: Host, epoch: u64) {
        for fenced in self.shared.begin_fence(host, epoch) {
            self.shared.await_drained(&fenced, None);
        }
    }

    fn receive(&self, out: &mut Vec<u8>) -> Option<Sender> {
        let mut state = self.shared.lock();
        let ShmTargetState { peers, inboxes, slots, .. } = &mut *state;
        self.shared.control.drain_announced(|slot| {
            if let Some(Some(peer)) = peers.get(slot)
                && inboxes.handle_announced(peer.endpoint).is_err()
            {
                disconnect_corrupt(peer);
            }
        });
        inboxes.receive(out, |endpoint| {
            let peer = slots.get(&endpoint).and_then(|slot| peers[*slot].as_ref());
            peer.into_iter().for_each(disconnect_corrupt);
        })
    }

    fn wait(&self, timeout: Duration) {
        let deadline = Instant::now().checked_add(timeout);
        let has_message = || self.shared.control.has_announced() || self.shared.lock().inboxes.has_message();
        while !has_message() {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return;
            }
            self.shared.control.wait_for_message(left, has_message);
        }
    }

    fn reply(&self, to: EndpointNumber, message: &[u8]) -> bool {
        let mut state = self.shared.lock();
        let ShmTargetState { peers, slots, tables, .. } = &mut *state;
        let peer = slots.get(&to).and_then(|slot| peers[*slot].as_mut());
        peer.is_some_and(|peer| !tables.is_fenced(peer.who) && self.shared.put(peer, message))
    }

    fn send(&self, to: Host, message: &[u8]) -> usize {
        let mut state = self.shared.lock();
        let ShmTargetState { peers, tables, .. } = &mut *state;
        let is_there = |peer: &&mut ShmPeer| peer.who.host == to && !tables.is_fenced(peer.who);
        peers
            .iter_mut()
            .flatten()
            .filter(is_there)
            .map(|peer| usize::from(self.shared.put(peer, message)))
            .sum()
    }

    fn control(&self) -> Option<BorrowedFd<'_>> {
        Some(self.shared.control.fd())
    }

    fn endpoints(&self) -> usize {
        self.shared.lock().slots.len()
    }
}

/// Disconnects an endpoint that corrupted its ring.
fn disconnect_corrupt(peer: &ShmPeer) {
    tracing::warn!(who = ?peer.who, "an endpoint corrupted its mailbox; disconnecting it");
    let _ = rustix::net::shutdown(&*peer.socket, rustix::net::Shutdown::Both);
}

impl ShmTargetState {
    /// Allocates a slot and a number for an endpoint.
    pub(super) fn allocate(
        &mut self,
        options: &ShmOptions,
        who: Identity,
    ) -> Result<(usize, EndpointNumber), RefusalReason> {
        let ShmOptions { endpoints_max, endpoints_per_tenant_max: limit, .. } = *options;
        if self.slots.len() >= endpoints_max {
            return Err(RefusalReason::Full(endpoints_max));
        }
        let count = self.of_tenant.entry(who.tenant).or_default();
        if *count >= limit {
            return Err(RefusalReason::TenantFull { tenant: who.tenant, limit });
        }
        *count += 1;
        let slot = self.free_slots.pop().map_or(self.peers.len(), |Reverse(slot)| slot);
        if slot == self.peers.len() {
            self.peers.push(None);
        }
        self.last_number += 1;
        let endpoint = EndpointNumber(self.last_number);
        self.slots.insert(endpoint, slot);
        Ok((slot, endpoint))
    }

    /// Frees the slot of an endpoint.
    pub(super) fn free(&mut self, slot: usize, from: Sender) {
        self.peers[slot] = None;
        self.slots.remove(&from.endpoint);
        self.free_slots.push(Reverse(slot));
        if let Some(count) = self.of_tenant.get_mut(&from.who.tenant) {
            *count -= 1;
            if *count == 0 {
                self.of_tenant.remove(&from.who.tenant);
            }
        }
    }
}
