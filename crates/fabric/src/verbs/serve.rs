//! The target's thread: lets initiators in, tells them what keys open, binds windows for them, carries messages.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec};

use super::letters::{Answer, Opened, Request};
use super::peer::Peer;
use super::session::{Phase, Session, prove};
use super::slots::Slots;
use super::sys::completions::{Completions, Ended, Outcome};
use super::sys::connection::{Connection, Event, EventKind, Events};
use super::sys::device::Device;
use super::sys::pair::{Kind, Opening, Order};
use super::sys::receives::SharedReceives;
use super::sys::window::Window;
use super::target::{Command, Shared, State};
use super::{HANDSHAKE_TIME, INLINE_BYTES, LETTER_BYTES, LETTERS_MAX, LINGER_TIME, Options};
use crate::keys::{Grant, admits};
use crate::target::{Host, Identity};
use crate::tcp::hello::{self, Hello, Reply, SessionId, Welcome};
use crate::work::Key;

/// Ids of completions: places of messages that came, of those that went, and binds.
const CAME: u64 = 1 << 62;
const WENT: u64 = 1 << 63;
const SLOT_MASK: u64 = u32::MAX as u64;
/// Completions taken at a time.
const POLL_MAX: usize = 64;
/// Those who connect and wait to be heard.
const BACKLOG: i32 = 64;
/// The thread looks so often who is late, and who has lingered for long enough.
const TICK: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// A window that is being bound.
#[derive(Debug)]
struct Binding {
    session: usize,
    key: Key,
    window: Window,
    opened: Opened,
    /// Its key was invalidated meanwhile.
    is_dead: bool,
}

pub(super) struct Server {
    // Dropped in this order: what is used outlives what uses it.
    sessions: HashMap<usize, Session>,
    bindings: HashMap<u64, Binding>,
    #[expect(dead_code, reason = "it listens for as long as it is kept")]
    listener: Connection,
    events: Events,
    receives: SharedReceives,
    completions: Completions,
    inbox: Slots,
    outbox: Slots,
    /// Whose place in the outbox it is.
    letters: HashMap<u32, usize>,
    /// By the number of the queue pair.
    by_pair: HashMap<u32, usize>,
    lingering: Vec<(Arc<Peer>, Instant)>,
    next_binding: u64,
    letter: Vec<u8>,
    device: &'static Device,
}

impl Server {
    /// Listen; nobody is let in before [`Self::run`].
    pub fn listen(address: SocketAddr, options: &Options) -> io::Result<(Self, &'static Device, SocketAddr)> {
        let named = |error: io::Error| io::Error::new(error.kind(), format!("{address}: {error}"));
        let events = Events::new().map_err(named)?;
        let listener = Connection::new(&events).map_err(named)?;
        let address = listener.listen(address, BACKLOG).map_err(named)?;
        let none =
            |_| io::Error::new(io::ErrorKind::NotFound, format!("{address} is not an RDMA device's address"));
        let device = listener.device().map_err(none)?;
        let letters = u32::try_from(options.endpoints_max * 8).unwrap_or(u32::MAX).max(LETTERS_MAX);
        let letters = letters.min(u32::try_from(device.caps.shared_receives).unwrap_or(u32::MAX));
        let receives = SharedReceives::new(device, letters as usize)?;
        let depth = (options.endpoints_max * SESSION_DEPTH + letters as usize).min(device.caps.completions);
        let server = Self {
            sessions: HashMap::new(),
            bindings: HashMap::new(),
            listener,
            events,
            receives,
            completions: Completions::new(device, depth)?,
            inbox: Slots::new(device, "aquifer-verbs-inbox", letters, LETTER_BYTES)?,
            outbox: Slots::new(device, "aquifer-verbs-outbox", letters, LETTER_BYTES)?,
            letters: HashMap::new(),
            by_pair: HashMap::new(),
            lingering: Vec::new(),
            next_binding: 0,
            letter: Vec::new(),
            device,
        };
        for slot in 0..letters {
            server.offer(slot)?;
        }
        Ok((server, device, address))
    }

    fn offer(&self, slot: u32) -> io::Result<()> {
        // SAFETY: the place is registered for as long as the queue lives, and nobody else's until something has come there.
        unsafe { self.receives.offer(CAME | u64::from(slot), self.inbox.whole(slot)) }
    }

    /// Until the target goes away.
    pub fn run(mut self, shared: &Shared) {
        let mut ended = Vec::with_capacity(POLL_MAX);
        while !shared.stop.load(Ordering::SeqCst) {
            let commands = std::mem::take(&mut shared.lock().commands);
            commands.into_iter().for_each(|command| self.obey(command));
            while let Ok(Some(event)) = self.events.next() {
                self.heed_event(event);
            }
            ended.clear();
            while self.completions.poll(&mut ended, POLL_MAX) > 0 {
                for end in std::mem::take(&mut ended) {
                    self.heed(shared, &end);
                }
            }
            self.carry_mail(shared);
            self.end_late(shared);
            self.completions.arm();
            if self.completions.poll(&mut ended, POLL_MAX) > 0 {
                for end in std::mem::take(&mut ended) {
                    self.heed(shared, &end);
                }
                continue;
            }
            self.wait(shared);
        }
        shared.lock().commands.clear();
    }

    fn wait(&self, shared: &Shared) {
        let mut polled = [
            PollFd::new(&shared.wake, PollFlags::IN),
            PollFd::from_borrowed_fd(self.events.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.completions.fd(), PollFlags::IN),
        ];
        if let Err(error) = rustix::event::poll(&mut polled, Some(&TICK))
            && error != rustix::io::Errno::INTR
        {
            tracing::error!(%error, "the fabric target cannot wait for its device");
        }
        if polled[0].revents().contains(PollFlags::IN) {
            // It only wakes: nothing is lost if it was read already.
            let _ = rustix::io::read(&shared.wake, &mut [0; 8]);
        }
        if polled[2].revents().contains(PollFlags::IN) {
            self.completions.quiet();
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Invalidate(key, done) => {
                self.bindings.values_mut().for_each(|binding| binding.is_dead |= binding.key == key);
                // A window that is freed opens nothing any more when this returns.
                self.sessions.values_mut().for_each(|session| drop(session.windows.remove(&key)));
                let _nobody_waits = done.send(());
            }
            Command::Fence(host, epoch, done) => {
                self.fence(host, epoch);
                let _nobody_waits = done.send(());
            }
        }
    }

    fn fence(&mut self, host: Host, epoch: u64) {
        let is_fenced = |who: Identity| who.host == host && who.epoch <= epoch;
        let fenced = self
            .sessions
            .iter()
            .filter(|(_, session)| session.peer().is_some_and(|peer| is_fenced(peer.who)));
        let fenced: Vec<usize> = fenced.map(|(name, _)| *name).collect();
        fenced.into_iter().for_each(|name| self.close(name));
    }

    /// The connection is over; the session may come back over another.
    fn close(&mut self, name: usize) {
        let Some(session) = self.sessions.remove(&name) else { return };
        self.by_pair.remove(&session.pair.number());
        if let Phase::Open(peer) = &session.phase {
            self.lingering.push((Arc::clone(peer), Instant::now()));
        }
        // What it still had under way is told as flushed, or not at all; its places are free with it.
        let freed: Vec<u32> =
            self.letters.iter().filter(|(_, of)| **of == name).map(|(slot, _)| *slot).collect();
        drop(session);
        for slot in freed {
            self.letters.remove(&slot);
            self.outbox.give_back(slot);
        }
        self.bindings.retain(|_, binding| binding.session != name);
    }

    fn end_late(&mut self, shared: &Shared) {
        let now = Instant::now();
        let late = self.sessions.iter().filter(|(_, session)| session.is_late(now));
        let late: Vec<usize> = late.map(|(name, _)| *name).collect();
        late.into_iter().for_each(|name| self.close(name));
        if self.lingering.iter().any(|(_, since)| now - *since >= LINGER_TIME) {
            let mut state = shared.lock();
            self.lingering.retain(|(peer, since)| {
                let stays = now - *since < LINGER_TIME;
                if !stays {
                    state.release(peer);
                }
                stays
            });
        }
    }

    fn heed_event(&mut self, event: Event) {
        if let Some((connection, speaks_it)) = event.asks {
            if speaks_it && let Err(error) = self.let_in(connection) {
                tracing::warn!(%error, "cannot accept an endpoint");
            }
        } else if matches!(event.kind, EventKind::Disconnected | EventKind::Failed(_) | EventKind::Rejected) {
            self.close(event.of);
        }
    }

    fn let_in(&mut self, mut connection: Connection) -> io::Result<()> {
        let Self { device, completions, receives, .. } = self;
        let pair =
            connection.open_pair(device, completions, SESSION_DEPTH, 0, Some(receives), INLINE_BYTES)?;
        connection.accept(device.caps.reads_served)?;
        let name = connection.name();
        self.by_pair.insert(pair.number(), name);
        self.sessions.insert(name, Session::new(connection, pair, Instant::now() + HANDSHAKE_TIME));
        Ok(())
    }

    fn heed(&mut self, shared: &Shared, end: &Ended) {
        let slot = u32::try_from(end.id & SLOT_MASK).expect("32 bits");
        if end.id & WENT != 0 {
            if let Some(name) = self.letters.remove(&slot) {
                self.outbox.give_back(slot);
                self.has_ended(name);
            }
        } else if end.id & CAME != 0 {
            let mut letter = std::mem::take(&mut self.letter);
            self.inbox.read(slot, end.bytes as usize, &mut letter);
            if let Err(error) = self.offer(slot) {
                tracing::error!(%error, "the device takes no more receives");
            }
            if end.outcome == Outcome::Done
                && let Some(&name) = self.by_pair.get(&end.pair)
            {
                self.hear(shared, name, &letter);
            }
            self.letter = letter;
            return;
        } else if let Some(binding) = self.bindings.remove(&end.id) {
            let name = binding.session;
            self.has_ended(name);
            self.bound(binding, end.outcome);
        }
        if end.outcome != Outcome::Done
            && let Some(&name) = self.by_pair.get(&end.pair)
        {
            self.close(name);
        }
    }

    fn has_ended(&mut self, name: usize) {
        if let Some(session) = self.sessions.get_mut(&name) {
            session.under_way -= 1;
        }
        self.say_unsaid(name);
    }

    fn hear(&mut self, shared: &Shared, name: usize, letter: &[u8]) {
        let Some(session) = self.sessions.get_mut(&name) else { return };
        let outcome = match &mut session.phase {
            Phase::Proving(deadline) => {
                let deadline = *deadline;
                let (outcome, answer) = prove(letter, &shared.key);
                session.phase = match outcome {
                    Ok(seal) => Phase::Greeting(seal, deadline),
                    Err(error) => {
                        tracing::info!(%error, "an endpoint was turned away");
                        Phase::Refused(deadline)
                    }
                };
                self.say(name, answer);
                return;
            }
            Phase::Greeting(seal, _) => {
                let mut plain = Vec::new();
                let opened = seal.open(letter, &mut plain).map_err(|error| error.to_string());
                opened.and_then(|_| hello::parse_hello(&plain).map_err(|error| error.to_string()))
            }
            Phase::Open(peer) => {
                let peer = Arc::clone(peer);
                return self.hear_request(shared, name, &peer, letter);
            }
            Phase::Refused(_) => return,
        };
        match outcome {
            Ok(hello) => self.greet(shared, name, &hello),
            Err(error) => {
                tracing::info!(error, "an endpoint was turned away");
                self.close(name);
            }
        }
    }

    fn greet(&mut self, shared: &Shared, name: usize, hello: &Hello) {
        let admitted = self.admit(shared, hello);
        let reply = match &admitted {
            Ok(peer) => Reply::Welcome(Welcome {
                session: peer.id,
                done: 0,
                encrypt: false,
                limits: shared.options.limits,
                regions: shared.lock().tables.announce(hello.who),
            }),
            Err(reason) => Reply::Refusal(reason.clone()),
        };
        let Some(session) = self.sessions.get_mut(&name) else { return };
        let Phase::Greeting(seal, deadline) = &mut session.phase else { return };
        let mut sealed = Vec::new();
        seal.close(&hello::encode_reply(&reply), &mut sealed);
        session.phase = match admitted {
            Ok(peer) => Phase::Open(peer),
            Err(reason) => {
                tracing::info!(reason, "an endpoint was turned away");
                Phase::Refused(*deadline)
            }
        };
        self.say(name, sealed);
    }

    /// A new session, or the one that it goes on with.
    fn admit(&mut self, shared: &Shared, hello: &Hello) -> Result<Arc<Peer>, String> {
        let who = hello.who;
        if let Some(epoch) = who.epoch.checked_sub(1)
            && shared.lock().tables.refusal(who).is_none()
        {
            // What the host's agent before this one still had under way must not be done any more.
            shared.lock().tables.fence(who.host, epoch);
            self.fence(who.host, epoch);
        }
        if let Some(reason) = shared.lock().tables.refusal(who) {
            return Err(reason);
        }
        let Some(resume) = hello.resume else { return self.begin(&mut shared.lock(), who) };
        let is_it = |peer: &Peer| peer.id == resume.session && peer.who == who;
        let open = self.sessions.iter().find(|(_, session)| session.peer().is_some_and(|peer| is_it(peer)));
        if let Some(name) = open.map(|(name, _)| *name) {
            // Its old connection has not been found broken yet.
            self.close(name);
        }
        let at = self.lingering.iter().position(|(peer, _)| is_it(peer));
        let at = at.ok_or("there is no such session (any more)")?;
        let (peer, _) = self.lingering.swap_remove(at);
        if peer.resume(resume.heard, resume.taken) {
            Ok(peer)
        } else {
            shared.lock().release(&peer);
            Err("the session has gone on without you".into())
        }
    }

    fn begin(&mut self, state: &mut State, who: Identity) -> Result<Arc<Peer>, String> {
        if state.slots.iter().all(|taken| *taken) && !self.lingering.is_empty() {
            // Whoever comes is here; of those who lingered longest nobody knows.
            let (oldest, _) = self.lingering.remove(0);
            state.release(&oldest);
        }
        let Some(slot) = state.slots.iter().position(|taken| !taken) else {
            return Err(format!("{} endpoints are connected already", state.slots.len()));
        };
        let mut id: SessionId = [0; 16];
        rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())
            .map_err(|error| format!("the target has no random bytes: {error}"))?;
        state.slots[slot] = true;
        let peer = Arc::new(Peer::new(who, id, slot));
        state.peers.push(Arc::clone(&peer));
        Ok(peer)
    }

    fn hear_request(&mut self, shared: &Shared, name: usize, peer: &Peer, letter: &[u8]) {
        let Some(request) = Request::parse(letter) else {
            tracing::warn!(host = peer.who.host.0, "an endpoint says what is not of the protocol");
            return self.close(name);
        };
        match request {
            Request::Ask(key) => self.open(shared, name, peer.who, key),
            Request::Forget(key) => {
                if let Some(session) = self.sessions.get_mut(&name) {
                    session.windows.remove(&key);
                }
            }
            Request::Message(number, message) => {
                let limits = &shared.options.limits;
                let is_short = message.len() <= limits.message_bytes_max as usize;
                let had_room = is_short
                    && peer.deliver(number, shared.control.next_stamp(), message, limits.receive_depth);
                self.answer(name, &Answer::Delivered(number, had_room));
            }
            Request::Taken(count) => {
                if !peer.credit(count) {
                    tracing::warn!(
                        host = peer.who.host.0,
                        "an endpoint has taken messages that it never had"
                    );
                    self.close(name);
                }
            }
        }
    }

    /// Bind a window for a key, if the key is for this one.
    fn open(&mut self, shared: &Shared, name: usize, who: Identity, key: Key) {
        let grant = shared.control.lookup(key).filter(|grant| admits(grant.scope, who));
        let Some(session) = self.sessions.get_mut(&name) else { return };
        let Some(grant) = grant.filter(|_| !session.windows.contains_key(&key)) else {
            return self.answer(name, &Answer::Told(key, None));
        };
        if let Err(error) = self.begin_binding(shared, name, key, &grant) {
            tracing::warn!(%error, "no window can be bound");
            self.answer(name, &Answer::Told(key, None));
        }
    }

    fn begin_binding(&mut self, shared: &Shared, name: usize, key: Key, grant: &Grant) -> io::Result<()> {
        let session = self.sessions.get_mut(&name).ok_or(io::ErrorKind::NotConnected)?;
        if session.under_way >= SESSION_DEPTH {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let window = Window::new(self.device)?;
        let device_key = window.fresh_key();
        let state = shared.lock();
        let region = state.regions.get(grant.region).ok_or(io::ErrorKind::NotFound)?;
        let opening = Opening {
            window: window.raw(),
            region: region.raw(),
            key: device_key,
            addr: grant.base,
            len: grant.len,
            access: grant.access,
        };
        let id = self.next_binding & SLOT_MASK;
        self.next_binding += 1;
        let order = Order { id, kind: Kind::Bind(opening), signalled: true, fenced: false };
        // SAFETY: regions stay registered for as long as the target lives, the window is kept until the bind has ended.
        unsafe { session.pair.post(&[order])? };
        session.under_way += 1;
        let opened = Opened { addr: grant.base, len: grant.len, access: grant.access, device_key };
        self.bindings.insert(id, Binding { session: name, key, window, opened, is_dead: false });
        Ok(())
    }

    fn bound(&mut self, binding: Binding, outcome: Outcome) {
        let Binding { session: name, key, window, opened, is_dead } = binding;
        let Some(session) = self.sessions.get_mut(&name) else { return };
        let is_bound = outcome == Outcome::Done && !is_dead;
        if is_bound {
            session.windows.insert(key, window);
        }
        self.answer(name, &Answer::Told(key, is_bound.then_some(opened)));
    }

    /// Messages of the target's owner that were not sent yet.
    fn carry_mail(&mut self, shared: &Shared) {
        let _ = shared;
        let open =
            self.sessions.iter().filter_map(|(name, session)| Some((*name, Arc::clone(session.peer()?))));
        for (name, peer) in open.collect::<Vec<_>>() {
            while let Some((number, message)) = peer.next_message() {
                self.answer(name, &Answer::Message(number, &message));
            }
        }
    }

    fn answer(&mut self, name: usize, answer: &Answer<'_>) {
        let mut letter = Vec::new();
        answer.write(&mut letter);
        self.say(name, letter);
    }

    fn say(&mut self, name: usize, letter: Vec<u8>) {
        if let Some(session) = self.sessions.get_mut(&name) {
            session.unsaid.push_back(letter);
        }
        self.say_unsaid(name);
    }

    fn say_unsaid(&mut self, name: usize) {
        let Self { sessions, outbox, letters, .. } = self;
        let Some(session) = sessions.get_mut(&name) else { return };
        let mut has_failed = false;
        while session.under_way < SESSION_DEPTH && !session.unsaid.is_empty() && !has_failed {
            let Some(slot) = outbox.take() else { return };
            let letter = session.unsaid.pop_front().expect("it is not empty");
            outbox.write(slot, &letter);
            let kind = Kind::Send { local: outbox.piece(slot, letter.len()) };
            let order = Order { id: WENT | u64::from(slot), kind, signalled: true, fenced: false };
            letters.insert(slot, name);
            session.under_way += 1;
            // SAFETY: the place is registered for as long as the pair lives, and free again only when the letter has gone.
            has_failed = unsafe { session.pair.post(&[order]) }.is_err();
        }
        if has_failed {
            self.close(name);
        }
    }
}

/// Letters and binds that one session may have under way.
const SESSION_DEPTH: usize = 64;
