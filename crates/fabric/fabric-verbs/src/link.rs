//! An initiator's connection: one queue pair with its queues and slots.

use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};

use super::slots::{MessageSlots, RECEIVED_BIT, SENT_BIT, slot_of};
use super::sys::completions::{CompletionQueue, WorkCompletion, WorkOutcome};
use super::sys::connection::{CmConnection, CmEventKind, CmEvents};
use super::sys::device::Device;
use super::sys::queue_pair::{QueuePair, WorkKind, WorkRequest};
use super::{INLINE_BYTES, MESSAGE_SLOT_BYTES, MESSAGE_SLOTS_MAX, QUEUE_DEPTH_LIMIT};
use aquifer_fabric::handshake::hello::{Hello, Welcome};
use aquifer_fabric::handshake::{self, Credential};
use aquifer_fabric::work::EndpointError;

/// A connection with all its resources.
#[derive(Debug)]
pub(super) struct VerbsLink {
    // Fields are dropped in this order, so a resource outlives its users.
    connection: CmConnection,
    completions: CompletionQueue,
    events: CmEvents,
    inbox: MessageSlots,
    outbox: MessageSlots,
    pair: QueuePair,
    pub device: &'static Device,
}

impl VerbsLink {
    /// Connects to the target at an address.
    fn open(address: SocketAddr, deadline: Instant) -> io::Result<Self> {
        let events = CmEvents::new()?;
        let mut connection = CmConnection::new(&events)?;
        connection.resolve_address(address, left_ms(deadline))?;
        expect(&events, CmEventKind::AddressResolved, deadline)?;
        let device = connection.device()?;
        let depth = (QUEUE_DEPTH_LIMIT + MESSAGE_SLOTS_MAX as usize).min(device.caps.queue_depth);
        let completions = CompletionQueue::new(device, depth + MESSAGE_SLOTS_MAX as usize)?;
        let inbox = MessageSlots::new(device, "aquifer-verbs-inbox", MESSAGE_SLOTS_MAX, MESSAGE_SLOT_BYTES)?;
        let outbox =
            MessageSlots::new(device, "aquifer-verbs-outbox", MESSAGE_SLOTS_MAX, MESSAGE_SLOT_BYTES)?;
        let pair = connection.open_pair(
            device,
            &completions,
            depth,
            MESSAGE_SLOTS_MAX as usize,
            None,
            INLINE_BYTES,
        )?;
        let mut link = Self { connection, completions, events, inbox, outbox, pair, device };
        while let Some(slot) = link.inbox.allocate() {
            link.offer(slot)?;
        }
        link.connection.resolve_route(left_ms(deadline))?;
        expect(&link.events, CmEventKind::RouteResolved, deadline)?;
        link.connection.connect(device.caps.reads_begun)?;
        expect(&link.events, CmEventKind::Established, deadline)?;
        Ok(link)
    }

    fn offer(&self, slot: u32) -> io::Result<()> {
        // SAFETY: the slot is registered for as long as the pair lives, and unused until a message
        // has arrived in it.
        unsafe { self.pair.receive(RECEIVED_BIT | u64::from(slot), self.inbox.whole(slot)) }
    }

    /// Takes up to `max` completions. Returns their number.
    pub fn poll(&self, out: &mut Vec<WorkCompletion>, max: usize) -> usize {
        self.completions.poll(out, max)
    }

    /// Posts work to the device.
    ///
    /// # Errors
    /// If the device accepts no more. The connection is then unusable.
    ///
    /// # Safety
    /// The conditions of [`QueuePair::post`] apply.
    pub unsafe fn post(&self, requests: &[WorkRequest]) -> io::Result<()> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.pair.post(requests) }
    }

    /// Sends a message. Returns false if all slots are in use.
    ///
    /// # Errors
    /// The errors of [`Self::post`].
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<bool> {
        let Some(slot) = self.outbox.allocate() else { return Ok(false) };
        self.outbox.write(slot, bytes);
        let kind = WorkKind::Send { local: self.outbox.piece(slot, bytes.len()) };
        let request = WorkRequest { id: SENT_BIT | u64::from(slot), kind, signalled: true, fenced: false };
        // SAFETY: the slot is registered for as long as the pair lives, and released only when the
        // message was sent.
        unsafe { self.pair.post(&[request])? };
        Ok(true)
    }

    /// Whether a slot is free for another message.
    pub fn has_free_slot(&self) -> bool {
        self.outbox.has_free()
    }

    /// Releases the slot of a message that was sent.
    pub fn free_slot(&mut self, id: u64) {
        self.outbox.release(slot_of(id));
    }

    /// Copies a received message to `out`, and offers its slot for another.
    ///
    /// # Errors
    /// If the device accepts no more.
    pub fn receive(&self, ended: &WorkCompletion, out: &mut Vec<u8>) -> io::Result<()> {
        let slot = slot_of(ended.id);
        self.inbox.read(slot, ended.bytes as usize, out);
        self.offer(slot)
    }

    /// Whether the peer has disconnected or is gone.
    pub fn is_disconnected(&self) -> bool {
        loop {
            match self.events.next() {
                Ok(Some(event)) if event.kind == CmEventKind::Disconnected => return true,
                Ok(Some(_)) => {}
                Ok(None) => return false,
                Err(_) => return true,
            }
        }
    }

    pub fn completions(&self) -> &CompletionQueue {
        &self.completions
    }

    pub fn events_fd(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }
}

impl Drop for VerbsLink {
    fn drop(&mut self) {
        self.connection.disconnect();
    }
}

fn left_ms(deadline: Instant) -> i32 {
    let left = deadline.saturating_duration_since(Instant::now()).as_millis();
    i32::try_from(left).unwrap_or(i32::MAX).max(1)
}

fn wait_for(fds: &[BorrowedFd<'_>], deadline: Instant) -> io::Result<()> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    let timeout = Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
    let mut polled: Vec<PollFd<'_>> =
        fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    match rustix::event::poll(&mut polled, Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn expect(events: &CmEvents, wanted: CmEventKind, deadline: Instant) -> io::Result<()> {
    loop {
        match events.next()?.map(|event| event.kind) {
            Some(kind) if kind == wanted => return Ok(()),
            Some(CmEventKind::Rejected) => return Err(io::ErrorKind::ConnectionRefused.into()),
            Some(CmEventKind::Disconnected) => return Err(io::ErrorKind::ConnectionReset.into()),
            Some(CmEventKind::Failed(error)) => return Err(io::Error::from_raw_os_error(error)),
            Some(_) => {}
            None => wait_for(&[events.as_fd()], deadline)?,
        }
    }
}

/// A stream over messages for the handshake. What was written is sent as one message when an answer
/// is read.
struct HandshakeStream {
    link: VerbsLink,
    outgoing: Vec<u8>,
    received: Vec<u8>,
    taken: usize,
    deadline: Instant,
}

impl HandshakeStream {
    fn next_end(&mut self) -> io::Result<WorkCompletion> {
        let mut ended = Vec::with_capacity(1);
        loop {
            for is_armed in [false, true] {
                if self.link.poll(&mut ended, 1) > 0 {
                    return Ok(ended[0]);
                }
                if !is_armed {
                    self.link.completions.arm();
                }
            }
            if self.link.is_disconnected() {
                return Err(io::ErrorKind::ConnectionReset.into());
            }
            wait_for(&[self.link.completions.fd(), self.link.events.as_fd()], self.deadline)?;
            self.link.completions.disarm();
        }
    }

    fn receive_message(&mut self) -> io::Result<()> {
        loop {
            let end = self.next_end()?;
            if end.outcome != WorkOutcome::Done {
                return Err(io::ErrorKind::ConnectionReset.into());
            }
            if end.id & RECEIVED_BIT != 0 {
                self.taken = 0;
                return self.link.receive(&end, &mut self.received);
            }
            self.link.free_slot(end.id);
        }
    }
}

impl Read for HandshakeStream {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if !self.outgoing.is_empty() {
            let outgoing = std::mem::take(&mut self.outgoing);
            self.link.send(&outgoing)?;
        }
        while self.taken == self.received.len() {
            self.receive_message()?;
        }
        let count = out.len().min(self.received.len() - self.taken);
        out[..count].copy_from_slice(&self.received[self.taken..self.taken + count]);
        self.taken += count;
        Ok(count)
    }
}

impl Write for HandshakeStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.outgoing.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Connects and runs the handshake.
pub(super) fn open_session(
    address: SocketAddr,
    credential: &Credential,
    hello: &Hello,
    timeout: Duration,
) -> Result<(VerbsLink, Welcome), EndpointError> {
    let deadline = Instant::now() + timeout;
    let unreachable = |source| EndpointError::Unreachable { address: address.to_string(), source };
    let link = VerbsLink::open(address, deadline).map_err(unreachable)?;
    let stream = HandshakeStream { link, outgoing: Vec::new(), received: Vec::new(), taken: 0, deadline };
    let (secured, welcome) = handshake::initiate_session(stream, address, credential, hello)?;
    Ok((secured.into_parts().0.link, welcome))
}
