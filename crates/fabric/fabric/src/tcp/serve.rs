//! The serving threads. Each serves the sessions of its connections, without waking any other
//! thread.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use aquifer_secure_channel::RecordCipher;
use parking_lot::Mutex;
use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use zerocopy::IntoBytes;

use super::Rate;
use super::busy_poll::BusyPoll;
use super::connection::{ServedConnection, TurnBuffers};
use super::session::{ANSWERS_BYTES_MAX, TcpSession};
use super::target::{TcpPeer, TcpShared};
use super::wire::{self, AnswerHead};
use crate::wake::WakeFd;

/// Bound of the events taken from epoll at a time.
const EVENTS_MAX: usize = 64;
/// The time for which a stopping target tries to send farewells.
const FAREWELL_TIMEOUT: Duration = Duration::from_millis(200);

/// Most times in a row that the most recent connection is polled before all others are.
const PREFERRED_MAX: u32 = 8;
/// Most times in a row that a thread with several busy connections polls them without yielding the
/// processor.
const BUSY_TURNS_MAX: u32 = 8;

const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// The epoll token of the wake descriptor.
const WAKE_TOKEN: u64 = u64::MAX;

/// A handle by which other threads pass connections to a serving thread and wake it.
#[derive(Debug)]
pub(super) struct ServeHandle {
    wake: WakeFd,
    accepted: Mutex<Vec<AcceptedConnection>>,
    /// Sessions that have messages to send, or whose connection is to be closed.
    notified: Mutex<Vec<usize>>,
}

/// A connection whose handshake is complete.
#[derive(Debug)]
pub(super) struct AcceptedConnection {
    pub socket: OwnedFd,
    pub session: TcpSession,
    pub cipher: Option<RecordCipher>,
    /// Answers to send before anything else.
    pub answers: Vec<u8>,
}

impl ServeHandle {
    pub fn new() -> std::io::Result<Self> {
        Ok(Self { wake: WakeFd::new()?, accepted: Mutex::default(), notified: Mutex::default() })
    }

    pub fn wake(&self) {
        self.wake.wake();
    }

    /// Notifies the thread, which sends the messages of a session, or closes a stale connection.
    pub fn notify(&self, peer: &TcpPeer) {
        if !peer.own.is_notified.swap(true, Ordering::SeqCst) {
            self.notified.lock().push(peer.slot);
        }
        self.wake();
    }

    pub fn add(&self, accepted: AcceptedConnection) {
        self.accepted.lock().push(accepted);
        self.wake();
    }
}

/// A connection from which bytes were received.
#[derive(Clone, Copy)]
struct ReadyConnection {
    at: usize,
    /// Whether the peer has closed the connection.
    is_closed: bool,
}

/// A serving thread.
pub(super) struct ServeThread {
    shared: Arc<TcpShared>,
    number: usize,
    epoll: OwnedFd,
    /// The connections, each at the place that follows from its session's slot.
    connections: Vec<Option<Box<ServedConnection>>>,
    buffers: TurnBuffers,
    /// The connections that are paused, by the end of the pause.
    paused: BTreeSet<(Instant, usize)>,
    busy_poll: BusyPoll,
    /// The connection that was served last, and how many times it was preferred since all were
    /// polled.
    last: Option<usize>,
    preferred: u32,
    /// Whether other connections were served in the last turn, and the number of such turns in a
    /// row.
    is_contended: bool,
    busy_turns: u32,
    /// Set while the target stops. Then the thread only sends.
    farewell_until: Option<Instant>,
}

impl ServeThread {
    pub fn new(shared: &Arc<TcpShared>, number: usize) -> std::io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &shared.handles[number].wake, EventData::new_u64(WAKE_TOKEN), EventFlags::IN)?;
        let busy_poll = BusyPoll::new(shared.options.spin_time);
        let connections = Vec::new();
        Ok(Self {
            shared: Arc::clone(shared),
            number,
            epoll,
            connections,
            buffers: TurnBuffers::default(),
            paused: BTreeSet::new(),
            busy_poll,
            last: None,
            preferred: 0,
            is_contended: false,
            busy_turns: 0,
            farewell_until: None,
        })
    }

    pub fn run(mut self) {
        let mut events = Vec::with_capacity(EVENTS_MAX);
        loop {
            match self.wait(&mut events) {
                Some(ReadyConnection { at, is_closed: true }) => self.close(at),
                Some(ReadyConnection { at, .. }) => self.serve_connection(at),
                None => self.handle_events(&events),
            }
            self.resume_paused();
            if self.shared.stop.load(Ordering::SeqCst) && self.send_farewells() {
                return;
            }
        }
    }

    /// Waits for input of the most recent connection, or for events of any connection.
    fn wait(&mut self, events: &mut Vec<Event>) -> Option<ReadyConnection> {
        if self.poll_ready_events(events) {
            return None;
        }
        let timeout = self.timeout();
        let (epoll, preferred) = (&self.epoll, &mut self.preferred);
        let mut last = self.last.and_then(|at| Some((at, self.connections.get_mut(at)?.as_mut()?)));
        if let Some((_, connection)) = &mut last {
            connection.begin_turn(&mut self.buffers);
        }
        let mut ready = None;
        // Receiving costs no more than a check for input.
        let has_input = self.busy_poll.poll(|| {
            if *preferred < PREFERRED_MAX
                && let Some((at, connection)) = &mut last
            {
                ready = connection.try_receive().map(|is_closed| ReadyConnection { at: *at, is_closed });
                if ready.is_some() {
                    *preferred += 1;
                    return true;
                }
            }
            *preferred = 0;
            epoll_wait(epoll, events, Some(&NOW)).is_ok_and(|count| count > 0)
        });
        if ready.is_none()
            && let Some((_, connection)) = &mut last
        {
            connection.end_turn(&mut self.buffers);
        }
        if has_input {
            return ready;
        }
        self.preferred = 0;
        match epoll_wait(&self.epoll, events, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => tracing::error!(%error, "cannot poll the connections of the TCP target; retrying"),
        }
        None
    }

    /// Polls for events that arrived while others were served. With several busy connections there
    /// mostly are some, so the thread does not yield the processor first.
    fn poll_ready_events(&mut self, events: &mut Vec<Event>) -> bool {
        let may_poll = self.is_contended && self.busy_turns < BUSY_TURNS_MAX && self.busy_poll.is_on();
        let has_events = may_poll && epoll_wait(&self.epoll, events, Some(&NOW)).is_ok_and(|count| count > 0);
        self.busy_turns = if has_events { self.busy_turns + 1 } else { 0 };
        has_events
    }

    fn handle_events(&mut self, events: &[Event]) {
        self.is_contended = false;
        for event in events {
            match event.data.u64() {
                WAKE_TOKEN => self.handle_wake(),
                at => self.handle_event(usize::try_from(at).expect("our own number"), event.flags),
            }
        }
    }

    fn timeout(&self) -> Option<Timespec> {
        let paused = self.paused.first().map(|(until, _)| *until);
        let until = paused.into_iter().chain(self.farewell_until).min()?;
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_micros(10));
        Timespec::try_from(left).ok()
    }

    fn is_limited(&self) -> bool {
        self.shared.options.rate != Rate::default()
    }

    /// Handles an event of a connection.
    fn handle_event(&mut self, at: usize, flags: EventFlags) {
        let Some(connection) = self.connections[at].as_mut() else { return };
        let is_stopping = self.farewell_until.is_some();
        connection.begin_turn(&mut self.buffers);
        let may_come = EventFlags::IN | EventFlags::HUP | EventFlags::ERR;
        if flags.intersects(may_come) && !is_stopping && connection.receive() {
            self.close(at);
            return;
        }
        self.is_contended |= self.last.replace(at) != Some(at);
        self.serve_connection(at);
    }

    /// Adds accepted connections, closes stale ones and sends messages.
    fn handle_wake(&mut self) {
        let handle = &self.shared.handles[self.number];
        handle.wake.clear();
        let accepted = std::mem::take(&mut *handle.accepted.lock());
        let notified = std::mem::take(&mut *handle.notified.lock());
        for accepted in accepted {
            self.add_connection(accepted);
        }
        for slot in notified {
            let at = self.place(slot);
            let Some(Some(connection)) = self.connections.get(at) else { continue };
            let own = &connection.session.peer.own;
            // Cleared before the messages are read, so that a later message notifies again.
            own.is_notified.store(false, Ordering::SeqCst);
            if own.is_stale.swap(false, Ordering::SeqCst) {
                self.close(at);
            } else {
                self.serve_connection(at);
            }
        }
    }

    /// The place of the connection of the session in a slot. The slots of one thread are as far
    /// apart as there are threads.
    fn place(&self, slot: usize) -> usize {
        slot / self.shared.handles.len()
    }

    fn add_connection(&mut self, accepted: AcceptedConnection) {
        let at = self.place(accepted.session.slot);
        let data = EventData::new_u64(at as u64);
        if let Err(error) = epoll::add(&self.epoll, &accepted.socket, data, EventFlags::IN) {
            tracing::warn!(%error, "cannot add a connection to epoll; closing it");
            self.shared.park(accepted.session);
            return;
        }
        if at >= self.connections.len() {
            self.connections.resize_with(at + 1, || None);
        }
        debug_assert!(self.connections[at].is_none(), "a session has one connection at a time");
        accepted.session.peer.own.is_notified.store(false, Ordering::SeqCst);
        self.connections[at] = Some(Box::new(ServedConnection::new(accepted)));
        // The session may have had answers or messages to send since before it was parked.
        self.serve_connection(at);
    }

    fn resume_paused(&mut self) {
        if self.paused.is_empty() {
            return;
        }
        let now = Instant::now();
        while let Some((_, at)) = self.paused.first().copied().filter(|(until, _)| *until <= now) {
            self.paused.pop_first();
            if let Some(connection) = &mut self.connections[at] {
                connection.paused_until = None;
                self.serve_connection(at);
            }
        }
    }

    /// Serves all requests of a connection that can be served now, and sends the answers.
    fn serve_connection(&mut self, at: usize) {
        let (is_stopping, is_limited) = (self.farewell_until.is_some(), self.is_limited());
        let Some(connection) = self.connections[at].as_mut() else { return };
        connection.begin_turn(&mut self.buffers);
        loop {
            let may_serve = !is_stopping && connection.paused_until.is_none();
            let served = if may_serve { connection.serve(&self.shared) } else { Ok((0, 0)) };
            let (bytes, operations) = match served {
                Ok(work) => work,
                Err(reason) => {
                    let who = connection.session.who;
                    tracing::warn!(?who, reason, "an endpoint violated the protocol; closing its connection");
                    self.close(at);
                    return;
                }
            };
            if connection.session.is_ended {
                self.close(at);
                return;
            }
            if may_serve && is_limited {
                let now = Instant::now();
                let tenant = connection.session.who.tenant;
                let wait = self.shared.limiter.lock().charge(tenant, bytes, operations, now);
                connection.paused_until = wait.map(|wait| now + wait);
                self.paused.extend(connection.paused_until.map(|until| (until, at)));
            }
            while !is_stopping && connection.session.next_message(connection.answers.bytes()) {}
            let was_stalled = connection.answers.len() >= ANSWERS_BYTES_MAX;
            if connection.send() {
                self.close(at);
                return;
            }
            let is_stalled = connection.answers.len() >= ANSWERS_BYTES_MAX;
            // Requests that waited for room in the answer buffer are served now that there is some.
            if !was_stalled || is_stalled || !may_serve {
                break;
            }
        }
        connection.end_turn(&mut self.buffers);
        if let Err(error) = connection.update_interest(&self.epoll, at, is_stopping) {
            tracing::warn!(%error, "cannot change the events of a connection; closing it");
            self.close(at);
        }
    }

    /// Closes a connection. Its session is parked unless the initiator has ended it.
    fn close(&mut self, at: usize) {
        let Some(mut connection) = self.connections[at].take() else { return };
        connection.end_turn(&mut self.buffers);
        if let Some(until) = connection.paused_until {
            self.paused.remove(&(until, at));
        }
        let ServedConnection { socket, session, .. } = *connection;
        drop(socket);
        if session.is_ended {
            self.shared.end_session(&session);
        } else {
            self.shared.park(session);
        }
    }

    /// Sends a farewell with the number of done requests to all initiators, then closes the
    /// connections. Returns true when all are closed.
    fn send_farewells(&mut self) -> bool {
        if self.shared.handshakes_in_progress.load(Ordering::SeqCst) > 0 {
            return false;
        }
        let now = Instant::now();
        if self.farewell_until.is_none() {
            self.handle_wake();
            self.farewell_until = Some(now + FAREWELL_TIMEOUT);
            for at in 0..self.connections.len() {
                let Some(connection) = self.connections[at].as_mut() else { continue };
                let farewell = AnswerHead::new(wire::FAREWELL, Ok(connection.session.done()), 0);
                connection.answers.put(farewell.as_bytes());
                self.serve_connection(at);
            }
        }
        let is_late = self.farewell_until.is_some_and(|until| until <= now);
        for at in 0..self.connections.len() {
            if self.connections[at].as_ref().is_some_and(|connection| is_late || connection.has_sent_all()) {
                self.close(at);
            }
        }
        self.connections.iter().all(Option::is_none)
    }
}

/// Waits for events of epoll.
fn epoll_wait(
    epoll: &OwnedFd,
    events: &mut Vec<Event>,
    timeout: Option<&Timespec>,
) -> rustix::io::Result<usize> {
    events.clear();
    epoll::wait(epoll, spare_capacity(events), timeout)
}
