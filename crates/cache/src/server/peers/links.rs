//! Frames that a worker sends to other servers.

use std::collections::BTreeMap;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use super::frame::{self, Answer, AnswerEnd};
use super::{Connector, PeerSocket};
use crate::commands::elsewhere::Task;
use crate::server::dealing::WorkerHandle;
use crate::server::stream::Stream;

/// Bytes that wait to be sent to a server beyond which nothing more is forwarded to it.
const OUTGOING_MAX: usize = 4 << 20;

/// A client's connection that waits for an answer: its place among those of the worker, and its
/// serial number, because places are used again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Waiter {
    /// The place.
    pub number: usize,
    /// The serial number.
    pub serial: u64,
}

/// What has become of a frame.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FrameEnd {
    /// It was answered: the replies to the entries that are done, and why no more are.
    Answered(Vec<Vec<u8>>, AnswerEnd),
    /// Nothing of it was done: the server cannot be reached.
    NotSent,
    /// The connection was lost. What was done is unknown.
    Lost,
}

/// The links of a worker, by the number of the server.
#[derive(Debug)]
pub struct Links {
    worker: Arc<WorkerHandle>,
    connector: Arc<dyn Connector>,
    links: BTreeMap<u16, Link>,
    next_number: u64,
}

/// A link to a server.
#[derive(Debug, Default)]
struct Link {
    /// Not there until the server has answered.
    stream: Option<Stream>,
    input: Vec<u8>,
    /// Frames that are yet to be sent.
    outgoing: Vec<u8>,
    flights: BTreeMap<u64, Waiter>,
    waits_to_send: bool,
}

/// What the epoll of a worker is to wait for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Interest {
    /// What arrives.
    Receive,
    /// Room to send.
    Send,
}

impl Links {
    /// No links.
    pub fn new(worker: Arc<WorkerHandle>, connector: Arc<dyn Connector>) -> Self {
        Self { worker, connector, links: BTreeMap::new(), next_number: 0 }
    }

    /// Has a frame sent at the end of the turn; returns its number. `None` if too much waits to be
    /// sent.
    pub fn forward(&mut self, server: u16, waiter: Waiter, entries: &[(usize, Task<'_>)]) -> Option<u64> {
        let link = self.links.entry(server).or_insert_with(|| {
            self.connector.connect(server, Arc::clone(&self.worker));
            Link::default()
        });
        if link.outgoing.len() > OUTGOING_MAX {
            return None;
        }
        self.next_number += 1;
        frame::push_frame(&mut link.outgoing, self.next_number, entries);
        link.flights.insert(self.next_number, waiter);
        Some(self.next_number)
    }

    /// A server can be reached, or cannot, or has ended. Returns the frames that end by that.
    pub fn connected(&mut self, server: u16, socket: Option<PeerSocket>) -> Vec<(u64, Waiter, FrameEnd)> {
        let Some(link) = self.links.get_mut(&server) else { return Vec::new() };
        if let Some(socket) = socket {
            link.stream = Some(socket.into_stream());
            return Vec::new();
        }
        let Some(link) = self.links.remove(&server) else { return Vec::new() };
        let end = if link.stream.is_some() { FrameEnd::Lost } else { FrameEnd::NotSent };
        link.flights.into_iter().map(|(number, waiter)| (number, waiter, end.clone())).collect()
    }

    /// The descriptor of a link.
    pub fn descriptor(&self, server: u16) -> Option<BorrowedFd<'_>> {
        self.links.get(&server).and_then(|link| link.stream.as_ref()).map(AsFd::as_fd)
    }

    /// Receives from a server, or sends what it did not take before. Calls `end` for each frame
    /// that has ended.
    pub fn on_event(&mut self, server: u16, mut end: impl FnMut(u64, Waiter, FrameEnd)) {
        let Some(link) = self.links.get_mut(&server) else { return };
        let Some(stream) = &mut link.stream else { return };
        stream.send_backlog();
        link.input.reserve(frame::LINK_INPUT_BYTES);
        stream.receive(&mut link.input);
        let mut is_broken = stream.is_ended;
        let mut at = 0;
        loop {
            match frame::complete_len(&link.input[at..]) {
                Ok(Some(len)) => {
                    let Ok(answer) = Answer::read(&link.input[at..at + len]) else {
                        is_broken = true;
                        break;
                    };
                    at += len;
                    if let Some(waiter) = link.flights.remove(&answer.number) {
                        let replies = answer.replies.iter().map(|reply| reply.to_vec()).collect();
                        end(answer.number, waiter, FrameEnd::Answered(replies, answer.end));
                    }
                }
                Ok(None) => break,
                Err(frame::Malformed) => {
                    is_broken = true;
                    break;
                }
            }
        }
        link.input.drain(..at);
        if is_broken {
            self.lose(server, end);
        }
    }

    /// Sends the frames of a turn. Calls `end` for each frame that has ended, and `wait` for links
    /// whose interest has changed.
    pub fn send(
        &mut self,
        mut wait: impl FnMut(u16, BorrowedFd<'_>, Interest),
        mut end: impl FnMut(u64, Waiter, FrameEnd),
    ) {
        let mut lost = Vec::new();
        for (server, link) in &mut self.links {
            let Some(stream) = &mut link.stream else { continue };
            if !stream.has_backlog() && !link.outgoing.is_empty() {
                let outgoing = mem::take(&mut link.outgoing);
                stream.send(&[&outgoing]);
                link.outgoing = outgoing;
                link.outgoing.clear();
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
                lost.push(*server);
            }
        }
        lost.into_iter().for_each(|server| self.lose(server, &mut end));
    }

    fn lose(&mut self, server: u16, mut end: impl FnMut(u64, Waiter, FrameEnd)) {
        let Some(link) = self.links.remove(&server) else { return };
        for (number, waiter) in link.flights {
            end(number, waiter, FrameEnd::Lost);
        }
    }
}
