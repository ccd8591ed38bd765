//! A thread that serves connections.

use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::time::Timespec;

use super::Common;
use super::acceptor::Accepted;
use super::connection::{Connection, INPUT_BYTES, Input, WaitsFor};
use super::dealing::WorkerHandle;
use super::peers::PeerSocket;
use super::peers::links::{FrameEnd, Interest, Links, Waiter};
use super::peers::serving::PeerConnection;
use super::peers::waiting::PeerAccess;
use super::source::Source;
use crate::commands::lookahead::{self, Hashes, KEYS_AHEAD};
use crate::commands::{Context, Replies, Service};
use crate::operations::Access;

/// Most events that one wait returns.
const EVENTS_MAX: usize = 256;
/// Most free buffers of each kind that a thread keeps.
const BUFFERS_MAX: usize = 64;
/// Largest capacity in bytes of a reply buffer that is kept.
const REPLY_BUFFER_MAX: usize = 64 << 10;
/// Interval at which waiting requests are retried, if no wake-up arrives before.
const PARKED_RETRY_INTERVAL: Duration = Duration::from_millis(20);
/// [`PARKED_RETRY_INTERVAL`] as the timeout of an epoll wait.
const PARKED_RETRY_TIMESPEC: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
/// The timeout of an epoll wait that returns at once.
const NO_WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// Serves connections.
#[derive(Debug)]
pub struct Worker {
    thread: usize,
    epoll: OwnedFd,
    handle: Arc<WorkerHandle>,
    common: Arc<Common>,
    service: Arc<Service>,
    connections: Vec<Option<Connection>>,
    free: Vec<usize>,
    peers: Vec<Option<PeerConnection>>,
    links: Links,
    /// Connections that are served in the next turn.
    ready: Vec<usize>,
    ready_peers: Vec<usize>,
    /// Connections that are retried at [`PARKED_RETRY_INTERVAL`].
    parked: Vec<usize>,
    next_serial: u64,
    input_buffers: Vec<Vec<u8>>,
    reply_buffers: Vec<Vec<u8>>,
    idle_checked_s: u32,
    last_retry: Instant,
    /// The time at which the current turn has begun.
    now: Instant,
}

/// A connection that was served in a turn, with the number of used input bytes.
struct Served<'p> {
    number: usize,
    used: usize,
    replies: Replies<'p>,
}

impl Worker {
    /// A worker with this number.
    ///
    /// # Errors
    /// If the system has no descriptor for it.
    pub fn new(
        thread: usize,
        handle: Arc<WorkerHandle>,
        common: Arc<Common>,
        service: Arc<Service>,
    ) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, handle.waker(), Source::Waker.data(), epoll::EventFlags::IN)?;
        let connector = Arc::clone(&common.connector);
        Ok(Self {
            thread,
            epoll,
            links: Links::new(Arc::clone(&handle), connector, common.partition_timeout),
            handle,
            common,
            service,
            connections: Vec::new(),
            free: Vec::new(),
            peers: Vec::new(),
            ready: Vec::new(),
            ready_peers: Vec::new(),
            parked: Vec::new(),
            next_serial: 0,
            input_buffers: Vec::new(),
            reply_buffers: Vec::new(),
            idle_checked_s: 0,
            last_retry: Instant::now(),
            now: Instant::now(),
        })
    }

    /// Serves until the server stops.
    pub fn run(mut self) {
        let mut events: Vec<epoll::Event> = Vec::with_capacity(EVENTS_MAX);
        while !self.common.stops.load(Ordering::Relaxed) {
            events.clear();
            match epoll::wait(&self.epoll, spare_capacity(&mut events), self.timeout().as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, thread = self.thread, "epoll failed: the worker ends");
                    return;
                }
            }
            self.now = Instant::now();
            let hits = self.common.store.has_pool().then(|| (self.now, self.local_hits()));
            for event in &events {
                match Source::of(event.data.u64()) {
                    Source::Client(number) => self.on_client(number, event.flags),
                    Source::Peer(number) => self.on_peer(number, event.flags),
                    Source::Link(server) => self.on_link(server),
                    Source::Waker => self.on_wake(),
                }
            }
            if self.has_waiting() && self.now.duration_since(self.last_retry) >= PARKED_RETRY_INTERVAL {
                self.retry_waiting();
            }
            self.turn();
            if let Some((began, hits_before)) = hits {
                let ns = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
                let hits = self.local_hits().saturating_sub(hits_before);
                self.common.counters[self.thread].local_times.record_several(ns, hits);
            }
        }
    }

    /// Hits of this thread that needed no item of the pool.
    fn local_hits(&self) -> u64 {
        let counters = &self.common.counters[self.thread];
        counters.get_hits.get() - counters.fetched_hits.get()
    }

    /// Whether requests wait for a partition, for an item of the pool, for room, or for the answer
    /// of another server.
    fn has_waiting(&self) -> bool {
        !self.parked.is_empty()
            || self.links.has_flights()
            || self.peers.iter().flatten().any(PeerConnection::is_waiting)
    }

    fn timeout(&self) -> Option<Timespec> {
        if !self.ready.is_empty() || !self.ready_peers.is_empty() {
            return Some(NO_WAIT);
        }
        self.has_waiting().then_some(PARKED_RETRY_TIMESPEC)
    }

    fn on_client(&mut self, number: usize, flags: epoll::EventFlags) {
        let counters = &self.common.counters[self.thread];
        let Some(connection) = &mut self.connections[number] else { return };
        if connection.stream.has_backlog() {
            if flags.intersects(epoll::EventFlags::OUT | epoll::EventFlags::ERR | epoll::EventFlags::HUP) {
                counters.bytes_written.add(connection.send_backlog());
            }
        } else {
            counters.bytes_read.add(connection.receive(&mut self.input_buffers));
        }
        self.make_ready(number);
    }

    fn on_peer(&mut self, number: usize, flags: epoll::EventFlags) {
        let Some(peer) = &mut self.peers[number] else { return };
        if peer.stream.has_backlog() {
            if flags.intersects(epoll::EventFlags::OUT | epoll::EventFlags::ERR | epoll::EventFlags::HUP) {
                peer.stream.send_backlog();
            }
        } else {
            peer.receive();
        }
        self.make_peer_ready(number);
    }

    fn on_link(&mut self, server: u16) {
        let mut ends = Vec::new();
        self.links.on_event(server, self.now, |frame, waiter, end| ends.push((frame, waiter, end)));
        self.end_frames(ends);
    }

    /// Makes the connections ready whose frames have ended.
    fn end_frames(&mut self, ends: Vec<(u64, Waiter, FrameEnd)>) {
        for (frame, waiter, end) in ends {
            let connection = self.connections.get_mut(waiter.number).and_then(Option::as_mut);
            if connection.is_some_and(|connection| connection.note_frame_end(waiter, frame, end)) {
                self.make_ready(waiter.number);
            }
        }
    }

    fn make_ready(&mut self, number: usize) {
        if let Some(connection) = &mut self.connections[number]
            && !mem::replace(&mut connection.is_ready, true)
        {
            self.ready.push(number);
        }
    }

    fn make_peer_ready(&mut self, number: usize) {
        if let Some(peer) = &mut self.peers[number]
            && !mem::replace(&mut peer.is_ready, true)
        {
            self.ready_peers.push(number);
        }
    }

    fn on_wake(&mut self) {
        let now_s = self.common.clock.now_s();
        let new_connections = self.handle.drain_connections();
        for accepted in new_connections.clients {
            self.open(accepted, now_s);
        }
        for socket in new_connections.peers {
            self.open_peer(socket);
        }
        for (server, socket) in new_connections.links {
            self.open_link(server, socket);
        }
        if self.common.idle_timeout_s != 0 && self.idle_checked_s != now_s {
            self.idle_checked_s = now_s;
            self.close_idle(now_s);
        }
        self.retry_waiting();
    }

    /// Makes connections and peers with waiting requests ready, and ends frames whose time has
    /// passed.
    fn retry_waiting(&mut self) {
        self.last_retry = self.now;
        let mut ends = Vec::new();
        self.links.expire(self.now, |frame, waiter, end| ends.push((frame, waiter, end)));
        self.end_frames(ends);
        for number in mem::take(&mut self.parked) {
            if self.connections[number].as_ref().is_some_and(Connection::must_retry) {
                self.make_ready(number);
            }
        }
        for number in 0..self.peers.len() {
            if self.peers[number].as_ref().is_some_and(PeerConnection::is_waiting) {
                self.make_peer_ready(number);
            }
        }
    }

    fn open(&mut self, accepted: Accepted, now_s: u32) {
        self.next_serial += 1;
        let connection = Connection::new(accepted, self.next_serial, now_s, self.common.partition_timeout);
        let number = self.free.pop().unwrap_or(self.connections.len());
        let data = Source::Client(number).data();
        if let Err(error) = epoll::add(&self.epoll, &connection, data, epoll::EventFlags::IN) {
            tracing::warn!(%error, "cannot add a client to epoll; closing its connection");
            self.common.connections.fetch_sub(1, Ordering::Relaxed);
            if number < self.connections.len() {
                self.free.push(number);
            }
            return;
        }
        let descriptor = connection.as_fd().as_raw_fd();
        self.handle.reports().insert(descriptor, Arc::clone(&connection.report));
        if number == self.connections.len() {
            self.connections.push(Some(connection));
        } else {
            self.connections[number] = Some(connection);
        }
    }

    fn open_peer(&mut self, socket: PeerSocket) {
        let peer = PeerConnection::new(socket);
        let free = self.peers.iter().position(Option::is_none);
        let number = free.unwrap_or_else(|| {
            self.peers.push(None);
            self.peers.len() - 1
        });
        match epoll::add(&self.epoll, &peer, Source::Peer(number).data(), epoll::EventFlags::IN) {
            Ok(()) => self.peers[number] = Some(peer),
            Err(error) => tracing::warn!(%error, "cannot add a peer to epoll; closing its connection"),
        }
    }

    fn open_link(&mut self, server: u16, socket: Option<PeerSocket>) {
        let ends = self.links.connected(server, socket);
        self.end_frames(ends);
        if let Some(descriptor) = self.links.descriptor(server)
            && let Err(error) =
                epoll::add(&self.epoll, descriptor, Source::Link(server).data(), epoll::EventFlags::IN)
            && error != Errno::EXIST
        {
            tracing::warn!(%error, server, "cannot add the link of a server to epoll");
        }
    }

    fn close(&mut self, number: usize) {
        if let Some(connection) = self.connections[number].take() {
            let descriptor = connection.as_fd().as_raw_fd();
            self.handle.reports().remove(&descriptor);
            self.common.connections.fetch_sub(1, Ordering::Relaxed);
            self.free.push(number);
        }
    }

    fn close_idle(&mut self, now_s: u32) {
        for number in 0..self.connections.len() {
            let is_idle = self.connections[number].as_ref().is_some_and(|connection| {
                let last_s = connection.report.last_request_s.load(Ordering::Relaxed);
                !connection.is_ready && now_s.saturating_sub(last_s) >= self.common.idle_timeout_s
            });
            if is_idle {
                self.common.counters[self.thread].idle_kicks.add(1);
                self.close(number);
            }
        }
    }

    /// Serves the connections that are ready, and sends their replies.
    fn turn(&mut self) {
        if !self.ready.is_empty() || !self.ready_peers.is_empty() {
            self.serve();
        }
        let epoll = &self.epoll;
        let mut ends = Vec::new();
        self.links.send(
            self.now,
            |server, descriptor, interest| wait_for_link(epoll, server, descriptor, interest),
            |frame, waiter, end| ends.push((frame, waiter, end)),
        );
        self.end_frames(ends);
    }

    fn serve(&mut self) {
        let common = Arc::clone(&self.common);
        let service = Arc::clone(&self.service);
        let now_s = common.clock.now_s();
        common.store.flush_due(now_s);
        let ready = mem::take(&mut self.ready);
        // Inputs stay where they are during the turn, while the connections change.
        let mut inputs: Vec<Input> = ready
            .iter()
            .map(|number| {
                self.connections[*number].as_mut().map_or_else(Input::default, |c| mem::take(&mut c.input))
            })
            .collect();
        let ready_peers = mem::take(&mut self.ready_peers);
        let peer_inputs: Vec<Vec<u8>> = ready_peers
            .iter()
            .map(|number| {
                self.peers[*number].as_mut().map_or_else(Vec::new, |peer| mem::take(&mut peer.input))
            })
            .collect();
        let pin = common.store.pin(self.thread);
        // A fenced server treats its own partitions as if they were about to leave.
        let is_fenced = !common.connector.may_serve();
        if is_fenced {
            pin.serve_until(0);
        }
        let counters = &common.counters[self.thread];
        let access = Access {
            store: &common.store,
            pin: &pin,
            clock: &common.clock,
            now_s,
            counters,
            item_size_max: common.item_size_max,
        };
        let context = Context { access, service: &service };
        let served_peers = self.serve_peers(&ready_peers, &peer_inputs, &context, is_fenced);
        let mut served = Vec::with_capacity(ready.len());
        let mut looked_ahead = 0;
        for (at, (number, input)) in ready.iter().zip(&inputs).enumerate() {
            if at == looked_ahead {
                looked_ahead += look_ahead(&inputs[at..], &context);
            }
            let mut replies = Replies::new(self.reply_buffers.pop().unwrap_or_default());
            let mut used = 0;
            if let Some(connection) = &mut self.connections[*number]
                && !connection.stream.has_backlog()
            {
                let waiter = connection.waiter(*number);
                let mut peer_access = PeerAccess { links: &mut self.links, waiter, now: self.now };
                used = connection.serve(
                    input,
                    common.requests_per_turn,
                    &context,
                    &mut peer_access,
                    &mut replies,
                );
            }
            served.push(Served { number: *number, used, replies });
        }
        // The lease may have ended during the turn: then no reply is sent. A turn that began after
        // the lease has served nothing of this server.
        let may_send = is_fenced || common.connector.may_serve();
        for Served { number, replies, .. } in &served {
            if let Some(connection) = &mut self.connections[*number]
                && !may_send
            {
                connection.stream.is_broken = true;
            } else if let Some(connection) = &mut self.connections[*number]
                && !connection.stream.has_backlog()
            {
                counters.bytes_written.add(connection.send(replies));
            }
        }
        let ends: Vec<_> = served
            .into_iter()
            .map(|Served { number, used, replies }| (number, used, replies.into_buffer()))
            .collect();
        drop(pin);
        for ((number, used, buffer), input) in ends.into_iter().zip(inputs.drain(..)) {
            self.keep_reply_buffer(buffer);
            self.finish(number, input, used);
        }
        for ((number, used), input) in served_peers.into_iter().zip(peer_inputs) {
            self.finish_peer(number, input, used);
        }
    }

    /// Serves other servers, and sends their replies. Returns the number of used bytes of each
    /// input.
    fn serve_peers<'p>(
        &mut self,
        ready: &[usize],
        inputs: &'p [Vec<u8>],
        context: &Context<'p>,
        is_fenced: bool,
    ) -> Vec<(usize, usize)> {
        let mut served = Vec::with_capacity(ready.len());
        for (number, input) in ready.iter().zip(inputs) {
            let mut replies = Replies::new(self.reply_buffers.pop().unwrap_or_default());
            let mut used = 0;
            if let Some(peer) = &mut self.peers[*number]
                && !peer.stream.has_backlog()
            {
                used = peer.serve(input, context, &mut replies);
                if is_fenced || self.common.connector.may_serve() {
                    peer.stream.send(&replies.parts());
                } else {
                    peer.stream.is_ended = true;
                }
            }
            self.keep_reply_buffer(replies.into_buffer());
            served.push((*number, used));
        }
        served
    }

    fn keep_reply_buffer(&mut self, buffer: Vec<u8>) {
        if buffer.capacity() <= REPLY_BUFFER_MAX && self.reply_buffers.len() < BUFFERS_MAX {
            self.reply_buffers.push(buffer);
        }
    }

    /// Ends the turn of a connection.
    fn finish(&mut self, number: usize, input: Input, used: usize) {
        let Some(connection) = &mut self.connections[number] else { return };
        connection.is_ready = false;
        connection.put_input(input, used);
        if connection.is_over() {
            connection.stream.end_sending();
            self.close(number);
            return;
        }
        if connection.input.unused().is_empty()
            && let Some(buffer) = mem::take(&mut connection.input).into_buffer()
            && buffer.capacity() == INPUT_BYTES
            && self.input_buffers.len() < BUFFERS_MAX
        {
            self.input_buffers.push(buffer);
        }
        let next = connection.next_wait();
        if connection.waits_for != next {
            let before = mem::replace(&mut connection.waits_for, next);
            if let Err(error) = wait_for_client(&self.epoll, number, connection, before) {
                tracing::warn!(%error, "cannot change the epoll events of a client; closing its connection");
                self.close(number);
                return;
            }
        }
        if connection.must_retry() {
            self.parked.push(number);
        }
        let can_send = !connection.stream.has_backlog();
        if connection.has_decrypted() && can_send {
            let counters = &self.common.counters[self.thread];
            counters.bytes_read.add(connection.receive(&mut self.input_buffers));
            connection.is_runnable = true;
        }
        if connection.is_runnable && can_send {
            connection.is_ready = true;
            self.ready.push(number);
        }
    }

    /// Ends the turn of a connection of another server.
    fn finish_peer(&mut self, number: usize, mut input: Vec<u8>, used: usize) {
        let Some(peer) = &mut self.peers[number] else { return };
        peer.is_ready = false;
        input.drain(..used);
        peer.input = input;
        if peer.is_over() {
            self.peers[number] = None;
            return;
        }
        let waits_to_send = peer.stream.has_backlog();
        if mem::replace(&mut peer.waits_to_send, waits_to_send) != waits_to_send {
            let flags = if waits_to_send { epoll::EventFlags::OUT } else { epoll::EventFlags::IN };
            if let Err(error) = epoll::modify(&self.epoll, &*peer, Source::Peer(number).data(), flags) {
                tracing::warn!(%error, "cannot change the epoll events of a peer; closing its connection");
                self.peers[number] = None;
                return;
            }
        }
        if !waits_to_send && peer.has_frame() {
            self.make_peer_ready(number);
        }
    }
}

fn wait_for_link(epoll: &OwnedFd, server: u16, descriptor: BorrowedFd<'_>, interest: Interest) {
    let flags = match interest {
        Interest::Receive => epoll::EventFlags::IN,
        Interest::Send => epoll::EventFlags::IN | epoll::EventFlags::OUT,
    };
    if let Err(error) = epoll::modify(epoll, descriptor, Source::Link(server).data(), flags) {
        tracing::warn!(%error, server, ?interest, "cannot change the epoll events of a link");
    }
}

/// Changes the epoll events of a connection, which waited for `before`, to those for which it waits
/// now.
fn wait_for_client(
    epoll: &OwnedFd,
    number: usize,
    connection: &Connection,
    before: WaitsFor,
) -> rustix::io::Result<()> {
    let data = Source::Client(number).data();
    let flags = match connection.waits_for {
        WaitsFor::Requests => epoll::EventFlags::IN,
        WaitsFor::Room => epoll::EventFlags::OUT,
        // A closed socket has events even if none is registered.
        WaitsFor::Nothing => return epoll::delete(epoll, connection),
    };
    if before == WaitsFor::Nothing {
        epoll::add(epoll, connection, data, flags)
    } else {
        epoll::modify(epoll, connection, data, flags)
    }
}

/// Prefetches the memory that the requests of the first connections need; returns the number of
/// those connections.
fn look_ahead(inputs: &[Input], context: &Context<'_>) -> usize {
    let mut hashes = Hashes::new();
    let mut connections = 0;
    for input in inputs {
        lookahead::collect(context.access.store, input.unused(), &mut hashes);
        connections += 1;
        if hashes.len() >= KEYS_AHEAD {
            break;
        }
    }
    lookahead::load(context.access.store, &hashes);
    connections
}
