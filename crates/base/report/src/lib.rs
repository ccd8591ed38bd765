//! The statistics of a host, declared once: services fill them, `aquifer run --stats` and `aquifer
//! status --json` show them, and the agent's metrics are made from them.

#![forbid(unsafe_code)]

#[cfg(test)]
mod golden_tests;

use serde::{Deserialize, Serialize};

/// Fault latency in microseconds, from the agent's read of a fault to the fill of the page.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct LatencyUs {
    /// Median.
    pub p50: f64,
    /// 99th percentile.
    pub p99: f64,
    /// 99.9th percentile.
    pub p999: f64,
}

/// Latency of the faults that have waited for something, in microseconds.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct FaultWaitUs {
    /// For a page in the mempool or in the page cache of the host.
    pub host: LatencyUs,
    /// For a memory node.
    pub node: LatencyUs,
    /// For room below the limit, or for the page's own eviction.
    pub room: LatencyUs,
}

/// Statistics of a process of a run.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ProgramStatistics {
    /// Process id; 0 while unknown.
    pub pid: u32,
    /// Resident memory that counts against the limit.
    pub held_bytes: u64,
    /// Faults served.
    pub faults: u64,
    /// Pages read from memory nodes.
    pub remote_reads: u64,
    /// Pages evicted from the process.
    pub evictions: u64,
    /// Pages that could not be read from any replica.
    pub lost_pages: u64,
    /// Resident memory that the process shares with others, which is not paged.
    #[serde(default)]
    pub shared_bytes: u64,
}

/// A process of a run that is not paged.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct UnpagedProcess {
    /// Process id.
    pub pid: u32,
    /// Name of the process.
    pub name: String,
    /// The reason why the process is not paged.
    pub reason: String,
}

/// Statistics of a run; `aquifer run --stats` writes them.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct RunStatistics {
    /// The program's name.
    pub name: String,
    /// User id of the run's owner.
    pub tenant: u32,
    /// Limit of resident memory (`--local`), which is guaranteed.
    pub limit_bytes: u64,
    /// Limit while the host has idle memory (`--local-max`), 2^64 − 1 for as much as the host
    /// lends; `None` if the run is not elastic.
    #[serde(default)]
    pub limit_max_bytes: Option<u64>,
    /// Resident memory beyond the guaranteed part: idle memory of the host, which is taken back
    /// when others need it.
    #[serde(default)]
    pub borrowed_bytes: u64,
    /// Pages of the run in the page cache of the host.
    #[serde(default)]
    pub cached_bytes: u64,
    /// Requested replicas of each page (`--replicas`).
    pub replicas: usize,
    /// Slabs that have fewer replicas than requested now, and survive fewer failures of nodes.
    pub degraded_slabs: u64,
    /// Slabs of which a missing replica was created.
    pub copied_slabs: u64,
    /// Damaged pages that were repaired from another replica.
    pub repaired_pages: u64,
    /// Sparse slabs that were emptied and freed.
    pub vacated_slabs: u64,
    /// Pages that were moved out of sparse slabs.
    pub repacked_pages: u64,
    /// Bytes that were copied to other memory nodes, because their nodes recall memory.
    #[serde(default)]
    pub moved_bytes: u64,
    /// The policy by which pages have a copy on a disk node (`--backup`); empty for a run by swap.
    #[serde(default)]
    pub backup: String,
    /// Room of disk nodes that the run occupies.
    #[serde(default)]
    pub disk_bytes: u64,
    /// Slabs that are on a disk now because memory nodes had no room for their replicas.
    #[serde(default)]
    pub displaced_slabs: u64,
    /// Reads and writes that failed because of the disk of a node.
    #[serde(default)]
    pub disk_errors: u64,
    /// Memory of the run that memory nodes recall now.
    #[serde(default)]
    pub recalled: Vec<RecalledRunMemory>,
    /// Evicted pages that were not written again, because a memory node still has the same bytes.
    pub unchanged_pages: u64,
    /// Number of the run's processes now.
    pub processes: usize,
    /// The run's processes.
    pub programs: Vec<ProgramStatistics>,
    /// Processes of the run that are not paged now, at most 16.
    #[serde(default)]
    pub unpaged: Vec<UnpagedProcess>,
    /// The reason why the pool or the mempool has no room for pages of the run now; `None` if both
    /// have room.
    #[serde(default)]
    pub short_of_room: Option<String>,
    /// Resident memory that processes share (`MAP_SHARED`, System V), which is not paged; counted
    /// once for each of these processes.
    #[serde(default)]
    pub shared_bytes: u64,
    /// Size of the swap device of a run with `--swap`; `None` for other runs.
    #[serde(default)]
    pub swap_bytes: Option<u64>,
    /// Faults served.
    pub faults: u64,
    /// Pages filled with zeros.
    pub zero_pages: u64,
    /// Pages filled from the reclaimable queue of the mempool.
    pub mempool_hits: u64,
    /// Pages filled from the staging queue of the mempool.
    pub staging_hits: u64,
    /// Pages filled from the page cache of the host.
    #[serde(default)]
    pub cache_hits: u64,
    /// Pages read from memory nodes.
    pub remote_reads: u64,
    /// READs posted for `remote_reads`.
    pub remote_read_trips: u64,
    /// Pages of `remote_reads` that were filled before a fault on them.
    pub prefetched: u64,
    /// Pages written to memory nodes; each replica counts.
    pub remote_writes: u64,
    /// WRITEs posted for `remote_writes`.
    pub remote_write_trips: u64,
    /// Pages evicted from the run's processes.
    pub evictions: u64,
    /// Pages that could not be read from any replica.
    pub lost_pages: u64,
    /// Anonymous resident memory at the last sample.
    pub resident_bytes: u64,
    /// The most resident memory in any sample.
    pub resident_peak_bytes: u64,
    /// Blocks of the mempool that the run uses now, in bytes.
    pub mempool_bytes: u64,
    /// Memory that the run has allocated on memory nodes now.
    pub remote_bytes: u64,
    /// The most memory that the run had allocated on memory nodes.
    pub remote_peak_bytes: u64,
    /// Latency of faults.
    pub fault_latency_us: LatencyUs,
    /// Latency of faults by what they have waited for.
    #[serde(default)]
    pub fault_wait_us: FaultWaitUs,
}

/// Statistics of a tenant, which is a user with runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct TenantStatistics {
    /// User id.
    pub tenant: u32,
    /// Number of the tenant's runs.
    pub runs: usize,
    /// Number of processes in these runs.
    pub processes: usize,
    /// Resident memory of these processes at the last sample.
    pub resident_bytes: u64,
    /// Part of `resident_bytes` that is idle memory of the host.
    #[serde(default)]
    pub borrowed_bytes: u64,
    /// Pages of the runs in the page cache of the host.
    #[serde(default)]
    pub cached_bytes: u64,
    /// Blocks of the mempool that the runs use, in bytes.
    pub mempool_bytes: u64,
    /// Memory that the runs have allocated on memory nodes.
    pub remote_bytes: u64,
    /// Room of disk nodes that the runs occupy.
    #[serde(default)]
    pub disk_bytes: u64,
    /// Faults served, ended runs included.
    pub faults: u64,
    /// Pages filled from the page cache of the host, ended runs included.
    #[serde(default)]
    pub cache_hits: u64,
    /// Pages read from memory nodes, ended runs included.
    pub remote_reads: u64,
    /// Pages evicted, ended runs included.
    pub evictions: u64,
    /// Pages that could not be read from any replica, ended runs included.
    pub lost_pages: u64,
}

/// Status of an agent and its host; `aquifer status` requests it.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct AgentStatus {
    /// The host's number in the cluster.
    pub host: u16,
    /// Largest size of the mempool.
    pub mempool_bytes: u64,
    /// Blocks of the mempool in use.
    pub mempool_used_bytes: u64,
    /// Blocks of the mempool in the page cache.
    #[serde(default)]
    pub cached_bytes: u64,
    /// Idle memory of the host that elastic runs have.
    #[serde(default)]
    pub borrowed_bytes: u64,
    /// Memory of the host that is available, at the last look of the agent.
    #[serde(default)]
    pub available_bytes: u64,
    /// Memory of the host that the agent keeps available.
    #[serde(default)]
    pub keep_free_bytes: u64,
    /// The memory nodes in the directory.
    pub nodes: Vec<NodeStatus>,
    /// Memory nodes that were in the directory while this agent ran, and are not any more.
    #[serde(default)]
    pub missing_nodes: Vec<MissingNode>,
    /// Tenants that have or had runs, at most 64.
    pub tenants: Vec<TenantStatistics>,
    /// Users of extents, at most 64.
    #[serde(default)]
    pub users: Vec<UserStatistics>,
    /// Sessions, those with the most bytes first, at most 64.
    #[serde(default)]
    pub sessions: Vec<SessionStatistics>,
    /// The runs.
    pub runs: Vec<RunStatistics>,
}

/// Memory of a run that a memory node recalls.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RecalledRunMemory {
    /// Number of the node.
    pub node: u16,
    /// Bytes that hold pages.
    pub bytes: u64,
    /// The part of them of which no other node has a copy.
    pub only_copy_bytes: u64,
}

/// Statistics of a session: a program that uses extents.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SessionStatistics {
    /// User id.
    pub tenant: u32,
    /// The program's process id.
    pub pid: u32,
    /// Number of the program's extents.
    pub extents: u64,
    /// Bytes of these extents.
    pub bytes: u64,
    /// Bytes of extents that the agent keeps ready for the program.
    pub stocked_bytes: u64,
    /// Answered requests.
    pub requests: u64,
}

/// Statistics of all sessions of a user.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct UserStatistics {
    /// User id.
    pub tenant: u32,
    /// Bytes allocated in the pool, extents that are kept ready included.
    #[serde(rename = "taken_bytes")]
    pub allocated_bytes: u64,
    /// Requests refused because the key opens nothing, or was not tried.
    pub refused: u64,
}

/// A memory node that has left the directory, in order or not.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MissingNode {
    /// Number of the node.
    pub id: u16,
    /// Time at which the node left, in seconds since 1970.
    pub since_s: u64,
}

/// Statistics of a memory node, as the agent knows them.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct NodeStatus {
    /// Number of the node.
    pub id: u16,
    /// Memory that the node lends.
    pub memory_bytes: u64,
    /// Free part of `memory_bytes`.
    pub free_bytes: u64,
    /// Whether the node lends room on a disk instead of memory.
    #[serde(default)]
    pub is_disk: bool,
    /// The error of the agent's last attempt to connect to the node; `None` after a success.
    #[serde(default)]
    pub failure: Option<String>,
}
