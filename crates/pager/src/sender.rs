//! Writes evicted pages to the memory nodes: coalesced, several batches at once, and again elsewhere if a node fails.
//!
//! The front end copies a batch into its block of the mempool; [`Sender::stage`] looks at what is there, and
//! [`Sender::advance`] posts writes and collects acknowledgements without waiting.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use aquifer_fabric::{Completion, PostError, Verb, Work};
use aquifer_pool::{NodeId, PoolClient};

use crate::filler::{Filler, NoRoom, Room};
use crate::integrity::{is_zero, page_crc};
use crate::mempool::{BLOCK_PAGES, BlockId, Mempool};
use crate::mutation::Mutation;
use crate::page::{Location, PAGE_BYTES};
use crate::ports::{Connector, Ports};
use crate::slabs::SlabSet;
use crate::view;
use crate::volume::Staged;

/// Batches that may await acknowledgement at once.
pub const JOBS_MAX: usize = 64;

/// A batch on its way.
#[derive(Debug)]
struct Job {
    number: u64,
    owner: u64,
    block: BlockId,
    count: usize,
    crcs: [u32; BLOCK_PAGES],
    locations: [Option<Location>; BLOCK_PAGES],
    /// Pages with data that are not posted yet.
    unposted: u64,
    outstanding: usize,
}

/// A batch that all memory nodes have acknowledged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Written {
    /// Whose batch.
    pub owner: u64,
    /// The block that it lies in.
    pub block: BlockId,
    /// Pages of the batch.
    pub count: usize,
    /// Where each page is now; `None` for those that needed no writing.
    pub locations: [Option<Location>; BLOCK_PAGES],
}

/// What was written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SenderStats {
    /// WRITEs posted.
    pub writes: u64,
    /// Pages written.
    pub pages: u64,
    /// Pages found to be all zeros.
    pub zero_pages: u64,
}

/// The sender of one run. One thread uses it.
#[derive(Debug)]
pub struct Sender {
    slabs: Arc<SlabSet>,
    ports: Ports,
    pool: PoolClient,
    filler: Filler,
    jobs: Vec<Job>,
    next_job: u64,
    completions: Vec<Completion>,
    stats: SenderStats,
    mutation: Mutation,
}

impl Sender {
    /// A sender that writes from the mempool to slabs that it takes from `pool`.
    #[must_use]
    pub fn new(
        slabs: Arc<SlabSet>,
        mempool: &Mempool,
        connector: Arc<dyn Connector>,
        pool: PoolClient,
        seed: u64,
    ) -> Self {
        Self {
            filler: Filler::new(Arc::clone(&slabs), seed),
            slabs,
            ports: Ports::new(connector, Arc::clone(mempool.memory())),
            pool,
            jobs: Vec::with_capacity(JOBS_MAX),
            next_job: 0,
            completions: Vec::with_capacity(BLOCK_PAGES),
            stats: SenderStats::default(),
            mutation: Mutation::None,
        }
    }

    /// Break one protocol step on purpose, for tests.
    pub fn mutate(&mut self, mutation: Mutation) {
        self.mutation = mutation;
    }

    /// What was written so far.
    #[must_use]
    pub fn stats(&self) -> SenderStats {
        self.stats
    }

    /// The pool that slabs are taken from.
    pub fn pool(&mut self) -> &mut PoolClient {
        &mut self.pool
    }

    /// Whether another batch can be staged.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.jobs.len() < JOBS_MAX
    }

    /// Whether any batch awaits acknowledgement.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Look at a batch that now lies in its block: which pages are zero, which need writing (and are from now on, until
    /// [`Written`] names them). `readable(i)` says whether page `i` could be copied.
    pub fn stage(
        &mut self,
        owner: u64,
        block: BlockId,
        count: usize,
        readable: impl Fn(usize) -> bool,
        found: &mut Vec<Staged>,
    ) {
        assert!(count <= BLOCK_PAGES && self.has_room());
        let mut job = Job {
            number: self.next_job,
            owner,
            block,
            count,
            crcs: [0; BLOCK_PAGES],
            locations: [None; BLOCK_PAGES],
            unposted: 0,
            outstanding: 0,
        };
        self.next_job += 1;
        found.clear();
        for index in 0..count {
            let what = if readable(index) {
                let bytes = view::page(self.ports.memory(), block.slot(index).offset());
                if is_zero(bytes) {
                    self.stats.zero_pages += 1;
                    Staged::Zeros
                } else {
                    job.crcs[index] = page_crc(bytes);
                    job.unposted |= 1 << index;
                    Staged::Data
                }
            } else {
                Staged::Unreadable
            };
            found.push(what);
        }
        self.jobs.push(job);
    }

    /// Post what is unposted, collect what is acknowledged, return empty slabs. Never waits.
    ///
    /// # Errors
    /// If there is no room on any memory node: the batches stay staged and are tried again at the next call.
    pub fn advance(&mut self, done: &mut Vec<Written>) -> Result<(), NoRoom> {
        if self.slabs.has_emptied() {
            self.filler.return_empty(&mut self.pool);
        }
        self.collect();
        let result = self.post_all();
        self.collect();
        let early = self.mutation == Mutation::AcknowledgeEarly;
        self.jobs.retain(|job| {
            let finished = job.unposted == 0 && (job.outstanding == 0 || early);
            if finished {
                let Job { owner, block, count, locations, .. } = *job;
                done.push(Written { owner, block, count, locations });
            }
            !finished
        });
        result
    }

    /// A program has ended: what of its pages is not posted yet need not be. Its batches are still reported as written.
    pub fn abandon(&mut self, owner: u64) {
        for job in self.jobs.iter_mut().filter(|job| job.owner == owner) {
            job.unposted = 0;
        }
    }

    /// What to wait for when all batches wait for acknowledgements; `None` if a node answers at once.
    pub fn event_fds(&mut self) -> Option<Vec<BorrowedFd<'_>>> {
        self.ports.open_ports().map(|(_, port)| port.endpoint.event_fd()).collect()
    }

    /// A memory node has come (back): use it.
    pub fn rejoin(&mut self, node: NodeId) {
        self.ports.close(node);
    }

    /// The run has ended: all slabs go back.
    pub fn close(&mut self) {
        self.jobs.clear();
        self.filler.close(&mut self.pool);
    }

    fn post_all(&mut self) -> Result<(), NoRoom> {
        for at in 0..self.jobs.len() {
            while self.jobs[at].unposted != 0 {
                let first = self.jobs[at].unposted.trailing_zeros();
                let want = (self.jobs[at].unposted >> first).trailing_ones();
                let room = self.filler.room(&mut self.pool, want)?;
                if !self.post(at, first as usize, room) {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Post one WRITE; false if the node's queue is full.
    fn post(&mut self, at: usize, first: usize, room: Room) -> bool {
        let job = &mut self.jobs[at];
        let pages = room.pages as usize;
        let mask = (u64::MAX >> (BLOCK_PAGES - pages)) << first;
        let port = match self.ports.port(room.node) {
            Ok(port) => port,
            Err(error) => {
                tracing::warn!(node = room.node.0, %error, "memory node lost; its pages go elsewhere");
                self.lose_node(room.node);
                return true;
            }
        };
        let local = port.slice(job.block.slot(first).offset(), pages * PAGE_BYTES);
        let remote = self.slabs.place(room.first).remote;
        let id = job.number << 16 | (first as u64) << 8 | pages as u64;
        let work = Work { id, verb: Verb::Write { local, remote }, signalled: true };
        if let Err(PostError::QueueFull { .. }) = port.endpoint.post(&[work]) {
            return false;
        }
        for offset in 0..room.pages {
            let index = first + offset as usize;
            let location = Location(room.first.0 + offset);
            self.slabs.occupy(location, job.crcs[index]);
            job.locations[index] = Some(location);
        }
        job.unposted &= !mask;
        job.outstanding += 1;
        self.stats.writes += 1;
        self.stats.pages += pages as u64;
        true
    }

    fn collect(&mut self) {
        let mut lost = Vec::new();
        let mut completions = std::mem::take(&mut self.completions);
        for (node, port) in self.ports.open_ports() {
            completions.clear();
            while port.endpoint.poll(&mut completions, BLOCK_PAGES) > 0 {}
            for completion in &completions {
                if !Self::settle(&mut self.jobs, &self.slabs, completion) {
                    lost.push(node);
                }
            }
        }
        self.completions = completions;
        lost.dedup();
        for node in lost {
            self.lose_node(node);
        }
    }

    /// Book one completion; false if its write failed.
    fn settle(jobs: &mut [Job], slabs: &SlabSet, completion: &Completion) -> bool {
        let number = completion.id >> 16;
        let first = usize::try_from(completion.id >> 8 & 0xff).expect("8 bits");
        let pages = usize::try_from(completion.id & 0xff).expect("8 bits");
        let Some(job) = jobs.iter_mut().find(|job| job.number == number) else {
            return completion.outcome.is_ok();
        };
        job.outstanding -= 1;
        if completion.outcome.is_ok() {
            return true;
        }
        for index in first..first + pages {
            slabs.release(job.locations[index].take().expect("it was posted to a location"));
            job.unposted |= 1 << index;
        }
        false
    }

    fn lose_node(&mut self, node: NodeId) {
        // The port stays: what it still has under way comes back as failed and is written elsewhere.
        self.filler.forget_node(node);
        self.pool.remove_node(node);
    }
}
