//! The target's thread: lets initiators in, tells them what keys open, binds windows for them, carries messages.
//!
//! - [`admission`]: strangers prove who they are, and begin a session or go on with one.
//! - [`requests`]: what those who are in ask for, and what they are told.
//! - [`closing`]: windows are closed, with nobody looking.

mod admission;
mod closing;
mod requests;

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec};

use super::letters::Answer;
use super::peer::Peer;
use super::session::{Phase, Session, UnderWay};
use super::slots::{CAME, Slots, slot_of};
use super::sys::completions::{Completions, Ended, Outcome};
use super::sys::connection::{Connection, Event, EventKind, Events};
use super::sys::device::Device;
use super::sys::receives::SharedReceives;
use super::target::{Command, Shared};
use super::{INLINE_BYTES, LETTER_BYTES, LETTERS_MAX, Options, WINDOWS_EACH};
use aquifer_fabric::handshake::{HANDSHAKE_TIME, LINGER_TIME};
use aquifer_fabric::target::{Host, Identity};

/// Completions taken at a time.
const POLL_MAX: usize = 64;
/// Those who connect and wait to be heard.
const BACKLOG: i32 = 64;
/// Connections of those who have not proved who they are, at most: each costs a queue pair.
const STRANGERS_MAX: usize = 64;
/// Letters and binds that one session may have under way.
const SESSION_DEPTH: usize = 64;
/// The thread looks so often who is late, and who has lingered for long enough.
const TICK: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

pub(super) struct Server {
    // Dropped in this order: what is used outlives what uses it.
    sessions: HashMap<usize, Session>,
    #[expect(dead_code, reason = "it listens for as long as it is kept")]
    listener: Connection,
    events: Events,
    receives: SharedReceives,
    completions: Completions,
    inbox: Slots,
    outbox: Slots,
    /// Whose it is, by the id of its completion. Ids are never used again: one that comes late is nobody's.
    under_way: HashMap<u64, usize>,
    next_id: u64,
    /// By the number of the queue pair.
    by_pair: HashMap<u32, usize>,
    /// Somebody found no place in the outbox.
    is_short_of_places: bool,
    /// Nothing new is bound or said for the moment.
    is_held: bool,
    lingering: Vec<(Arc<Peer>, Instant)>,
    windows_each: usize,
    letter: Vec<u8>,
    ended: Vec<Ended>,
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
        let lacks = device.caps.lacks();
        if !lacks.is_empty() {
            let what = format!("{} cannot lend memory: it lacks {}", device.caps.name, lacks.join(", "));
            return Err(io::Error::new(io::ErrorKind::Unsupported, what));
        }
        let letters = u32::try_from(options.endpoints_max * 8).unwrap_or(u32::MAX).max(LETTERS_MAX);
        let letters = letters.min(u32::try_from(device.caps.shared_receives).unwrap_or(u32::MAX));
        let receives = SharedReceives::new(device, letters as usize)?;
        let depth = (options.endpoints_max * SESSION_DEPTH + letters as usize).min(device.caps.completions);
        let server = Self {
            sessions: HashMap::new(),
            listener,
            events,
            receives,
            completions: Completions::new(device, depth)?,
            inbox: Slots::new(device, "aquifer-verbs-inbox", letters, LETTER_BYTES)?,
            outbox: Slots::new(device, "aquifer-verbs-outbox", letters, LETTER_BYTES)?,
            under_way: HashMap::new(),
            next_id: 0,
            by_pair: HashMap::new(),
            is_short_of_places: false,
            is_held: false,
            lingering: Vec::new(),
            // Each has its share, so that nobody can take the others'.
            windows_each: (device.caps.windows / options.endpoints_max).clamp(1, WINDOWS_EACH),
            letter: Vec::new(),
            ended: Vec::with_capacity(POLL_MAX),
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
        let _end = EndOfService(shared);
        while !shared.stop.load(Ordering::SeqCst) {
            let commands = std::mem::take(&mut shared.lock().commands);
            commands.into_iter().for_each(|command| self.obey(shared, command));
            while let Ok(Some(event)) = self.events.next() {
                self.heed_event(shared, event);
            }
            self.heed_all(shared);
            self.carry_mail(shared);
            self.end_late(shared);
            self.completions.arm();
            // What came before that is not told.
            if self.heed_all(shared) == 0 {
                self.wait(shared);
            }
        }
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
            shared.wake.clear();
        }
        if polled[2].revents().contains(PollFlags::IN) {
            self.completions.quiet();
        }
    }

    fn obey(&mut self, shared: &Shared, command: Command) {
        match command {
            Command::Invalidate(key, done) => {
                self.sessions.values_mut().for_each(|session| session.invalidate(key));
                let _nobody_waits = done.send(());
            }
            Command::Expel(range, done) => {
                self.expel(shared, &range);
                let _nobody_waits = done.send(());
            }
            Command::Fence(host, epoch, done) => {
                self.fence(shared, host, epoch);
                let _nobody_waits = done.send(());
            }
            Command::Remap(order, done) => {
                let outcome = self.remap(shared, &order);
                let _nobody_waits = done.send(outcome);
            }
        }
    }

    /// Nothing of that host's is served any more when this returns, and none of its sessions comes back.
    fn fence(&mut self, shared: &Shared, host: Host, epoch: u64) {
        let is_fenced = |who: Identity| who.host == host && who.epoch <= epoch;
        let of_it = |session: &Session| session.peer().is_some_and(|peer| is_fenced(peer.who));
        let fenced = self.sessions.iter().filter(|(_, session)| of_it(session)).map(|(name, _)| *name);
        fenced.collect::<Vec<_>>().into_iter().for_each(|name| self.close(name));
        self.release_lingering(shared, |peer, _| is_fenced(peer.who));
    }

    /// The connection is over; the session may come back over another.
    fn close(&mut self, name: usize) {
        let Some(session) = self.sessions.remove(&name) else { return };
        self.by_pair.remove(&session.pair.number());
        if let Phase::Open(peer) = &session.phase {
            self.lingering.push((Arc::clone(peer), Instant::now()));
        }
        let mut places = Vec::new();
        for (id, what) in &session.under_way {
            self.under_way.remove(id);
            if let UnderWay::Letter(place) = what {
                places.push(*place);
            }
        }
        // Its letters are read until its queue pair is gone.
        drop(session);
        places.into_iter().for_each(|place| self.outbox.give_back(place));
    }

    fn end_late(&mut self, shared: &Shared) {
        let now = Instant::now();
        let late = self.sessions.iter().filter(|(_, session)| session.is_late(now));
        let late: Vec<usize> = late.map(|(name, _)| *name).collect();
        late.into_iter().for_each(|name| self.close(name));
        self.release_lingering(shared, |_, since| now - since >= LINGER_TIME);
    }

    fn release_lingering(&mut self, shared: &Shared, ends: impl Fn(&Peer, Instant) -> bool) {
        for (peer, _) in self.lingering.extract_if(.., |(peer, since)| ends(peer, *since)) {
            shared.lock().release(&peer);
        }
    }

    fn heed_event(&mut self, shared: &Shared, event: Event) {
        if let Some((connection, speaks_it)) = event.asks {
            if speaks_it && let Err(error) = self.let_in(shared, connection) {
                tracing::warn!(%error, "cannot accept an endpoint");
            }
        } else if matches!(event.kind, EventKind::Disconnected | EventKind::Failed(_) | EventKind::Rejected) {
            self.close(event.of);
        }
    }

    fn let_in(&mut self, shared: &Shared, mut connection: Connection) -> io::Result<()> {
        // The new queue pair may get the number of one that is gone: what came for that one is heard first.
        self.heed_all(shared);
        if self.sessions.values().filter(|session| session.peer().is_none()).count() >= STRANGERS_MAX {
            return Err(io::Error::other("too many connect at once"));
        }
        let Self { device, completions, receives, .. } = self;
        let pair =
            connection.open_pair(device, completions, SESSION_DEPTH, 0, Some(receives), INLINE_BYTES)?;
        connection.accept(device.caps.reads_served)?;
        let name = connection.name();
        self.by_pair.insert(pair.number(), name);
        self.sessions.insert(name, Session::new(connection, pair, Instant::now() + HANDSHAKE_TIME));
        Ok(())
    }

    /// Heed all that the device has to tell; how much that was.
    fn heed_all(&mut self, shared: &Shared) -> usize {
        let mut count = 0;
        let mut ended = std::mem::take(&mut self.ended);
        while self.completions.poll(&mut ended, POLL_MAX) > 0 {
            count += ended.len();
            ended.drain(..).for_each(|end| self.heed(shared, &end));
        }
        self.ended = ended;
        if std::mem::take(&mut self.is_short_of_places) {
            let names: Vec<usize> = self.sessions.keys().copied().collect();
            names.into_iter().for_each(|name| self.advance(shared, name));
        }
        count
    }

    fn heed(&mut self, shared: &Shared, end: &Ended) {
        let is_done = end.outcome == Outcome::Done;
        if end.id & CAME != 0 {
            let mut letter = std::mem::take(&mut self.letter);
            let place = slot_of(end.id);
            self.inbox.read(place, end.bytes as usize, &mut letter);
            if let Err(error) = self.offer(place) {
                tracing::error!(%error, "the device takes no more receives");
            }
            if is_done && let Some(&name) = self.by_pair.get(&end.pair) {
                self.hear(shared, name, &letter);
            }
            self.letter = letter;
        } else if let Some(name) = self.under_way.remove(&end.id) {
            let session = self.sessions.get_mut(&name);
            match session.and_then(|session| session.under_way.remove(&end.id)) {
                Some(UnderWay::Letter(place)) => self.outbox.give_back(place),
                Some(UnderWay::Bind(binding)) => self.bound(name, binding, is_done),
                None => {}
            }
            self.advance(shared, name);
        }
        if !is_done && let Some(&name) = self.by_pair.get(&end.pair) {
            self.close(name);
        }
    }

    /// Messages of the target's owner that were not sent yet.
    fn carry_mail(&mut self, shared: &Shared) {
        let open = self.sessions.iter_mut().filter_map(|(name, session)| {
            let peer = Arc::clone(session.peer()?);
            let mut has_some = false;
            while peer.mailbox.send_next(|number, message| session.tell(&Answer::Message(number, message))) {
                has_some = true;
            }
            has_some.then_some(*name)
        });
        open.collect::<Vec<_>>().into_iter().for_each(|name| self.advance(shared, name));
    }
}

/// However the thread ends: nobody waits for it after that.
struct EndOfService<'a>(&'a Shared);

impl Drop for EndOfService<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.is_served = false;
        state.commands.clear();
    }
}
