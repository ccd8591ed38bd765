//! The loop of a run's sender: stages batches and blocks of the run's programs in their order, and
//! notifies each program of their completion.
//!
//! The product runs the loop in a thread, with real programs. The simulator runs it among the steps
//! of its model.

use std::collections::VecDeque;
use std::sync::Arc;

use aquifer_pager::{BLOCK_PAGES, BlockId, Mempool, Mutation, NoRoom, Sender, StageOutcome, WrittenBatch};

use crate::edge::{EvictedBatch, SenderEvent};

/// The sender's access to a program. Clones name the same program.
pub trait SentProgram: Clone {
    /// Number of the program. It owns the batches.
    fn id(&self) -> u64;

    /// Copies a batch from its staging buffer into its block.
    ///
    /// Returns the number of leading pages that were copied: fewer than all if the program has
    /// ended.
    fn copy_batch(&self, mempool: &Mempool, batch: &EvictedBatch) -> usize;

    /// Passes an event to the program's monitor.
    fn push_event(&self, event: SenderEvent);
}

/// A request to stage pages of a program.
#[derive(Debug)]
pub struct SendRequest<P> {
    program: P,
    source: PageSource,
}

#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "a box would be an allocation for each batch")]
enum PageSource {
    /// An evicted batch, in a staging buffer of the program.
    Batch(EvictedBatch),
    /// Slots of a block that holds their bytes already.
    Block { block: BlockId, slots: u64 },
}

/// The requests of monitors to the sender.
#[derive(Debug)]
pub struct SendQueue<P> {
    requests: VecDeque<SendRequest<P>>,
    /// Programs that have ended.
    abandoned: Vec<u64>,
    is_stopping: bool,
}

impl<P> Default for SendQueue<P> {
    fn default() -> Self {
        Self { requests: VecDeque::new(), abandoned: Vec::new(), is_stopping: false }
    }
}

impl<P: SentProgram> SendQueue<P> {
    /// Queues a batch in a staging buffer of the program.
    pub fn push_batch(&mut self, program: P, batch: EvictedBatch) {
        self.requests.push_back(SendRequest { program, source: PageSource::Batch(batch) });
    }

    /// Queues slots of a block whose bytes are in the mempool.
    pub fn push_block(&mut self, program: P, block: BlockId, slots: u64) {
        self.requests.push_back(SendRequest { program, source: PageSource::Block { block, slots } });
    }

    /// Records that a program has ended, so that its pages need not be written.
    pub fn abandon(&mut self, program: u64) {
        self.abandoned.push(program);
    }

    /// Requests that the loop ends when all requests are completed.
    pub fn stop(&mut self) {
        self.is_stopping = true;
    }

    /// Whether there is nothing to do: no request, and the loop need not end.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.requests.is_empty() && !self.is_stopping
    }

    /// Whether a request of a program waits.
    #[must_use]
    pub fn has_request_of(&self, program: u64) -> bool {
        self.requests.iter().any(|request| request.program.id() == program)
    }
}

/// The first step of a turn.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "a box would be an allocation for each batch")]
pub enum NextStep<P> {
    /// Stage the pages of a request.
    Stage(SendRequest<P>),
    /// Only poll for acknowledgements.
    Poll,
    /// End the loop: the run has ended, and all requests are completed.
    End,
}

/// The sender of a run, with the programs whose batches are in flight.
#[derive(Debug)]
pub struct SendLoop<P> {
    /// The sender.
    pub sender: Sender,
    mempool: Arc<Mempool>,
    /// Programs with staged batches that are not acknowledged, and the number of batches.
    programs: Vec<(P, usize)>,
    written: Vec<WrittenBatch>,
    found: Vec<StageOutcome>,
}

impl<P: SentProgram> SendLoop<P> {
    /// Creates the loop of a new sender.
    #[must_use]
    pub fn new(sender: Sender, mempool: Arc<Mempool>) -> Self {
        let found = Vec::with_capacity(BLOCK_PAGES);
        Self { sender, mempool, programs: Vec::new(), written: Vec::new(), found }
    }

    /// Applies the queue's abandoned programs and stop request, and returns the first step of the
    /// turn.
    pub fn next_step(&mut self, queue: &mut SendQueue<P>) -> NextStep<P> {
        for owner in std::mem::take(&mut queue.abandoned) {
            self.sender.abandon(owner);
            // Blocks that are not yet staged need not be written either: there may be no room.
            for request in queue.requests.iter_mut().filter(|request| request.program.id() == owner) {
                if let PageSource::Block { slots, .. } = &mut request.source {
                    *slots = 0;
                }
            }
        }
        if queue.is_stopping {
            self.sender.stop_healing();
            if queue.requests.is_empty() && self.sender.is_idle() {
                return NextStep::End;
            }
        }
        let request = if self.sender.has_capacity() { queue.requests.pop_front() } else { None };
        request.map_or(NextStep::Poll, NextStep::Stage)
    }

    /// Stages the pages of a request.
    pub fn stage(&mut self, request: SendRequest<P>) {
        let SendRequest { program, source } = request;
        match source {
            PageSource::Batch(batch) => self.stage_batch(&program, &batch),
            PageSource::Block { block, slots } => {
                let is_wanted = |index: usize| slots >> index & 1 == 1;
                self.sender.stage_with_clean_copies(
                    program.id(),
                    block,
                    BLOCK_PAGES,
                    is_wanted,
                    &[],
                    &mut self.found,
                );
            }
        }
        match self.programs.iter_mut().find(|(other, _)| other.id() == program.id()) {
            Some((_, batches)) => *batches += 1,
            None => self.programs.push((program, 1)),
        }
    }

    /// Copies a batch into its block, and stages it.
    fn stage_batch(&mut self, program: &P, batch: &EvictedBatch) {
        let readable = if Mutation::StageUnreadable.is_active() {
            let _ = program.copy_batch(&self.mempool, batch);
            batch.positions.len()
        } else {
            program.copy_batch(&self.mempool, batch)
        };
        let (block, buffer) = (batch.block, batch.buffer);
        self.sender.stage_with_clean_copies(
            program.id(),
            block,
            batch.positions.len(),
            |index| index < readable,
            &batch.clean_copies,
            &mut self.found,
        );
        program.push_event(SenderEvent::Staged { block, buffer, found: self.found.clone() });
    }

    /// Writes staged pages to memory nodes, and passes acknowledgements on to the programs.
    ///
    /// Returns whether anything was acknowledged.
    ///
    /// # Errors
    /// If the pool has no room for staged pages. They stay staged, and a later call retries.
    pub fn advance(&mut self) -> (bool, Result<(), NoRoom>) {
        let result = self.sender.advance(&mut self.written);
        let has_written = !self.written.is_empty();
        let mut written = std::mem::take(&mut self.written);
        written.drain(..).for_each(|batch| self.push_written(batch));
        self.written = written;
        (has_written, result)
    }

    fn push_written(&mut self, written: WrittenBatch) {
        let at = self.programs.iter().position(|(program, _)| program.id() == written.owner);
        let at = at.expect("only staged batches are acknowledged");
        let (program, batches) = &mut self.programs[at];
        program.push_event(SenderEvent::Written(Box::new(written)));
        *batches -= 1;
        if *batches == 0 {
            self.programs.swap_remove(at);
        }
    }
}
