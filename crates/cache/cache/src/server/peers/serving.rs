//! Frames of other servers, and their answers.

use std::os::fd::{AsFd, BorrowedFd};

use super::PeerSocket;
use super::frame::{self, ANSWER_HEAD_BYTES, AnswerEnd, Frame, REPLY_LEN_BYTES};
use crate::clock::boot_us;
use crate::commands::elsewhere::{self, EntryEnd};
use crate::commands::{Context, REPLIES_MAX, Replies};
use crate::server::stream::Stream;
use crate::store::presence::Presence;

/// A connection of another server that forwards requests.
#[derive(Debug)]
pub struct PeerConnection {
    /// The socket.
    pub stream: Stream,
    /// The received bytes, except during a turn.
    pub input: Vec<u8>,
    /// Frames that wait for a partition that is about to leave or to arrive, for an item of the
    /// pool, or for room.
    waiting: Vec<WaitingFrame>,
    /// Whether the connection is queued for the next turn.
    pub is_ready: bool,
    /// Whether the connection waits to send, not to receive.
    pub waits_to_send: bool,
    /// Whether the other server has violated the protocol.
    is_malformed: bool,
}

/// A frame of which `done` entries were executed.
#[derive(Debug)]
struct WaitingFrame {
    bytes: Vec<u8>,
    lens: Vec<u32>,
    done: usize,
    replies: Vec<u8>,
    /// Whether the next entry waits for an item of the pool, or for room.
    fetches: bool,
}

/// The progress of a frame.
enum Progress {
    /// The frame must be answered.
    Ends(AnswerEnd),
    /// The frame waits: for an item of the pool or for room if `fetches`, else for a partition.
    Waits { fetches: bool },
}

impl AsFd for PeerConnection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl PeerConnection {
    /// A connection that was accepted.
    pub fn new(socket: PeerSocket) -> Self {
        Self {
            stream: socket.into_stream(),
            input: Vec::new(),
            waiting: Vec::new(),
            is_ready: false,
            waits_to_send: false,
            is_malformed: false,
        }
    }

    /// Receives bytes from the socket; returns their number.
    pub fn receive(&mut self) -> u64 {
        self.input.reserve(frame::LINK_INPUT_BYTES);
        self.stream.receive(&mut self.input)
    }

    /// Whether any frame waits.
    pub fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Serves the frames in `input`, which was taken from this connection, and those that wait;
    /// returns the number of used bytes of the input.
    pub fn serve<'p>(&mut self, input: &'p [u8], context: &Context<'p>, out: &mut Replies<'p>) -> usize {
        self.serve_waiting(context, out);
        let mut at = 0;
        // The remaining frames are served when the replies were sent.
        while out.len() < REPLIES_MAX && !self.is_malformed {
            match frame::complete_len(&input[at..]) {
                Ok(Some(len)) => {
                    self.serve_frame(&input[at..at + len], context, out);
                    at += len;
                }
                Ok(None) => break,
                Err(frame::Malformed) => self.is_malformed = true,
            }
        }
        at
    }

    fn serve_frame<'p>(&mut self, bytes: &'p [u8], context: &Context<'p>, out: &mut Replies<'p>) {
        let Ok(frame) = Frame::read(bytes) else {
            self.is_malformed = true;
            return;
        };
        let start = out.mark();
        let head_len = ANSWER_HEAD_BYTES + frame.entries.len() * REPLY_LEN_BYTES;
        let buffer = out.buffer();
        buffer.resize(buffer.len() + head_len, 0);
        let mut lens = vec![0; frame.entries.len()];
        let mut done = 0;
        match serve_frame(&frame, &mut done, &mut lens, false, context, out) {
            Progress::Ends(end) => {
                let replies = out.len_since(start) - head_len;
                let head = frame::answer_head((frame.number, boot_us()), done, end, &lens, replies);
                out.overwrite(start, &head);
            }
            Progress::Waits { fetches } => {
                // The frame is kept with its replies so far.
                let replies = out.bytes_since(start).split_off(head_len);
                out.truncate(start);
                let bytes = bytes.to_vec();
                self.waiting.push(WaitingFrame { bytes, lens, done, replies, fetches });
            }
        }
    }

    fn serve_waiting<'p>(&mut self, context: &Context<'p>, out: &mut Replies<'p>) {
        self.waiting.retain_mut(|WaitingFrame { bytes, lens, done, replies, fetches }| {
            let Ok(frame) = Frame::read(bytes) else { return false };
            let mut more = Replies::new(Vec::new());
            let progress = serve_frame(&frame, done, lens, *fetches, context, &mut more);
            for part in more.parts() {
                replies.extend_from_slice(part);
            }
            let end = match progress {
                // The frame has waited for its partition during its whole time.
                Progress::Ends(AnswerEnd::Late) if !*fetches => AnswerEnd::Unavailable,
                Progress::Ends(end) => end,
                Progress::Waits { fetches: now } => {
                    *fetches = now;
                    return true;
                }
            };
            out.push(&frame::answer_head((frame.number, boot_us()), *done, end, lens, replies.len()));
            out.push(replies);
            false
        });
    }

    /// Whether the connection must be closed.
    pub fn is_over(&self) -> bool {
        self.is_malformed || self.stream.is_ended
    }

    /// Whether a complete frame is in the input.
    pub fn has_frame(&self) -> bool {
        frame::complete_len(&self.input).is_ok_and(|len| len.is_some())
    }
}

/// Serves a frame until its time has passed: its sender ends the requests then, and a change must
/// not follow newer ones.
fn serve_frame<'p>(
    frame: &Frame<'p>,
    done: &mut usize,
    lens: &mut [u32],
    fetched: bool,
    context: &Context<'p>,
    out: &mut Replies<'p>,
) -> Progress {
    if boot_us() >= frame.until_us {
        return Progress::Ends(AnswerEnd::Late);
    }
    let pin = context.access.pin;
    let before_us = pin.serves_until_us();
    pin.serve_until(before_us.min(frame.until_us));
    let progress = serve_entries(frame, done, lens, fetched, context, out);
    pin.serve_until(before_us);
    progress
}

/// Serves the entries that were not executed. If `fetched`, the first of them has waited for an
/// item of the pool.
fn serve_entries<'p>(
    frame: &Frame<'p>,
    done: &mut usize,
    lens: &mut [u32],
    fetched: bool,
    context: &Context<'p>,
    out: &mut Replies<'p>,
) -> Progress {
    let counters = context.access.counters;
    let first = *done;
    for (at, entry) in frame.entries.iter().enumerate().skip(first) {
        if out.len() >= REPLIES_MAX {
            return Progress::Ends(AnswerEnd::Again);
        }
        let (mark, hits_before) = (out.mark(), counters.get_hits.get());
        match elsewhere::execute(*entry, context, out) {
            EntryEnd::Done => {
                if fetched && at == first {
                    counters.fetched_hits.add(counters.get_hits.get() - hits_before);
                }
                lens[at] = u32::try_from(out.len_since(mark)).expect("replies are shorter");
                *done += 1;
            }
            EntryEnd::Elsewhere => {
                out.truncate(mark);
                if entry.0 >= context.access.store.partitions().len() {
                    return Progress::Ends(AnswerEnd::Malformed);
                }
                return match context.access.presence(entry.0) {
                    Presence::Elsewhere(place) => Progress::Ends(AnswerEnd::Moved(entry.0, place)),
                    _ if boot_us() >= frame.until_us => Progress::Ends(AnswerEnd::Late),
                    // The partition has just arrived.
                    Presence::Here => Progress::Ends(AnswerEnd::Again),
                    Presence::Leaving | Presence::Unknown if !frame.waits => {
                        Progress::Ends(AnswerEnd::Unavailable)
                    }
                    Presence::Leaving | Presence::Unknown => Progress::Waits { fetches: false },
                };
            }
            EntryEnd::NoRoom => {
                out.truncate(mark);
                return Progress::Waits { fetches: true };
            }
            EntryEnd::Malformed => {
                out.truncate(mark);
                return Progress::Ends(AnswerEnd::Malformed);
            }
        }
    }
    Progress::Ends(AnswerEnd::Done)
}
