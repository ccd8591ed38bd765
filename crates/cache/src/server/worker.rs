//! A thread that serves connections.

use std::collections::BTreeMap;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::buffer::spare_capacity;
use rustix::event::{EventfdFlags, epoll};
use rustix::io::Errno;
use rustix::time::Timespec;

use super::Common;
use super::acceptor::Accepted;
use super::connection::{Connection, ConnectionReport, INPUT_BYTES, Input};
use crate::commands::lookahead::{self, Hashes, KEYS_AHEAD};
use crate::commands::{Context, Replies, Service};
use crate::operations::Access;

/// What the waker has as its number.
const WAKE: u64 = u64::MAX;
/// Events that are taken at a time.
const EVENTS_MAX: usize = 256;
/// Free buffers that a thread keeps, of each kind.
const BUFFERS_MAX: usize = 64;
/// A buffer for replies that has grown beyond this is not kept.
const REPLY_BUFFER_MAX: usize = 64 << 10;

/// The part of a worker that other threads use.
#[derive(Debug)]
pub struct WorkerHandle {
    waker: OwnedFd,
    dealt: Mutex<Vec<Accepted>>,
    reports: Mutex<BTreeMap<RawFd, Arc<ConnectionReport>>>,
}

impl WorkerHandle {
    /// A handle for a worker that is yet to start.
    ///
    /// # Errors
    /// If the system has no descriptor for it.
    pub fn new() -> io::Result<Self> {
        let waker = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { waker, dealt: Mutex::default(), reports: Mutex::default() })
    }

    /// Wakes the worker.
    pub fn wake(&self) {
        // The counter can only overflow if the worker has ended.
        let _ = rustix::io::write(&self.waker, &1u64.to_ne_bytes());
    }

    /// Deals a connection to the worker.
    pub fn deal(&self, accepted: Accepted) {
        lock(&self.dealt).push(accepted);
        self.wake();
    }

    /// The worker's connections, by descriptor.
    pub fn reports(&self) -> MutexGuard<'_, BTreeMap<RawFd, Arc<ConnectionReport>>> {
        lock(&self.reports)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

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
    /// Connections to be served in the next turn.
    ready: Vec<usize>,
    input_buffers: Vec<Vec<u8>>,
    reply_buffers: Vec<Vec<u8>>,
    idle_checked_s: u32,
}

/// A connection in a turn: its input, and how much of it was used.
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
        epoll::add(&epoll, &handle.waker, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        Ok(Self {
            thread,
            epoll,
            handle,
            common,
            service,
            connections: Vec::new(),
            free: Vec::new(),
            ready: Vec::new(),
            input_buffers: Vec::new(),
            reply_buffers: Vec::new(),
            idle_checked_s: 0,
        })
    }

    /// Serves until the server stops.
    pub fn run(mut self) {
        let mut events: Vec<epoll::Event> = Vec::with_capacity(EVENTS_MAX);
        while !self.common.stops.load(Ordering::Relaxed) {
            events.clear();
            let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
            let timeout = if self.ready.is_empty() { None } else { Some(&at_once) };
            match epoll::wait(&self.epoll, spare_capacity(&mut events), timeout) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "cannot wait for requests");
                    return;
                }
            }
            for event in &events {
                match usize::try_from(event.data.u64()) {
                    Ok(number) if event.data.u64() != WAKE => self.on_event(number, event.flags),
                    _ => self.on_wake(),
                }
            }
            self.turn();
        }
    }

    fn on_event(&mut self, number: usize, flags: epoll::EventFlags) {
        let counters = &self.common.counters[self.thread];
        let Some(connection) = &mut self.connections[number] else { return };
        if connection.has_backlog() {
            if flags.intersects(epoll::EventFlags::OUT | epoll::EventFlags::ERR | epoll::EventFlags::HUP) {
                counters.bytes_written.add(connection.send_backlog());
            }
        } else {
            counters.bytes_read.add(connection.receive(&mut self.input_buffers));
        }
        if !mem::replace(&mut connection.is_ready, true) {
            self.ready.push(number);
        }
    }

    fn on_wake(&mut self) {
        let mut count = [0; 8];
        // Only this thread reads the counter; without a count there is nothing new.
        let _ = rustix::io::read(&self.handle.waker, &mut count);
        let now_s = self.common.clock.now_s();
        let dealt = mem::take(&mut *lock(&self.handle.dealt));
        for accepted in dealt {
            self.open(accepted, now_s);
        }
        if self.common.idle_timeout_s != 0 && self.idle_checked_s != now_s {
            self.idle_checked_s = now_s;
            self.close_idle(now_s);
        }
    }

    fn open(&mut self, accepted: Accepted, now_s: u32) {
        let connection = Connection::new(accepted, now_s);
        let number = self.free.pop().unwrap_or(self.connections.len());
        let data = epoll::EventData::new_u64(number as u64);
        if let Err(error) = epoll::add(&self.epoll, &connection, data, epoll::EventFlags::IN) {
            tracing::warn!(%error, "cannot serve a connection");
            self.common.connections.fetch_sub(1, Ordering::Relaxed);
            if number < self.connections.len() {
                self.free.push(number);
            }
            return;
        }
        let descriptor = std::os::fd::AsFd::as_fd(&connection).as_raw_fd();
        self.handle.reports().insert(descriptor, Arc::clone(&connection.report));
        if number == self.connections.len() {
            self.connections.push(Some(connection));
        } else {
            self.connections[number] = Some(connection);
        }
    }

    fn close(&mut self, number: usize) {
        if let Some(connection) = self.connections[number].take() {
            let descriptor = std::os::fd::AsFd::as_fd(&connection).as_raw_fd();
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
        if self.ready.is_empty() {
            return;
        }
        let common = Arc::clone(&self.common);
        let service = Arc::clone(&self.service);
        let now_s = common.clock.now_s();
        flush_if_due(&common, &service, now_s);
        let ready = mem::take(&mut self.ready);
        // Inputs stay where they are during the turn, while the connections change.
        let mut inputs: Vec<Input> = ready
            .iter()
            .map(|number| {
                self.connections[*number].as_mut().map_or_else(Input::default, |c| mem::take(&mut c.input))
            })
            .collect();
        let pin = common.store.pin(self.thread);
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
        let mut served = Vec::with_capacity(ready.len());
        let mut looked_ahead = 0;
        for (at, (number, input)) in ready.iter().zip(&inputs).enumerate() {
            if at == looked_ahead {
                looked_ahead += look_ahead(&inputs[at..], &context);
            }
            let mut replies = Replies::new(self.reply_buffers.pop().unwrap_or_default());
            let mut used = 0;
            if let Some(connection) = &mut self.connections[*number]
                && !connection.has_backlog()
            {
                used = connection.serve(input, common.requests_per_turn, &context, &mut replies);
            }
            served.push(Served { number: *number, used, replies });
        }
        for Served { number, replies, .. } in &served {
            if let Some(connection) = &mut self.connections[*number]
                && !connection.has_backlog()
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
            if buffer.capacity() <= REPLY_BUFFER_MAX && self.reply_buffers.len() < BUFFERS_MAX {
                self.reply_buffers.push(buffer);
            }
            self.finish(number, input, used);
        }
    }

    /// Ends the turn of a connection.
    fn finish(&mut self, number: usize, input: Input, used: usize) {
        let Some(connection) = &mut self.connections[number] else { return };
        connection.is_ready = false;
        connection.put_input(input, used);
        if connection.is_over() {
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
        let waits_to_send = connection.has_backlog();
        if connection.waits_to_send != waits_to_send {
            connection.waits_to_send = waits_to_send;
            let flags = if waits_to_send { epoll::EventFlags::OUT } else { epoll::EventFlags::IN };
            let data = epoll::EventData::new_u64(number as u64);
            if let Err(error) = epoll::modify(&self.epoll, &*connection, data, flags) {
                tracing::warn!(%error, "cannot wait for a connection");
                self.close(number);
                return;
            }
        }
        if connection.has_decrypted() && !waits_to_send {
            let counters = &self.common.counters[self.thread];
            counters.bytes_read.add(connection.receive(&mut self.input_buffers));
            connection.is_runnable = true;
        }
        if connection.is_runnable && !waits_to_send {
            connection.is_ready = true;
            self.ready.push(number);
        }
    }
}

/// Loads the memory that the requests of the first connections need; returns of how many
/// connections.
fn look_ahead(inputs: &[Input], context: &Context<'_>) -> usize {
    let mut hashes = Hashes::new();
    let mut connections = 0;
    for input in inputs {
        lookahead::collect(input.unused(), &mut hashes);
        connections += 1;
        if hashes.len() >= KEYS_AHEAD {
            break;
        }
    }
    lookahead::load(context.access.store, context.access.pin, &hashes);
    connections
}

/// Flushes all items if the time has come that a client has set.
fn flush_if_due(common: &Common, service: &Service, now_s: u32) {
    let flush_s = service.flush_s.load(Ordering::Relaxed);
    let is_due = flush_s != 0 && now_s >= flush_s;
    if is_due && service.flush_s.compare_exchange(flush_s, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
        common.store.flush();
    }
}
