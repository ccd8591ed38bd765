//! The servers of a cache and their partitions, as `aquifer cache status --json` prints them.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::cluster::SERVERS;
use super::partitions::PARTITIONS;

/// The servers of a cache.
#[derive(Clone, Debug, Deserialize)]
pub struct CacheStatus {
    without_server: Vec<usize>,
    pub servers: Vec<ServerStatus>,
    silent: BTreeMap<u16, String>,
}

/// A server in [`CacheStatus`].
#[derive(Clone, Debug, Deserialize)]
pub struct ServerStatus {
    /// The server's number in the cache.
    pub server: u16,
    clients: Vec<String>,
    partitions: Vec<PartitionStatus>,
    /// Partitions that other servers have handed over to this one.
    received: u64,
}

/// A partition in [`CacheStatus`].
#[derive(Clone, Copy, Debug, Deserialize)]
struct PartitionStatus {
    partition: usize,
    items: u64,
    requests_per_s: f64,
    moves: bool,
}

/// A requested move of a partition.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Order {
    pub partition: usize,
    /// Number of the server that owns the partition.
    pub from: u16,
    /// Number of the target server.
    pub to: u16,
}

impl CacheStatus {
    /// Whether all servers answer and each partition has a server.
    pub fn is_whole(&self) -> bool {
        self.servers.len() == SERVERS && self.without_server.is_empty() && self.silent.is_empty()
    }

    /// The number of the server with this port.
    pub fn number_at(&self, port: u16) -> Option<u16> {
        let end = format!(":{port}");
        let has_port = |server: &&ServerStatus| server.clients.iter().any(|at| at.ends_with(&end));
        self.servers.iter().find(has_port).map(|server| server.server)
    }

    /// The number of the server that owns a partition; `None` while the partition moves.
    pub fn owner(&self, partition: usize) -> Option<u16> {
        let is_here = |one: &PartitionStatus| one.partition == partition && !one.moves;
        let mut owners = self.servers.iter().filter(|server| server.partitions.iter().any(is_here));
        owners.next().map(|server| server.server)
    }

    /// The server with the fewest requests, except `other_than`.
    pub fn least_loaded(&self, other_than: u16) -> Option<u16> {
        let others = self.servers.iter().filter(|server| server.server != other_than);
        let least = others.min_by(|one, other| one.requests_per_s().total_cmp(&other.requests_per_s()));
        least.map(|server| server.server)
    }

    /// The move of the most requested partition of the most loaded server to the least loaded one.
    /// Partitions in `moved` stay.
    pub fn hottest(&self, moved: &[usize]) -> Option<Order> {
        let load = |server: &&ServerStatus| server.requests_per_s();
        let source = self.servers.iter().max_by(|one, other| load(one).total_cmp(&load(other)))?;
        let movable = source.partitions.iter().filter(|one| !one.moves && !moved.contains(&one.partition));
        let hottest = movable.max_by(|one, other| one.requests_per_s.total_cmp(&other.requests_per_s))?;
        let (partition, from) = (hottest.partition, source.server);
        Some(Order { partition, from, to: self.least_loaded(from)? })
    }

    /// Moves that were made since the servers started.
    pub fn moves(&self) -> u64 {
        self.servers.iter().map(|server| server.received).sum()
    }

    /// Items of each partition.
    pub fn items(&self) -> Vec<u64> {
        let mut items = vec![0; PARTITIONS];
        for partition in self.servers.iter().flat_map(|server| &server.partitions) {
            items[partition.partition] += partition.items;
        }
        items
    }
}

impl ServerStatus {
    fn requests_per_s(&self) -> f64 {
        self.partitions.iter().map(|partition| partition.requests_per_s).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A status of servers, each with its partitions and their requests per second.
    fn status(servers: &[(u16, &[(usize, f64)])]) -> CacheStatus {
        let partition = |(partition, requests_per_s): &(usize, f64)| PartitionStatus {
            partition: *partition,
            items: 2,
            requests_per_s: *requests_per_s,
            moves: false,
        };
        let server = |(server, partitions): &(u16, &[(usize, f64)])| ServerStatus {
            server: *server,
            clients: vec![format!("tcp:127.0.0.1:{}", 7000 + server)],
            partitions: partitions.iter().map(partition).collect(),
            received: 3,
        };
        let servers = servers.iter().map(server).collect();
        CacheStatus { without_server: Vec::new(), servers, silent: BTreeMap::new() }
    }

    #[test]
    fn the_hottest_partition_moves_to_the_least_loaded_server() {
        let status = status(&[(1, &[(4, 9.0), (5, 8.0)]), (2, &[(6, 10.0)]), (3, &[(7, 2.0)])]);
        assert_eq!(status.hottest(&[]), Some(Order { partition: 4, from: 1, to: 3 }));
        assert_eq!(status.hottest(&[4]), Some(Order { partition: 5, from: 1, to: 3 }));
        assert_eq!(status.hottest(&[4, 5]), None);
        assert_eq!((status.owner(6), status.owner(8)), (Some(2), None));
        assert_eq!((status.number_at(7002), status.number_at(70)), (Some(2), None));
        assert_eq!((status.moves(), status.items()[4], status.items()[8]), (9, 2, 0));
    }

    #[test]
    fn the_status_that_the_command_prints_is_read() {
        let text = r#"{"name":"main","partitions":1,"without_server":[0],"silent":{"2":"gone"},"servers":[
            {"server":1,"clients":["tcp:127.0.0.1:7"],"memory_bytes":1,"used_bytes":0,"drains":false,
            "partitions":[{"partition":0,"items":1,"bytes":2,"requests_per_s":0.5,"moves":true}],
            "given":0,"received":4}]}"#;
        let status: CacheStatus = serde_json::from_str(text).unwrap();
        assert!(!status.is_whole());
        assert_eq!((status.owner(0), status.moves(), status.items()[0]), (None, 4, 1));
    }
}
