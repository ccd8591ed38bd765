//! Posts work to the device, in order, as far as its keys are known.

use super::{EndpointState, VerbsEndpoint, result_slot};
use crate::key_cache::KeyLookup;
use crate::messages::InitiatorMessage;
use crate::sys::queue_pair::{LocalPiece, RemotePlace, WorkKind, WorkRequest};
use aquifer_fabric::keys::{KeyId, Right};
use aquifer_fabric::work::{RemoteAddr, Verb, Work, WorkError};

/// The next step for a piece of work.
enum NextStep {
    Give(WorkKind),
    /// The outcome is known without the device.
    Known(Result<u64, WorkError>),
    /// Send the work as a message.
    Send(Vec<u8>),
    Wait,
}

impl VerbsEndpoint {
    /// Posts all work that can be posted now, in order.
    pub(super) fn pump(&mut self) {
        self.send_unsent();
        let mut requests = std::mem::take(&mut self.requests);
        requests.clear();
        while self.link.is_some()
            && self.state == EndpointState::Open
            && let Some((number, work)) = self.queue.next()
        {
            match self.next_step(number, &work) {
                NextStep::Known(outcome) => self.queue.complete_next(outcome),
                NextStep::Give(kind) => {
                    let fenced = self.queue.post_next();
                    requests.push(WorkRequest { id: number, kind, signalled: work.signalled, fenced });
                }
                NextStep::Send(bytes) => {
                    self.post_requests(&mut requests);
                    self.queue.post_next();
                    self.send(InitiatorMessage::Message(number, &bytes));
                }
                NextStep::Wait => break,
            }
        }
        self.post_requests(&mut requests);
        self.requests = requests;
    }

    fn post_requests(&mut self, requests: &mut Vec<WorkRequest>) {
        // The completion of the last request stands for those before it.
        let Some(last) = requests.last_mut() else { return };
        last.signalled = true;
        if let Some(link) = &self.link {
            // SAFETY: the ranges are in `locals` and `results`, which outlive the link: it is
            // dropped before either, and its work in flight with it.
            let given = unsafe { link.post(requests) };
            if let Err(error) = given {
                tracing::warn!(address = %self.address, %error, "cannot post to the device; disconnecting");
                self.disconnect(None);
            }
        }
        requests.clear();
    }

    fn send_unsent(&mut self) {
        while let (Some(link), Some(message)) = (&mut self.link, self.unsent.front()) {
            match link.send(message) {
                Ok(true) => drop(self.unsent.pop_front()),
                Ok(false) => return,
                Err(_) => self.disconnect(None),
            }
        }
    }

    fn next_step(&mut self, number: u64, work: &Work) -> NextStep {
        match self.try_next_step(number, work) {
            Ok(plan) => plan,
            Err(error) => NextStep::Known(Err(error)),
        }
    }

    fn try_next_step(&mut self, number: u64, work: &Work) -> Result<NextStep, WorkError> {
        let (right, remote, len) = match work.verb {
            Verb::Read { local, remote } => (Right::Read, remote, local.len),
            Verb::Write { local, remote } => (Right::Write, remote, local.len),
            Verb::CompareSwap { remote, .. } | Verb::FetchAdd { remote, .. } => (Right::Atomic, remote, 8),
            Verb::Send { local } => {
                let bytes = self.locals.bytes(local)?;
                let is_long = local.len > self.limits.message_bytes_max;
                // Messages must stay in order.
                let has_free_slot =
                    self.unsent.is_empty() && self.link.as_ref().is_some_and(|link| link.has_free_slot());
                return match has_free_slot {
                    _ if is_long => Err(WorkError::TooLong),
                    true => Ok(NextStep::Send(bytes)),
                    false => Ok(NextStep::Wait),
                };
            }
        };
        if len > self.limits.transfer_bytes_max {
            return Err(WorkError::TooLong);
        }
        let local = match work.verb {
            Verb::Read { local, .. } | Verb::Write { local, .. } => self.locals.piece(local)?,
            _ if !remote.addr.is_multiple_of(8) => return Err(WorkError::Misaligned),
            _ => self.results.whole(result_slot(number, &self.limits)),
        };
        let Some(key) = self.device_key(remote, right, len, number)? else { return Ok(NextStep::Wait) };
        if len == 0 {
            return Ok(NextStep::Known(Ok(0)));
        }
        Ok(NextStep::Give(kind_of(&work.verb, local, RemotePlace { addr: remote.addr, key })))
    }

    /// The device's key; `None` while the target has not answered the request for it.
    fn device_key(
        &mut self,
        remote: RemoteAddr,
        right: Right,
        len: u32,
        number: u64,
    ) -> Result<Option<u32>, WorkError> {
        let done = self.queue.done();
        let key_id = KeyId::at(remote.key, remote.addr);
        match self.keys.look_up(key_id, right, (remote.addr, u64::from(len)), number, done) {
            KeyLookup::Open(key) => return Ok(Some(key)),
            KeyLookup::Refused(error) => return Err(error),
            KeyLookup::Wait => {}
            KeyLookup::Ask => self.ask(key_id, None),
            KeyLookup::Replace(old) => self.ask(key_id, Some(old)),
        }
        Ok(None)
    }

    fn ask(&mut self, key_id: KeyId, instead_of: Option<KeyId>) {
        if let Some(old) = instead_of {
            self.send(InitiatorMessage::Forget(old));
        }
        self.send(InitiatorMessage::Ask(key_id));
    }
}

fn kind_of(verb: &Verb, local: LocalPiece, remote: RemotePlace) -> WorkKind {
    match *verb {
        Verb::Read { .. } => WorkKind::Read { local, remote },
        Verb::Write { .. } => WorkKind::Write { local, remote },
        Verb::CompareSwap { expected, desired, .. } => {
            WorkKind::CompareSwap { result: local, remote, expected, desired }
        }
        Verb::FetchAdd { add, .. } => WorkKind::FetchAdd { result: local, remote, add },
        Verb::Send { .. } => WorkKind::Send { local },
    }
}
