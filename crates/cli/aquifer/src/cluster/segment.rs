//! `aquifer segment`: shows, moves and frees the segments of this host.

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use aquifer_arena::calls::{Call, CopiesStatus, SegmentStatus, SegmentTotals, TimeSummary};
use aquifer_client::segments::free_copies;
use aquifer_host::client;
use aquifer_ipc::size::ByteSize;
use serde::Serialize;

use crate::Outcome;
use crate::cli::{SegmentArguments, SegmentCommand};
use crate::say::say_line;

/// Interval between checks whether a segment has moved.
const MOVE_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// The segments of an agent's host.
#[derive(Debug, Serialize)]
pub struct SegmentsStatus {
    /// The segments of the caller, or all segments if the caller is the agent's user.
    pub segments: Vec<SegmentStatus>,
    /// Counts since the start of the host's agent.
    pub totals: SegmentTotals,
    /// The copies of segments on memory nodes, also of segments of other hosts.
    pub copies: Vec<CopiesStatus>,
}

/// Executes a command.
pub fn segment(state: Option<&Path>, arguments: &SegmentArguments) -> Outcome {
    let agent = arguments.agent.socket(state)?;
    match &arguments.command {
        SegmentCommand::List { json } => list(&agent, *json),
        SegmentCommand::Status { id, json, user } => status(&agent, *id, *user, *json),
        SegmentCommand::Move { id, process, user, timeout_ms } => {
            move_to(&agent, *id, process, *user, Duration::from_millis(*timeout_ms))
        }
        SegmentCommand::Free { id, user } => free(&agent, *id, *user),
    }
}

/// The segments of an agent's host, for this command and for `aquifer status`.
///
/// # Errors
/// If the agent does not answer; `None` if there is no agent.
pub fn report(agent: &Path) -> std::io::Result<Option<SegmentsStatus>> {
    let Some((segments, totals)) = client::segment_report(agent)? else { return Ok(None) };
    let copies = client::copies_report(agent)?.unwrap_or_default();
    Ok(Some(SegmentsStatus { segments, totals, copies }))
}

fn require(agent: &Path) -> Result<SegmentsStatus, Box<dyn Error>> {
    report(agent)?.ok_or_else(|| no_agent(agent))
}

fn no_agent(agent: &Path) -> Box<dyn Error> {
    format!("no agent answers at {}: start a cluster with `aquifer up`", agent.display()).into()
}

fn list(agent: &Path, json: bool) -> Outcome {
    let report = require(agent)?;
    if json {
        say_line!("{}", serde_json::to_string_pretty(&report)?);
        return Ok(ExitCode::SUCCESS);
    }
    for segment in &report.segments {
        let copies = report.copies_of(segment.user, segment.id);
        say_line!(
            "{}{}",
            line_of(segment),
            copies.map_or_else(String::new, |copies| format!(", {}", synced(copies)))
        );
    }
    for copies in report.copies.iter().filter(|copies| !copies.has_owner) {
        let CopiesStatus { user, id, bytes, .. } = copies;
        let state = if copies.nodes.is_empty() { "deallocated" } else { "lost by its host" };
        say_line!("user {user} segment {id}: {}, {state}, {}", ByteSize(*bytes), synced(copies));
    }
    say_line!("{}", summary(&report));
    Ok(ExitCode::SUCCESS)
}

impl SegmentsStatus {
    fn copies_of(&self, user: u32, id: u64) -> Option<&CopiesStatus> {
        self.copies.iter().find(|copies| (copies.user, copies.id) == (user, id))
    }
}

/// Text with the time and the nodes of a segment's last sync.
fn synced(copies: &CopiesStatus) -> String {
    let list = |nodes: &[u16]| {
        let word = if nodes.len() == 1 { "node" } else { "nodes" };
        format!("{word} {}", nodes.iter().map(u16::to_string).collect::<Vec<_>>().join(", "))
    };
    if copies.nodes.is_empty() {
        return format!("not freed yet on {}", list(&copies.left_on));
    }
    let now_s = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let ago_s = now_s.saturating_sub(copies.synced_at_s);
    format!("synced {ago_s} s ago to {}", list(&copies.nodes))
}

/// One line of text about a segment.
fn line_of(segment: &SegmentStatus) -> String {
    let SegmentStatus { user, id, bytes, missing_bytes, process, is_open, target, .. } = segment;
    let owner = if *is_open { format!("process {process}") } else { format!("of {process}, which is away") };
    let pages = match missing_bytes {
        0 => String::new(),
        missing => {
            let percent = (bytes - missing) * 100 / bytes.max(&1);
            format!(", {percent} % is here, {} follows", ByteSize(*missing))
        }
    };
    let target = target.as_ref().map_or_else(String::new, |target| format!(", prepared for {target}"));
    format!("user {user} segment {id}: {}, {owner}{pages}{target}", ByteSize(*bytes))
}

/// One line of text about all segments.
pub fn summary(report: &SegmentsStatus) -> String {
    let SegmentsStatus { segments, totals, .. } = report;
    let bytes = segments.iter().map(|segment| segment.bytes).sum();
    format!(
        "segments: {}, {}; handed over: {}{}; received: {}; touches that waited: {}{}",
        segments.len(),
        ByteSize(bytes),
        totals.handed_over,
        times(&totals.transfers),
        totals.received,
        totals.waits.count,
        times(&totals.waits),
    )
}

fn times(times: &TimeSummary) -> String {
    match times.count {
        0 => String::new(),
        _ => format!(" (median {} µs, longest {} µs)", times.p50_us, times.longest_us),
    }
}

fn find(agent: &Path, id: u64, user: Option<u32>) -> Result<(SegmentStatus, SegmentTotals), Box<dyn Error>> {
    let SegmentsStatus { segments, totals, .. } = require(agent)?;
    let is_wanted =
        |segment: &&SegmentStatus| segment.id == id && user.is_none_or(|user| segment.user == user);
    let mut found: Vec<_> = segments.iter().filter(is_wanted).cloned().collect();
    match (found.pop(), found.is_empty()) {
        (Some(segment), true) => Ok((segment, totals)),
        (Some(_), false) => Err(format!("several users have a segment {id}: give --user").into()),
        (None, _) => {
            Err(format!("segment {id} is not on this host: `aquifer segment list` shows those that are")
                .into())
        }
    }
}

fn status(agent: &Path, id: u64, user: Option<u32>, json: bool) -> Outcome {
    let (segment, totals) = find(agent, id, user)?;
    if json {
        say_line!("{}", serde_json::to_string_pretty(&segment)?);
        return Ok(ExitCode::SUCCESS);
    }
    say_line!("{}", line_of(&segment));
    say_line!("address: {:#x}", segment.address);
    say_line!("here: {} of {}", ByteSize(segment.bytes - segment.missing_bytes), ByteSize(segment.bytes));
    say_line!("On this host since its agent started:");
    let pages = |pages: u64| ByteSize(pages * 4096);
    say_line!("pulled on touch: {}, ahead: {}", pages(totals.pages_on_touch), pages(totals.pages_ahead));
    say_line!("pause of a hand-over, in µs: {}", long_times(&totals.transfers));
    say_line!("pause of a touch of a page elsewhere, in µs: {}", long_times(&totals.waits));
    Ok(ExitCode::SUCCESS)
}

fn long_times(times: &TimeSummary) -> String {
    let TimeSummary { count, p50_us, p99_us, longest_us } = times;
    match count {
        0 => "none".to_owned(),
        _ => format!("median {p50_us}, 99 % within {p99_us}, longest {longest_us}, in all {count}"),
    }
}

fn move_to(agent: &Path, id: u64, process: &str, user: Option<u32>, timeout: Duration) -> Outcome {
    let (segment, _) = find(agent, id, user)?;
    if segment.process == process {
        say_line!("{process} has segment {id} already");
        return Ok(ExitCode::SUCCESS);
    }
    let call = Call::Move { user: segment.user, id, process: process.to_owned() };
    client::segments(agent, &call)?.ok_or_else(|| no_agent(agent))?;
    let began = Instant::now();
    loop {
        let still_here = require(agent)?.segments.into_iter().find(|other| {
            (other.user, other.id) == (segment.user, segment.id) && other.process == segment.process
        });
        if still_here.is_none() {
            say_line!("{} has handed segment {id} over", segment.process);
            return Ok(ExitCode::SUCCESS);
        }
        if began.elapsed() > timeout {
            let owner = &segment.process;
            return Err(format!(
                "process {owner} was asked to hand segment {id} over to {process}, and has not done so \
                within {timeout:?}: a process hands segments over when it polls for requests \
                (Process::next_event)"
            )
            .into());
        }
        std::thread::sleep(MOVE_CHECK_INTERVAL);
    }
}

fn free(agent: &Path, id: u64, user: Option<u32>) -> Outcome {
    let report = require(agent)?;
    let is_here = report.segments.iter().any(|segment| segment.id == id);
    let is_wanted = |copies: &&CopiesStatus| copies.id == id && user.is_none_or(|user| copies.user == user);
    // The agent refuses a segment that another host owns.
    let lost = report.copies.iter().find(is_wanted).filter(|copies| !is_here || !copies.has_owner);
    let owner = match lost {
        Some(lost) => lost.user,
        None => find(agent, id, user)?.0.user,
    };
    let has_copies = report.copies_of(owner, id).is_some();
    if has_copies && owner != rustix::process::getuid().as_raw() {
        let why = "its copies are in the heaps of that user";
        return Err(format!("run this as user {owner}, the owner of segment {id}: {why}").into());
    }
    if lost.is_none() {
        client::segments(agent, &Call::Free { user: owner, id })?.ok_or_else(|| no_agent(agent))?;
    }
    if has_copies {
        free_copies(agent, id)?;
    }
    say_line!("segment {id} of user {owner} is freed");
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_is_shown_in_one_line() {
        let mut segment = SegmentStatus {
            user: 5,
            id: 7,
            address: 1 << 40,
            bytes: 8 << 20,
            missing_bytes: 0,
            process: "counter".into(),
            is_open: true,
            target: None,
        };
        assert_eq!(line_of(&segment), "user 5 segment 7: 8 MiB, process counter");
        segment.missing_bytes = 2 << 20;
        segment.target = Some("other".into());
        segment.is_open = false;
        let line = "user 5 segment 7: 8 MiB, of counter, which is away, 75 % is here, 2 MiB follows, \
                    prepared for other";
        assert_eq!(line_of(&segment), line);
        let copies = Vec::new();
        let mut report = SegmentsStatus { segments: vec![segment], totals: SegmentTotals::default(), copies };
        let line = "segments: 1, 8 MiB; handed over: 0; received: 0; touches that waited: 0";
        assert_eq!(summary(&report), line);
        report.totals.handed_over = 2;
        report.totals.transfers = TimeSummary { count: 2, p50_us: 200, p99_us: 300, longest_us: 400 };
        let line = "segments: 1, 8 MiB; handed over: 2 (median 200 µs, longest 400 µs); received: 0; touches \
                    that waited: 0";
        assert_eq!(summary(&report), line);
    }
}
