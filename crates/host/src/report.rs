//! The JSON in which a host reports on itself: what `aquifer run --stats` writes and `aquifer status` asks for.

use serde::{Deserialize, Serialize};

/// Fault latency in microseconds, measured by the agent from hearing of a fault to its page's being there.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct LatencyUs {
    /// Median.
    pub p50: f64,
    /// 99th percentile.
    pub p99: f64,
    /// 99.9th percentile.
    pub p999: f64,
}

/// A process of a run.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ProgramStatistics {
    /// Its process id; 0 while unknown.
    pub pid: u32,
    /// Pages of it that are resident and counted.
    pub held_bytes: u64,
    /// Faults served.
    pub faults: u64,
    /// Pages read from memory nodes.
    pub remote_reads: u64,
    /// Pages taken out of it.
    pub evictions: u64,
    /// Pages that could not be read back.
    pub lost_pages: u64,
}

/// What `aquifer run --stats` writes.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct RunStatistics {
    /// The program.
    pub name: String,
    /// The user that it belongs to.
    pub tenant: u32,
    /// `--local`.
    pub limit_bytes: u64,
    /// `--replicas`.
    pub replicas: usize,
    /// Slabs with fewer copies than that, now: what is in them does not bear the death of as many nodes as it should.
    pub degraded_slabs: u64,
    /// Slabs of which a missing copy was made.
    pub copied_slabs: u64,
    /// Damaged pages that were written anew from a good copy.
    pub repaired_pages: u64,
    /// Sparse slabs that were emptied into others.
    pub vacated_slabs: u64,
    /// Pages that were moved for that.
    pub repacked_pages: u64,
    /// Pages that left as they had come from memory nodes, and were not written again.
    pub unchanged_pages: u64,
    /// Processes of the run alive now.
    pub processes: usize,
    /// Each of them.
    pub programs: Vec<ProgramStatistics>,
    /// Faults served.
    pub faults: u64,
    /// Pages filled with zeros.
    pub zero_pages: u64,
    /// Pages filled from the reclaimable queue of the mempool.
    pub mempool_hits: u64,
    /// Pages filled from the staging queue of the mempool.
    pub staging_hits: u64,
    /// Pages read from memory nodes.
    pub remote_reads: u64,
    /// READs posted for them.
    pub remote_read_trips: u64,
    /// Of `remote_reads`, those filled before they were asked for.
    pub prefetched: u64,
    /// Pages written to memory nodes, each copy counted.
    pub remote_writes: u64,
    /// WRITEs posted for them.
    pub remote_write_trips: u64,
    /// Pages taken out of the program.
    pub evictions: u64,
    /// Pages that could not be read back.
    pub lost_pages: u64,
    /// Anonymous resident memory now, as sampled.
    pub resident_bytes: u64,
    /// The most that was sampled.
    pub resident_peak_bytes: u64,
    /// The mempool's blocks in use now.
    pub mempool_bytes: u64,
    /// Taken from memory nodes now.
    pub remote_bytes: u64,
    /// The most there ever was.
    pub remote_peak_bytes: u64,
    /// Latency.
    pub fault_latency_us: LatencyUs,
}

/// A tenant: the user that its runs belong to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TenantStatistics {
    /// The user's number.
    pub tenant: u32,
    /// Its runs.
    pub runs: usize,
    /// Processes in them.
    pub processes: usize,
    /// Resident memory of those, as sampled.
    pub resident_bytes: u64,
    /// The mempool's blocks that they have.
    pub mempool_bytes: u64,
    /// What they have of memory nodes.
    pub remote_bytes: u64,
    /// Faults served, of runs that are over too, as all that follows.
    pub faults: u64,
    /// Pages read from memory nodes.
    pub remote_reads: u64,
    /// Pages taken out of programs.
    pub evictions: u64,
    /// Pages that could not be read back.
    pub lost_pages: u64,
}

/// What `aquifer status` asks an agent for.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct AgentStatus {
    /// This host's number in the cluster.
    pub host: u16,
    /// Bytes of the mempool, and of them in use.
    pub mempool_bytes: u64,
    /// In use.
    pub mempool_used_bytes: u64,
    /// Memory nodes that it knows.
    pub nodes: Vec<NodeStatus>,
    /// Tenants that have runs or had some, at most 64.
    pub tenants: Vec<TenantStatistics>,
    /// Users of extents, at most 64.
    #[serde(default)]
    pub users: Vec<UserStatistics>,
    /// Sessions, those with most extents first, at most 64.
    #[serde(default)]
    pub sessions: Vec<SessionStatistics>,
    /// Runs.
    pub runs: Vec<RunStatistics>,
}

/// A program that has extents.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SessionStatistics {
    /// The user's number.
    pub tenant: u32,
    /// Its process.
    pub pid: u32,
    /// Extents that it has.
    pub extents: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes that are kept ready for it.
    pub stocked_bytes: u64,
    /// Requests that were answered.
    pub requests: u64,
}

/// What a user's sessions have together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct UserStatistics {
    /// The user's number.
    pub tenant: u32,
    /// Bytes of the pool, what is kept ready included.
    pub taken_bytes: u64,
    /// Requests that were refused because a key opens nothing.
    pub refused: u64,
}

/// A memory node as an agent sees it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct NodeStatus {
    /// Its number.
    pub id: u16,
    /// Bytes that it lends.
    pub memory_bytes: u64,
    /// Of them free.
    pub free_bytes: u64,
}
