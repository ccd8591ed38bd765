//! `aquifer status`: shows daemons, free memory and running programs.

use std::process::ExitCode;
use std::time::Duration;

use aquifer_directory::names::{AgentRecord, NodeRecord};
use aquifer_host::client::status_within;
use aquifer_objects::service::report::HeapReport;
use aquifer_report::AgentStatus;
use serde::Serialize;

use super::config::ClusterConfig;
use super::daemon::Daemon;
use super::location::DirectoryLocation;
use super::running::{known_daemons, running_daemon, running_daemons};
use super::segment::{self, SegmentsStatus};
use super::up::lost_socket;
use crate::Outcome;
use crate::cli::StatusArguments;
use crate::say::{say, say_line};
use crate::settings::DirectorySettings;
use crate::state::StateDir;
use records::{Reader, Records};

/// Exit code of `aquifer status` if a daemon of the cluster does not run.
const EXIT_DEGRADED: u8 = 3;
/// Exit code of `aquifer status` if no cluster is up.
const EXIT_NO_CLUSTER: u8 = 4;
/// Timeout of answers from daemons of this machine that are known to run. An agent waits for nodes
/// before it answers a status request.
const LOCAL_TIMEOUT: Duration = Duration::from_secs(8);
/// Timeout of answers from other daemons.
const REMOTE_TIMEOUT: Duration = Duration::from_millis(1800);

/// The status of a cluster, as `aquifer status --json` prints it.
#[derive(Debug, Serialize)]
struct Status {
    /// The state folder.
    state: String,
    /// Whether there is a cluster and all its daemons run.
    up: bool,
    /// Whether the agent's sockets exist.
    #[serde(skip)]
    is_reachable: bool,
    /// The location of a directory that has answered and has no record of a cluster.
    #[serde(skip)]
    empty_directory: Option<String>,
    /// The start of a command line for this cluster.
    #[serde(skip)]
    command: String,
    #[serde(rename = "parts")]
    daemons: Vec<DaemonStatus>,
    nodes: Vec<NodeStatus>,
    /// Nodes that have ended or cannot be reached, and were not stopped in order.
    missing_nodes: Vec<MissingNode>,
    heaps: Vec<HeapsStatus>,
    agents: Vec<AgentRecord>,
    /// The status of this machine's agent and of the programs that it serves.
    agent: Option<AgentStatus>,
    /// The segments of this machine, if there are any or were.
    segments: Option<SegmentsStatus>,
    /// Messages about information that could not be obtained.
    problems: Vec<String>,
}

#[derive(Debug, Serialize)]
struct DaemonStatus {
    name: String,
    #[serde(rename = "alive")]
    is_running: bool,
    pid: Option<u32>,
    /// Whether `aquifer up` has started the process, or will start it.
    #[serde(rename = "by_up")]
    is_of_up: bool,
}

/// A node that has left the directory.
#[derive(Debug, Serialize)]
struct MissingNode {
    id: u16,
    /// The time when it left, in seconds since 1970, if the agent has seen that.
    since_s: Option<u64>,
}

#[derive(Debug, Serialize)]
struct NodeStatus {
    id: u16,
    /// The node's address; `None` if the directory does not answer.
    address: Option<String>,
    memory_bytes: u64,
    /// Requested size.
    memory_bytes_wanted: u64,
    /// Memory in use that the node recalls: hosts move their pages off it.
    recalled_bytes: u64,
    /// Upper bound of the requested size.
    memory_bytes_max: u64,
    /// Free memory, as the agent reports it.
    free_bytes: Option<u64>,
    /// Whether the node lends room on a disk instead of memory.
    is_disk: bool,
}

/// A service of heaps.
#[derive(Debug, Serialize)]
struct HeapsStatus {
    node: u16,
    address: String,
    /// Memory that its heaps may take.
    memory_bytes: u64,
    /// The reports of the service on its heaps; `None` if it does not answer.
    heaps: Option<Vec<HeapReport>>,
}

/// Prints the status.
///
/// # Errors
/// If the stored configuration or a daemon's lock cannot be read.
pub fn status(state: &StateDir, arguments: &StatusArguments) -> Outcome {
    let status = collect(&shown_folder(state)?, arguments)?;
    if arguments.json {
        say_line!("{}", serde_json::to_string_pretty(&status)?);
    } else {
        say!("{}", text::to_text(&status));
    }
    Ok(ExitCode::from(status.exit_code()))
}

/// The state folder that is shown: the folder of the daemons of systemd, if no folder was named and
/// the default one has no cluster.
fn shown_folder(state: &StateDir) -> Result<StateDir, Box<dyn std::error::Error>> {
    let Some(system) = state.system_folder() else { return Ok(state.clone()) };
    let is_used = ClusterConfig::load(state)?.is_some() || !running_daemons(state)?.is_empty();
    Ok(if is_used || running_daemons(&system)?.is_empty() { state.clone() } else { system })
}

impl Status {
    fn exit_code(&self) -> u8 {
        if self.has_missing_daemons() || !self.is_reachable {
            EXIT_DEGRADED
        } else if !self.has_cluster() {
            EXIT_NO_CLUSTER
        } else {
            0
        }
    }

    /// Whether a daemon runs here, or an agent or a directory has answered about a cluster.
    fn has_cluster(&self) -> bool {
        self.daemons.iter().any(|daemon| daemon.is_running) || self.agent.is_some() || self.has_records()
    }

    /// Whether a directory has records of a cluster.
    fn has_records(&self) -> bool {
        !(self.nodes.is_empty()
            && self.missing_nodes.is_empty()
            && self.heaps.is_empty()
            && self.agents.is_empty())
    }

    /// Whether a daemon of the cluster does not run.
    fn has_missing_daemons(&self) -> bool {
        self.daemons.iter().any(|daemon| !daemon.is_running)
    }

    fn is_running(&self, name: &str) -> bool {
        self.daemons.iter().any(|daemon| daemon.name == name && daemon.is_running)
    }
}

fn collect(state: &StateDir, arguments: &StatusArguments) -> Result<Status, Box<dyn std::error::Error>> {
    let config = ClusterConfig::load(state)?;
    let mut status = Status::new(state);
    status.daemons = daemons(state, config.as_ref())?;
    status.up = !status.daemons.is_empty() && status.daemons.iter().all(|daemon| daemon.is_running);
    if status.is_running("agent") {
        let lost_sockets = config.iter().flat_map(|config| config.lost_sockets(state));
        status.problems.extend(lost_sockets.map(|socket| lost_socket(&socket)));
        status.is_reachable = status.problems.is_empty();
    }
    let socket = arguments.agent.socket(state.by_option())?;
    // The cluster's own socket may be the shared one.
    let own_sockets = [Some(state.agent_socket()), config.as_ref().and_then(|it| it.shared_socket.clone())];
    let is_own = own_sockets.contains(&Some(socket.clone()));
    // A dead agent does not answer, although the keeper still has its socket.
    let is_asked = if is_own { status.is_running("agent") } else { socket.exists() };
    let timeout = if is_own { LOCAL_TIMEOUT } else { REMOTE_TIMEOUT };
    let asked = socket.clone();
    let agent_reader = Reader::start(timeout, move || is_asked.then(|| status_within(&asked, timeout)));
    let asked = socket.clone();
    let segments_reader =
        Reader::start(timeout, move || is_asked.then(|| segment::report(&asked).ok().flatten()).flatten());

    let is_given = arguments.directory != DirectorySettings::default();
    let location = if is_given {
        Some(DirectoryLocation::new(&arguments.directory)?)
    } else {
        queried_directory(state, config.as_ref(), &status)?
    };
    let records = location.as_ref().map(|location| Records::read(state, location, &mut status.problems));
    match agent_reader.wait() {
        Some(Some(Ok(agent))) => status.agent = agent,
        Some(Some(Err(error))) => {
            status.problems.push(format!("the agent's status is not available: {error}"));
        }
        Some(None) => {}
        None => status.problems.push("the agent's status is not available: it does not answer".to_owned()),
    }
    // The agent asks the directory for copies of segments.
    let is_directory_silent = matches!(records, Some(None));
    status.segments =
        if is_directory_silent { segments_reader.now() } else { segments_reader.wait() }.flatten();
    // Nodes of another cluster can have the same numbers.
    let is_of_cluster = is_own || status.daemons.is_empty();
    if status.agent.is_some() && !is_of_cluster {
        status
            .problems
            .push(format!("the agent at {} is not of the cluster in this folder", socket.display()));
    }
    let agent = status.agent.as_ref().filter(|_| is_of_cluster);
    let failures = agent.iter().flat_map(|agent| &agent.nodes);
    status.problems.extend(failures.filter_map(|node| {
        let failure = node.failure.as_ref()?;
        Some(format!("the agent cannot use memory node {}: {failure}", node.id))
    }));
    let is_own_directory = location.as_ref().is_some_and(DirectoryLocation::is_own) && config.is_some();
    match records.flatten() {
        Some(records) => {
            status.empty_directory = location.filter(|_| records.is_empty()).map(|it| it.to_string());
            status.missing_nodes = missing_nodes(&records, agent, is_own_directory);
            status.nodes = records.nodes.iter().map(|node| node_status(node, agent)).collect();
            (status.heaps, status.agents) = (records.heaps, records.agents);
        }
        // The directory does not answer: show the nodes that the agent knows.
        None => status.nodes = agent.iter().flat_map(|agent| &agent.nodes).map(node_of_agent).collect(),
    }
    status.nodes.sort_by_key(|node| node.id);
    Ok(status)
}

impl Status {
    /// An empty status.
    fn new(state: &StateDir) -> Self {
        Self {
            state: state.path().display().to_string(),
            up: false,
            is_reachable: true,
            empty_directory: None,
            command: state.command(),
            daemons: Vec::new(),
            nodes: Vec::new(),
            missing_nodes: Vec::new(),
            heaps: Vec::new(),
            agents: Vec::new(),
            agent: None,
            segments: None,
            problems: Vec::new(),
        }
    }
}

/// The daemons of the configuration, and all others that run in the folder.
fn daemons(
    state: &StateDir,
    config: Option<&ClusterConfig>,
) -> Result<Vec<DaemonStatus>, Box<dyn std::error::Error>> {
    let mut daemons = config.map(ClusterConfig::daemons).unwrap_or_default();
    daemons.extend(known_daemons(state)?);
    daemons.sort_unstable();
    daemons.dedup();
    let mut statuses = Vec::new();
    for daemon in daemons {
        let running = running_daemon(state, daemon)?;
        let is_of_cluster = config.is_some_and(|config| config.daemons().contains(&daemon));
        if is_of_cluster || running.is_some() {
            statuses.push(DaemonStatus {
                name: daemon.to_string(),
                is_running: running.is_some(),
                is_of_up: running.as_ref().is_none_or(|running| running.is_of_up),
                pid: running.map(|running| running.process.pid),
            });
        }
    }
    Ok(statuses)
}

/// The directory of the cluster, if a daemon runs that uses it.
fn queried_directory(
    state: &StateDir,
    config: Option<&ClusterConfig>,
    status: &Status,
) -> Result<Option<DirectoryLocation>, Box<dyn std::error::Error>> {
    let is_running = |location: &DirectoryLocation| {
        let daemon = &Daemon::Directory.to_string();
        if location.is_own() {
            status.is_running(daemon)
        } else {
            status.daemons.iter().any(|daemon| daemon.is_running)
        }
    };
    if let Some(config) = config {
        return Ok(Some(DirectoryLocation::new(&config.directory)?).filter(is_running));
    }
    if is_running(&DirectoryLocation::Embedded) {
        return Ok(Some(DirectoryLocation::Embedded));
    }
    if !status.is_running(&Daemon::Agent.to_string()) {
        return Ok(None);
    }
    // An agent that was not started by `aquifer up` has its directory from a file of its own.
    let access = aquifer_host::cluster_access::request_cluster_access(&state.agent_socket());
    let settings = access.ok().and_then(|(_, access)| serde_json::from_str(&access.directory).ok());
    Ok(settings.and_then(|settings| DirectoryLocation::new(&settings).ok()))
}

fn node_status(node: &NodeRecord, agent: Option<&AgentStatus>) -> NodeStatus {
    let known = agent.iter().flat_map(|agent| &agent.nodes).find(|known| known.id == node.id);
    NodeStatus {
        id: node.id,
        address: Some(node.address.clone()),
        memory_bytes: node.memory_bytes,
        memory_bytes_wanted: node.requested_memory_bytes,
        recalled_bytes: node.recalled_bytes,
        memory_bytes_max: node.memory_bytes_max,
        free_bytes: known.map(|known| known.free_bytes),
        is_disk: node.is_disk,
    }
}

/// The status of a node by the agent's report.
fn node_of_agent(node: &aquifer_report::NodeStatus) -> NodeStatus {
    NodeStatus {
        id: node.id,
        address: None,
        memory_bytes: node.memory_bytes,
        memory_bytes_wanted: node.memory_bytes,
        recalled_bytes: 0,
        memory_bytes_max: node.memory_bytes,
        free_bytes: Some(node.free_bytes),
        is_disk: node.is_disk,
    }
}

/// Nodes of which the directory has a record of the memory, and none of the node.
///
/// In a cluster of `aquifer up` such nodes may be of an earlier configuration, so only nodes that
/// the agent has seen count.
fn missing_nodes(records: &Records, agent: Option<&AgentStatus>, is_own: bool) -> Vec<MissingNode> {
    let seen = |id| {
        let missing = agent.iter().flat_map(|agent| &agent.missing_nodes);
        missing.clone().find(|node| node.id == id).map(|node| node.since_s)
    };
    let is_present = |id| records.nodes.iter().any(|node| node.id == id);
    let ids = records.lives.iter().map(|record| record.life.node).filter(|id| !is_present(*id));
    ids.map(|id| MissingNode { id, since_s: seen(id) })
        .filter(|node| !is_own || node.since_s.is_some())
        .collect()
}

#[cfg(test)]
mod golden_tests;
mod records;
mod text;

pub(super) use text::name_of;
