//! The status as text for people.

use std::fmt::Write;

use aquifer_arena::calls::SegmentTotals;
use aquifer_ipc::size::ByteSize;
use aquifer_report::{AgentStatus, RunStatistics};

use super::super::daemon::Daemon;
use super::super::segment::{self, SegmentsStatus};
use super::{DaemonStatus, HeapsStatus, NodeStatus, Status};

/// Least shared memory that is shown: each process shares a little with the agent.
const SHOWN_SHARED_BYTES_MIN: u64 = 1 << 20;
/// Explanations of the words about runs.
const LEGEND: &str = "
resident: in the program, of its limit; borrowed: idle memory of this host, beyond the limit;
mempool: evicted, and still on this host; cached: the same, in memory of this host that is idle;
on memory nodes: allocated there, all replicas; faults: accesses for which a page was brought in
";

pub(super) fn to_text(status: &Status) -> String {
    let mut text = String::new();
    // Writing to a String does not fail.
    let _written = write_text(&mut text, status);
    text
}

fn write_text(text: &mut String, status: &Status) -> std::fmt::Result {
    let running = status.daemons.iter().filter(|daemon| daemon.is_running).count();
    if !status.has_cluster() {
        match &status.empty_directory {
            Some(directory) => writeln!(
                text,
                "The directory at {directory} has no cluster of this name: no node and no agent is there"
            )?,
            None => {
                writeln!(
                    text,
                    "No cluster is up in {}. Start one with: {} up",
                    status.state, status.command
                )?;
            }
        }
        return status.problems.iter().try_for_each(|problem| writeln!(text, "{problem}"));
    }
    if status.daemons.is_empty() {
        let what =
            if status.agent.is_some() { "An agent of this host serves you" } else { "The directory answers" };
        writeln!(text, "{what}")?;
    } else if status.daemons.iter().all(|daemon| !daemon.is_of_up) {
        writeln!(text, "These daemons run in {}; `aquifer up` has not started them", status.state)?;
    } else if status.has_missing_daemons() {
        let missing = status.daemons.len() - running;
        let (count, state) = (status.daemons.len(), &status.state);
        writeln!(
            text,
            "{missing} of {count} daemons of the cluster in {state} do not run. Start them with: {} up",
            status.command
        )?;
    } else {
        writeln!(text, "The cluster is up, in {}", status.state)?;
    }
    status.daemons.iter().try_for_each(|daemon| write_daemon(text, status, daemon))?;
    write_nodes(text, status)?;
    if let Some(agent) = &status.agent {
        write_agent(text, agent)?;
    }
    let is_used =
        |report: &&SegmentsStatus| !report.segments.is_empty() || report.totals != SegmentTotals::default();
    if let Some(report) = status.segments.as_ref().filter(is_used) {
        writeln!(text, "  {}", segment::summary(report))?;
    }
    status.problems.iter().try_for_each(|problem| writeln!(text, "  problem: {problem}"))?;
    let has_runs = status.agent.as_ref().is_some_and(|agent| !agent.runs.is_empty());
    if has_runs { text.write_str(LEGEND) } else { Ok(()) }
}

/// Writes the nodes that are no daemons here, and the totals of all nodes.
fn write_nodes(text: &mut String, status: &Status) -> std::fmt::Result {
    let is_here = |node: &&NodeStatus| {
        status.daemons.iter().any(|daemon| daemon.name == Daemon::Node(node.id).to_string())
    };
    for node in status.nodes.iter().filter(|node| !is_here(node)) {
        write!(text, "  {:<10}", Daemon::Node(node.id).to_string())?;
        match &node.address {
            Some(address) => write!(text, " at {address}")?,
            None => write!(text, " as the agent knows it:")?,
        }
        write_lent(text, node)?;
        writeln!(text)?;
    }
    for node in &status.missing_nodes {
        write!(text, "  {:<10} missing", Daemon::Node(node.id).to_string())?;
        match node.since_s {
            Some(since_s) => writeln!(text, " for {}", time_since(since_s))?,
            None => writeln!(text)?,
        }
    }
    for is_disk in [false, true] {
        write_pool(text, &status.nodes.iter().filter(|node| node.is_disk == is_disk).collect::<Vec<_>>())?;
    }
    let degraded =
        status.agent.iter().flat_map(|agent| &agent.runs).map(|run| run.degraded_slabs).sum::<u64>();
    if degraded > 0 {
        writeln!(text, "  degraded: {degraded} slabs have fewer replicas than their runs want")?;
    }
    Ok(())
}

/// Writes what several nodes of a class lend together.
fn write_pool(text: &mut String, nodes: &[&NodeStatus]) -> std::fmt::Result {
    if nodes.len() < 2 {
        return Ok(());
    }
    let lent = ByteSize(nodes.iter().map(|node| node.memory_bytes).sum());
    let on_disks = if nodes[0].is_disk { " on disks" } else { "" };
    write!(text, "  pool       {} nodes lend {lent}{on_disks}", nodes.len())?;
    if nodes.iter().any(|node| node.free_bytes.is_some()) {
        let free = nodes.iter().filter_map(|node| node.free_bytes).sum();
        write!(text, ", {} free", ByteSize(free))?;
    }
    writeln!(text)
}

/// The time that has passed since `since_s`, in seconds since 1970, as text: `45 s` or `3 min`.
fn time_since(since_s: u64) -> String {
    let now_s = std::time::UNIX_EPOCH.elapsed().map_or(since_s, |now| now.as_secs());
    let elapsed_s = now_s.saturating_sub(since_s);
    match elapsed_s {
        0..120 => format!("{elapsed_s} s"),
        120..7200 => format!("{} min", elapsed_s / 60),
        7200..172_800 => format!("{} h", elapsed_s / 3600),
        _ => format!("{} days", elapsed_s / 86_400),
    }
}

/// Writes how much memory a node lends, and how much of it is free.
fn write_lent(text: &mut String, node: &NodeStatus) -> std::fmt::Result {
    write!(text, " lends {}{}", ByteSize(node.memory_bytes), if node.is_disk { " on a disk" } else { "" })?;
    if node.memory_bytes != node.memory_bytes_wanted {
        write!(text, " (requested: {})", ByteSize(node.memory_bytes_wanted))?;
    }
    if node.recalled_bytes > 0 {
        write!(text, ", {} to be moved", ByteSize(node.recalled_bytes))?;
    }
    match node.free_bytes {
        Some(free) => write!(text, ", {} free", ByteSize(free)),
        None => Ok(()),
    }
}

/// A user's name, or its number if it has none.
pub(in super::super) fn name_of(user: u32) -> String {
    let found = nix::unistd::User::from_uid(nix::unistd::Uid::from_raw(user));
    found.ok().flatten().map_or_else(|| user.to_string(), |user| user.name)
}

fn write_daemon(text: &mut String, status: &Status, daemon: &DaemonStatus) -> std::fmt::Result {
    match daemon.pid {
        Some(pid) => write!(text, "  {:<10} running  process {pid:<8}", daemon.name)?,
        None => write!(text, "  {:<10} dead", daemon.name)?,
    }
    let is_of_daemon = |node: &&NodeStatus| daemon.name == Daemon::Node(node.id).to_string();
    if let Some(node) = status.nodes.iter().find(is_of_daemon).filter(|_| daemon.is_running) {
        write_lent(text, node)?;
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
        write!(
            text,
            " mempool {} of {}, {} cached, {} borrowed",
            ByteSize(agent.mempool_used_bytes),
            ByteSize(agent.mempool_bytes),
            ByteSize(agent.cached_bytes),
            ByteSize(agent.borrowed_bytes),
        )?;
    }
    let is_of_cluster = status.daemons.iter().any(|daemon| daemon.is_of_up);
    if is_of_cluster && !daemon.is_of_up {
        write!(text, " (not started by `aquifer up`)")?;
    }
    writeln!(text)
}

/// Writes a run with a swap device.
fn write_swapped(text: &mut String, run: &RunStatistics, device_bytes: u64) -> std::fmt::Result {
    writeln!(
        text,
        "  run {} of {}, by swap: {} of {} resident, {} on memory nodes (a device of {}), {} faults, \
            processes: {}",
        run.name,
        name_of(run.tenant),
        ByteSize(run.resident_bytes),
        ByteSize(run.limit_bytes),
        ByteSize(run.remote_bytes),
        ByteSize(device_bytes),
        run.faults,
        run.processes,
    )?;
    run.programs.iter().try_for_each(|program| {
        writeln!(
            text,
            "    process {:<8} {} resident, {} faults",
            program.pid,
            ByteSize(program.held_bytes),
            program.faults
        )
    })
}

/// The resident memory of a run, with what is guaranteed to it.
fn resident(run: &RunStatistics) -> String {
    let [resident, limit, borrowed] = [run.resident_bytes, run.limit_bytes, run.borrowed_bytes].map(ByteSize);
    match run.limit_max_bytes {
        None => format!("{resident} of {limit} resident"),
        Some(_) => format!("{resident} resident ({limit} guaranteed, {borrowed} borrowed)"),
    }
}

/// The room on disks, if any is used.
fn on_disks(bytes: u64) -> String {
    if bytes == 0 { String::new() } else { format!(", {} on disks", ByteSize(bytes)) }
}

fn write_agent(text: &mut String, agent: &AgentStatus) -> std::fmt::Result {
    for tenant in &agent.tenants {
        writeln!(
            text,
            "  user {}: runs: {}, processes: {}, {} resident ({} borrowed), {} in the mempool, {} cached, \
                {} on memory nodes{}, {} faults",
            name_of(tenant.tenant),
            tenant.runs,
            tenant.processes,
            ByteSize(tenant.resident_bytes),
            ByteSize(tenant.borrowed_bytes),
            ByteSize(tenant.mempool_bytes),
            ByteSize(tenant.cached_bytes),
            ByteSize(tenant.remote_bytes),
            on_disks(tenant.disk_bytes),
            tenant.faults,
        )?;
    }
    for user in &agent.users {
        writeln!(
            text,
            "  user {}: {} in extents, {} requests with wrong keys",
            name_of(user.tenant),
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
        if let Some(device_bytes) = run.swap_bytes {
            write_swapped(text, run, device_bytes)?;
            continue;
        }
        writeln!(
            text,
            "  run {} of {}: {}, {} in the mempool, {} cached, {} on memory nodes{}, {} faults, \
                processes: {}",
            run.name,
            name_of(run.tenant),
            resident(run),
            ByteSize(run.mempool_bytes),
            ByteSize(run.cached_bytes),
            ByteSize(run.remote_bytes),
            on_disks(run.disk_bytes),
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
