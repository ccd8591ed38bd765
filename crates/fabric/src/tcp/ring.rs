//! The threads that serve: each turns the sessions of its connections with one io_uring, and never wakes anybody else.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};
use rustix::net::SendFlags;
use zerocopy::IntoBytes;

use super::rate::Limiter;
use super::secure::Seal;
use super::session::{ANSWERS_BYTES_MAX, Nonsense, Session};
use super::target::{Shared, lock};
use super::wire::{self, Answer};

/// Requests that arrive together are served together, up to so many bytes.
const INPUT_BYTES: usize = 256 << 10;
/// Every connection has at most one receive and one send under way.
const ENTRIES: u32 = 1024;
/// A target that goes away tries for so long to tell its initiators.
const FAREWELL_TIME: Duration = Duration::from_millis(200);

/// What an entry of the ring was about; with the connection's number above.
const BELL: u64 = 0;
const RECEIVED: u64 = 1;
const SENT: u64 = 2;
const KIND_BITS: u32 = 8;

/// The way to a ring's thread.
#[derive(Debug)]
pub(super) struct Hand {
    bell: OwnedFd,
    arrivals: Mutex<Vec<Arrival>>,
}

/// A connection that was let in.
#[derive(Debug)]
pub(super) struct Arrival {
    pub socket: OwnedFd,
    pub session: Session,
    pub seal: Option<Seal>,
    /// What is to be said first.
    pub answers: Vec<u8>,
}

impl Hand {
    pub fn new(bell: OwnedFd) -> Self {
        Self { bell, arrivals: Mutex::new(Vec::new()) }
    }

    pub fn wake(&self) {
        // Writing to an eventfd fails only when its count is full, and then it is awake already.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }

    pub fn give(&self, arrival: Arrival) {
        lock(&self.arrivals).push(arrival);
        self.wake();
    }
}

/// One connection. It is freed only when nothing of it is under way in the kernel.
struct Connection {
    socket: OwnedFd,
    /// None once it has been given back: the connection is closing.
    session: Option<Session>,
    seal: Option<Seal>,
    /// As it came.
    input: Box<[u8]>,
    filled: usize,
    /// What a sealed connection said, opened.
    opened: Vec<u8>,
    /// To be sent next.
    answers: Vec<u8>,
    /// Being sent.
    outgoing: Vec<u8>,
    sent: usize,
    is_receiving: bool,
    is_sending: bool,
    /// Its tenant has taken more than its share.
    paused_until: Option<Instant>,
}

/// One thread's work.
pub(super) struct RingThread {
    shared: Arc<Shared>,
    number: usize,
    ring: IoUring,
    connections: Vec<Option<Box<Connection>>>,
    limiter: Limiter,
    bell_count: Box<[u8; 8]>,
    is_bell_armed: bool,
    /// Set when the target goes away: no more is asked, only said.
    farewell_until: Option<Instant>,
    /// The sequence of each slot's `active` word is the session's; this is the batch that completions arrive in.
    completions: Vec<(u64, i32)>,
}

impl RingThread {
    pub fn new(shared: &Arc<Shared>, number: usize) -> std::io::Result<Self> {
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_r_disabled()
            .build(ENTRIES)?;
        Ok(Self {
            shared: Arc::clone(shared),
            number,
            ring,
            connections: Vec::new(),
            limiter: Limiter::new(shared.options.rate),
            bell_count: Box::new([0; 8]),
            is_bell_armed: false,
            farewell_until: None,
            completions: Vec::with_capacity(ENTRIES as usize),
        })
    }

    pub fn run(mut self) {
        // Enabled here, so that the kernel takes this thread for the one that submits.
        if let Err(error) = self.ring.submitter().register_enable_rings() {
            tracing::error!(%error, "the target's ring cannot be enabled: it will not serve");
            return;
        }
        loop {
            self.arm_bell();
            if let Err(error) = self.wait() {
                tracing::error!(%error, "the target's ring failed");
            }
            let mut completions = std::mem::take(&mut self.completions);
            completions.extend(self.ring.completion().map(|entry| (entry.user_data(), entry.result())));
            for (what, result) in completions.drain(..) {
                self.handle(what, result);
            }
            self.completions = completions;
            self.resume_paused();
            if self.shared.stop.load(Ordering::SeqCst) && self.take_leave() {
                return;
            }
        }
    }

    fn wait(&mut self) -> std::io::Result<()> {
        let paused = self.connections.iter().flatten().filter_map(|connection| connection.paused_until).min();
        let until = [paused, self.farewell_until].into_iter().flatten().min();
        let result = match until {
            None => self.ring.submit_and_wait(1),
            Some(until) => {
                let left = until.saturating_duration_since(Instant::now()).max(Duration::from_micros(10));
                let left = Timespec::from(left);
                self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&left))
            }
        };
        match result {
            Err(error) if matches!(error.raw_os_error(), Some(libc::ETIME | libc::EINTR | libc::EBUSY)) => {
                Ok(())
            }
            other => other.map(drop),
        }
    }

    fn push(&mut self, entry: &squeue::Entry) {
        loop {
            // SAFETY: what the entry points to belongs to a connection or to `self`, and is neither moved nor freed before
            // its completion was handled.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                return;
            }
            if let Err(error) = self.ring.submit() {
                tracing::error!(%error, "the target's ring takes no more work");
                std::thread::yield_now();
            }
        }
    }

    fn arm_bell(&mut self) {
        if self.is_bell_armed {
            return;
        }
        self.is_bell_armed = true;
        let fd = Fd(self.shared.hands[self.number].bell.as_raw_fd());
        let entry = opcode::Read::new(fd, self.bell_count.as_mut_ptr(), 8).build().user_data(BELL);
        self.push(&entry);
    }

    fn handle(&mut self, what: u64, result: i32) {
        let at = usize::try_from(what >> KIND_BITS).expect("our own number");
        match what & ((1 << KIND_BITS) - 1) {
            BELL => {
                self.is_bell_armed = false;
                self.answer_bell();
            }
            kind => {
                let Some(connection) = self.connections.get_mut(at).and_then(Option::as_mut) else {
                    unreachable!("a connection stays while anything of it is under way");
                };
                let is_over =
                    if kind == RECEIVED { connection.received(result) } else { connection.has_sent(result) };
                if is_over {
                    self.close(at);
                } else {
                    self.advance(at);
                }
            }
        }
    }

    /// Somebody came, or has something to say to an initiator.
    fn answer_bell(&mut self) {
        let arrivals = std::mem::take(&mut *lock(&self.shared.hands[self.number].arrivals));
        for arrival in arrivals {
            let connection = Some(Box::new(Connection::new(arrival)));
            let at = self.connections.iter().position(Option::is_none);
            match at {
                Some(at) => self.connections[at] = connection,
                None => self.connections.push(connection),
            }
        }
        for at in 0..self.connections.len() {
            let session = self.connections[at].as_ref().and_then(|connection| connection.session.as_ref());
            match session.map(|session| session.peer.is_stale.swap(false, Ordering::SeqCst)) {
                Some(true) => self.close(at),
                Some(false) => self.advance(at),
                None => {}
            }
        }
    }

    fn resume_paused(&mut self) {
        let now = Instant::now();
        for at in 0..self.connections.len() {
            if let Some(connection) = &mut self.connections[at]
                && connection.paused_until.is_some_and(|until| until <= now)
            {
                connection.paused_until = None;
                self.advance(at);
            }
        }
    }

    /// Do all that can be done for a connection now.
    fn advance(&mut self, at: usize) {
        let is_leaving = self.farewell_until.is_some();
        loop {
            let Some(connection) = self.connections[at].as_mut() else { return };
            if connection.session.is_none() {
                self.free_if_quiet(at);
                return;
            }
            // What the kernel is receiving into is not to be moved; all that came before was served.
            let may_serve = !is_leaving && !connection.is_receiving && connection.paused_until.is_none();
            if may_serve && let Err(reason) = connection.serve(&self.shared) {
                let who = connection.session.as_ref().map(|session| session.who);
                tracing::warn!(?who, reason, "an endpoint said nonsense; its connection is closed");
                self.close(at);
                return;
            }
            let Some(session) = &mut connection.session else { return };
            if session.has_left {
                self.close(at);
                return;
            }
            if may_serve && self.limiter.is_on() {
                let (bytes, operations) = session.take_work();
                let now = Instant::now();
                let wait = self.limiter.charge(session.who.tenant, bytes, operations, now);
                connection.paused_until = wait.map(|wait| now + wait);
            }
            while !is_leaving && session.peer.next_message(&mut connection.answers) {}
            let is_stalled = connection.answers.len() >= ANSWERS_BYTES_MAX;
            let began = self.send(at);
            if !(is_stalled && began && may_serve) {
                if may_serve && !is_stalled {
                    self.receive(at);
                }
                return;
            }
        }
    }

    /// Send what there is to send, unless something is being sent; whether that was begun.
    fn send(&mut self, at: usize) -> bool {
        let Some(connection) = self.connections[at].as_mut() else { return false };
        if connection.is_sending || !connection.prepare_sending() {
            return false;
        }
        // Mostly the kernel takes it all at once, and nothing is left to wait for.
        while connection.send_now() {
            if !connection.prepare_sending() {
                return true;
            }
        }
        let entry = connection.send_entry((at as u64) << KIND_BITS | SENT);
        self.push(&entry);
        true
    }

    fn receive(&mut self, at: usize) {
        let Some(connection) = self.connections[at].as_mut() else { return };
        if !connection.is_receiving && connection.paused_until.is_none() {
            let entry = connection.receive_entry((at as u64) << KIND_BITS | RECEIVED);
            self.push(&entry);
        }
    }

    /// The connection is over; its session may not be.
    fn close(&mut self, at: usize) {
        let Some(connection) = self.connections[at].as_mut() else { return };
        if let Some(session) = connection.session.take() {
            // What is under way in the kernel ends at once.
            let _ = rustix::net::shutdown(&connection.socket, rustix::net::Shutdown::Both);
            if session.has_left {
                self.shared.dismiss(&session);
            } else {
                self.shared.keep_for_a_while(session);
            }
        }
        self.free_if_quiet(at);
    }

    fn free_if_quiet(&mut self, at: usize) {
        if self.connections[at]
            .as_ref()
            .is_some_and(|connection| !connection.is_receiving && !connection.is_sending)
        {
            self.connections[at] = None;
        }
    }

    /// The target goes away: tell everyone how far it came, then close. True when all is closed.
    fn take_leave(&mut self) -> bool {
        if self.shared.welcoming.load(Ordering::SeqCst) > 0 {
            return false;
        }
        let now = Instant::now();
        if self.farewell_until.is_none() {
            self.answer_bell();
            self.farewell_until = Some(now + FAREWELL_TIME);
            for at in 0..self.connections.len() {
                if let Some(connection) = self.connections[at].as_mut()
                    && let Some(session) = &connection.session
                {
                    let farewell = Answer::new(wire::FAREWELL, Ok(session.done()), 0);
                    connection.answers.extend_from_slice(farewell.as_bytes());
                    self.send(at);
                }
            }
        }
        let is_late = self.farewell_until.is_some_and(|until| until <= now);
        for at in 0..self.connections.len() {
            if let Some(connection) = &self.connections[at]
                && (is_late || (!connection.is_sending && connection.answers.is_empty()))
            {
                self.close(at);
            }
        }
        if is_late {
            self.farewell_until = Some(now + FAREWELL_TIME);
        }
        self.connections.iter().all(Option::is_none)
    }
}

impl Connection {
    fn new(arrival: Arrival) -> Self {
        Self {
            socket: arrival.socket,
            session: Some(arrival.session),
            seal: arrival.seal,
            input: vec![0; INPUT_BYTES].into_boxed_slice(),
            filled: 0,
            opened: Vec::new(),
            answers: arrival.answers,
            outgoing: Vec::new(),
            sent: 0,
            is_receiving: false,
            is_sending: false,
            paused_until: None,
        }
    }

    /// Serve what has come; the reason if it was nonsense.
    fn serve(&mut self, shared: &Shared) -> Result<(), &'static str> {
        let Some(session) = &mut self.session else { return Ok(()) };
        // Whoever kills a key clears it, then waits until this word was seen even or changed.
        let active = shared.control.active(session.slot);
        let sequence = active.load(Ordering::Relaxed).wrapping_add(1);
        active.store(sequence, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let served = match &mut self.seal {
            None => session.feed(&self.input[..self.filled], &mut self.answers).map(|used| (used, 0)),
            Some(seal) => {
                let used = if self.opened.len() < INPUT_BYTES {
                    seal.open(&self.input[..self.filled], &mut self.opened)
                } else {
                    Ok(0)
                };
                match used {
                    Ok(used) => session.feed(&self.opened, &mut self.answers).map(|fed| (used, fed)),
                    Err(_) => Err(Nonsense("what came was not sealed by its initiator")),
                }
            }
        };
        active.store(sequence.wrapping_add(1), Ordering::Release);
        let (used, fed) = served.map_err(|nonsense| nonsense.0)?;
        self.input.copy_within(used..self.filled, 0);
        self.filled -= used;
        self.opened.drain(..fed);
        Ok(())
    }

    /// Bytes came; true if no more will.
    fn received(&mut self, result: i32) -> bool {
        self.is_receiving = false;
        match usize::try_from(result) {
            Ok(0) => true,
            Ok(bytes) => {
                self.filled += bytes;
                false
            }
            Err(_) => !matches!(-result, libc::EINTR | libc::EAGAIN),
        }
    }

    /// Bytes went; true if no more will.
    fn has_sent(&mut self, result: i32) -> bool {
        self.is_sending = false;
        match usize::try_from(result) {
            Ok(bytes) => {
                self.sent += bytes;
                false
            }
            Err(_) => !matches!(-result, libc::EINTR | libc::EAGAIN),
        }
    }

    /// Whether there is something to send.
    fn prepare_sending(&mut self) -> bool {
        if self.sent < self.outgoing.len() {
            return true;
        }
        self.outgoing.clear();
        self.sent = 0;
        match &mut self.seal {
            None => std::mem::swap(&mut self.outgoing, &mut self.answers),
            Some(seal) => {
                seal.close(&self.answers, &mut self.outgoing);
                self.answers.clear();
            }
        }
        !self.outgoing.is_empty()
    }

    /// Give the kernel what it takes without waiting; whether that was all.
    fn send_now(&mut self) -> bool {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match rustix::net::send(&self.socket, &self.outgoing[self.sent..], flags) {
            Ok(bytes) => {
                self.sent += bytes;
                self.sent == self.outgoing.len()
            }
            // What is wrong shows when the ring sends it.
            Err(_) => false,
        }
    }

    fn send_entry(&mut self, what: u64) -> squeue::Entry {
        self.is_sending = true;
        let bytes = &self.outgoing[self.sent..];
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        opcode::Send::new(Fd(self.socket.as_raw_fd()), bytes.as_ptr(), len)
            .flags(libc::MSG_NOSIGNAL)
            .build()
            .user_data(what)
    }

    fn receive_entry(&mut self, what: u64) -> squeue::Entry {
        self.is_receiving = true;
        let room = &mut self.input[self.filled..];
        let len = u32::try_from(room.len()).unwrap_or(u32::MAX);
        opcode::Recv::new(Fd(self.socket.as_raw_fd()), room.as_mut_ptr(), len).build().user_data(what)
    }
}
