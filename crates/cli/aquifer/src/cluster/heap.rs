//! `aquifer heap`: lists, compacts and limits the heaps of the cluster.

use std::error::Error;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use aquifer_directory::names::{self, HeapsRecord};
use aquifer_fabric::{ClusterKey, Host, Ticket};
use aquifer_ipc::size::ByteSize;
use aquifer_objects::access::HeapAccess;
use aquifer_objects::operator::HeapOperator;
use aquifer_objects::service::report::{ClassReport, HeapReport};
use aquifer_objects::service::{OPERATOR, TICKET_SERVICE};

use super::key;
use super::lend::location;
use crate::Outcome;
use crate::cli::{HeapArguments, HeapCommand};
use crate::say::say_line;
use crate::state::StateDir;

/// Lifetime of the ticket of a command.
const TICKET_TIME: Duration = Duration::from_secs(600);

/// Executes a command on all services of heaps.
pub fn heap(state: &StateDir, arguments: &HeapArguments) -> Outcome {
    let directory = location(state, &arguments.directory)?.connect(state)?;
    let key = key::load(&arguments.key.clone().unwrap_or_else(|| state.key_file()))?;
    let services = names::heaps(&*directory)?;
    if services.is_empty() {
        return Err("no node serves heaps: give nodes memory for them (aquifer up --heap-memory SIZE), or \
            start those services that have stopped (aquifer up)"
            .into());
    }
    match arguments.command {
        HeapCommand::List { json } => list(&services, &key, json),
        HeapCommand::Compact { uid } => compact(&services, &key, uid),
        HeapCommand::Limit { uid, size } => limit(&services, &key, uid, size),
    }
}

fn connect(service: &HeapsRecord, key: &ClusterKey) -> Result<HeapOperator, Box<dyn Error>> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    let ticket = Ticket {
        tenant: OPERATOR,
        host: Host::NODE,
        epoch: 0,
        expiry_s: (now + TICKET_TIME).as_secs(),
        service: TICKET_SERVICE,
    };
    let address = service.address.parse()?;
    Ok(HeapOperator::new(HeapAccess::new(service.node, address, &ticket, key).connect()?)?)
}

/// The reports on all heaps of a service, for `aquifer status`; `None` if it does not answer.
pub fn reports(service: &HeapsRecord, key: &ClusterKey) -> Option<Vec<HeapReport>> {
    connect(service, key).ok()?.reports().ok()
}

fn list(services: &[HeapsRecord], key: &ClusterKey, json: bool) -> Outcome {
    let mut reports = Vec::new();
    for service in services {
        reports.extend(connect(service, key)?.reports()?);
    }
    if json {
        say_line!("{}", serde_json::to_string_pretty(&reports)?);
        return Ok(ExitCode::SUCCESS);
    }
    for service in services {
        let of_node = || reports.iter().filter(|report| report.node == service.node);
        let held = of_node().map(|report| report.held_bytes).sum();
        let (held, memory) = (ByteSize(held), ByteSize(service.memory_bytes));
        say_line!("node {}: heaps take {held} of {memory}", service.node);
        of_node().for_each(print);
    }
    Ok(ExitCode::SUCCESS)
}

fn print(report: &HeapReport) {
    let fragmentation = ratio(report.held_bytes, report.live_bytes);
    say_line!(
        "  user {}: {} objects, {} live in {} ({fragmentation}), limit {}, merges: {}, corrected pointers: \
         {}",
        report.tenant,
        report.objects,
        ByteSize(report.live_bytes),
        ByteSize(report.held_bytes),
        ByteSize(report.limit_bytes),
        report.merges,
        report.corrections
    );
    let mut classes = report.classes.clone();
    classes.sort_by_key(|class| std::cmp::Reverse(class.held_bytes));
    for ClassReport { slot_bytes, block_bytes, held_bytes, objects, is_hot } in classes {
        let fragmentation = ratio(held_bytes, objects * u64::from(slot_bytes));
        say_line!(
            "    slots of {slot_bytes} B in blocks of {}: {objects} objects in {} ({fragmentation}){}",
            ByteSize(block_bytes),
            ByteSize(held_bytes),
            if is_hot { ", hot" } else { "" }
        );
    }
}

/// Held memory for each live byte.
fn ratio(held: u64, live: u64) -> String {
    match (held * 100).checked_div(live) {
        Some(hundredths) => format!("{}.{:02}x", hundredths / 100, hundredths % 100),
        None => "empty".to_owned(),
    }
}

fn compact(services: &[HeapsRecord], key: &ClusterKey, uid: u32) -> Outcome {
    for service in services {
        let merges = connect(service, key)?.compact(uid)?;
        say_line!("node {}: merges: {merges}", service.node);
    }
    Ok(ExitCode::SUCCESS)
}

fn limit(services: &[HeapsRecord], key: &ClusterKey, uid: u32, bytes: u64) -> Outcome {
    for service in services {
        connect(service, key)?.set_limit(uid, bytes)?;
        let limit = ByteSize(bytes.min(service.memory_bytes));
        say_line!("node {}: the heap of user {uid} may take {limit}", service.node);
    }
    Ok(ExitCode::SUCCESS)
}
