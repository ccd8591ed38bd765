//! Counts of what schedules did, so that a simulator that tests nothing is noticed.

/// Counts of events in a schedule, or in all schedules. A simulator in which an event never happens
/// cannot find its bugs.
#[derive(Clone, Copy, Debug, Default)]
pub struct PagingCounts {
    pub evictions: u64,
    pub zero_fills: u64,
    pub staging_fills: u64,
    /// Pages that were filled from the page cache, and blocks that it gave up.
    pub cache_fills: u64,
    pub cache_drops: u64,
    pub remote_fills: u64,
    pub busy: u64,
    pub kept: u64,
    pub absent: u64,
    pub privatised: u64,
    pub forks: u64,
    pub remaps: u64,
    pub kills: u64,
    pub crashes: u64,
    /// Nodes that returned without their memory, and the number of these that the sender added.
    pub returns: u64,
    pub joined: u64,
    /// Extents and spans that the leak scan freed.
    pub leaks_freed: u64,
    pub damages: u64,
    pub lost: u64,
    pub full: u64,
    pub slow: u64,
    pub late: u64,
    pub unchanged: u64,
    pub copied: u64,
    pub repaired: u64,
    /// Nodes that wanted their memory back, and slabs that were moved off them.
    pub withdrawals: u64,
    pub moved_slabs: u64,
    /// Times that a disk began to fail, accesses that failed therefore, slabs with a backup because
    /// memory nodes had no room, and slabs that returned to memory.
    pub disk_failures: u64,
    pub disk_errors: u64,
    pub displaced: u64,
    pub returned: u64,
    /// Pages that were moved out of slabs that were being vacated.
    pub repacked: u64,
    /// Nodes that died while all pages had other replicas, and the number of these that died after
    /// the replicas of an earlier dead node had been replaced.
    pub survived: u64,
    pub survived_after_healing: u64,
    pub restarts: u64,
    /// Partitions of a node.
    pub cuts: u64,
    /// Nodes that fenced our host.
    pub expiries: u64,
    pub absences: u64,
    /// Nodes whose operations the sender abandoned because they did not answer, and pages that it
    /// wrote again.
    pub dropped_nodes: u64,
    pub rewritten: u64,
    /// Forks after which pages were write-protected, and answers that permitted writes.
    pub protections: u64,
    pub unprotected: u64,
    /// Steps of threads that waited until the agent had read their pin.
    pub pins_awaited: u64,
    /// Writes of the worker that the kernel refused, because they would have waited.
    pub refused_writes: u64,
}

impl PagingCounts {
    pub fn labelled(&self) -> [(&'static str, u64); 43] {
        [
            ("evictions", self.evictions),
            ("zero fills", self.zero_fills),
            ("fills from the mempool", self.staging_fills),
            ("fills from the page cache", self.cache_fills),
            ("blocks that the page cache gave up", self.cache_drops),
            ("fills from memory nodes", self.remote_fills),
            ("fills refused as busy", self.busy),
            ("pages that the worker left", self.kept),
            ("pages that were absent", self.absent),
            ("shared pages made private", self.privatised),
            ("forks", self.forks),
            ("remaps", self.remaps),
            ("kills", self.kills),
            ("crashed nodes", self.crashes),
            ("nodes that returned", self.returns),
            ("nodes that were added", self.joined),
            ("leaks that were freed", self.leaks_freed),
            ("damaged pages", self.damages),
            ("lost pages", self.lost),
            ("times the pool was full", self.full),
            ("slow nodes", self.slow),
            ("fetches with late READs", self.late),
            ("pages that left unchanged", self.unchanged),
            ("slabs copied", self.copied),
            ("pages repaired", self.repaired),
            ("nodes that wanted memory back", self.withdrawals),
            ("slabs moved to other nodes", self.moved_slabs),
            ("disks that began to fail", self.disk_failures),
            ("accesses that failed because of a disk", self.disk_errors),
            ("slabs that went to a disk", self.displaced),
            ("slabs that returned from a disk", self.returned),
            ("pages moved", self.repacked),
            ("deaths that lost no page", self.survived),
            ("deaths after healing that lost no page", self.survived_after_healing),
            ("restarts of the agent", self.restarts),
            ("partitions of a node", self.cuts),
            ("nodes that fenced the host", self.expiries),
            ("nodes that were away", self.absences),
            ("nodes that the sender dropped", self.dropped_nodes),
            ("pages that were written again", self.rewritten),
            ("forks that were protected", self.protections),
            ("writes to protected pages", self.unprotected),
            ("waits of a thread that pins a page", self.pins_awaited),
        ]
    }

    pub fn add(&mut self, other: &Self) {
        self.evictions += other.evictions;
        self.zero_fills += other.zero_fills;
        self.staging_fills += other.staging_fills;
        self.cache_fills += other.cache_fills;
        self.cache_drops += other.cache_drops;
        self.remote_fills += other.remote_fills;
        self.busy += other.busy;
        self.kept += other.kept;
        self.absent += other.absent;
        self.privatised += other.privatised;
        self.forks += other.forks;
        self.remaps += other.remaps;
        self.kills += other.kills;
        self.crashes += other.crashes;
        self.returns += other.returns;
        self.joined += other.joined;
        self.leaks_freed += other.leaks_freed;
        self.damages += other.damages;
        self.lost += other.lost;
        self.full += other.full;
        self.slow += other.slow;
        self.late += other.late;
        self.unchanged += other.unchanged;
        self.copied += other.copied;
        self.repaired += other.repaired;
        self.withdrawals += other.withdrawals;
        self.moved_slabs += other.moved_slabs;
        self.disk_failures += other.disk_failures;
        self.disk_errors += other.disk_errors;
        self.displaced += other.displaced;
        self.returned += other.returned;
        self.repacked += other.repacked;
        self.survived += other.survived;
        self.survived_after_healing += other.survived_after_healing;
        self.restarts += other.restarts;
        self.cuts += other.cuts;
        self.expiries += other.expiries;
        self.absences += other.absences;
        self.dropped_nodes += other.dropped_nodes;
        self.rewritten += other.rewritten;
        self.protections += other.protections;
        self.unprotected += other.unprotected;
        self.pins_awaited += other.pins_awaited;
        self.refused_writes += other.refused_writes;
    }
}
