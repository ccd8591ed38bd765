//! The rows of the tables in `docs/formats/directory.md`, one scenario each.

use super::link::Outcome;
use super::program::SegmentProgram;
use super::world::{GracePeriods, World};

/// Interval between steps, in milliseconds.
const STEP_MS: u64 = 500;
/// Time before the event, in seconds.
const BEFORE_S: u64 = 10;
/// Time after the end of the event, in seconds.
const AFTER_S: u64 = 90;
/// Time until the next process of a killed agent starts while the node is cut off, in seconds.
const RESTART_S: u64 = 10;
const GRACE_MS: u64 = 30_000;
/// Time after the begin of the event at which another host claims a host without keep-alives, in
/// milliseconds: the lease lasts 12 to 15 s, and then the grace time passes.
const CLAIM_MS: std::ops::RangeInclusive<u64> = 42_000..=47_000;

/// The machine of the host in the tables.
const AGENT: usize = 0;
/// The machine of a host that recovers others.
const OTHER: usize = 1;

/// An event that lasts for some time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Event {
    Stall,
    CutAll,
    CutAgent,
    CutNode,
    CutBoth,
    StopAgent,
    KillAgent,
    SuspendAgent,
    StopNode,
    KillNode,
    /// The agent is cut off while the node is killed.
    KillNodeCutAgent,
    /// The agent is killed when the node is cut off, and its next process starts soon.
    KillAgentCutNode,
    /// Another node starts while the agent is stopped.
    StopAgentLateNode,
}

/// The fate of the host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    /// The process of the host continues.
    Continues,
    /// A next process takes over.
    Resumed,
    /// Another host frees its memory.
    Recovered,
}
use Event::*;
use Fate::*;

/// A row: its name, the event and its duration in seconds, the fate of the host, whether the host
/// treats its memory on the node as lost, and whether operations of a running process wait for the
/// node.
type Row = (&'static str, Event, u64, Fate, bool, bool);

const LOST: bool = true;
const WAITS: bool = true;

const ROWS: &[Row] = &[
    ("agent-stall-1", Stall, 1, Continues, !LOST, !WAITS),
    ("agent-stall-5", Stall, 5, Continues, !LOST, !WAITS),
    ("agent-stall-20", Stall, 20, Continues, !LOST, !WAITS),
    ("agent-stall-60", Stall, 60, Continues, !LOST, !WAITS),
    ("agent-cut-all-60", CutAll, 60, Resumed, !LOST, WAITS),
    ("agent-cut-agent-10", CutAgent, 10, Continues, !LOST, !WAITS),
    ("agent-cut-agent-40", CutAgent, 40, Resumed, !LOST, WAITS),
    ("agent-cut-agent-60", CutAgent, 60, Recovered, !LOST, WAITS),
    ("agent-cut-node-60", CutNode, 60, Continues, !LOST, !WAITS),
    ("agent-cut-both-60", CutBoth, 60, Recovered, !LOST, WAITS),
    ("agent-stop-10", StopAgent, 10, Continues, !LOST, !WAITS),
    ("agent-stop-20", StopAgent, 20, Resumed, !LOST, !WAITS),
    ("agent-stop-60", StopAgent, 60, Recovered, !LOST, !WAITS),
    ("agent-kill-10", KillAgent, 10, Resumed, !LOST, !WAITS),
    ("agent-kill-40", KillAgent, 40, Resumed, !LOST, !WAITS),
    ("agent-kill-60", KillAgent, 60, Recovered, !LOST, !WAITS),
    ("agent-suspend-20", SuspendAgent, 20, Resumed, !LOST, !WAITS),
    ("agent-suspend-60", SuspendAgent, 60, Recovered, !LOST, !WAITS),
    ("agent-stop-late-node", StopAgentLateNode, 60, Recovered, !LOST, WAITS),
    ("node-stall-1", Stall, 1, Continues, !LOST, !WAITS),
    ("node-stall-5", Stall, 5, Continues, !LOST, !WAITS),
    ("node-stall-20", Stall, 20, Continues, !LOST, !WAITS),
    ("node-stall-60", Stall, 60, Continues, !LOST, !WAITS),
    ("node-cut-all-60", CutAll, 60, Resumed, !LOST, WAITS),
    ("node-cut-agent-10", CutAgent, 10, Continues, !LOST, !WAITS),
    ("node-cut-node-60", CutNode, 60, Continues, !LOST, !WAITS),
    ("node-cut-both-60", CutBoth, 60, Recovered, !LOST, WAITS),
    ("node-stop-5", StopNode, 5, Continues, !LOST, WAITS),
    ("node-stop-20", StopNode, 20, Continues, LOST, WAITS),
    ("node-kill-10", KillNode, 10, Continues, LOST, !WAITS),
    ("node-suspend-20", StopNode, 20, Continues, LOST, WAITS),
    ("node-cut-node-60-kill-agent-10", KillAgentCutNode, 60, Resumed, !LOST, !WAITS),
    ("kept-stall-1", Stall, 1, Continues, !LOST, !WAITS),
    ("kept-stall-5", Stall, 5, Continues, !LOST, !WAITS),
    ("kept-stall-20", Stall, 20, Continues, !LOST, !WAITS),
    ("kept-stall-60", Stall, 60, Continues, !LOST, !WAITS),
    ("kept-cut-all-60", CutAll, 60, Resumed, !LOST, WAITS),
    ("kept-cut-agent-10", CutAgent, 10, Continues, !LOST, !WAITS),
    ("kept-cut-node-60", CutNode, 60, Continues, !LOST, !WAITS),
    ("kept-cut-both-60", CutBoth, 60, Recovered, !LOST, WAITS),
    ("kept-stop-5", StopNode, 5, Continues, !LOST, WAITS),
    ("kept-stop-20", StopNode, 20, Continues, !LOST, WAITS),
    ("kept-stop-60", StopNode, 60, Continues, LOST, WAITS),
    ("kept-kill-10", KillNode, 10, Continues, !LOST, WAITS),
    ("kept-kill-10-cut-agent", KillNodeCutAgent, 10, Continues, !LOST, WAITS),
    ("kept-kill-60", KillNode, 60, Continues, LOST, WAITS),
    ("kept-suspend-20", StopNode, 20, Continues, !LOST, WAITS),
    ("kept-cut-node-60-kill-agent-10", KillAgentCutNode, 60, Resumed, !LOST, !WAITS),
];

/// A row of segments: its name, the event and its duration in seconds, and the earliest and latest
/// time after the begin of the event at which the program loses its access, in seconds; `None` if
/// it does not.
type SegmentRow = (&'static str, Event, u64, Option<(u64, u64)>);

const SEGMENT_ROWS: &[SegmentRow] = &[
    ("segment-stall-1", Stall, 1, None),
    ("segment-stall-5", Stall, 5, None),
    ("segment-stall-20", Stall, 20, None),
    ("segment-stall-60", Stall, 60, Some((31, 38))),
    ("segment-cut-agent-20", CutAgent, 20, None),
    ("segment-cut-agent-60", CutAgent, 60, Some((31, 38))),
    ("segment-cut-all-60", CutAll, 60, Some((31, 38))),
    ("segment-stop-15", StopAgent, 15, None),
    ("segment-kill-15", KillAgent, 15, None),
    ("segment-stop-60", StopAgent, 60, Some((19, 23))),
    ("segment-kill-60", KillAgent, 60, Some((19, 23))),
    ("segment-suspend-60", SuspendAgent, 60, Some((60, 64))),
];

/// The names of all rows.
pub fn names() -> impl Iterator<Item = &'static str> {
    ROWS.iter().map(|row| row.0).chain(SEGMENT_ROWS.iter().map(|row| row.0))
}

/// Plays all rows. Returns the failed ones with their errors.
pub fn play_all() -> Vec<String> {
    let outcomes = ROWS.iter().map(|row| (row.0, play(row)));
    let of_segments = SEGMENT_ROWS.iter().map(|row| (row.0, play_segment(row)));
    let failed = outcomes.chain(of_segments).filter_map(|(name, outcome)| Some((name, outcome.err()?)));
    failed.map(|(name, error)| format!("{name}: {error}")).collect()
}

/// Plays a row of segments. The program must have lost its access before another host claims its
/// host, from when on another host may own the segment.
fn play_segment(&(_, event, seconds, lost_s): &SegmentRow) -> Result<(), String> {
    let grace = GracePeriods { host_ms: GRACE_MS, nodes_ms: [0; 3] };
    let mut world = World::new(1, grace, 2, 2);
    world.nodes[0].start(0).map_err(|error| error.to_string())?;
    world.start_host(AGENT, None)?;
    world.start_host(OTHER, None)?;
    let mut program = SegmentProgram::start(&world, AGENT);
    let first = world.machines[AGENT].host.as_ref().expect("the host runs").record.clone();
    let mut steps = |world: &mut World, seconds: u64, is_agent_down: bool| {
        for _ in 0..seconds * 1_000 / STEP_MS {
            world.step(is_agent_down)?;
            program.step(world);
            let is_claimed = world.claims.contains_key(&(first.host, first.claim_epoch));
            // A suspended machine runs nothing. When it resumes, the program steps first.
            if is_claimed && program.lost_ms.is_none() && !world.machines[AGENT].is_suspended {
                return Err(format!(
                    "a program has access to a segment that another host may own, at {} ms",
                    world.now_ms
                ));
            }
        }
        Ok::<(), String>(())
    };
    steps(&mut world, BEFORE_S, false)?;
    let began_ms = world.now_ms;
    world.set_event(event, true)?;
    steps(&mut world, seconds, event == KillAgent)?;
    world.set_event(event, false)?;
    steps(&mut world, AFTER_S, false)?;
    let lost_after_ms = program.lost_ms.map(|lost_ms| lost_ms - began_ms);
    let is_right = match (lost_after_ms, lost_s) {
        (Some(found), Some((earliest, latest))) => (earliest * 1_000..=latest * 1_000).contains(&found),
        (found, expected) => found.is_none() && expected.is_none(),
    };
    if is_right { Ok(()) } else { Err(format!("access was lost after {lost_after_ms:?} ms")) }
}

fn play(&(name, event, seconds, fate, is_lost, waits): &Row) -> Result<(), String> {
    let kept_ms = if name.starts_with("kept-") { GRACE_MS } else { 0 };
    let grace = GracePeriods { host_ms: GRACE_MS, nodes_ms: [kept_ms; 3] };
    let mut world = World::new(1, grace, 2, 2);
    world.nodes[0].start(0).map_err(|error| error.to_string())?;
    world.start_host(AGENT, None)?;
    world.start_host(OTHER, None)?;
    let mut has_waited = false;
    let mut steps = |world: &mut World, seconds: u64, is_agent_down: bool| {
        for _ in 0..seconds * 1_000 / STEP_MS {
            has_waited |= world.step(is_agent_down)?;
        }
        Ok::<(), String>(())
    };
    steps(&mut world, BEFORE_S, false)?;
    let first = world.machines[AGENT].host.as_ref().expect("the host runs").record.clone();
    let began_ms = world.now_ms;
    world.set_event(event, true)?;
    let down_s = match event {
        KillAgent => seconds,
        KillAgentCutNode => RESTART_S,
        _ => 0,
    };
    steps(&mut world, down_s, true)?;
    steps(&mut world, seconds - down_s, false)?;
    world.set_event(event, false)?;
    steps(&mut world, AFTER_S, false)?;
    let last = world.machines[AGENT].host.as_ref().ok_or("the host does not run")?.record.clone();
    let found = match last.claim_epoch == first.claim_epoch {
        true if last.epoch == first.epoch => Continues,
        true => Resumed,
        false => Recovered,
    };
    let lost = world.counts.lost_memory > 0;
    if (found, lost, has_waited) != (fate, is_lost, waits) {
        return Err(format!("{found:?}, lost: {lost}, waits: {has_waited}"));
    }
    let claimed_ms = world.claims.get(&(first.host, first.claim_epoch)).map(|at_ms| at_ms - began_ms);
    if claimed_ms.is_some() != (fate == Recovered) || claimed_ms.is_some_and(|at| !CLAIM_MS.contains(&at)) {
        return Err(format!("the host was claimed after {claimed_ms:?} ms"));
    }
    world.end()
}

impl World {
    /// Advances the time by one step, and all agents and nodes. Returns whether an operation waits
    /// for the node.
    fn step(&mut self, is_agent_down: bool) -> Result<bool, String> {
        self.pass_time(STEP_MS, |_| true)?;
        for index in [AGENT, OTHER] {
            let machine = &self.machines[index];
            let is_down = index == AGENT && is_agent_down || machine.is_halted();
            if machine.host.is_none() && !is_down {
                self.start_host(index, None)?;
            }
        }
        self.read_all(AGENT)?;
        if self.nodes[0].has_lease() || self.nodes[0].serves() {
            self.use_memory(AGENT)?;
        }
        for _ in 0..3 {
            self.recover(OTHER, false)?;
        }
        self.poll_links(AGENT)?;
        let host = self.machines[AGENT].host.as_ref().filter(|_| !self.machines[AGENT].is_halted());
        Ok(host.is_some_and(|host| host.links.iter().any(|link| link.is_pending()) || !host.left.is_empty()))
    }

    /// Reads over all idle connections of a host, also from nodes that do not answer.
    fn read_all(&mut self, index: usize) -> Result<(), String> {
        if self.machines[index].is_halted() {
            return Ok(());
        }
        let Some(host) = &self.machines[index].host else { return Ok(()) };
        for link in (0..host.links.len()).rev() {
            let host = self.machines[index].host.as_mut().expect("the host runs");
            let link_to_read = &mut host.links[link];
            let is_idle = link_to_read.poll_pending() == Outcome::Done && !link_to_read.extents.is_empty();
            if is_idle {
                let outcome = link_to_read.check(0);
                self.check_outcome(index, link, outcome, true)?;
            }
        }
        Ok(())
    }

    /// Begins or ends an event.
    fn set_event(&mut self, event: Event, begins: bool) -> Result<(), String> {
        let now_ms = self.now_ms;
        match event {
            Stall => self.is_directory_stopped = begins,
            CutAll => self.all_cut = begins,
            CutAgent => self.machines[AGENT].is_cut = begins,
            CutNode => self.nodes[0].is_cut = begins,
            CutBoth => (self.machines[AGENT].is_cut, self.nodes[0].is_cut) = (begins, begins),
            StopAgent => self.machines[AGENT].is_stopped = begins,
            StopAgentLateNode => {
                self.machines[AGENT].is_stopped = begins;
                if !begins {
                    self.nodes[1].start(now_ms).map_err(|error| error.to_string())?;
                    // The host uses the node before its next keep-alive.
                    let host = self.machines[AGENT].host.as_mut().ok_or("the host has ended")?;
                    host.renewed_ms = now_ms;
                    host.update_nodes();
                }
            }
            SuspendAgent => self.machines[AGENT].is_suspended = begins,
            KillAgent | KillAgentCutNode => {
                self.nodes[0].is_cut = begins && event == KillAgentCutNode;
                if begins {
                    self.end_host(AGENT, true);
                }
            }
            StopNode => self.nodes[0].set_stopped(begins, now_ms),
            KillNode | KillNodeCutAgent => {
                self.machines[AGENT].is_cut = begins && event == KillNodeCutAgent;
                if begins {
                    self.nodes[0].kill(now_ms);
                } else {
                    self.nodes[0].start(now_ms).map_err(|error| error.to_string())?;
                }
            }
        }
        self.apply_cuts();
        Ok(())
    }
}
