//! `aquifer status`: shows daemons, free memory and running programs.

use std::path::Path;
use std::process::ExitCode;

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
use crate::settings::DirectorySettings;
use crate::state::StateDir;

/// Exit code of `aquifer status` if a daemon of the cluster does not run.
const EXIT_DEGRADED: u8 = 3;
/// Exit code of `aquifer status` if no cluster is up.
const EXIT_NO_CLUSTER: u8 = 4;

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
    /// Whether a directory has answered.
    #[serde(skip)]
    has_records: bool,
    /// How to give this cluster a command.
    #[serde(skip)]
    command: String,
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
    let status = collect(state, arguments)?;
    if arguments.json {
        say_line!("{}", serde_json::to_string_pretty(&status)?);
    } else {
        say!("{}", text::to_text(&status));
    }
    Ok(ExitCode::from(status.exit_code()))
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

    /// Whether a daemon runs here, or an agent or a directory has answered.
    fn has_cluster(&self) -> bool {
        self.daemons.iter().any(|daemon| daemon.is_running) || self.agent.is_some() || self.has_records
    }

    /// Whether a daemon of the cluster does not run.
    fn has_missing_daemons(&self) -> bool {
        self.daemons.iter().any(|daemon| !daemon.is_running)
    }
}

fn collect(state: &StateDir, arguments: &StatusArguments) -> Result<Status, Box<dyn std::error::Error>> {
    let agent_socket = &*arguments.agent.socket(state);
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
    let is_given = arguments.directory != DirectorySettings::default();
    let settings =
        if is_given { Some(&arguments.directory) } else { config.as_ref().map(|config| &config.directory) };
    let location = settings.map(DirectoryLocation::new).transpose()?;
    // An external directory is queried only if a daemon of the cluster runs.
    let is_queried = |location: &DirectoryLocation| {
        if is_given {
            true
        } else if location.is_own() {
            is_running("directory")
        } else {
            daemons.iter().any(|daemon| daemon.is_running)
        }
    };
    let records = location.filter(is_queried).map(|location| read_records(state, &location));
    let records = records.transpose().unwrap_or_else(|error| {
        problems.push(error);
        None
    });
    let has_records = records.is_some();
    let (nodes, heaps, agents) = records.unwrap_or_default();
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
        has_records,
        command: state.command(),
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

#[cfg(test)]
mod golden_tests;
mod text;
