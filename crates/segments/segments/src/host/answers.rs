//! Answers the requests of other agents, in the target's thread that receives their messages.

use std::sync::Weak;
use std::sync::atomic::Ordering::Relaxed;

use aquifer_fabric::{Host, MessageHandler, Sender as MessageSender};

use super::SegmentKey;
use super::jobs::Job;
use super::memory::{PAGE_BYTES, SegmentMemory};
use super::segment_table::SharedSegment;
use super::shared::{HostShared, Segment};
use super::wire::{Answer, Ask, CopyPlace, Request};
use crate::pulling::{Lineage, Link, Puller};
use aquifer_ownership::{Holder, Holding, Input, Message, Output};

impl HostShared {
    /// Answers a request of another agent. Returns `None` if it is for another life of this host,
    /// or cannot be served.
    pub(super) fn answer(&self, request: &Request) -> Option<Answer> {
        let Request { segment, from, to, ask } = request;
        let from = if let Ask::Fence { source, .. } = ask { source } else { from };
        if *to != self.own {
            return None;
        }
        match ask {
            Ask::Release { generation } => {
                self.jobs.push(Job::Release(*segment, *generation));
                return Some(Answer::Done);
            }
            Ask::Place { generation } => {
                let place = self.place_of(*segment, *generation);
                return Some(place.map_or(Answer::Decline, Answer::Place));
            }
            _ => {}
        }
        let entry = self.entry_for(*segment, ask)?;
        let (mut outputs, mut arrived) = (Vec::new(), None);
        {
            let mut entry = entry.lock();
            let message = match ask {
                Ask::Prepare { process, .. } if !self.processes.contains(segment.tenant, process) => {
                    Message::Prepare(0)
                }
                _ => entry.admitted(request)?,
            };
            let before = entry.holder.holding();
            entry.holder.step(&Input::Message(*from, message), &mut outputs);
            if let (Ask::Transfer { generation, copies }, Holding::Prepared { .. }, true) =
                (ask, before, entry.holder.has_access())
            {
                self.begin_pulling(&mut entry, *generation, copies);
                arrived = Some(entry.process.clone());
                self.statistics.received.fetch_add(1, Relaxed);
            }
            if let (Ask::Prepare { process, address, .. }, Holding::Prepared { .. }) =
                (ask, entry.holder.holding())
            {
                entry.process.clone_from(process);
                entry.identity = self.processes.identity(segment.tenant, process);
                entry.address = *address;
            }
            entry.save();
        }
        if let Some(process) = arrived {
            self.arrive(*segment, &process);
        }
        let is_answer = |output: &Output| matches!(output, Output::Send(to, _) if to == from);
        let at = outputs.iter().position(is_answer)?;
        let Output::Send(_, message) = outputs.remove(at) else { return None };
        if !outputs.is_empty() {
            self.jobs.push(Job::CarryOut(*segment, outputs));
        }
        Answer::of(message)
    }

    /// Returns the entry of a segment. For [`Ask::Prepare`], its memory is allocated, and the
    /// result is `None` if that fails.
    pub(super) fn entry_for(&self, segment: SegmentKey, ask: &Ask) -> Option<SharedSegment> {
        let entry = self.segments.get_or_add(segment, self.own);
        if let Ask::Prepare { bytes, .. } = ask
            && entry.lock().bytes() != Some(*bytes)
        {
            // A copy of another length belongs to a deallocated segment with the same number.
            let is_idle = |entry: &Segment| {
                matches!(entry.holder.holding(), Holding::Absent | Holding::Prepared { .. })
            };
            let former = match &mut *entry.lock() {
                idle if is_idle(idle) => idle.memory.take(),
                _ => return Some(SharedSegment::clone(&entry)),
            };
            former.into_iter().for_each(|former| self.memories.retire(former));
            let is_length = *bytes > 0 && bytes.is_multiple_of(PAGE_BYTES);
            let memory = is_length.then(|| self.memories.allocate(segment, *bytes));
            match memory {
                Some(Ok(memory)) => entry.lock().memory = Some(memory),
                refused => {
                    if let Some(Err(error)) = refused {
                        tracing::warn!(%segment, %error, "cannot allocate memory for a segment");
                    }
                    // No hand-over of it was decided, so the entry can be forgotten.
                    let absent = Holder::absent(self.own);
                    self.segments.remove_if(segment, &entry, |entry| entry.holder == absent);
                    return None;
                }
            }
        }
        Some(entry)
    }

    /// Begins to pull the pages of a segment that has just arrived.
    pub(super) fn begin_pulling(&self, entry: &mut Segment, generation: u64, copies: &[CopyPlace]) {
        let own = copies.iter().filter(|place| place.link.at == self.own);
        let needed: Vec<u64> = own.map(|place| place.link.generation).collect();
        let Some(memory) = &mut entry.memory else { return };
        let is_begun = memory.begin_map(generation, &needed, false);
        debug_assert!(is_begun, "there are as many maps as copies");
        let own = self.own_place(memory, generation);
        entry.copies = own.into_iter().chain(copies.iter().copied()).collect();
        let lineage = Lineage::of(entry.copies.iter().map(|place| place.link));
        entry.puller = Some(Puller::new(self.own, memory.pages(), lineage));
    }

    /// Returns where this host's copy of a generation can be read; `None` if there is none.
    fn place_of(&self, segment: SegmentKey, generation: u64) -> Option<CopyPlace> {
        let entry = self.segments.get(segment)?;
        let entry = entry.lock();
        self.own_place(entry.memory.as_ref()?, generation)
    }

    pub(super) fn own_place(&self, memory: &SegmentMemory, generation: u64) -> Option<CopyPlace> {
        let [data, present] = memory.place(generation)?;
        let link = Link { at: self.own, generation };
        Some(CopyPlace { link, address: self.memories.target().address(), data, present })
    }
}

/// The handler of messages from other agents. Answers `null` once the host is dropped.
#[derive(Debug)]
pub(super) struct Handler(pub Weak<HostShared>);

impl MessageHandler for Handler {
    fn handle(&self, from: MessageSender, message: &[u8], answer: &mut Vec<u8>) {
        let request = serde_json::from_slice::<Request>(message).ok();
        // The sender that a request names must be the host that has sent the message.
        let request = request.filter(|request| {
            (from.who.host, from.who.epoch) == (Host(request.from.host), request.from.epoch)
        });
        let answered = self.0.upgrade().zip(request).and_then(|(host, request)| host.answer(&request));
        answer.extend(serde_json::to_vec(&answered).unwrap_or_default());
    }
}
