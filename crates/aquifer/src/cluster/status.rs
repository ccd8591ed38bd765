//! `aquifer status`: what is up, how much memory is free, what runs.

use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;

use aquifer_directory::names::{self, AgentRecord, NodeRecord};
use aquifer_host::report::AgentStatus;
use serde::Serialize;

use super::launch::{LaunchError, life_of};
use super::part::Part;
use super::shape::Shape;
use super::source::Source;
use crate::Outcome;
use crate::cli::StatusArguments;
use crate::say::{say, say_line};
use crate::state::StateDir;
use aquifer_ipc::size::ByteSize;

/// All there is to say.
#[derive(Debug, Serialize)]
struct Status {
    state: String,
    /// Whether every part is alive.
    up: bool,
    parts: Vec<PartStatus>,
    nodes: Vec<NodeStatus>,
    agents: Vec<AgentRecord>,
    /// What this machine's agent says of itself and of the programs that it serves.
    agent: Option<AgentStatus>,
    /// What could not be found out, and why.
    problems: Vec<String>,
}

#[derive(Debug, Serialize)]
struct PartStatus {
    name: String,
    alive: bool,
    pid: Option<u32>,
}

#[derive(Debug, Serialize)]
struct NodeStatus {
    id: u16,
    address: String,
    memory_bytes: u64,
    /// What it is asked to lend.
    memory_bytes_wanted: u64,
    /// The most that it could be asked to lend.
    memory_bytes_max: u64,
    /// As the agent sees it.
    free_bytes: Option<u64>,
}

/// Show it.
pub fn status(state: &StateDir, arguments: &StatusArguments) -> Outcome {
    let status = find_out(state, &arguments.agent.socket(state))?;
    if arguments.json {
        say_line!("{}", serde_json::to_string_pretty(&status)?);
    } else {
        say!("{}", in_words(&status));
    }
    Ok(ExitCode::SUCCESS)
}

fn find_out(state: &StateDir, agent_socket: &Path) -> Result<Status, Box<dyn std::error::Error>> {
    let shape = Shape::load(state)?;
    let mut parts = Vec::new();
    for part in shape.iter().flat_map(Shape::parts) {
        parts.push(part_status(state, part)?);
    }
    let mut problems = Vec::new();
    let is_alive = |name: &str| parts.iter().any(|part: &PartStatus| part.name == name && part.alive);
    let source = shape.as_ref().map(|shape| Source::new(&shape.directory)).transpose()?;
    // One that is elsewhere is asked while there is anything that would use it.
    let is_there = |source: &Source| {
        if source.is_own() { is_alive("directory") } else { parts.iter().any(|part| part.alive) }
    };
    let told = source.filter(is_there).map(|source| in_directory(state, &source));
    let (nodes, agents) = told
        .transpose()
        .unwrap_or_else(|error| {
            problems.push(error);
            None
        })
        .unwrap_or_default();
    // Somebody else's, or one that was not started by `aquifer up`: by itself, or as a service.
    let is_single = agent_socket != state.agent_socket() || shape.is_none() && agent_socket.exists();
    let agent = if is_alive("agent") || is_single {
        agent_status(agent_socket).unwrap_or_else(|error| {
            problems.push(format!("the agent does not tell how it is: {error}"));
            None
        })
    } else {
        None
    };
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
        up: !parts.is_empty() && parts.iter().all(|part| part.alive),
        parts,
        nodes,
        agents,
        agent,
        problems,
    })
}

fn part_status(state: &StateDir, part: Part) -> Result<PartStatus, LaunchError> {
    let process = life_of(state, part)?;
    Ok(PartStatus {
        name: part.to_string(),
        alive: process.is_some(),
        pid: process.map(|process| process.pid),
    })
}

fn in_directory(state: &StateDir, source: &Source) -> Result<(Vec<NodeRecord>, Vec<AgentRecord>), String> {
    let directory = source.connect(state).map_err(|error| error.to_string())?;
    let nodes = names::nodes(&*directory).map_err(|error| error.to_string())?;
    let agents = names::agents(&*directory).map_err(|error| error.to_string())?;
    Ok((nodes, agents))
}

fn agent_status(socket: &Path) -> std::io::Result<Option<AgentStatus>> {
    aquifer_host::client::status(socket)
}

fn in_words(status: &Status) -> String {
    let mut text = String::new();
    // Writing to a String does not fail.
    let _written = write_words(&mut text, status);
    text
}

fn write_words(text: &mut String, status: &Status) -> std::fmt::Result {
    if status.parts.iter().all(|part| !part.alive) && status.agent.is_none() {
        writeln!(text, "No cluster is up in {}. Start one with: aquifer up", status.state)?;
        return status.problems.iter().try_for_each(|problem| writeln!(text, "{problem}"));
    }
    let missing = status.parts.iter().filter(|part| !part.alive).count();
    match missing {
        0 if status.parts.is_empty() => writeln!(text, "This host's agent serves you")?,
        0 => writeln!(text, "The cluster is up, in {}", status.state)?,
        _ => writeln!(
            text,
            "Parts of the cluster in {} are dead: {missing}. aquifer up brings them back",
            status.state
        )?,
    }
    for part in &status.parts {
        match part.pid {
            Some(pid) => write!(text, "  {:<10} alive  process {pid:<8}", part.name)?,
            None => write!(text, "  {:<10} dead", part.name)?,
        }
        let node =
            status.nodes.iter().find(|node| part.alive && part.name == Part::Node(node.id).to_string());
        if let Some(node) = node {
            write!(text, " lends {}", ByteSize(node.memory_bytes))?;
            if node.memory_bytes != node.memory_bytes_wanted {
                write!(text, " (asked for {})", ByteSize(node.memory_bytes_wanted))?;
            }
            if let Some(free) = node.free_bytes {
                write!(text, ", {} free", ByteSize(free))?;
            }
        }
        if let (true, Some(agent)) = (part.name == Part::Agent.to_string(), &status.agent) {
            write!(
                text,
                " mempool {} of {}",
                ByteSize(agent.mempool_used_bytes),
                ByteSize(agent.mempool_bytes)
            )?;
        }
        writeln!(text)?;
    }
    for tenant in status.agent.iter().flat_map(|agent| &agent.tenants) {
        writeln!(
            text,
            "  user {}: runs: {}, processes: {}, {} resident, {} in the mempool, {} on memory nodes, {} faults",
            tenant.tenant,
            tenant.runs,
            tenant.processes,
            ByteSize(tenant.resident_bytes),
            ByteSize(tenant.mempool_bytes),
            ByteSize(tenant.remote_bytes),
            tenant.faults,
        )?;
    }
    for user in status.agent.iter().flat_map(|agent| &agent.users) {
        writeln!(
            text,
            "  user {}: {} as extents, {} requests refused for their keys",
            user.tenant,
            ByteSize(user.taken_bytes),
            user.refused
        )?;
    }
    for session in status.agent.iter().flat_map(|agent| &agent.sessions) {
        writeln!(
            text,
            "  process {:<8} {} in {} extents, {} kept ready, {} requests",
            session.pid,
            ByteSize(session.bytes),
            session.extents,
            ByteSize(session.stocked_bytes),
            session.requests
        )?;
    }
    for run in status.agent.iter().flat_map(|agent| &agent.runs) {
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
                "    process {:<8} {} held, {} faults, {} pages taken, {} read back",
                program.pid,
                ByteSize(program.held_bytes),
                program.faults,
                program.evictions,
                program.remote_reads,
            )?;
        }
        if run.replicas > 1 {
            match run.degraded_slabs {
                0 => writeln!(text, "    each page on {} memory nodes", run.replicas)?,
                slabs => writeln!(
                    text,
                    "    degraded: {slabs} slabs are on fewer than {} memory nodes",
                    run.replicas
                )?,
            }
        }
    }
    status.problems.iter().try_for_each(|problem| writeln!(text, "  {problem}"))
}

#[cfg(test)]
mod golden_tests;
