//! The users of memory that a node recalls, as text.

use aquifer_directory::names::{self, NodeRecord, RecalledRun};
use aquifer_directory::{Directory, DirectoryError};
use aquifer_ipc::size::ByteSize;
use aquifer_pool::size::SPAN_BYTES;

use crate::cluster::status::name_of;

/// Returns a line for each user of what a node recalls: the runs of all hosts, and what other
/// programs of each user and heaps have.
///
/// # Errors
/// Those of the directory.
pub(super) fn show_holders(
    directory: &dyn Directory,
    node: &NodeRecord,
) -> Result<Vec<String>, DirectoryError> {
    let records = names::recalled_records(directory)?;
    let runs =
        records.into_iter().flat_map(|record| record.runs.into_iter().map(move |run| (record.host, run)));
    Ok(show_lines(node, &runs.filter(|(_, run)| run.node == node.id).collect::<Vec<_>>()))
}

/// The lines, from the runs and their hosts.
fn show_lines(node: &NodeRecord, runs: &[(u16, RecalledRun)]) -> Vec<String> {
    let mut lines: Vec<String> = runs.iter().map(|(host, run)| show_run(*host, run)).collect();
    for holder in &node.recalled_from {
        let of_runs = |tenant| runs.iter().filter(move |(_, run)| run.tenant == tenant);
        let in_runs = holder.tenant.map_or(0, |tenant| of_runs(tenant).map(|(_, run)| run.bytes).sum());
        let others = holder.bytes.saturating_sub(in_runs);
        // A span counts as a whole although runs may use a part of it.
        if others < SPAN_BYTES {
            continue;
        }
        let bytes = ByteSize(others);
        lines.push(match holder.tenant {
            Some(tenant) => format!("{bytes} of sessions or caches of {}", name_of(tenant)),
            None => format!("{bytes} of heaps, which end with the node"),
        });
    }
    lines
}

fn show_run(host: u16, run: &RecalledRun) -> String {
    let RecalledRun { name, tenant, bytes, only_copy_bytes, .. } = run;
    let copies = match *only_copy_bytes {
        0 => "with copies on other nodes".to_owned(),
        only if only == *bytes => "without a copy on another node".to_owned(),
        only => format!("{} of them without a copy on another node", ByteSize(only)),
    };
    format!("{} of {name} of {} on host {host}, {copies}", ByteSize(*bytes), name_of(*tenant))
}

#[cfg(test)]
mod tests {
    use aquifer_directory::names::MemoryHolder;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn each_run_is_named_and_the_rest_of_each_user() {
        let holder = |tenant, bytes| MemoryHolder { tenant, bytes };
        let user = u32::MAX - 9;
        let node = NodeRecord {
            id: 1,
            fabric: "shm".into(),
            address: "a".into(),
            memory_bytes: 0,
            memory_bytes_max: 0,
            requested_memory_bytes: 0,
            resize_blocker: None,
            recalled_bytes: 20 * MIB,
            recalled_from: vec![holder(Some(user), 10 * MIB), holder(Some(5), MIB), holder(None, 4 * MIB)],
            kept_ms: 0,
            epoch: 1,
            is_disk: false,
        };
        let run = |name: &str, bytes, only_copy_bytes| {
            (3, RecalledRun { node: 1, name: name.into(), tenant: user, bytes, only_copy_bytes })
        };
        let runs = [run("redis", 4 * MIB, MIB), run("python3", 2 * MIB, 2 * MIB), run("cat", MIB, 0)];
        let name = name_of(user);
        let expected = [
            format!("4 MiB of redis of {name} on host 3, 1 MiB of them without a copy on another node"),
            format!("2 MiB of python3 of {name} on host 3, without a copy on another node"),
            format!("1 MiB of cat of {name} on host 3, with copies on other nodes"),
            format!("3 MiB of sessions or caches of {name}"),
            format!("1 MiB of sessions or caches of {}", name_of(5)),
            "4 MiB of heaps, which end with the node".to_owned(),
        ];
        assert_eq!(show_lines(&node, &runs), expected);
    }
}
