//! The part of the edge for the pool: the run's sender, reads from memory nodes, and the other
//! programs.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use aquifer_pager::{
    BlockId, FetchError, Location, PAGE_BYTES, PageNumber, SlabSet, TableError, Volume, view,
};

use super::super::process::ProgramProcess;
use super::super::program::{self, ForkedProgram};
use super::{PAGE, ProcessEdge, SENDER_TIMEOUT};
use crate::areas::Areas;
use crate::edge::{Edge, EvictedBatch, OtherPrograms, SenderEvent};
use crate::uffd::Userfaultfd;

impl Edge for ProcessEdge {
    fn submit_batch(&mut self, batch: EvictedBatch) {
        let staging = self.attachment.as_ref().map_or(0, |attachment| attachment.hello.staging);
        self.run.sender.submit_batch(&self.program, staging, batch);
    }

    fn submit_block(&mut self, block: BlockId, slots: u64) {
        self.run.sender.submit_block(&self.program, block, slots);
    }

    fn poll_sender(&mut self, out: &mut Vec<SenderEvent>) {
        self.program.drain_sender_events(out);
    }

    fn wait_for_sender(&mut self) -> bool {
        self.program.sleep_until_signalled(SENDER_TIMEOUT);
        // The end of the process does not end the wait: the sender continues, and children may need
        // the pages.
        !self.program.is_killed()
    }

    fn fetch(&mut self, slabs: &SlabSet, locations: &[Location]) -> Result<usize, FetchError> {
        self.fetcher.fetch(slabs, locations)
    }

    fn fetched_page(&self, index: usize) -> &[u8] {
        view::page(self.fetcher.buffer(), index * PAGE_BYTES)
    }

    fn start_child(&mut self, child: OwnedFd, volume: Volume, areas: Areas) {
        let origin = (self.program.id, self.journal.sequence());
        let uffd = Userfaultfd::from(child);
        // A child that is not attached has no control memory. It may have areas with an advice from
        // its parent.
        let attached = self.attachment.as_ref();
        let has_fork_advice = self.program.has_fork_advice.load(Relaxed)
            || attached.is_some_and(|attached| attached.worker.has_fork_advice());
        // The parent waits in the fork until this event is read, or has just continued.
        let user = self.program.process().and_then(ProgramProcess::user);
        let forked = ForkedProgram { uffd: uffd.clone(), volume, areas, origin, has_fork_advice, user };
        let started = program::serve_child(&self.run, &self.program, forked);
        if let Err(error) = started {
            self.refuse(uffd, &error);
        }
    }

    fn refuse_child(&mut self, child: OwnedFd, error: &TableError) {
        self.refuse(Userfaultfd::from(child), error);
    }

    fn abandon_child(&mut self, child: OwnedFd) {
        self.refuse(Userfaultfd::from(child), &"its parent has ended");
    }

    fn end_run(&mut self, reason: &str) {
        self.run.end(reason);
    }

    fn set_waits_for_block(&mut self, waits: bool) {
        if self.program.waits_for_block.load(Relaxed) != waits {
            self.program.waits_for_block.store(waits, SeqCst);
        }
    }

    fn wake_others(&mut self, others: OtherPrograms) {
        let service = self.run.service.upgrade();
        match (others, service) {
            (OtherPrograms::AllWithBlocks, Some(service)) => service.wake_block_owners(),
            (OtherPrograms::UsersWithoutBlock, Some(service)) => {
                let runs = service.runs_of(self.run.tenant());
                runs.iter().for_each(|run| run.wake_others(self.program.id, OtherPrograms::WithoutBlock));
            }
            _ => self.run.wake_others(self.program.id, others),
        }
    }

    fn report_lost(&mut self, page: PageNumber, error: &FetchError) {
        let (pid, address) = (self.program.pid(), page * PAGE);
        tracing::error!(pid, address, %error, "page lost: accesses raise SIGBUS");
        if !self.is_loss_reported {
            self.is_loss_reported = true;
            self.run.notify_owner(&format!(
                "process {pid} lost the page at {address:#x}: {error}. Accesses to it raise SIGBUS"
            ));
        }
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}
