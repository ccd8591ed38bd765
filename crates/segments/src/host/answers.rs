//! Answers other agents, in the thread of the target that receives their messages.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};

use aquifer_fabric::{Host, MessageHandler, Sender as MessageSender};
use parking_lot::Mutex;

use super::SegmentKey;
use super::memory::{PAGE_BYTES, SegmentMemory};
use super::shared::{HostShared, Job, Segment};
use super::wire::{Answer, Ask, CopyPlace, Request};
use crate::ownership::{Holder, Holding, Input, Message, Output};
use crate::pulling::{Lineage, Link, Puller};

impl HostShared {
    /// Answers another agent.
    pub(super) fn answer(&self, request: &Request) -> Option<Answer> {
        let Request { segment, from, to, ask } = request;
        let from = if let Ask::Fence { source, .. } = ask { source } else { from };
        if *to != self.own {
            return None;
        }
        match ask {
            Ask::Release { generation } => {
                self.leave(Job::Release(*segment, *generation));
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
                Ask::Prepare { process, .. } if !self.has_process(segment.tenant, process) => {
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
                entry.identity = self.identity_of(segment.tenant, process);
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
            self.leave(Job::CarryOut(*segment, outputs));
        }
        Answer::of(message)
    }

    pub(super) fn has_process(&self, tenant: u32, process: &str) -> bool {
        self.processes.lock().contains_key(&(tenant, process.to_owned()))
    }

    pub(super) fn leave(&self, job: Job) {
        if let Some(jobs) = &*self.jobs.lock() {
            let _ = jobs.send(job);
        }
    }

    /// The entry of a segment, with memory if it is to be prepared.
    pub(super) fn entry_for(&self, segment: SegmentKey, ask: &Ask) -> Option<Arc<Mutex<Segment>>> {
        let new = || Arc::new(Mutex::new(Segment::absent(self.own)));
        let entry = Arc::clone(self.segments.lock().entry(segment).or_insert_with(new));
        if let Ask::Prepare { bytes, .. } = ask
            && entry.lock().bytes() != Some(*bytes)
        {
            // A copy of another length is of a segment that had this number and was deallocated.
            let is_idle = |entry: &Segment| {
                matches!(entry.holder.holding(), Holding::Absent | Holding::Prepared { .. })
            };
            let former = match &mut *entry.lock() {
                idle if is_idle(idle) => idle.memory.take(),
                _ => return Some(Arc::clone(&entry)),
            };
            former.iter().for_each(|former| self.close_memory(former));
            let is_length = *bytes > 0 && bytes.is_multiple_of(PAGE_BYTES);
            let memory = is_length.then(|| self.new_memory(segment, *bytes));
            match memory {
                Some(Ok(memory)) => entry.lock().memory = Some(memory),
                refused => {
                    if let Some(Err(error)) = refused {
                        tracing::warn!(%error, "no memory for a segment");
                    }
                    self.forget_if_new(segment, &entry);
                    return None;
                }
            }
        }
        Some(entry)
    }

    /// Forgets a segment of which nothing was decided, unless another thread has its entry.
    fn forget_if_new(&self, segment: SegmentKey, entry: &Arc<Mutex<Segment>>) {
        let mut segments = self.segments.lock();
        let is_known = segments.get(&segment).is_some_and(|known| Arc::ptr_eq(known, entry));
        // One is the caller's.
        let is_alone = Arc::strong_count(entry) == 2;
        if is_known && is_alone && entry.lock().holder == Holder::absent(self.own) {
            segments.remove(&segment);
        }
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

    /// Where a copy is now.
    fn place_of(&self, segment: SegmentKey, generation: u64) -> Option<CopyPlace> {
        let entry = self.segments.lock().get(&segment).cloned()?;
        let entry = entry.lock();
        self.own_place(entry.memory.as_ref()?, generation)
    }

    pub(super) fn own_place(&self, memory: &SegmentMemory, generation: u64) -> Option<CopyPlace> {
        let [data, present] = memory.place(generation)?;
        let link = Link { at: self.own, generation };
        Some(CopyPlace { link, address: self.target.address(), data, present })
    }
}

/// Answers messages as long as the host exists.
#[derive(Debug)]
pub(super) struct Handler(pub Weak<HostShared>);

impl MessageHandler for Handler {
    fn handle(&self, from: MessageSender, message: &[u8], answer: &mut Vec<u8>) {
        let request = serde_json::from_slice::<Request>(message).ok();
        // The source that a request names must be the host that has sent it.
        let request = request.filter(|request| {
            (from.who.host, from.who.epoch) == (Host(request.from.host), request.from.epoch)
        });
        let answered = self.0.upgrade().zip(request).and_then(|(host, request)| host.answer(&request));
        answer.extend(serde_json::to_vec(&answered).unwrap_or_default());
    }
}
