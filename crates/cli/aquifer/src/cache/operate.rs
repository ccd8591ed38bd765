//! `aquifer cache status`, `move`, `balance` and `drain`.

use std::collections::BTreeMap;
use std::error::Error;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use aquifer_cache_cluster::channel::{Access, ask_at};
use aquifer_cache_cluster::records::{CacheKey, Registry, ServerRecord};
use aquifer_cache_cluster::wire::{Answer, Ask, PartitionStatus, ServerStatus};
use aquifer_ipc::size::ByteSize;
use serde::Serialize;

use super::arguments::{CacheCommand, ClusterChoice};
use super::cluster::load_key;
use crate::Outcome;
use crate::cluster::location::DirectoryLocation;
use crate::say::say_line;
use crate::state::StateDir;

/// Interval between checks whether a server has drained.
const DRAIN_CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// Checks for each line of progress that is printed: one a second.
const CHECKS_PER_LINE: u32 = 5;
/// Number of partitions that are shown as the hottest.
const HOTTEST: usize = 5;
const UNEXPECTED_ANSWER: &str = "the server sent an unexpected answer; use the same version everywhere";

/// The status of a cache, as `aquifer cache status --json` prints it.
#[derive(Debug, Serialize)]
struct CacheStatus {
    /// The name of the cache.
    name: String,
    /// The number of partitions.
    partitions: usize,
    /// Partitions that no answering server owns.
    without_server: Vec<usize>,
    /// The servers that have answered.
    servers: Vec<ServerStatus>,
    /// Servers that have not answered, with the reason.
    silent: BTreeMap<u16, String>,
}

/// The servers of a cache, and the access to them.
struct Cache {
    servers: BTreeMap<u16, ServerRecord>,
    partitions: usize,
    access: Access,
}

/// Executes a command.
pub fn operate(state: &StateDir, command: &CacheCommand) -> Outcome {
    match command {
        CacheCommand::Status { cluster, json } => status(&Cache::find(state, cluster)?, *json),
        CacheCommand::Move { cluster, partition, to } => {
            move_to(&Cache::find(state, cluster)?, *partition, *to)
        }
        CacheCommand::Balance { cluster } => balance(&Cache::find(state, cluster)?),
        CacheCommand::Drain { cluster, server, undo } => drain(&Cache::find(state, cluster)?, *server, *undo),
    }
}

impl Cache {
    fn find(state: &StateDir, cluster: &ClusterChoice) -> Result<Self, Box<dyn Error>> {
        let directory = DirectoryLocation::new(&cluster.directory)?.connect(state)?;
        let registry = Registry::new(directory, &cluster.name);
        let servers = registry.servers()?;
        if servers.is_empty() {
            let why = format!(
                "no server of a cache \"{}\" is in this directory: start one with \
                    `aquifer cache --directory PLACE`",
                cluster.name
            );
            return Err(why.into());
        }
        let (entries, _) = registry.list()?;
        let partitions = entries
            .iter()
            .filter(|entry| matches!(registry.parse_key(&entry.key), Some(CacheKey::Partition(_))))
            .count();
        let access = Access { cache: cluster.name.clone(), key: load_key(state, cluster)?, encrypt: true };
        Ok(Self { servers, partitions, access })
    }

    fn ask(&self, server: &ServerRecord, ask: &Ask) -> Result<Answer, String> {
        ask_at(server.address, &self.access, ask).map_err(|error| error.to_string())
    }

    fn server(&self, number: u16) -> Result<&ServerRecord, String> {
        self.servers.get(&number).ok_or_else(|| {
            let numbers: Vec<_> = self.servers.keys().map(u16::to_string).collect();
            format!("there is no server {number}: the servers are {}", numbers.join(", "))
        })
    }

    fn status(&self) -> CacheStatus {
        let (mut servers, mut silent) = (Vec::new(), BTreeMap::new());
        for (number, record) in &self.servers {
            match self.ask(record, &Ask::Status) {
                Ok(Answer::Status(status)) => servers.push(*status),
                Ok(_) => drop(silent.insert(*number, "it sent an unexpected answer".to_owned())),
                Err(why) => drop(silent.insert(*number, why)),
            }
        }
        let mut without_server: Vec<usize> = (0..self.partitions).collect();
        for partition in servers.iter().flat_map(|server: &ServerStatus| &server.partitions) {
            without_server.retain(|other| *other != partition.partition);
        }
        let (name, partitions) = (self.access.cache.clone(), self.partitions);
        CacheStatus { name, partitions, without_server, servers, silent }
    }
}

fn status(cache: &Cache, json: bool) -> Outcome {
    let status = cache.status();
    if json {
        say_line!("{}", serde_json::to_string_pretty(&status)?);
    } else {
        show(&status);
    }
    let is_whole = status.silent.is_empty() && status.without_server.is_empty();
    Ok(if is_whole { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn show(status: &CacheStatus) {
    say_line!("cache {}: {} partitions on {} servers", status.name, status.partitions, status.servers.len());
    let clients: Vec<String> = status.servers.iter().map(|server| server.clients.join(" ")).collect();
    let width = clients.iter().map(String::len).max().unwrap_or(0).max("clients".len());
    say_line!(
        "{:>6}  {:<width$}  {:>10}  {:>10}  {:>10}  {:>9}  {:>12}",
        "server",
        "clients",
        "partitions",
        "used",
        "memory",
        "items",
        "requests/s"
    );
    for (server, clients) in status.servers.iter().zip(&clients) {
        let items: u64 = server.partitions.iter().map(|partition| partition.items).sum();
        say_line!(
            "{:>6}  {clients:<width$}  {:>10}  {:>10}  {:>10}  {items:>9}  {:>12.0}{}",
            server.server,
            server.partitions.len(),
            ByteSize(server.used_bytes).to_string(),
            ByteSize(server.memory_bytes).to_string(),
            rate(server).max(0.0),
            if server.drains { "  drains" } else { "" },
        );
    }
    let mut hottest: Vec<(&PartitionStatus, u16)> = status
        .servers
        .iter()
        .flat_map(|server| server.partitions.iter().map(|partition| (partition, server.server)))
        .filter(|(partition, _)| partition.requests_per_s >= 1.0)
        .collect();
    hottest.sort_by(|(one, _), (other, _)| other.requests_per_s.total_cmp(&one.requests_per_s));
    if !hottest.is_empty() {
        let shown = hottest.iter().take(HOTTEST).map(|(partition, server)| {
            format!("{} on server {server} ({:.0}/s)", partition.partition, partition.requests_per_s)
        });
        say_line!("hottest partitions: {}", shown.collect::<Vec<_>>().join(", "));
    }
    let moving = status.servers.iter().flat_map(|server| &server.partitions).filter(|one| one.moves);
    let moving: Vec<String> = moving.map(|partition| partition.partition.to_string()).collect();
    if !moving.is_empty() {
        say_line!("moving now: {}", moving.join(", "));
    }
    if !status.without_server.is_empty() {
        say_line!("partitions without a server: {}", status.without_server.len());
    }
    for server in status.servers.iter().filter(|server| server.drains) {
        say_line!(
            "server {0} drains: it has partitions only if no other server can have them; \
             `aquifer cache drain {0} --undo` lets it have partitions again",
            server.server
        );
    }
    for (server, why) in &status.silent {
        say_line!("server {server} does not answer: {why}");
    }
}

fn rate(server: &ServerStatus) -> f64 {
    server.partitions.iter().map(|partition| partition.requests_per_s).sum()
}

fn move_to(cache: &Cache, partition: usize, to: u16) -> Outcome {
    cache.server(to)?;
    let status = cache.status();
    let has = |server: &&ServerStatus| server.partitions.iter().any(|one| one.partition == partition);
    let source = status.servers.iter().find(has).ok_or_else(|| {
        let last = cache.partitions.saturating_sub(1);
        if partition <= last {
            format!("no server has partition {partition} at present: servers take it within seconds")
        } else {
            format!("there is no partition {partition}: partitions have numbers from 0 to {last}")
        }
    })?;
    if source.server == to {
        say_line!("server {to} has partition {partition} already");
        return Ok(ExitCode::SUCCESS);
    }
    let began = Instant::now();
    match cache.ask(cache.server(source.server)?, &Ask::Move { partition, to })? {
        Answer::Done => {
            let took = began.elapsed().as_secs_f64() * 1000.0;
            say_line!(
                "partition {partition} has moved from server {} to {to} in {took:.0} ms",
                source.server
            );
            Ok(ExitCode::SUCCESS)
        }
        Answer::Declined(why) => Err(format!("partition {partition} has not moved: {why}").into()),
        _ => Err(UNEXPECTED_ANSWER.into()),
    }
}

fn balance(cache: &Cache) -> Outcome {
    let first = cache.servers.values().next().ok_or("the cache has no servers")?;
    match cache.ask(first, &Ask::Balance)? {
        Answer::Moves(moves) if moves.is_empty() => {
            let without_server = cache.status().without_server.len();
            if without_server > 0 {
                return Err(format!("{without_server} partitions have no server at present").into());
            }
            say_line!("all servers have about the same load");
        }
        Answer::Moves(moves) => {
            for (partition, to) in &moves {
                say_line!("partition {partition} to server {to}");
            }
            say_line!("moved {} partitions", moves.len());
        }
        Answer::Declined(why) => return Err(why.into()),
        _ => return Err(UNEXPECTED_ANSWER.into()),
    }
    Ok(ExitCode::SUCCESS)
}

fn drain(cache: &Cache, number: u16, undo: bool) -> Outcome {
    let server = cache.server(number)?;
    match cache.ask(server, &Ask::Drain { drains: !undo })? {
        Answer::Done => {}
        Answer::Declined(why) => return Err(why.into()),
        _ => return Err(UNEXPECTED_ANSWER.into()),
    }
    if undo {
        say_line!("server {number} may have partitions again");
        return Ok(ExitCode::SUCCESS);
    }
    let others = cache.servers.values().filter(|other| other.server != number && !other.drains).count();
    if others == 0 {
        return Err(format!(
            "no other server can have the partitions of server {number}: start one first; it drains when \
                there is one (`aquifer cache drain {number} --undo` takes that back)"
        )
        .into());
    }
    let mut checks = 0;
    loop {
        let Answer::Status(status) = cache.ask(server, &Ask::Status)? else {
            return Err(UNEXPECTED_ANSWER.into());
        };
        let left = status.partitions.len();
        if left == 0 {
            say_line!(
                "server {number} has no partitions: it can be stopped; `aquifer cache drain {number} --undo` \
                 lets it have partitions again"
            );
            return Ok(ExitCode::SUCCESS);
        }
        if checks % CHECKS_PER_LINE == 0 {
            say_line!("{left} partitions are left");
        }
        checks += 1;
        std::thread::sleep(DRAIN_CHECK_INTERVAL);
    }
}
