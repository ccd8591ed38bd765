//! Clients of a real node. Each has an endpoint, whose operations are counted.

use std::sync::Arc;
use std::time::Duration;

use aquifer_bench::support::one_sided_array::{ArrayClient, ArrayProgress, Held, READ_MAX, Touch};
use aquifer_fabric::{
    Completion, Endpoint, Host, LocalKey, LocalSlice, Memory, PostError, RemoteAddr, Tenant, Verb, Work,
};
use aquifer_pool::{Extent, PoolClient, SizeClass};

use super::NODE_SECTIONS;
use super::counted::{Counted, Counts, Tally};
use super::rpc::{MESSAGE_BYTES, Request, decode_answer};
use super::server::NODE;

/// Time between two polls of an endpoint over a network.
const POLL_TIMEOUT: Duration = Duration::from_millis(20);
/// Polls before the thread yields the processor, as in the pool's client.
const SPINS_MAX: u32 = 256;
/// Length of a message.
const MESSAGE_LEN: u32 = 16;
const _: () = assert!(MESSAGE_LEN as usize == MESSAGE_BYTES);
/// Completions polled at a time.
const POLL_MAX: usize = 32;
/// Bytes of the largest READ of entries in the local memory.
const ENTRIES_BYTES: usize = READ_MAX as usize * 8;
/// Offset of a word of zeros in the local memory.
const ZERO_AT: u64 = ENTRIES_BYTES as u64;

/// An allocator of extents of a real node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RealAllocator {
    /// RPC; the target binds a window for each extent.
    OnDemandRpc,
    /// RPC; one key for all memory.
    Rpc,
    /// The one-sided array.
    Array,
    /// The pool.
    Pool,
    /// One trip without an allocation: the lower bound.
    Trip,
}

impl RealAllocator {
    /// All allocators; the pool and the lower bound are last.
    pub const ALL: [Self; 5] = [Self::OnDemandRpc, Self::Rpc, Self::Array, Self::Pool, Self::Trip];

    /// Name in the report.
    pub fn name(self) -> &'static str {
        match self {
            Self::OnDemandRpc => "RPC, a window bound for each",
            Self::Rpc => "RPC, registered beforehand",
            Self::Array => "one-sided array",
            Self::Pool => "ours",
            Self::Trip => "(one trip, nothing taken)",
        }
    }
}

/// Memory that a client has allocated.
#[derive(Clone, Copy, Debug)]
pub enum Allocation {
    Chunk(u32, SizeClass),
    Entries(Held),
    Extent(Extent),
    Nothing,
}

/// A client.
#[derive(Debug)]
pub struct AllocClient {
    tally: Arc<Tally>,
    inner: Inner,
}

#[derive(Debug)]
enum Inner {
    Rpc { wire: Wire, window: bool, answer: Vec<u8> },
    Array { wire: Wire, machine: Box<ArrayClient>, results: Vec<u16>, works: Vec<Work> },
    Pool(Box<PoolClient>),
    Trip(Wire),
}

impl AllocClient {
    /// A client with this host number.
    ///
    /// # Errors
    /// If the endpoint fails.
    pub fn new(allocator: RealAllocator, host: Host, endpoint: Box<dyn Endpoint>) -> Result<Self, String> {
        let (counted, tally) = Counted::new(endpoint);
        let inner = match allocator {
            RealAllocator::OnDemandRpc | RealAllocator::Rpc => {
                let window = allocator == RealAllocator::OnDemandRpc;
                Inner::Rpc { wire: Wire::new(Box::new(counted), 0)?, window, answer: Vec::new() }
            }
            RealAllocator::Array => {
                let machine = Box::new(ArrayClient::new(host.0, NODE_SECTIONS, 1, 0));
                let wire = Wire::new(Box::new(counted), 1)?;
                Inner::Array { wire, machine, results: Vec::new(), works: Vec::new() }
            }
            RealAllocator::Pool => {
                let mut pool = PoolClient::new(host, Tenant(0));
                pool.add_node(NODE, Box::new(counted)).map_err(|error| error.to_string())?;
                Inner::Pool(Box::new(pool))
            }
            RealAllocator::Trip => Inner::Trip(Wire::new(Box::new(counted), 0)?),
        };
        Ok(Self { tally, inner })
    }

    /// Counts of operations over the client's endpoint.
    pub fn counts(&self) -> Counts {
        self.tally.counts()
    }

    /// Allocates an extent.
    ///
    /// # Errors
    /// If no extent is free, or the endpoint fails.
    pub fn allocate(&mut self, class: SizeClass) -> Result<Allocation, String> {
        match &mut self.inner {
            Inner::Rpc { wire, window, answer } => {
                wire.ask(Request::Allocate { class, window: *window }, answer)?;
                let granted = decode_answer(answer).ok_or("the node has refused an RPC")?;
                Ok(Allocation::Chunk(granted.chunk, class))
            }
            Inner::Array { wire, machine, results, works } => {
                if !machine.start_allocation(0, class) {
                    return Err("the array is full".into());
                }
                loop {
                    wire.touch(machine.touches(), works, results)?;
                    if let ArrayProgress::Allocated(held) = machine.complete(results)? {
                        return Ok(Allocation::Entries(held));
                    }
                }
            }
            Inner::Pool(pool) => {
                pool.allocate(NODE, class).map(Allocation::Extent).map_err(|error| error.to_string())
            }
            Inner::Trip(wire) => {
                let probe = Verb::FetchAdd { remote: wire.remote(0), add: 0 };
                wire.run(&[Work { id: 0, verb: probe, signalled: true }])?;
                Ok(Allocation::Nothing)
            }
        }
    }

    /// Frees an allocation.
    ///
    /// # Errors
    /// If the allocation is not of this client, or the endpoint fails.
    pub fn free(&mut self, allocation: Allocation) -> Result<(), String> {
        match (&mut self.inner, allocation) {
            (Inner::Rpc { wire, answer, .. }, Allocation::Chunk(chunk, class)) => {
                wire.ask(Request::Free { chunk, class }, answer)?;
                decode_answer(answer).map(drop).ok_or_else(|| "the node refused to free the extent".into())
            }
            (Inner::Array { wire, machine, results, works }, Allocation::Entries(held)) => {
                machine.start_free(held);
                wire.touch(machine.touches(), works, results)?;
                machine.complete(results).map(drop)
            }
            (Inner::Pool(pool), Allocation::Extent(extent)) => {
                pool.free(extent).map_err(|error| error.to_string())
            }
            (_, Allocation::Nothing) => Ok(()),
            _ => Err("the allocation is of another allocator".into()),
        }
    }
}

/// An endpoint with some local memory.
#[derive(Debug)]
struct Wire {
    endpoint: Box<dyn Endpoint>,
    base: RemoteAddr,
    local: Arc<Memory>,
    key: LocalKey,
    done: Vec<Completion>,
    outcomes: Vec<u64>,
}

impl Wire {
    /// A connection to a region of the node.
    fn new(mut endpoint: Box<dyn Endpoint>, region: usize) -> Result<Self, String> {
        let region = endpoint.regions().get(region).ok_or("the node has not registered its memory")?;
        let base = RemoteAddr { addr: region.base, key: region.key };
        let local = Memory::create("aquifer-bench", 2 * ENTRIES_BYTES).map(Arc::new);
        let local = local.map_err(|error| error.to_string())?;
        let key = endpoint.register_local(Arc::clone(&local)).map_err(|error| error.to_string())?;
        Ok(Self { endpoint, base, local, key, done: Vec::new(), outcomes: Vec::new() })
    }

    /// Address of an entry of the region.
    fn remote(&self, entry: u32) -> RemoteAddr {
        RemoteAddr { addr: self.base.addr + u64::from(entry) * 8, key: self.base.key }
    }

    /// Posts operations, whose ids are their indices, and waits for all. Their outcomes are then in
    /// `outcomes`.
    fn run(&mut self, works: &[Work]) -> Result<(), String> {
        let (mut posted, mut ended, mut spins) = (0, 0, 0);
        self.outcomes.clear();
        self.outcomes.resize(works.len(), 0);
        while ended < works.len() {
            if posted < works.len() {
                posted += match self.endpoint.post(&works[posted..]) {
                    Ok(()) => works.len() - posted,
                    Err(PostError::QueueFull { accepted }) => accepted,
                };
            }
            self.done.clear();
            if self.endpoint.poll(&mut self.done, POLL_MAX) == 0 {
                self.pause(&mut spins)?;
            }
            for completion in &self.done {
                let outcome = completion.outcome.map_err(|error| error.to_string())?;
                let at = usize::try_from(completion.id).unwrap_or(usize::MAX);
                *self.outcomes.get_mut(at).ok_or("an operation ended that was not posted")? = outcome;
                ended += 1;
            }
        }
        Ok(())
    }

    /// Sends a request and waits for the answer.
    fn ask(&mut self, request: Request, answer: &mut Vec<u8>) -> Result<(), String> {
        self.local.write(0, &request.encode());
        let local = LocalSlice { key: self.key, offset: 0, len: MESSAGE_LEN };
        self.run(&[Work { id: 0, verb: Verb::Send { local }, signalled: true }])?;
        answer.clear();
        let mut spins = 0;
        while !self.endpoint.receive(answer) {
            self.pause(&mut spins)?;
        }
        Ok(())
    }

    fn pause(&mut self, spins: &mut u32) -> Result<(), String> {
        if self.endpoint.is_broken() {
            return Err("the node is gone".into());
        }
        self.endpoint.wait(POLL_TIMEOUT);
        if *spins < SPINS_MAX {
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
        *spins = spins.saturating_add(1);
        Ok(())
    }

    /// Carries out the operations of an array client, and returns the results.
    fn touch(
        &mut self,
        touches: &[Touch],
        works: &mut Vec<Work>,
        results: &mut Vec<u16>,
    ) -> Result<(), String> {
        works.clear();
        for touch in touches {
            let verb = match *touch {
                Touch::Clear { entry } => {
                    let local = LocalSlice { key: self.key, offset: ZERO_AT, len: 8 };
                    Verb::Write { local, remote: self.remote(entry) }
                }
                // An array client has at most one READ in a doorbell.
                Touch::Read { first, count } => {
                    let local = LocalSlice { key: self.key, offset: 0, len: count * 8 };
                    Verb::Read { local, remote: self.remote(first) }
                }
                Touch::Claim { entry, host } => {
                    Verb::CompareSwap { remote: self.remote(entry), expected: 0, desired: u64::from(host) }
                }
            };
            works.push(Work { id: works.len() as u64, verb, signalled: true });
        }
        self.run(works)?;
        results.clear();
        let owner = |word: u64| u16::try_from(word).unwrap_or(u16::MAX);
        for (touch, outcome) in touches.iter().zip(&self.outcomes) {
            match touch {
                Touch::Clear { .. } => {}
                Touch::Read { count, .. } => {
                    let entry = |at: u32| self.local.atomic_u64(at as usize * 8);
                    let read = (0..*count).map(|at| entry(at).load(std::sync::atomic::Ordering::Relaxed));
                    results.extend(read.map(owner));
                }
                Touch::Claim { .. } => results.push(owner(*outcome)),
            }
        }
        Ok(())
    }
}
