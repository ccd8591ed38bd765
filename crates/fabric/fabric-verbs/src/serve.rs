//! The target's thread, which accepts initiators, answers requests for keys, binds windows and
//! transfers messages.
//!
//! - [`admission`]: authenticates initiators, and begins or resumes sessions.
//! - [`requests`]: serves requests of admitted initiators.
//! - [`close_windows`]: closes windows when pages change or keys are revoked.

mod admission;
mod close_windows;
mod requests;

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec};

use super::answered::VerbsPeer;
use super::messages::TargetMessage;
use super::session::{InFlightRequest, SessionPhase, VerbsSession};
use super::slots::{MessageSlots, RECEIVED_BIT, slot_of};
use super::sys::completions::{CompletionQueue, WorkCompletion, WorkOutcome};
use super::sys::connection::{CmConnection, CmEvent, CmEventKind, CmEvents};
use super::sys::device::Device;
use super::sys::receives::SharedReceives;
use super::target::{ServerCommand, VerbsShared};
use super::{INLINE_BYTES, MESSAGE_SLOT_BYTES, MESSAGE_SLOTS_MAX, VerbsOptions, WINDOWS_EACH};
use aquifer_fabric::handshake::{HANDSHAKE_TIMEOUT, PARKED_TIMEOUT};
use aquifer_fabric::target::{Host, Identity};

/// Number of completions taken at a time.
const POLL_MAX: usize = 64;
/// Bound of the connection requests that wait.
const BACKLOG: i32 = 64;
/// Bound of the connections with an unfinished handshake. Each uses a queue pair.
const UNAUTHENTICATED_MAX: usize = 64;
/// Bound of the messages and binds in flight of one session.
const SESSION_DEPTH: usize = 64;
/// The interval at which expired handshakes and sessions are ended.
const EXPIRY_CHECK_INTERVAL: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

pub(super) struct VerbsServer {
    // Fields are dropped in this order, so a resource outlives its users.
    sessions: HashMap<usize, VerbsSession>,
    #[expect(dead_code, reason = "the field keeps the listener")]
    listener: CmConnection,
    events: CmEvents,
    receives: SharedReceives,
    completions: CompletionQueue,
    inbox: MessageSlots,
    outbox: MessageSlots,
    /// The session of each request in flight, by completion id. An id is never reused, so a late
    /// completion matches no session.
    in_flight: HashMap<u64, usize>,
    next_id: u64,
    /// The session of each queue pair, by its number.
    by_pair: HashMap<u32, usize>,
    /// Whether a session waits for a free slot of the outbox.
    is_outbox_full: bool,
    /// Whether posting is paused.
    is_paused: bool,
    parked: Vec<(Arc<VerbsPeer>, Instant)>,
    windows_each: usize,
    message: Vec<u8>,
    ended: Vec<WorkCompletion>,
    device: &'static Device,
}

impl VerbsServer {
    /// Listens. Initiators are accepted only while [`Self::run`] runs.
    pub fn listen(
        address: SocketAddr,
        options: &VerbsOptions,
    ) -> io::Result<(Self, &'static Device, SocketAddr)> {
        let named = |error: io::Error| io::Error::new(error.kind(), format!("{address}: {error}"));
        let events = CmEvents::new().map_err(named)?;
        let listener = CmConnection::new(&events).map_err(named)?;
        let address = listener.listen(address, BACKLOG).map_err(named)?;
        let no_device =
            |_| io::Error::new(io::ErrorKind::NotFound, format!("{address} is not an RDMA device's address"));
        let device = listener.device().map_err(no_device)?;
        let lacks = device.caps.lacks();
        if !lacks.is_empty() {
            let what = format!("{} cannot lend memory: it lacks {}", device.caps.name, lacks.join(", "));
            return Err(io::Error::new(io::ErrorKind::Unsupported, what));
        }
        let slots = u32::try_from(options.endpoints_max * 8).unwrap_or(u32::MAX).max(MESSAGE_SLOTS_MAX);
        let slots = slots.min(u32::try_from(device.caps.shared_receives).unwrap_or(u32::MAX));
        let receives = SharedReceives::new(device, slots as usize)?;
        let depth = (options.endpoints_max * SESSION_DEPTH + slots as usize).min(device.caps.completions);
        let server = Self {
            sessions: HashMap::new(),
            listener,
            events,
            receives,
            completions: CompletionQueue::new(device, depth)?,
            inbox: MessageSlots::new(device, "aquifer-verbs-inbox", slots, MESSAGE_SLOT_BYTES)?,
            outbox: MessageSlots::new(device, "aquifer-verbs-outbox", slots, MESSAGE_SLOT_BYTES)?,
            in_flight: HashMap::new(),
            next_id: 0,
            by_pair: HashMap::new(),
            is_outbox_full: false,
            is_paused: false,
            parked: Vec::new(),
            // Each endpoint has a share, so that no endpoint can use up the windows of others.
            windows_each: (device.caps.windows / options.endpoints_max).clamp(1, WINDOWS_EACH),
            message: Vec::new(),
            ended: Vec::with_capacity(POLL_MAX),
            device,
        };
        for slot in 0..slots {
            server.offer(slot)?;
        }
        Ok((server, device, address))
    }

    fn offer(&self, slot: u32) -> io::Result<()> {
        // SAFETY: the slot is registered for as long as the queue lives, and unused until a message
        // has arrived in it.
        unsafe { self.receives.offer(RECEIVED_BIT | u64::from(slot), self.inbox.whole(slot)) }
    }

    /// Serves until the target stops.
    pub fn run(mut self, shared: &VerbsShared) {
        let _end = ServiceEndGuard(shared);
        while !shared.stop.load(Ordering::SeqCst) {
            let commands = std::mem::take(&mut shared.lock().commands);
            commands.into_iter().for_each(|command| self.run_command(shared, command));
            while let Ok(Some(event)) = self.events.next() {
                self.handle_event(shared, event);
            }
            self.handle_completions(shared);
            self.send_messages(shared);
            self.end_expired(shared);
            self.completions.arm();
            // The device does not notify of completions from before it was armed.
            if self.handle_completions(shared) == 0 {
                self.wait(shared);
            }
        }
    }

    fn wait(&self, shared: &VerbsShared) {
        let mut polled = [
            PollFd::new(&shared.wake, PollFlags::IN),
            PollFd::from_borrowed_fd(self.events.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.completions.fd(), PollFlags::IN),
        ];
        if let Err(error) = rustix::event::poll(&mut polled, Some(&EXPIRY_CHECK_INTERVAL))
            && error != rustix::io::Errno::INTR
        {
            tracing::error!(%error, "cannot poll the RDMA device; retrying");
        }
        if polled[0].revents().contains(PollFlags::IN) {
            shared.wake.clear();
        }
        if polled[2].revents().contains(PollFlags::IN) {
            self.completions.disarm();
        }
    }

    fn run_command(&mut self, shared: &VerbsShared, command: ServerCommand) {
        match command {
            ServerCommand::Invalidate(key, done) => {
                self.sessions.values_mut().for_each(|session| session.invalidate(key));
                let _ignored = done.send(());
            }
            ServerCommand::Expel(range, done) => {
                self.expel(shared, &range);
                let _ignored = done.send(());
            }
            ServerCommand::Fence(host, epoch, done) => {
                self.fence(shared, host, epoch);
                let _ignored = done.send(());
            }
            ServerCommand::Remap(order, done) => {
                let outcome = self.remap(shared, &order);
                let _ignored = done.send(outcome);
            }
        }
    }

    /// Closes all sessions of a fenced host. When this returns none of them is served, and none can
    /// be resumed.
    fn fence(&mut self, shared: &VerbsShared, host: Host, epoch: u64) {
        let is_fenced = |who: Identity| who.host == host && who.epoch <= epoch;
        let is_of_host = |session: &VerbsSession| session.peer().is_some_and(|peer| is_fenced(peer.who));
        let fenced = self
            .sessions
            .iter()
            .filter(|(_, session)| is_of_host(session))
            .map(|(connection_id, _)| *connection_id);
        fenced.collect::<Vec<_>>().into_iter().for_each(|connection_id| self.close(connection_id));
        self.release_parked(shared, |peer, _| is_fenced(peer.who));
    }

    /// Closes a connection. Its session may be resumed over another one.
    fn close(&mut self, connection_id: usize) {
        let Some(session) = self.sessions.remove(&connection_id) else { return };
        self.by_pair.remove(&session.pair.number());
        if let SessionPhase::Open(peer) = &session.phase {
            self.parked.push((Arc::clone(peer), Instant::now()));
        }
        let mut slots = Vec::new();
        for (id, what) in &session.in_flight {
            self.in_flight.remove(id);
            if let InFlightRequest::Message(slot) = what {
                slots.push(*slot);
            }
        }
        // The slots are read until the queue pair is gone.
        drop(session);
        slots.into_iter().for_each(|slot| self.outbox.release(slot));
    }

    fn end_expired(&mut self, shared: &VerbsShared) {
        let now = Instant::now();
        let expired = self.sessions.iter().filter(|(_, session)| session.is_expired(now));
        let expired: Vec<usize> = expired.map(|(connection_id, _)| *connection_id).collect();
        expired.into_iter().for_each(|connection_id| self.close(connection_id));
        self.release_parked(shared, |_, since| now - since >= PARKED_TIMEOUT);
    }

    fn release_parked(&mut self, shared: &VerbsShared, is_over: impl Fn(&VerbsPeer, Instant) -> bool) {
        for (peer, _) in self.parked.extract_if(.., |(peer, since)| is_over(peer, *since)) {
            shared.lock().release(&peer);
        }
    }

    fn handle_event(&mut self, shared: &VerbsShared, event: CmEvent) {
        if let Some((connection, is_protocol)) = event.request {
            if is_protocol && let Err(error) = self.accept(shared, connection) {
                tracing::warn!(%error, "cannot accept a connection");
            }
        } else if matches!(
            event.kind,
            CmEventKind::Disconnected | CmEventKind::Failed(_) | CmEventKind::Rejected
        ) {
            self.close(event.of);
        }
    }

    fn accept(&mut self, shared: &VerbsShared, mut connection: CmConnection) -> io::Result<()> {
        // The new queue pair may get the number of a destroyed one, so messages for that one are
        // handled first.
        self.handle_completions(shared);
        if self.sessions.values().filter(|session| session.peer().is_none()).count() >= UNAUTHENTICATED_MAX {
            return Err(io::Error::other("the limit of unfinished handshakes is reached"));
        }
        let Self { device, completions, receives, .. } = self;
        let pair =
            connection.open_pair(device, completions, SESSION_DEPTH, 0, Some(receives), INLINE_BYTES)?;
        connection.accept(device.caps.reads_served)?;
        let connection_id = connection.id();
        self.by_pair.insert(pair.number(), connection_id);
        self.sessions
            .insert(connection_id, VerbsSession::new(connection, pair, Instant::now() + HANDSHAKE_TIMEOUT));
        Ok(())
    }

    /// Handles all completions. Returns their number.
    fn handle_completions(&mut self, shared: &VerbsShared) -> usize {
        let mut count = 0;
        let mut ended = std::mem::take(&mut self.ended);
        while self.completions.poll(&mut ended, POLL_MAX) > 0 {
            count += ended.len();
            ended.drain(..).for_each(|end| self.handle_completion(shared, &end));
        }
        self.ended = ended;
        if std::mem::take(&mut self.is_outbox_full) {
            let connection_ids: Vec<usize> = self.sessions.keys().copied().collect();
            connection_ids.into_iter().for_each(|connection_id| self.post_queued(shared, connection_id));
        }
        count
    }

    fn handle_completion(&mut self, shared: &VerbsShared, end: &WorkCompletion) {
        let is_done = end.outcome == WorkOutcome::Done;
        if end.id & RECEIVED_BIT != 0 {
            let mut message = std::mem::take(&mut self.message);
            let slot = slot_of(end.id);
            self.inbox.read(slot, end.bytes as usize, &mut message);
            if let Err(error) = self.offer(slot) {
                tracing::error!(%error, "the device does not accept a receive");
            }
            if is_done && let Some(&connection_id) = self.by_pair.get(&end.pair) {
                self.handle_message(shared, connection_id, &message);
            }
            self.message = message;
        } else if let Some(connection_id) = self.in_flight.remove(&end.id) {
            let session = self.sessions.get_mut(&connection_id);
            match session.and_then(|session| session.in_flight.remove(&end.id)) {
                Some(InFlightRequest::Message(slot)) => self.outbox.release(slot),
                Some(InFlightRequest::Bind(binding)) => self.handle_bound(connection_id, binding, is_done),
                None => {}
            }
            self.post_queued(shared, connection_id);
        }
        if !is_done && let Some(&connection_id) = self.by_pair.get(&end.pair) {
            self.close(connection_id);
        }
    }

    /// Queues unsent messages of the target's owner for each session.
    fn send_messages(&mut self, shared: &VerbsShared) {
        let open = self.sessions.iter_mut().filter_map(|(connection_id, session)| {
            let peer = Arc::clone(session.peer()?);
            let mut has_some = false;
            while peer
                .mailbox
                .send_next(|number, message| session.queue_answer(&TargetMessage::Message(number, message)))
            {
                has_some = true;
            }
            has_some.then_some(*connection_id)
        });
        open.collect::<Vec<_>>()
            .into_iter()
            .for_each(|connection_id| self.post_queued(shared, connection_id));
    }
}

/// Marks the thread as ended when it is dropped, so that no caller waits for it.
struct ServiceEndGuard<'a>(&'a VerbsShared);

impl Drop for ServiceEndGuard<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.is_served = false;
        state.commands.clear();
    }
}
