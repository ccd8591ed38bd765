//! The initiator's end, which checks keys, copies bytes and performs atomics while work is posted.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::handshake::{self, ShmReply, ShmWelcome};
use super::mailbox::{Direction, MessageRing, mailbox_bytes};
use super::regions::{AccessFault, MappedRegion, MappedRegions};
use super::socket;
use super::watch::{PeerSocket, watch};
use crate::Memory;
use crate::control::{ControlError, ControlMemory, FENCED, OPEN};
use crate::keys::Right;
use crate::locals::LocalMemories;
use crate::memory::{copy, u64_from};
use crate::target::{Identity, Region};
use crate::work::{
    Completion, Endpoint, EndpointError, Limits, LocalKey, LocalSlice, PostError, RemoteAddr, Verb, Work,
    WorkError, is_lack_of_room,
};

/// Bytes after which a batch leaves and re-enters the `active` state, so that a target that
/// invalidates a key waits for one long copy and not for a whole queue of them.
const PAUSE_BYTES: u64 = 256 << 10;

/// One connection to a [`super::ShmTarget`].
pub struct ShmEndpoint {
    who: Identity,
    control: ControlMemory,
    slot: usize,
    /// The last value stored in the `active` word; odd inside a batch.
    sequence: u64,
    peer_socket: Arc<PeerSocket>,
    limits: Limits,
    regions: Vec<Region>,
    mapped: MappedRegions,
    locals: LocalMemories,
    outbox: MessageRing,
    inbox: MessageRing,
    done: VecDeque<Completion>,
    /// Whether a WRITE was done since the batch or the last READ began. A READ must not overtake
    /// it.
    has_written: bool,
    broken: bool,
}

/// Connects to the target that listens at `path`.
///
/// # Errors
/// If no target listens there, the target refuses, or it speaks another protocol.
pub fn connect(path: &Path, who: Identity) -> Result<Box<dyn Endpoint>, EndpointError> {
    Ok(Box::new(ShmEndpoint::connect(path, who)?))
}

/// Why the memory of a welcome cannot be opened.
enum OpenFault {
    /// A lack of descriptors or memory of this process.
    NoRoom(io::Error),
    /// The target violated the protocol. Contains the reason.
    Protocol(String),
}

impl OpenFault {
    /// The fault of a mapping.
    fn of(error: io::Error, what: &str) -> Self {
        if is_lack_of_room(&error) { Self::NoRoom(error) } else { Self::Protocol(format!("{what}: {error}")) }
    }
}

impl<T: Into<String>> From<T> for OpenFault {
    fn from(reason: T) -> Self {
        Self::Protocol(reason.into())
    }
}

impl ShmEndpoint {
    /// Connects like [`connect`], for callers that want static dispatch.
    ///
    /// # Errors
    /// If no target listens there, the target refuses, or it speaks another protocol.
    pub fn connect(path: &Path, who: Identity) -> Result<Self, EndpointError> {
        let address = path.display().to_string();
        let unreachable = |source| EndpointError::Unreachable { address: address.clone(), source };
        let protocol = |reason| EndpointError::Protocol { address: address.clone(), reason };
        let socket = socket::connect(path).map_err(unreachable)?;
        // A target that refuses may have hung up before it reads the hello. Its answer has the
        // reason.
        let sent = socket::send(&socket, &handshake::encode_hello(who), &[]);
        let (bytes, fds) = socket::receive(&socket).map_err(unreachable)?;
        if bytes.is_empty() {
            let cause = sent.err().unwrap_or_else(|| io::ErrorKind::UnexpectedEof.into());
            return Err(unreachable(cause));
        }
        match handshake::parse_reply(&bytes).map_err(|e| protocol(e.to_string()))? {
            ShmReply::Refusal(refusal) => Err(EndpointError::Refused { address, refusal }),
            ShmReply::Welcome(welcome) => {
                let endpoint = Self::open(socket, who, welcome, fds).map_err(|fault| match fault {
                    OpenFault::NoRoom(source) => unreachable(source),
                    OpenFault::Protocol(reason) => protocol(reason),
                })?;
                watch(&endpoint.peer_socket).map_err(unreachable)?;
                Ok(endpoint)
            }
        }
    }

    /// Maps the memory of a welcome.
    fn open(
        socket: OwnedFd,
        who: Identity,
        welcome: ShmWelcome,
        fds: Vec<OwnedFd>,
    ) -> Result<Self, OpenFault> {
        if fds.len() != 2 {
            return Err(format!("the welcome came with {} descriptors instead of 2", fds.len()).into());
        }
        let map = |fd, len: u64, what: &str| {
            let len = usize::try_from(len).map_err(|_| format!("{what} is too long to map"))?;
            // Initiators pass no memory on, and may have many endpoints.
            Memory::from_fd(fd, len).map(Memory::without_fd).map_err(|error| OpenFault::of(error, what))
        };
        let mut fds = fds.into_iter();
        let mut next = || fds.next().ok_or("the welcome came without a descriptor");
        let control = ControlMemory::open(next()?, welcome.control_len).map_err(|error| match error {
            ControlError::Memory(error) => OpenFault::of(error, "control memory"),
            other => OpenFault::Protocol(other.to_string()),
        })?;
        let control = control.without_fd();
        let slot = welcome.slot as usize;
        if slot >= control.endpoints() {
            return Err(format!("slot {slot} is beyond the endpoint table").into());
        }
        if welcome.mailbox_len != u64_from(mailbox_bytes(&welcome.limits)) {
            return Err("the mailbox does not fit the limits".into());
        }
        let mailbox = Arc::new(map(next()?, welcome.mailbox_len, "mailbox")?);
        let limits = welcome.limits;
        Ok(Self {
            who,
            sequence: control.active(slot).load(Ordering::Relaxed) & !1,
            control,
            slot,
            peer_socket: PeerSocket::new(socket),
            limits,
            regions: welcome.regions,
            mapped: MappedRegions::default(),
            locals: LocalMemories::default(),
            outbox: MessageRing::new(&mailbox, &limits, Direction::ToTarget),
            inbox: MessageRing::new(&mailbox, &limits, Direction::ToInitiator),
            done: VecDeque::with_capacity(limits.queue_depth),
            has_written: false,
            broken: false,
        })
    }

    /// Marks the endpoint as accessing memory. Must be called before any key is read.
    #[inline]
    fn enter_batch(&mut self) {
        self.sequence = self.sequence.wrapping_add(1);
        self.control.active(self.slot).store(self.sequence, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.mapped.forget_removed(&self.control);
        self.has_written = false;
    }

    /// Marks all accesses so far as ended.
    #[inline]
    fn leave_batch(&mut self) {
        self.sequence = self.sequence.wrapping_add(1);
        self.control.active(self.slot).store(self.sequence, Ordering::Release);
    }

    /// The error that breaks this endpoint, if there is one. The first operation after it gets the
    /// error; later ones are flushed.
    #[inline]
    fn failure(&self) -> Option<WorkError> {
        if self.broken {
            return Some(WorkError::Flushed);
        }
        match self.control.state(self.slot) {
            OPEN if self.control.is_alive() && !self.peer_socket.is_hung_up() => None,
            FENCED => Some(WorkError::Fenced),
            _ => Some(WorkError::PeerGone),
        }
    }

    /// Executes a verb. If its region is not mapped, asks the target for the region's memory,
    /// outside of the batch, and tries once more.
    #[inline]
    fn execute(&mut self, verb: &Verb) -> Result<u64, WorkError> {
        match self.try_execute(verb) {
            Ok(value) => Ok(value),
            Err(AccessFault::Error(error)) => Err(error),
            Err(AccessFault::Unmapped(remote)) => self.map_and_execute(verb, remote),
        }
    }

    #[cold]
    fn map_and_execute(&mut self, verb: &Verb, remote: RemoteAddr) -> Result<u64, WorkError> {
        self.leave_batch();
        let mapped = self.mapped.request(&self.control, &self.peer_socket.socket, remote);
        self.enter_batch();
        if let Err(error) = mapped {
            let error = match (error, self.failure()) {
                // A target that has fenced this host refuses it.
                (_, Some(WorkError::Fenced)) => WorkError::Fenced,
                (WorkError::RemoteAccess, _) | (_, None) => error,
                // The target may have ended.
                (_, Some(failure)) => failure,
            };
            self.broken |= error != WorkError::RemoteAccess;
            return Err(error);
        }
        self.try_execute(verb).map_err(|fault| match fault {
            AccessFault::Error(error) => error,
            AccessFault::Unmapped(_) => WorkError::RemoteAccess,
        })
    }

    #[inline]
    fn try_execute(&mut self, verb: &Verb) -> Result<u64, AccessFault> {
        if let Some(failure) = self.failure() {
            self.broken = true;
            return Err(failure.into());
        }
        match *verb {
            Verb::Read { local, remote } => {
                let mut to = self.local_transfer(local)?;
                if std::mem::take(&mut self.has_written) {
                    fence(Ordering::SeqCst);
                }
                let (region, offset) = self.remote(remote, u64::from(local.len), Right::Read)?;
                for part in region.memory.parts(offset, u64::from(local.len)) {
                    let (from, bytes) = part?;
                    // SAFETY: both ranges were just checked to be inside mappings that live as long
                    // as this endpoint, and all parts together are as long as the local range.
                    unsafe {
                        copy(to, from, bytes);
                        to = to.add(bytes);
                    }
                }
                // Later operations of this endpoint must come after this one.
                fence(Ordering::AcqRel);
                Ok(u64::from(local.len))
            }
            Verb::Write { local, remote } => {
                let mut from = self.local_transfer(local)?;
                let (region, offset) = self.remote(remote, u64::from(local.len), Right::Write)?;
                fence(Ordering::AcqRel);
                for part in region.memory.parts(offset, u64::from(local.len)) {
                    let (to, bytes) = part?;
                    // SAFETY: both ranges were just checked to be inside mappings that live as long
                    // as this endpoint, and all parts together are as long as the local range.
                    unsafe {
                        copy(to, from, bytes);
                        from = from.add(bytes);
                    }
                }
                fence(Ordering::AcqRel);
                self.has_written = true;
                Ok(u64::from(local.len))
            }
            Verb::CompareSwap { remote, expected, desired } => {
                let word = self.word(remote)?;
                let swapped = word.compare_exchange(expected, desired, Ordering::SeqCst, Ordering::SeqCst);
                Ok(swapped.unwrap_or_else(|found| found))
            }
            Verb::FetchAdd { remote, add } => Ok(self.word(remote)?.fetch_add(add, Ordering::SeqCst)),
            Verb::Send { local } => Ok(self.send(local)?),
        }
    }

    fn send(&mut self, local: LocalSlice) -> Result<u64, WorkError> {
        if local.len > self.limits.message_bytes_max {
            return Err(WorkError::TooLong);
        }
        let from = self.local(local)?;
        let stamp = self.control.next_stamp();
        // SAFETY: `local` checked the source, and the length was checked above.
        match unsafe { self.outbox.put(stamp, from, local.len) } {
            Ok(true) => {
                self.control.announce_message(self.slot);
                Ok(u64::from(local.len))
            }
            Ok(false) => Err(WorkError::ReceiverNotReady),
            Err(_) => {
                self.broken = true;
                Err(WorkError::PeerGone)
            }
        }
    }

    /// The address of the local end of a READ or WRITE.
    #[inline]
    fn local_transfer(&self, local: LocalSlice) -> Result<*mut u8, WorkError> {
        if local.len > self.limits.transfer_bytes_max {
            return Err(WorkError::TooLong);
        }
        self.local(local)
    }

    #[inline]
    fn local(&self, slice: LocalSlice) -> Result<*mut u8, WorkError> {
        self.locals.pointer(slice).ok_or(WorkError::LocalAccess)
    }

    #[inline]
    fn remote(
        &self,
        remote: RemoteAddr,
        len: u64,
        right: Right,
    ) -> Result<(&MappedRegion, u64), AccessFault> {
        self.mapped.find(&self.control, self.who, remote, len, right)
    }

    #[inline]
    fn word(&self, remote: RemoteAddr) -> Result<&std::sync::atomic::AtomicU64, AccessFault> {
        if !remote.addr.is_multiple_of(8) {
            return Err(WorkError::Misaligned.into());
        }
        let (region, offset) = self.remote(remote, 8, Right::Atomic)?;
        let word = region.memory.part(offset, 8)?.cast::<u64>();
        // SAFETY: inside a mapping that lives as long as `self`; aligned, because regions and units
        // begin at multiples of 8 in both address spaces.
        Ok(unsafe { std::sync::atomic::AtomicU64::from_ptr(word) })
    }
}

impl Endpoint for ShmEndpoint {
    fn post(&mut self, batch: &[Work]) -> Result<(), PostError> {
        self.enter_batch();
        let mut moved = 0;
        let mut accepted = 0;
        for work in batch {
            if self.done.len() == self.limits.queue_depth {
                break;
            }
            accepted += 1;
            let outcome = self.execute(&work.verb);
            moved += *outcome.as_ref().unwrap_or(&0) * u64::from(moves_bytes(&work.verb));
            if work.signalled || outcome.is_err() {
                self.done.push_back(Completion { id: work.id, outcome });
            }
            if moved >= PAUSE_BYTES {
                moved = 0;
                self.leave_batch();
                self.enter_batch();
            }
        }
        self.leave_batch();
        if accepted == batch.len() { Ok(()) } else { Err(PostError::QueueFull { accepted }) }
    }

    fn poll(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        let count = self.done.len().min(max);
        out.extend(self.done.drain(..count));
        count
    }

    fn register_local(&mut self, memory: Arc<Memory>) -> Result<LocalKey, EndpointError> {
        self.locals.add(memory, self.limits.local_regions_max)
    }

    fn receive(&mut self, out: &mut Vec<u8>) -> bool {
        self.inbox.pop(out).unwrap_or_else(|_| {
            self.broken = true;
            false
        })
    }

    fn regions(&self) -> &[Region] {
        &self.regions
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn is_broken(&self) -> bool {
        self.failure().is_some()
    }
}

/// Whether the outcome of a verb is a number of bytes.
#[inline]
fn moves_bytes(verb: &Verb) -> bool {
    matches!(verb, Verb::Read { .. } | Verb::Write { .. })
}

impl Drop for ShmEndpoint {
    fn drop(&mut self) {
        self.peer_socket.hang_up();
    }
}

impl std::fmt::Debug for ShmEndpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ShmEndpoint")
            .field("who", &self.who)
            .field("slot", &self.slot)
            .field("regions", &self.regions.len())
            .field("broken", &self.broken)
            .finish_non_exhaustive()
    }
}
