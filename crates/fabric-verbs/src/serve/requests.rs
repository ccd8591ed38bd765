//! What those who are in ask for, and what they are told.

use std::io;

use super::{SESSION_DEPTH, Server};
use crate::LETTERS_MAX;
use crate::letters::{Answer, Opened, Request};
use crate::peer::Peer;
use crate::remap::Lent;
use crate::session::{Binding, Bound, Fate, UnderWay, Waiting};
use crate::slots::WENT;
use crate::sys::pair::{Kind, Opening, Order};
use crate::sys::window::Window;
use crate::target::Shared;
use aquifer_fabric::keys::{Grant, KeyId, admits};

/// Answers and messages that one session may leave waiting: twice what an initiator can have said that is not answered.
const WAITING_MAX: usize = 2 * LETTERS_MAX as usize;

impl Server {
    pub(super) fn hear_request(&mut self, shared: &Shared, name: usize, peer: &Peer, letter: &[u8]) {
        let Some(session) = self.sessions.get_mut(&name) else { return };
        let host = peer.who.host.0;
        if session.waiting.len() >= WAITING_MAX {
            tracing::warn!(host, "an endpoint says more than it listens to");
            return self.close(name);
        }
        match Request::parse(letter) {
            Some(Request::Ask(name)) => session.waiting.push_back(Waiting::Bind(name)),
            Some(Request::Forget(name)) => drop(session.windows.remove(&name)),
            Some(Request::Message(number, message)) => {
                let limits = &shared.options.limits;
                let is_short = message.len() <= limits.message_bytes_max as usize;
                let had_room = is_short
                    && peer.own.deliver(
                        &peer.mailbox,
                        number,
                        shared.control.next_stamp(),
                        message,
                        limits.receive_depth,
                    );
                session.tell(&Answer::Delivered(number, had_room));
            }
            Some(Request::Taken(count)) if peer.mailbox.credit_through(count) => {}
            Some(Request::Taken(_)) => {
                tracing::warn!(host, "an endpoint has taken messages that it never had");
                return self.close(name);
            }
            None => {
                tracing::warn!(host, "an endpoint says what is not of the protocol");
                return self.close(name);
            }
        }
        self.advance(shared, name);
    }

    /// Say something, now or when there is a place.
    pub(super) fn say(&mut self, shared: &Shared, name: usize, letter: Vec<u8>) {
        if let Some(session) = self.sessions.get_mut(&name) {
            session.waiting.push_back(Waiting::Letter(letter));
        }
        self.advance(shared, name);
    }

    /// Give the device what waits for it, in order.
    pub(super) fn advance(&mut self, shared: &Shared, name: usize) {
        while !self.is_held
            && let Some(session) = self.sessions.get_mut(&name)
            && session.under_way.len() < SESSION_DEPTH
            && let Some(first) = session.waiting.pop_front()
        {
            let given = match first {
                Waiting::Bind(wanted) => self.open(shared, name, wanted),
                Waiting::Letter(letter) => match self.outbox.take() {
                    Some(place) => self.send(name, place, &letter),
                    None => {
                        session.waiting.push_front(Waiting::Letter(letter));
                        self.is_short_of_places = true;
                        return;
                    }
                },
            };
            if let Err(error) = given {
                tracing::warn!(%error, "the device takes no more of an endpoint's letters and binds");
                return self.close(name);
            }
        }
    }

    fn send(&mut self, name: usize, place: u32, letter: &[u8]) -> io::Result<()> {
        self.outbox.write(place, letter);
        let kind = Kind::Send { local: self.outbox.piece(place, letter.len()) };
        self.give(name, WENT, UnderWay::Letter(place), kind)
    }

    /// Bind a window for a key, if the key is for this one.
    fn open(&mut self, shared: &Shared, name: usize, wanted: KeyId) -> io::Result<()> {
        let Some(session) = self.sessions.get_mut(&name) else { return Ok(()) };
        let Some(who) = session.peer().map(|peer| peer.who) else { return Ok(()) };
        let KeyId { key, start } = wanted;
        let grant = if key.is_table_key() {
            shared.lock().tables.table_grant(who, key, start)
        } else {
            shared.control.lookup(key).filter(|grant| admits(grant.scope, who))
        };
        let Some(grant) = grant.filter(|_| !session.has_window(wanted)) else {
            session.tell(&Answer::Told(wanted, None));
            return Ok(());
        };
        let lends = shared.lock().regions.get(grant.region).is_some_and(|lent| lent.registration().is_some());
        if !lends {
            session.tell(&Answer::Told(wanted, None));
            return Ok(());
        }
        let window = if session.windows_taken() < self.windows_each {
            let made = Window::new(self.device);
            made.inspect_err(|error| tracing::warn!(%error, "the device makes no more windows")).ok()
        } else {
            None
        };
        let Some(window) = window else {
            session.tell(&Answer::Full(wanted));
            return Ok(());
        };
        let device_key = window.fresh_key();
        let opening = {
            let state = shared.lock();
            let lent = state.regions.get(grant.region).and_then(Lent::registration);
            let region = lent.ok_or(io::ErrorKind::NotFound)?;
            let Grant { base: addr, len, access, .. } = grant;
            Opening { window: window.raw(), region: region.raw(), key: device_key, addr, len, access }
        };
        let opened = Opened { addr: grant.base, len: grant.len, access: grant.access, device_key };
        let bound = Bound { window, region: grant.region, range: grant.base..grant.base + grant.len };
        let binding = Binding { name: wanted, bound, opened, fate: Fate::Opens };
        self.give(name, 0, UnderWay::Bind(binding), Kind::Bind(opening))
    }

    /// Have the device do something for a session; it is noted, and kept, until it has ended.
    fn give(&mut self, name: usize, class: u64, what: UnderWay, kind: Kind) -> io::Result<()> {
        let id = class | self.next_id;
        self.next_id += 1;
        let session = self.sessions.get_mut(&name).ok_or(io::ErrorKind::NotConnected)?;
        session.under_way.insert(id, what);
        self.under_way.insert(id, name);
        let order = Order { id, kind, signalled: true, fenced: false };
        // SAFETY: regions and places are registered for as long as the target lives; a window or a place is noted as under way, and so neither freed
        // nor given to another until the device has told the end of it, or the queue pair is gone.
        unsafe { session.pair.post(&[order]) }
    }

    pub(super) fn bound(&mut self, name: usize, binding: Binding, is_done: bool) {
        let Some(session) = self.sessions.get_mut(&name) else { return };
        let Binding { name: wanted, bound, opened, fate } = binding;
        match fate {
            Fate::Opens if is_done => {
                session.windows.insert(wanted, bound);
                session.tell(&Answer::Told(wanted, Some(opened)));
            }
            Fate::Opens | Fate::Dead => session.tell(&Answer::Told(wanted, None)),
            Fate::Again => session.waiting.push_front(Waiting::Bind(wanted)),
        }
    }
}
