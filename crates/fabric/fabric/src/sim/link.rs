//! The host's end of a connection in a simulated fabric.

use std::collections::VecDeque;

use super::SimNodeId;
use crate::Memory;
use crate::locals::LocalMemories;
use crate::target::Identity;
use crate::work::{Completion, LocalSlice, Work, WorkError};

/// The state of one connection.
#[derive(Debug)]
pub(super) struct SimLink {
    pub who: Identity,
    pub node: SimNodeId,
    pub locals: LocalMemories,
    pub done: VecDeque<Completion>,
    pub inbox: VecDeque<Vec<u8>>,
    pub in_flight: VecDeque<InFlightOp>,
    /// Operations that are still on the wire although their outcome is not awaited any more.
    pub strays: Vec<InFlightOp>,
    pub next_serial: u64,
    /// Later events of this connection must come after these times, so that they stay in order.
    pub apply_after_ns: u64,
    pub complete_after_ns: u64,
    pub deliver_after_ns: u64,
    /// Messages on their way to the host, and messages that wait at the node.
    pub delivering: usize,
    pub waiting_at_node: usize,
    /// Whether requests or answers are lost from now on.
    pub requests_lost: bool,
    pub answers_lost: bool,
    /// The time from which on operations wait for the node, which is stopped.
    pub silent_since_ns: Option<u64>,
    /// The error of the next operation, set when the loss of the peer was detected.
    pub pending_error: Option<WorkError>,
    pub broken: bool,
    /// Whether the host has crashed or dropped the endpoint.
    pub closed: bool,
}

#[derive(Debug)]
pub(super) struct InFlightOp {
    pub serial: u64,
    pub work: Work,
    pub applied: Option<Result<u64, WorkError>>,
    /// The bytes that a READ found, or that a WRITE or SEND carries after it has left the host.
    pub data: Vec<u8>,
}

impl SimLink {
    pub fn new(who: Identity, node: SimNodeId, now_ns: u64) -> Self {
        Self {
            who,
            node,
            locals: LocalMemories::default(),
            done: VecDeque::new(),
            inbox: VecDeque::new(),
            in_flight: VecDeque::new(),
            strays: Vec::new(),
            next_serial: 0,
            apply_after_ns: now_ns,
            complete_after_ns: now_ns,
            deliver_after_ns: now_ns,
            delivering: 0,
            waiting_at_node: 0,
            requests_lost: false,
            answers_lost: false,
            silent_since_ns: None,
            pending_error: None,
            broken: false,
            closed: false,
        }
    }

    pub fn is_broken(&self) -> bool {
        self.broken || self.pending_error.is_some()
    }

    /// Whether operations are in flight.
    pub fn is_busy(&self) -> bool {
        !self.in_flight.is_empty() || !self.strays.is_empty()
    }

    /// Fails the operations in flight. The oldest gets the cause, and so do those that took effect
    /// unreported or may still take effect. The others are flushed.
    pub fn fail(&mut self, cause: WorkError, on_the_wire: &[u64]) {
        if self.is_broken() {
            return;
        }
        self.pending_error = Some(cause);
        let mut first = cause != WorkError::Fenced;
        while let Some(op) = self.in_flight.pop_front() {
            let took_effect = matches!(op.applied, Some(Ok(_)));
            let learns = first || took_effect || on_the_wire.contains(&op.serial);
            let outcome = Err(if learns { cause } else { WorkError::Flushed });
            self.done.push_back(Completion { id: op.work.id, outcome });
            first = false;
            self.broken = true;
        }
    }

    /// Puts the bytes that a WRITE or SEND carries into `data`, unless they left the host before.
    pub fn payload(&self, local: LocalSlice, bytes_max: u32, data: &mut Vec<u8>) -> Result<(), WorkError> {
        let (memory, offset) = self.transfer(local, bytes_max)?;
        if data.is_empty() {
            data.resize(local.len as usize, 0);
            memory.read(offset, data);
        }
        Ok(())
    }

    pub fn transfer(&self, local: LocalSlice, bytes_max: u32) -> Result<(&Memory, usize), WorkError> {
        if local.len > bytes_max {
            return Err(WorkError::TooLong);
        }
        self.local(local)
    }

    pub fn local(&self, slice: LocalSlice) -> Result<(&Memory, usize), WorkError> {
        self.locals.find(slice).ok_or(WorkError::LocalAccess)
    }
}
