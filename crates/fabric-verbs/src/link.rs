//! An initiator's connection: made, proved, and given up as a whole.

use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};

use super::slots::{CAME, Slots, WENT, slot_of};
use super::sys::completions::{Completions, Ended, Outcome};
use super::sys::connection::{Connection, EventKind, Events};
use super::sys::device::Device;
use super::sys::pair::{Kind, Order, Pair};
use super::{INLINE_BYTES, LETTER_BYTES, LETTERS_MAX, QUEUE_DEPTH_LIMIT};
use aquifer_fabric::handshake::hello::{Hello, Welcome};
use aquifer_fabric::handshake::{self, ClusterKey};
use aquifer_fabric::work::EndpointError;

/// One connection with all that belongs to it.
#[derive(Debug)]
pub(super) struct Link {
    // Dropped in this order: what is used outlives what uses it.
    connection: Connection,
    completions: Completions,
    events: Events,
    inbox: Slots,
    outbox: Slots,
    pair: Pair,
    pub device: &'static Device,
}

impl Link {
    /// Connect to whoever listens there.
    fn open(address: SocketAddr, deadline: Instant) -> io::Result<Self> {
        let events = Events::new()?;
        let mut connection = Connection::new(&events)?;
        connection.resolve_address(address, left_ms(deadline))?;
        expect(&events, EventKind::AddressResolved, deadline)?;
        let device = connection.device()?;
        let depth = (QUEUE_DEPTH_LIMIT + LETTERS_MAX as usize).min(device.caps.queue_depth);
        let completions = Completions::new(device, depth + LETTERS_MAX as usize)?;
        let inbox = Slots::new(device, "aquifer-verbs-inbox", LETTERS_MAX, LETTER_BYTES)?;
        let outbox = Slots::new(device, "aquifer-verbs-outbox", LETTERS_MAX, LETTER_BYTES)?;
        let pair =
            connection.open_pair(device, &completions, depth, LETTERS_MAX as usize, None, INLINE_BYTES)?;
        let mut link = Self { connection, completions, events, inbox, outbox, pair, device };
        while let Some(slot) = link.inbox.take() {
            link.offer(slot)?;
        }
        link.connection.resolve_route(left_ms(deadline))?;
        expect(&link.events, EventKind::RouteResolved, deadline)?;
        link.connection.connect(device.caps.reads_begun)?;
        expect(&link.events, EventKind::Established, deadline)?;
        Ok(link)
    }

    fn offer(&self, slot: u32) -> io::Result<()> {
        // SAFETY: the place is registered for as long as the pair lives, and given to nobody else until something has come there.
        unsafe { self.pair.receive(CAME | u64::from(slot), self.inbox.whole(slot)) }
    }

    /// What has ended, up to so much.
    pub fn poll(&self, out: &mut Vec<Ended>, max: usize) -> usize {
        self.completions.poll(out, max)
    }

    /// Give work to the device.
    ///
    /// # Errors
    /// If it takes no more: the connection is of no use then.
    ///
    /// # Safety
    /// As [`Pair::post`].
    pub unsafe fn post(&self, orders: &[Order]) -> io::Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.pair.post(orders) }
    }

    /// Send a message; false if all places are in use.
    ///
    /// # Errors
    /// As [`Self::post`].
    pub fn say(&mut self, bytes: &[u8]) -> io::Result<bool> {
        let Some(slot) = self.outbox.take() else { return Ok(false) };
        self.outbox.write(slot, bytes);
        let kind = Kind::Send { local: self.outbox.piece(slot, bytes.len()) };
        let order = Order { id: WENT | u64::from(slot), kind, signalled: true, fenced: false };
        // SAFETY: the place is registered for as long as the pair lives, and free again only when the message has gone.
        unsafe { self.pair.post(&[order])? };
        Ok(true)
    }

    /// Whether there is a place for one more message.
    pub fn may_say(&self) -> bool {
        self.outbox.has_free()
    }

    /// A message has gone; its place is free.
    pub fn went(&mut self, id: u64) {
        self.outbox.give_back(slot_of(id));
    }

    /// A message has come: put it into `out`, and offer its place for another.
    ///
    /// # Errors
    /// If the device takes no more.
    pub fn heard(&self, ended: &Ended, out: &mut Vec<u8>) -> io::Result<()> {
        let slot = slot_of(ended.id);
        self.inbox.read(slot, ended.bytes as usize, out);
        self.offer(slot)
    }

    /// Whether the other end has said farewell, or is gone.
    pub fn is_over(&self) -> bool {
        loop {
            match self.events.next() {
                Ok(Some(event)) if event.kind == EventKind::Disconnected => return true,
                Ok(Some(_)) => {}
                Ok(None) => return false,
                Err(_) => return true,
            }
        }
    }

    pub fn completions(&self) -> &Completions {
        &self.completions
    }

    pub fn events_fd(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }
}

impl Drop for Link {
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

fn expect(events: &Events, wanted: EventKind, deadline: Instant) -> io::Result<()> {
    loop {
        match events.next()?.map(|event| event.kind) {
            Some(kind) if kind == wanted => return Ok(()),
            Some(EventKind::Rejected) => return Err(io::ErrorKind::ConnectionRefused.into()),
            Some(EventKind::Disconnected) => return Err(io::ErrorKind::ConnectionReset.into()),
            Some(EventKind::Failed(error)) => return Err(io::Error::from_raw_os_error(error)),
            Some(_) => {}
            None => wait_for(&[events.as_fd()], deadline)?,
        }
    }
}

/// The handshake's bytes as messages: what was written goes as one when an answer is awaited.
struct Talk {
    link: Link,
    said: Vec<u8>,
    heard: Vec<u8>,
    taken: usize,
    deadline: Instant,
}

impl Talk {
    fn next_end(&mut self) -> io::Result<Ended> {
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
            if self.link.is_over() {
                return Err(io::ErrorKind::ConnectionReset.into());
            }
            wait_for(&[self.link.completions.fd(), self.link.events.as_fd()], self.deadline)?;
            self.link.completions.quiet();
        }
    }

    fn hear(&mut self) -> io::Result<()> {
        loop {
            let end = self.next_end()?;
            if end.outcome != Outcome::Done {
                return Err(io::ErrorKind::ConnectionReset.into());
            }
            if end.id & CAME != 0 {
                self.taken = 0;
                return self.link.heard(&end, &mut self.heard);
            }
            self.link.went(end.id);
        }
    }
}

impl Read for Talk {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if !self.said.is_empty() {
            let said = std::mem::take(&mut self.said);
            self.link.say(&said)?;
        }
        while self.taken == self.heard.len() {
            self.hear()?;
        }
        let count = out.len().min(self.heard.len() - self.taken);
        out[..count].copy_from_slice(&self.heard[self.taken..self.taken + count]);
        self.taken += count;
        Ok(count)
    }
}

impl Write for Talk {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.said.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Connect, prove who we are, and hear what is granted.
pub(super) fn knock(
    address: SocketAddr,
    key: &ClusterKey,
    hello: &Hello,
    patience: Duration,
) -> Result<(Link, Welcome), EndpointError> {
    let deadline = Instant::now() + patience;
    let unreachable = |source| EndpointError::Unreachable { address: address.to_string(), source };
    let link = Link::open(address, deadline).map_err(unreachable)?;
    let talk = Talk { link, said: Vec::new(), heard: Vec::new(), taken: 0, deadline };
    let (secured, welcome) = handshake::initiate_session(talk, address, key, hello)?;
    Ok((secured.into_parts().0.link, welcome))
}
