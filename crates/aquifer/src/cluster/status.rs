//! `aquifer status`: shows daemons, free memory and running programs.

use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;

use aquifer_arena::calls::Totals;
use aquifer_directory::names::{self, AgentRecord, HeapsRecord, NodeRecord};
use aquifer_objects::service::report::HeapReport;
use aquifer_report::AgentStatus;
use serde::Serialize;

use super::config::ClusterConfig;
use super::daemon::Daemon;
use super::launch::{LaunchError, process_of};
use super::location::DirectoryLocation;
use super::segment::{self, SegmentsStatus};
use super::up::lost_socket;
use super::{heap, key};
use crate::Outcome;
use crate::cli::StatusArguments;
use crate::say::{say, say_line};
use crate::state::StateDir;
use aquifer_ipc::size::ByteSize;

/// Exit code of `aquifer status` if a daemon of the cluster does not run.
const EXIT_DEGRADED: u8 = 3;

/// Less shared memory than this is not shown: each process shares a little with the agent.
const SHOWN_SHARED_BYTES_MIN: u64 = 1 << 20;

/// What `aquifer status --json` prints.
#[derive(Debug, Serialize)]
struct Status {
    /// The state folder.
    state: String,
    /// Whether there is a cluster and all its daemons run.
    up: bool,
    /// Whether the agent's sockets exist.
    #[serde(skip)]
    is_reachable: bool,
    #[serde(rename = "parts")]
    daemons: Vec<DaemonStatus>,
    nodes: Vec<NodeStatus>,
    heaps: Vec<HeapsStatus>,
    agents: Vec<AgentRecord>,
    /// The status of this machine's agent and of the programs that it serves.
    agent: Option<AgentStatus>,
    /// The segments of this machine, if there are any or were.
    segments: Option<SegmentsStatus>,
    /// Messages about what could not be determined.
    problems: Vec<String>,
}

#[derive(Debug, Serialize)]
struct DaemonStatus {
    name: String,
    #[serde(rename = "alive")]
    is_running: bool,
    pid: Option<u32>,
}

#[derive(Debug, Serialize)]
struct NodeStatus {
    id: u16,
    address: String,
    memory_bytes: u64,
    /// Requested size.
    memory_bytes_wanted: u64,
    /// Upper bound of the requested size.
    memory_bytes_max: u64,
    /// Free memory, as the agent reports it.
    free_bytes: Option<u64>,
}

/// A service of heaps.
#[derive(Debug, Serialize)]
struct HeapsStatus {
    node: u16,
    address: String,
    /// Memory that its heaps may take.
    memory_bytes: u64,
    /// What each heap holds, as the service reports it.
    heaps: Option<Vec<HeapReport>>,
}

/// Prints the status.
///
/// # Errors
/// If the stored configuration or a daemon's lock cannot be read.
pub fn status(state: &StateDir, arguments: &StatusArguments) -> Outcome {
    let status = collect(state, &arguments.agent.socket(state))?;
    if arguments.json {
        say_line!("{}", serde_json::to_string_pretty(&status)?);
    } else {
        say!("{}", to_text(&status));
    }
    Ok(if status.is_degraded() { ExitCode::from(EXIT_DEGRADED) } else { ExitCode::SUCCESS })
}

impl Status {
    /// Whether programs cannot rely on the cluster.
    fn is_degraded(&self) -> bool {
        self.has_missing_daemons() || !self.is_reachable
    }

    /// Whether a daemon of the cluster does not run.
    fn has_missing_daemons(&self) -> bool {
        self.daemons.iter().any(|daemon| !daemon.is_running)
    }
}

fn collect(state: &StateDir, agent_socket: &Path) -> Result<Status, Box<dyn std::error::Error>> {
    let config = ClusterConfig::load(state)?;
    let mut daemons = Vec::new();
    for daemon in config.iter().flat_map(ClusterConfig::daemons) {
        daemons.push(daemon_status(state, daemon)?);
    }
    let mut problems = Vec::new();
    let lost_sockets = config.iter().flat_map(|config| config.lost_sockets(state));
    let is_running =
        |name: &str| daemons.iter().any(|daemon: &DaemonStatus| daemon.name == name && daemon.is_running);
    if is_running("agent") {
        problems.extend(lost_sockets.map(|socket| lost_socket(&socket)));
    }
    let is_reachable = problems.is_empty();
    let location = config.as_ref().map(|config| DirectoryLocation::new(&config.directory)).transpose()?;
    // An external directory is queried only if a daemon of the cluster runs.
    let is_queried = |location: &DirectoryLocation| {
        if location.is_own() {
            is_running("directory")
        } else {
            daemons.iter().any(|daemon| daemon.is_running)
        }
    };
    let records = location.filter(is_queried).map(|location| read_records(state, &location));
    let (nodes, heaps, agents) = records
        .transpose()
        .unwrap_or_else(|error| {
            problems.push(error);
            None
        })
        .unwrap_or_default();
    // The agent of another user, or one that was started without `aquifer up`.
    let is_separate = agent_socket != state.agent_socket() || config.is_none() && agent_socket.exists();
    let agent = if is_running("agent") || is_separate {
        agent_status(agent_socket).unwrap_or_else(|error| {
            problems.push(format!("the agent's status is not available: {error}"));
            None
        })
    } else {
        None
    };
    let segments = agent.as_ref().and_then(|_| segment::report(agent_socket).ok().flatten());
    let free_bytes = |id| {
        agent.iter().flat_map(|agent| &agent.nodes).find(|node| node.id == id).map(|node| node.free_bytes)
    };
    let node_status = |node: NodeRecord| NodeStatus {
        id: node.id,
        address: node.address,
        memory_bytes: node.memory_bytes,
        memory_bytes_wanted: node.requested_memory_bytes,
        memory_bytes_max: node.memory_bytes_max,
        free_bytes: free_bytes(node.id),
    };
    let mut nodes: Vec<_> = nodes.into_iter().map(node_status).collect();
    nodes.sort_by_key(|node| node.id);
    Ok(Status {
        state: state.path().display().to_string(),
        up: !daemons.is_empty() && daemons.iter().all(|daemon| daemon.is_running),
        is_reachable,
        daemons,
        nodes,
        heaps,
        agents,
        agent,
        segments,
        problems,
    })
}

fn daemon_status(state: &StateDir, daemon: Daemon) -> Result<DaemonStatus, LaunchError> {
    let process = process_of(state, daemon)?;
    Ok(DaemonStatus {
        name: daemon.to_string(),
        is_running: process.is_some(),
        pid: process.map(|process| process.pid),
    })
}

/// What the directory knows.
type Records = (Vec<NodeRecord>, Vec<HeapsStatus>, Vec<AgentRecord>);

/// Reads the records of nodes, services of heaps and agents from the directory.
///
/// # Errors
/// The message for `Status::problems`.
fn read_records(state: &StateDir, location: &DirectoryLocation) -> Result<Records, String> {
    let directory = location.connect(state).map_err(|error| error.to_string())?;
    let nodes = names::nodes(&*directory).map_err(|error| error.to_string())?;
    let services = names::heaps(&*directory).map_err(|error| error.to_string())?;
    let agents = names::agents(&*directory).map_err(|error| error.to_string())?;
    let key = key::load(&state.key_file()).ok();
    let status = |service: HeapsRecord| HeapsStatus {
        heaps: key.as_ref().and_then(|key| heap::reports(&service, key)),
        node: service.node,
        address: service.address,
        memory_bytes: service.memory_bytes,
    };
    Ok((nodes, services.into_iter().map(status).collect(), agents))
}

fn agent_status(socket: &Path) -> std::io::Result<Option<AgentStatus>> {
    aquifer_host::client::status(socket)
}

fn to_text(status: &Status) -> String {
    let mut text = String::new();
    // Writing to a String does not fail.
    let _written = write_text(&mut text, status);
    text
}

fn write_text(text: &mut String, status: &Status) -> std::fmt::Result {
    let running = status.daemons.iter().filter(|daemon| daemon.is_running).count();
    if running == 0 && status.agent.is_none() {
        writeln!(text, "No cluster is up in {}. Start one with: aquifer up", status.state)?;
        return status.problems.iter().try_for_each(|problem| writeln!(text, "{problem}"));
    }
    if status.daemons.is_empty() {
        writeln!(text, "An agent of this host serves you")?;
    } else if status.has_missing_daemons() {
        let missing = status.daemons.len() - running;
        let (count, state) = (status.daemons.len(), &status.state);
        writeln!(
            text,
            "{missing} of {count} daemons of the cluster in {state} do not run. Start them with: aquifer up"
        )?;
    } else {
        writeln!(text, "The cluster is up, in {}", status.state)?;
    }
    status.daemons.iter().try_for_each(|daemon| write_daemon(text, status, daemon))?;
    if let Some(agent) = &status.agent {
        write_agent(text, agent)?;
    }
    let is_used =
        |report: &&SegmentsStatus| !report.segments.is_empty() || report.totals != Totals::default();
    if let Some(report) = status.segments.as_ref().filter(is_used) {
        writeln!(text, "  {}", segment::summary(report))?;
    }
    status.problems.iter().try_for_each(|problem| writeln!(text, "  {problem}"))
}

fn write_daemon(text: &mut String, status: &Status, daemon: &DaemonStatus) -> std::fmt::Result {
    match daemon.pid {
        Some(pid) => write!(text, "  {:<10} running  process {pid:<8}", daemon.name)?,
        None => write!(text, "  {:<10} dead", daemon.name)?,
    }
    let is_of_daemon = |node: &&NodeStatus| daemon.name == Daemon::Node(node.id).to_string();
    if let Some(node) = status.nodes.iter().find(is_of_daemon).filter(|_| daemon.is_running) {
        write!(text, " lends {}", ByteSize(node.memory_bytes))?;
        if node.memory_bytes != node.memory_bytes_wanted {
            write!(text, " (requested: {})", ByteSize(node.memory_bytes_wanted))?;
        }
        if let Some(free) = node.free_bytes {
            write!(text, ", {} free", ByteSize(free))?;
        }
    }
    let is_of_daemon = |heaps: &&HeapsStatus| daemon.name == Daemon::Heaps(heaps.node).to_string();
    if let Some(service) = status.heaps.iter().find(is_of_daemon).filter(|_| daemon.is_running) {
        let memory = ByteSize(service.memory_bytes);
        match &service.heaps {
            Some(heaps) => {
                let held = ByteSize(heaps.iter().map(|heap| heap.held_bytes).sum());
                let objects: u64 = heaps.iter().map(|heap| heap.objects).sum();
                write!(text, " heaps take {held} of {memory}, objects: {objects}")?;
            }
            None => write!(text, " heaps may take {memory}")?,
        }
    }
    if let (true, Some(agent)) = (daemon.name == Daemon::Agent.to_string(), &status.agent) {
        write!(text, " mempool {} of {}", ByteSize(agent.mempool_used_bytes), ByteSize(agent.mempool_bytes))?;
    }
    writeln!(text)
}

fn write_agent(text: &mut String, agent: &AgentStatus) -> std::fmt::Result {
    for tenant in &agent.tenants {
        writeln!(
            text,
            "  user {}: runs: {}, processes: {}, {} resident, {} in the mempool, {} on memory nodes, {} \
                faults",
            tenant.tenant,
            tenant.runs,
            tenant.processes,
            ByteSize(tenant.resident_bytes),
            ByteSize(tenant.mempool_bytes),
            ByteSize(tenant.remote_bytes),
            tenant.faults,
        )?;
    }
    for user in &agent.users {
        writeln!(
            text,
            "  user {}: {} in extents, {} requests with wrong keys",
            user.tenant,
            ByteSize(user.allocated_bytes),
            user.refused
        )?;
    }
    for session in &agent.sessions {
        writeln!(
            text,
            "  session of process {:<8} {} in {} extents, {} in stock, {} requests",
            session.pid,
            ByteSize(session.bytes),
            session.extents,
            ByteSize(session.stocked_bytes),
            session.requests
        )?;
    }
    for run in &agent.runs {
        writeln!(
            text,
            "  run {}: {} of {} resident, {} in the mempool, {} on memory nodes, {} faults, processes: {}",
            run.name,
            ByteSize(run.resident_bytes),
            ByteSize(run.limit_bytes),
            ByteSize(run.mempool_bytes),
            ByteSize(run.remote_bytes),
            run.faults,
            run.processes,
        )?;
        for program in &run.programs {
            writeln!(
                text,
                "    process {:<8} {} resident, {} faults, {} pages evicted, {} pages read from memory nodes",
                program.pid,
                ByteSize(program.held_bytes),
                program.faults,
                program.evictions,
                program.remote_reads,
            )?;
        }
        for process in &run.unpaged {
            writeln!(
                text,
                "    process {:<8} {} is not paged: {}",
                process.pid, process.name, process.reason
            )?;
        }
        if let Some(reason) = &run.short_of_room {
            writeln!(text, "    waits for room: {reason}")?;
        }
        if run.shared_bytes >= SHOWN_SHARED_BYTES_MIN {
            writeln!(text, "    {} in shared memory, which is not paged", ByteSize(run.shared_bytes))?;
        }
        if run.replicas > 1 {
            match run.degraded_slabs {
                0 => writeln!(text, "    each page has {} replicas", run.replicas)?,
                slabs => {
                    writeln!(text, "    degraded: {slabs} slabs have fewer than {} replicas", run.replicas)?
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod golden_tests;
