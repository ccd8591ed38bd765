//! Hosts that are audited while their clients go on, as `Custody::audit` does it; but only spans that are half closed are given up here: what else nobody knows of is
//! looked for when all is quiet.

use aquifer_fabric::Host;
use aquifer_pool::op::Held;

use super::Schedule;

/// An audit under way.
#[derive(Debug)]
pub struct Audit {
    /// The client that does it.
    pub by: usize,
    stage: Stage,
    /// What was found every time so far.
    found: Option<Vec<Held>>,
    /// Clients of the host that are at something which they had begun when it was last found.
    others: Vec<usize>,
}

/// What is next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Look,
    LookAgain,
    GiveBack,
}

impl Schedule {
    /// One begins now and then; one that is under way goes on when whoever it waits for is done.
    pub(super) fn audit_goes_on(&mut self) -> Result<(), String> {
        if self.audit.is_none() {
            let by = self.rng.index(self.clients.len());
            let client = &self.clients[by];
            // What a killed process has posted must not come later than an audit. Here that cannot be seen to.
            let has_late = self.restarts.late().any(|(host, _)| host == client.host);
            if !client.alive || !client.is_idle() || has_late || !self.rng.chance(1, 40) {
                return Ok(());
            }
            self.audit = Some(Audit { by, stage: Stage::Look, found: None, others: Vec::new() });
        }
        let Some(audit) = &mut self.audit else { return Ok(()) };
        if !audit.others.is_empty() || !self.clients[audit.by].is_idle() {
            return Ok(());
        }
        let by = audit.by;
        let ended = match audit.stage {
            Stage::Look | Stage::LookAgain => self.clients[by].look(),
            Stage::GiveBack => {
                let found = audit.found.take().unwrap_or_default();
                self.audit = None;
                self.clients[by].give_held(found)
            }
        };
        ended.map_or(Ok(()), |ended| self.ended(by, ended))
    }

    /// What a host has was looked for.
    pub(super) fn looked(&mut self, mut held: Vec<Held>) {
        let Some(audit) = &mut self.audit else { return };
        held.retain(|held| matches!(held, Held::Span { .. }));
        if let Some(before) = &audit.found {
            held.retain(|held| before.contains(held));
        }
        audit.found = Some(held);
        audit.stage = match audit.stage {
            Stage::Look => Stage::LookAgain,
            Stage::LookAgain | Stage::GiveBack => Stage::GiveBack,
        };
        let host = self.clients[audit.by].host;
        let is_busy = |index: &usize| self.clients[*index].host == host && !self.clients[*index].is_idle();
        audit.others = (0..self.clients.len()).filter(is_busy).collect();
    }

    /// Whoever waits for this client does so no longer.
    pub(super) fn has_ended(&mut self, index: usize) {
        if let Some(audit) = &mut self.audit {
            audit.others.retain(|other| *other != index);
        }
    }

    /// Its host has crashed, or its process was killed.
    pub(super) fn forget_audit_of(&mut self, host: Host) {
        self.audit.take_if(|audit| self.clients[audit.by].host == host);
    }
}
