//! Frames that a worker sends to other servers.

use std::collections::BTreeMap;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::frame::{self, Answer, AnswerEnd};
use super::peer_clock::PeerClock;
use super::{Connector, PeerSocket};
use crate::commands::elsewhere::Task;
use crate::server::dealing::WorkerHandle;
use crate::server::stream::Stream;

/// Unsent bytes to a server above which nothing more is forwarded to it.
const OUTGOING_MAX: usize = 4 << 20;
/// Least throughput of a link, in bytes per millisecond. The time of a frame is extended by the
/// time to send it and the bytes that are queued before it.
const BYTES_PER_MS: usize = 10_000;

/// A client's connection that waits for an answer: its place among those of the worker, and its
/// serial number, because places are reused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Waiter {
    /// The place.
    pub number: usize,
    /// The serial number.
    pub serial: u64,
}

/// The end of a frame.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FrameEnd {
    /// The server has answered: the replies to the executed entries, and the reason for the end.
    Answered(Vec<Vec<u8>>, AnswerEnd),
    /// No entry was executed: the server cannot be reached.
    NotSent,
    /// The connection was lost. It is unknown which entries were executed, and more may be until
    /// the frame's time has passed.
    Lost,
    /// The frame's time has passed. It is unknown which entries were executed; no more will be.
    Expired,
}

/// A frame that is queued for a server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Forwarded {
    /// The number of the frame.
    pub number: u64,
    /// The time after which the frame may not be served any more.
    pub ends: Instant,
}

/// The links of a worker, by the number of the server.
#[derive(Debug)]
pub struct Links {
    worker: Arc<WorkerHandle>,
    connector: Arc<dyn Connector>,
    /// The time without bytes of a server after which frames expire whose time has passed.
    timeout: Duration,
    links: BTreeMap<u16, Link>,
    next_number: u64,
}

/// A link to a server.
#[derive(Debug, Default)]
struct Link {
    /// The connection, once the connector has made it.
    stream: Option<Stream>,
    /// Whether a connection is being made.
    connects: bool,
    input: Vec<u8>,
    /// Frames that were not sent yet.
    queued: Vec<QueuedFrame>,
    flights: BTreeMap<u64, Flight>,
    clock: PeerClock,
    /// The time at which the last bytes of the server were received.
    last_received: Option<Instant>,
    /// Whether the last attempt to connect has failed, or a frame has expired and no bytes were
    /// received since.
    is_unresponsive: bool,
    waits_to_send: bool,
}

#[derive(Debug)]
struct QueuedFrame {
    forwarded: Forwarded,
    bytes: Vec<u8>,
}

/// A frame that was not answered yet.
#[derive(Clone, Copy, Debug)]
struct Flight {
    waiter: Waiter,
    ends: Instant,
}

/// The kind of event of a link for which a worker waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Interest {
    /// Bytes to receive.
    Receive,
    /// Room to send.
    Send,
}

impl Link {
    /// Bytes that were not sent yet.
    fn outgoing(&self) -> usize {
        let queued: usize = self.queued.iter().map(|frame| frame.bytes.len()).sum();
        queued + self.stream.as_ref().map_or(0, Stream::backlog_bytes)
    }

    /// Drops the connection. Calls `end` for all frames.
    fn lose(&mut self, mut end: impl FnMut(u64, Waiter, FrameEnd)) {
        let link = mem::replace(self, Self { is_unresponsive: true, ..Self::default() });
        for (number, flight) in link.flights {
            let is_queued = link.queued.iter().any(|frame| frame.forwarded.number == number);
            end(number, flight.waiter, if is_queued { FrameEnd::NotSent } else { FrameEnd::Lost });
        }
    }

    /// Reads the answers that were received completely; returns false if the server violates the
    /// protocol.
    fn read_answers(&mut self, now: Instant, mut end: impl FnMut(u64, Waiter, FrameEnd)) -> bool {
        let mut at = 0;
        let is_well = loop {
            match frame::complete_len(&self.input[at..]) {
                Ok(Some(len)) => {
                    let Ok(answer) = Answer::read(&self.input[at..at + len]) else { break false };
                    at += len;
                    self.clock.note(answer.clock_us, now);
                    // The answer to an expired frame is ignored.
                    if let Some(flight) = self.flights.remove(&answer.number) {
                        let replies = answer.replies.iter().map(|reply| reply.to_vec()).collect();
                        end(answer.number, flight.waiter, FrameEnd::Answered(replies, answer.end));
                    }
                }
                Ok(None) => break true,
                Err(frame::Malformed) => break false,
            }
        };
        self.input.drain(..at);
        is_well
    }

    /// Ends the frames whose time has passed, unless the server is sending.
    fn expire(&mut self, now: Instant, timeout: Duration, mut end: impl FnMut(u64, Waiter, FrameEnd)) {
        if self.last_received.is_some_and(|last_received| now < last_received + timeout) {
            return;
        }
        let is_over = |flight: &Flight| now >= flight.ends;
        self.is_unresponsive |= self.flights.values().any(is_over);
        self.queued.retain(|frame| now < frame.forwarded.ends);
        self.flights.retain(|number, flight| {
            if is_over(flight) {
                end(*number, flight.waiter, FrameEnd::Expired);
            }
            !is_over(flight)
        });
    }
}

impl Links {
    /// An empty set of links. A frame expires when its time has passed and the server has sent
    /// nothing for `timeout`.
    pub fn new(worker: Arc<WorkerHandle>, connector: Arc<dyn Connector>, timeout: Duration) -> Self {
        Self { worker, connector, timeout, links: BTreeMap::new(), next_number: 0 }
    }

    /// Whether a server is known not to answer.
    pub fn is_unresponsive(&self, server: u16) -> bool {
        self.links.get(&server).is_some_and(|link| link.is_unresponsive)
    }

    /// Queues a frame, which is sent at the end of the turn. Its time ends at `end`, or later if it
    /// takes long to send. If it `waits`, the server waits for partitions. `None` if more than
    /// `OUTGOING_MAX` bytes are unsent.
    pub fn forward(
        &mut self,
        server: u16,
        waiter: Waiter,
        entries: &[(usize, Task<'_>)],
        end: Instant,
        waits: bool,
    ) -> Option<Forwarded> {
        let link = self.links.entry(server).or_default();
        if link.stream.is_none() && !mem::replace(&mut link.connects, true) {
            self.connector.connect(server, Arc::clone(&self.worker));
        }
        if link.outgoing() > OUTGOING_MAX {
            return None;
        }
        self.next_number += 1;
        let mut bytes = Vec::new();
        frame::push_frame(&mut bytes, self.next_number, waits, entries);
        // A server that does not answer may accept no bytes, so no sending time is added.
        let queued = if link.is_unresponsive { 0 } else { link.outgoing() };
        let sending_ms = ((queued + bytes.len()) / BYTES_PER_MS) as u64;
        let ends = end + Duration::from_millis(sending_ms);
        let forwarded = Forwarded { number: self.next_number, ends };
        link.queued.push(QueuedFrame { forwarded, bytes });
        link.flights.insert(self.next_number, Flight { waiter, ends });
        Some(forwarded)
    }

    /// Sets the connection of a link, or drops the link if `socket` is `None`. Returns the frames
    /// that end by that.
    pub fn connected(&mut self, server: u16, socket: Option<PeerSocket>) -> Vec<(u64, Waiter, FrameEnd)> {
        let mut ends = Vec::new();
        let Some(link) = self.links.get_mut(&server) else { return ends };
        match socket {
            Some(socket) if link.stream.is_none() => {
                (link.connects, link.is_unresponsive) = (false, false);
                link.stream = Some(socket.into_stream());
            }
            // Another connection was made meanwhile.
            Some(_) => {}
            None => link.lose(|number, waiter, end| ends.push((number, waiter, end))),
        }
        ends
    }

    /// The descriptor of a link.
    pub fn descriptor(&self, server: u16) -> Option<BorrowedFd<'_>> {
        self.links.get(&server).and_then(|link| link.stream.as_ref()).map(AsFd::as_fd)
    }

    /// Whether any frame was not answered yet.
    pub fn has_flights(&self) -> bool {
        self.links.values().any(|link| !link.flights.is_empty())
    }

    /// Receives from a server, and sends bytes that the socket did not accept before. Calls `end`
    /// for each frame that has ended.
    pub fn on_event(&mut self, server: u16, now: Instant, mut end: impl FnMut(u64, Waiter, FrameEnd)) {
        let Some(link) = self.links.get_mut(&server) else { return };
        let Some(stream) = &mut link.stream else { return };
        stream.send_backlog();
        link.input.reserve(frame::LINK_INPUT_BYTES);
        let received = stream.receive(&mut link.input);
        let is_ended = stream.is_ended;
        if received > 0 {
            (link.last_received, link.is_unresponsive) = (Some(now), false);
        }
        if !link.read_answers(now, &mut end) || is_ended {
            link.lose(end);
        }
    }

    /// Ends the frames whose time has passed. Calls `end` for each of them.
    pub fn expire(&mut self, now: Instant, mut end: impl FnMut(u64, Waiter, FrameEnd)) {
        self.links.values_mut().for_each(|link| link.expire(now, self.timeout, &mut end));
    }

    /// Sends the frames of a turn. Calls `end` for each frame that has ended, and `wait` for links
    /// whose interest has changed.
    pub fn send(
        &mut self,
        now: Instant,
        mut wait: impl FnMut(u16, BorrowedFd<'_>, Interest),
        mut end: impl FnMut(u64, Waiter, FrameEnd),
    ) {
        for (server, link) in &mut self.links {
            let Some(stream) = &mut link.stream else { continue };
            if !stream.has_backlog() && !link.queued.is_empty() {
                for frame in &mut link.queued {
                    let until_us = link.clock.serve_until(frame.forwarded.ends, now);
                    frame::set_serve_until(&mut frame.bytes, until_us);
                }
                let parts: Vec<&[u8]> = link.queued.iter().map(|frame| &frame.bytes[..]).collect();
                stream.send(&parts);
                link.queued.clear();
            }
            if link.waits_to_send != stream.has_backlog() {
                link.waits_to_send = stream.has_backlog();
                wait(
                    *server,
                    stream.as_fd(),
                    if link.waits_to_send { Interest::Send } else { Interest::Receive },
                );
            }
            if stream.is_broken {
                link.lose(&mut end);
            }
        }
    }
}
