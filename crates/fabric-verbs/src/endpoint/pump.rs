//! What goes to the device, and what must wait.

use super::{Life, VerbsEndpoint, place_of};
use crate::keys::Verdict;
use crate::letters::Request;
use crate::sys::pair::{Kind, Order, Piece, Remote};
use aquifer_fabric::keys::{KeyId, Right};
use aquifer_fabric::work::{RemoteAddr, Verb, Work, WorkError};

/// What is to be done with work.
enum Plan {
    Give(Kind),
    /// It needs no device.
    Known(Result<u64, WorkError>),
    /// It is a message.
    Say(Vec<u8>),
    Wait,
}

impl VerbsEndpoint {
    /// Give the device all that it can have, in order.
    pub(super) fn pump(&mut self) {
        self.say_unsaid();
        let mut orders = std::mem::take(&mut self.orders);
        orders.clear();
        while self.link.is_some()
            && self.life == Life::Open
            && let Some((number, work)) = self.queue.next()
        {
            match self.plan(number, &work) {
                Plan::Known(outcome) => self.queue.settle_next(outcome),
                Plan::Give(kind) => {
                    let fenced = self.queue.give_next();
                    orders.push(Order { id: number, kind, signalled: work.signalled, fenced });
                }
                Plan::Say(bytes) => {
                    self.give(&mut orders);
                    self.queue.give_next();
                    self.say(Request::Message(number, &bytes));
                }
                Plan::Wait => break,
            }
        }
        self.give(&mut orders);
        self.orders = orders;
    }

    fn give(&mut self, orders: &mut Vec<Order>) {
        // Who is last stands for those before it.
        let Some(last) = orders.last_mut() else { return };
        last.signalled = true;
        if let Some(link) = &self.link {
            // SAFETY: pieces are of `locals` and `results`, which outlive the link: it is dropped, and with it what is under way, before either.
            let given = unsafe { link.post(orders) };
            if let Err(error) = given {
                tracing::warn!(address = %self.address, %error, "the device takes no more work");
                self.lose(None);
            }
        }
        orders.clear();
    }

    fn say_unsaid(&mut self) {
        while let (Some(link), Some(letter)) = (&mut self.link, self.unsaid.front()) {
            match link.say(letter) {
                Ok(true) => drop(self.unsaid.pop_front()),
                Ok(false) => return,
                Err(_) => self.lose(None),
            }
        }
    }

    fn plan(&mut self, number: u64, work: &Work) -> Plan {
        match self.try_plan(number, work) {
            Ok(plan) => plan,
            Err(error) => Plan::Known(Err(error)),
        }
    }

    fn try_plan(&mut self, number: u64, work: &Work) -> Result<Plan, WorkError> {
        let (right, remote, len) = match work.verb {
            Verb::Read { local, remote } => (Right::Read, remote, local.len),
            Verb::Write { local, remote } => (Right::Write, remote, local.len),
            Verb::CompareSwap { remote, .. } | Verb::FetchAdd { remote, .. } => (Right::Atomic, remote, 8),
            Verb::Send { local } => {
                let bytes = self.locals.bytes(local)?;
                let is_long = local.len > self.limits.message_bytes_max;
                // Letters keep their order: none overtakes what is still unsaid.
                let may_say = self.unsaid.is_empty() && self.link.as_ref().is_some_and(|link| link.may_say());
                return match may_say {
                    _ if is_long => Err(WorkError::TooLong),
                    true => Ok(Plan::Say(bytes)),
                    false => Ok(Plan::Wait),
                };
            }
        };
        if len > self.limits.transfer_bytes_max {
            return Err(WorkError::TooLong);
        }
        let local = match work.verb {
            Verb::Read { local, .. } | Verb::Write { local, .. } => self.locals.piece(local)?,
            _ if !remote.addr.is_multiple_of(8) => return Err(WorkError::Misaligned),
            _ => self.results.whole(place_of(number, &self.limits)),
        };
        let Some(key) = self.device_key(remote, right, len, number)? else { return Ok(Plan::Wait) };
        if len == 0 {
            return Ok(Plan::Known(Ok(0)));
        }
        Ok(Plan::Give(kind_of(&work.verb, local, Remote { addr: remote.addr, key })))
    }

    /// The key that the device knows; `None` while the target is asked for it.
    fn device_key(
        &mut self,
        remote: RemoteAddr,
        right: Right,
        len: u32,
        number: u64,
    ) -> Result<Option<u32>, WorkError> {
        let done = self.queue.done();
        let name = KeyId::at(remote.key, remote.addr);
        match self.keys.judge(name, right, (remote.addr, u64::from(len)), number, done) {
            Verdict::Open(key) => return Ok(Some(key)),
            Verdict::Refused(error) => return Err(error),
            Verdict::Wait => {}
            Verdict::Ask => self.ask(name, None),
            Verdict::Replace(old) => self.ask(name, Some(old)),
        }
        Ok(None)
    }

    fn ask(&mut self, name: KeyId, instead_of: Option<KeyId>) {
        if let Some(old) = instead_of {
            self.say(Request::Forget(old));
        }
        self.say(Request::Ask(name));
    }
}

fn kind_of(verb: &Verb, local: Piece, remote: Remote) -> Kind {
    match *verb {
        Verb::Read { .. } => Kind::Read { local, remote },
        Verb::Write { .. } => Kind::Write { local, remote },
        Verb::CompareSwap { expected, desired, .. } => {
            Kind::CompareSwap { result: local, remote, expected, desired }
        }
        Verb::FetchAdd { add, .. } => Kind::FetchAdd { result: local, remote, add },
        Verb::Send { .. } => Kind::Send { local },
    }
}
