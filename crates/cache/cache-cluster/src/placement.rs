//! Placement of partitions: where each is, which server claims an unowned one, and which ones move.
//! Pure functions.

use std::collections::BTreeMap;

use aquifer_cache::store::presence::{Place, Presence};
use aquifer_ownership::{Life, SegmentRecord};

/// Largest deviation of a server's load from the mean, as a fraction of the mean, that causes no
/// move.
const LOAD_TOLERANCE: f64 = 0.15;
/// Largest cost of a partition that moves, as a fraction of the difference between the loads of
/// both servers. Below 1, so that the partition does not move back at once.
const MOVE_COST_MAX: f64 = 0.8;
/// Fixed cost of each partition beside its requests, as a fraction of the mean rate. With it, idle
/// servers get equal numbers of partitions.
const IDLE_LOAD: f64 = 0.05;
/// Requests per second of the whole cache below which only the numbers of partitions are balanced.
const BUSY_MIN: f64 = 100.0;

/// The load of a server, as the balancer sees it.
#[derive(Clone, PartialEq, Debug)]
pub struct ServerLoad {
    /// Bytes of memory for items.
    pub memory_bytes: u64,
    /// Bytes that are used.
    pub used_bytes: u64,
    /// Whether the server drains: all of its partitions move away.
    pub drains: bool,
    /// Partitions of the server.
    pub partitions: Vec<PartitionLoad>,
}

/// The load of a partition, as the balancer sees it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct PartitionLoad {
    /// The partition.
    pub partition: usize,
    /// Requests per second.
    pub rate: f64,
    /// Bytes of memory.
    pub bytes: u64,
    /// Whether the partition may move now.
    pub may_move: bool,
}

/// A planned move of a partition.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Move {
    /// The partition.
    pub partition: usize,
    /// The number of its owner.
    pub from: u16,
    /// The number of its next owner.
    pub to: u16,
}

/// Returns the servers that may claim unowned partitions: those that do not drain, or all if every
/// server drains.
pub fn claimants(servers: impl Iterator<Item = (u16, bool)> + Clone) -> Vec<u16> {
    let active: Vec<u16> = servers.clone().filter(|(_, drains)| !drains).map(|(server, _)| server).collect();
    if active.is_empty() { servers.map(|(server, _)| server).collect() } else { active }
}

/// Returns the server that claims an unowned partition: the one with the highest hash of both
/// numbers. So each of n servers claims about one n-th, whichever server has ended.
#[must_use]
pub fn claimant(partition: usize, servers: impl Iterator<Item = u16>) -> Option<u16> {
    servers.max_by_key(|server| {
        let bytes = [&partition.to_le_bytes()[..], &server.to_le_bytes()].concat();
        (xxhash_rust::xxh3::xxh3_64(&bytes), *server)
    })
}

/// Returns where a partition is that is not on this server. `known`, which a peer may have
/// reported, is kept if it is newer than the record. `lives` must be false for this server itself,
/// and `is_server` true for numbers of known servers.
pub fn elsewhere(
    record: Option<&SegmentRecord>,
    known: Presence,
    lives: impl Fn(Life) -> bool,
    is_server: impl Fn(u16) -> bool,
) -> Presence {
    let Some(record) = record.filter(|record| lives(record.owner)) else { return Presence::Unknown };
    match known {
        Presence::Elsewhere(place) if place.generation > record.generation && is_server(place.server) => {
            known
        }
        _ => Presence::Elsewhere(Place { server: record.owner.host, generation: record.generation }),
    }
}

/// Whether a server may claim a partition that it does not own: no server owns it. If a hand-over
/// has begun and its target lives, only the target may, because only it knows that it has not
/// received the partition.
pub fn may_claim(record: Option<&SegmentRecord>, own: Life, lives: impl Fn(Life) -> bool) -> bool {
    let is_free = |life| life == own || !lives(life);
    record.is_none_or(|record| is_free(record.owner) && record.intent.is_none_or(is_free))
}

/// Whether a server that may claim a partition does so now. A server that is the target of the
/// partition's hand-over claims it. Of the others, only the [`claimant`] does, or any of the
/// [`claimants`] if the claimant has not done so for some time (`is_late`).
pub fn should_claim(
    (partition, record): (usize, Option<&SegmentRecord>),
    own: Life,
    is_late: bool,
    claimants: &[u16],
) -> bool {
    let is_intended = record.is_some_and(|record| record.intent == Some(own));
    let is_next = || is_late || claimant(partition, claimants.iter().copied()) == Some(own.host);
    is_intended || claimants.contains(&own.host) && is_next()
}

/// Plans the next moves, at most `moves_max`.
///
/// Partitions of servers that drain move first. Then a partition of the most loaded server moves to
/// the least loaded one, if that makes the difference between both clearly smaller.
#[must_use]
pub fn plan(servers: &BTreeMap<u16, ServerLoad>, moves_max: usize) -> Vec<Move> {
    let mut servers = servers.clone();
    let mut moves = Vec::new();
    while moves.len() < moves_max {
        let costs = Costs::of(&servers);
        let next = drained(&servers, &costs).or_else(|| balanced(&servers, &costs));
        let Some(next) = next else { break };
        let from = servers.get_mut(&next.from).expect("it was planned");
        let at = from.partitions.iter().position(|load| load.partition == next.partition);
        let mut load = from.partitions.remove(at.expect("it was planned"));
        load.may_move = false;
        from.used_bytes = from.used_bytes.saturating_sub(load.bytes);
        let to = servers.get_mut(&next.to).expect("it was planned");
        to.used_bytes += load.bytes;
        to.partitions.push(load);
        moves.push(next);
    }
    moves
}

/// Weights by which the load of a partition is computed.
struct Costs {
    idle: f64,
    counts_rates: bool,
}

impl Costs {
    #[expect(clippy::cast_precision_loss, reason = "there are few partitions")]
    fn of(servers: &BTreeMap<u16, ServerLoad>) -> Self {
        let loads = || servers.values().flat_map(|server| &server.partitions);
        let total: f64 = loads().map(|load| load.rate).sum();
        let counts_rates = total >= BUSY_MIN;
        let mean = total / loads().count().max(1) as f64;
        Self { idle: if counts_rates { mean * IDLE_LOAD } else { 1.0 }, counts_rates }
    }

    fn of_partition(&self, load: &PartitionLoad) -> f64 {
        self.idle + if self.counts_rates { load.rate } else { 0.0 }
    }

    fn of_server(&self, server: &ServerLoad) -> f64 {
        server.partitions.iter().map(|load| self.of_partition(load)).sum()
    }

    /// Returns the server with the least load that has room for a partition.
    fn least_loaded(&self, servers: &BTreeMap<u16, ServerLoad>, load: &PartitionLoad) -> Option<u16> {
        let fits = |server: &ServerLoad| !server.drains && load.bytes <= server.memory_bytes / 2;
        let candidates = servers.iter().filter(|(_, server)| fits(server));
        candidates
            .min_by(|(_, one), (_, other)| self.of_server(one).total_cmp(&self.of_server(other)))
            .map(|(number, _)| *number)
    }
}

fn drained(servers: &BTreeMap<u16, ServerLoad>, costs: &Costs) -> Option<Move> {
    servers.iter().filter(|(_, server)| server.drains).find_map(|(from, server)| {
        let load = server.partitions.iter().find(|load| load.may_move)?;
        let to = costs.least_loaded(servers, load)?;
        Some(Move { partition: load.partition, from: *from, to })
    })
}

#[expect(clippy::cast_precision_loss, reason = "there are few servers")]
fn balanced(servers: &BTreeMap<u16, ServerLoad>, costs: &Costs) -> Option<Move> {
    let active: Vec<_> = servers.iter().filter(|(_, server)| !server.drains).collect();
    let total: f64 = active.iter().map(|(_, server)| costs.of_server(server)).sum();
    let mean = total / active.len().max(1) as f64;
    let (from, source) = active
        .iter()
        .max_by(|(_, one), (_, other)| costs.of_server(one).total_cmp(&costs.of_server(other)))?;
    let high = costs.of_server(source);
    let low = active.iter().map(|(_, server)| costs.of_server(server)).fold(f64::MAX, f64::min);
    if high <= mean * (1.0 + LOAD_TOLERANCE) && low >= mean * (1.0 - LOAD_TOLERANCE) {
        return None;
    }
    // The partition that moves is the one after whose move both servers differ least.
    let difference_after = |load: &PartitionLoad| -> Option<(f64, u16)> {
        let to = costs.least_loaded(servers, load).filter(|to| to != *from)?;
        let (cost, low) = (costs.of_partition(load), costs.of_server(&servers[&to]));
        Some((((high - cost) - (low + cost)).abs(), to))
    };
    let movable = source.partitions.iter().filter(|load| load.may_move);
    let best = movable
        .filter_map(|load| Some((difference_after(load)?, load)))
        .min_by(|((one, _), _), ((other, _), _)| one.total_cmp(other));
    let ((_, to), load) = best?;
    let before = high - costs.of_server(&servers[&to]);
    let is_useful = costs.of_partition(load) <= before * MOVE_COST_MAX;
    is_useful.then_some(Move { partition: load.partition, from: **from, to })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(rates: &[(usize, f64)]) -> ServerLoad {
        let load = |(partition, rate): &(usize, f64)| PartitionLoad {
            partition: *partition,
            rate: *rate,
            bytes: 1 << 20,
            may_move: true,
        };
        let partitions: Vec<_> = rates.iter().map(load).collect();
        let used_bytes = partitions.len() as u64 * (1 << 20);
        ServerLoad { memory_bytes: 64 << 20, used_bytes, drains: false, partitions }
    }

    /// Plans and moves until no move is planned; returns the number of moves.
    fn run_all_moves(servers: &mut BTreeMap<u16, ServerLoad>) -> usize {
        let mut count = 0;
        loop {
            let moves = plan(servers, 2);
            if moves.is_empty() {
                return count;
            }
            for Move { partition, from, to } in moves {
                count += 1;
                assert!(count < 1000, "the balancer does not end");
                let source = servers.get_mut(&from).unwrap();
                let at = source.partitions.iter().position(|load| load.partition == partition).unwrap();
                let load = source.partitions.remove(at);
                servers.get_mut(&to).unwrap().partitions.push(load);
            }
        }
    }

    fn rate(server: &ServerLoad) -> f64 {
        server.partitions.iter().map(|load| load.rate).sum()
    }

    #[test]
    fn a_server_that_joins_gets_its_share() {
        let idle: Vec<(usize, f64)> = (0..128).map(|partition| (partition, 0.0)).collect();
        let mut servers =
            BTreeMap::from([(1, server(&idle[..64])), (2, server(&idle[64..])), (3, server(&[]))]);
        run_all_moves(&mut servers);
        for server in servers.values() {
            assert!((36..=50).contains(&server.partitions.len()), "{}", server.partitions.len());
        }
    }

    #[test]
    fn hot_partitions_are_spread() {
        // Zipf-like: two partitions have most of the load.
        let mut loads: Vec<(usize, f64)> = (0..32).map(|partition| (partition, 100.0)).collect();
        (loads[0].1, loads[1].1, loads[2].1) = (3000.0, 2500.0, 1500.0);
        let mut servers = BTreeMap::from([
            (1, server(&loads[..8])),
            (2, server(&loads[8..16])),
            (3, server(&loads[16..24])),
            (4, server(&loads[24..])),
        ]);
        let count = run_all_moves(&mut servers);
        assert!((2..30).contains(&count), "{count} moves");
        let high = servers.values().map(rate).fold(0.0, f64::max);
        assert!(high < 3600.0, "{high}");
        assert_eq!(plan(&servers, 2), []);
    }

    #[test]
    fn one_hot_partition_does_not_move() {
        let mut servers = BTreeMap::from([(1, server(&[(0, 10_000.0)])), (2, server(&[(1, 10.0)]))]);
        assert_eq!(run_all_moves(&mut servers), 0);
    }

    #[test]
    fn small_differences_cause_no_move() {
        let servers =
            BTreeMap::from([(1, server(&[(0, 500.0), (1, 550.0)])), (2, server(&[(2, 500.0), (3, 480.0)]))]);
        assert_eq!(plan(&servers, 8), []);
    }

    #[test]
    fn a_server_that_drains_loses_all_partitions() {
        let loads: Vec<(usize, f64)> = (0..12).map(|partition| (partition, 50.0)).collect();
        let mut servers =
            BTreeMap::from([(1, server(&loads[..4])), (2, server(&loads[4..8])), (3, server(&loads[8..]))]);
        servers.get_mut(&2).unwrap().drains = true;
        run_all_moves(&mut servers);
        assert_eq!(servers[&2].partitions, []);
        assert_eq!(servers[&1].partitions.len(), 6);
        // A single server keeps its partitions.
        let mut alone = BTreeMap::from([(2, ServerLoad { drains: true, ..server(&loads) })]);
        assert_eq!(run_all_moves(&mut alone), 0);
    }

    #[test]
    fn partitions_that_may_not_move_are_not_moved() {
        let mut servers = BTreeMap::from([(1, server(&[(0, 900.0), (1, 900.0)])), (2, server(&[]))]);
        servers.values_mut().flat_map(|server| &mut server.partitions).for_each(|load| load.may_move = false);
        assert_eq!(plan(&servers, 2), []);
    }

    #[test]
    fn unowned_partitions_are_spread_over_all_servers() {
        let mut counts = BTreeMap::new();
        for partition in 0..1024 {
            *counts.entry(claimant(partition, 1..=4).unwrap()).or_insert(0) += 1;
        }
        assert_eq!(counts.len(), 4);
        assert!(counts.values().all(|count| (200..320).contains(count)), "{counts:?}");
        assert_eq!(claimant(1, std::iter::empty()), None);
    }

    #[test]
    fn the_last_server_claims_although_it_drains() {
        let own = Life { host: 2, epoch: 7 };
        let claims = |servers: &[(u16, bool)]| {
            let claimants = claimants(servers.iter().copied());
            (0..64).filter(|partition| should_claim((*partition, None), own, false, &claimants)).count()
        };
        assert_eq!(claims(&[(1, false), (2, true)]), 0);
        assert_eq!(claims(&[(2, true)]), 64);
        assert!((1..64).contains(&claims(&[(1, true), (2, true)])));
        let claimants = claimants([(1, false), (2, true)].into_iter());
        assert!(!should_claim((3, None), own, true, &claimants), "the server that does not drain claims it");
    }
}
