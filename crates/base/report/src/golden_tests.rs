//! Golden JSON: `aquifer run --stats` and `aquifer status --json`.
//! A changed golden file needs a line in CHANGELOG. A new field needs a default, because agents of
//! other builds read these records.

use std::fmt::Debug;

use aquifer_tests_support::{Golden, golden};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{
    AgentStatus, FaultWaitUs, LatencyUs, NodeStatus, ProgramStatistics, RecalledRunMemory, RunStatistics,
    SessionStatistics, TenantStatistics, UnpagedProcess, UserStatistics,
};

fn add<T: Serialize + DeserializeOwned + PartialEq + Debug>(golden: &mut Golden, name: &str, value: &T) {
    let text = serde_json::to_string(value).expect("numbers and texts can be written");
    assert_eq!(&serde_json::from_str::<T>(&text).expect("it was just written"), value, "{name}");
    golden.text(name, &text);
}

fn run() -> RunStatistics {
    let program = ProgramStatistics {
        pid: 1,
        held_bytes: 2,
        faults: 3,
        remote_reads: 4,
        evictions: 5,
        lost_pages: 6,
        shared_bytes: 7,
    };
    RunStatistics {
        name: "ls".into(),
        tenant: 1,
        limit_bytes: 2,
        limit_max_bytes: Some(40),
        borrowed_bytes: 41,
        cached_bytes: 42,
        replicas: 3,
        degraded_slabs: 4,
        copied_slabs: 5,
        repaired_pages: 6,
        vacated_slabs: 7,
        repacked_pages: 8,
        moved_bytes: 43,
        backup: "always".into(),
        disk_bytes: 44,
        displaced_slabs: 45,
        disk_errors: 46,
        recalled: vec![RecalledRunMemory { node: 1, bytes: 44, only_copy_bytes: 43 }],
        unchanged_pages: 9,
        processes: 10,
        programs: vec![program],
        unpaged: vec![UnpagedProcess {
            pid: 9,
            name: "sleep".into(),
            reason: "it is statically linked".into(),
        }],
        short_of_room: Some("the pool is full".into()),
        shared_bytes: 37,
        swap_bytes: Some(38),
        faults: 11,
        zero_pages: 12,
        mempool_hits: 13,
        staging_hits: 14,
        cache_hits: 39,
        remote_reads: 15,
        remote_read_trips: 16,
        prefetched: 17,
        remote_writes: 18,
        remote_write_trips: 19,
        evictions: 20,
        lost_pages: 21,
        resident_bytes: 22,
        resident_peak_bytes: 23,
        mempool_bytes: 24,
        remote_bytes: 25,
        remote_peak_bytes: 26,
        fault_latency_us: LatencyUs { p50: 1.5, p99: 2.5, p999: 3.5 },
        fault_wait_us: FaultWaitUs {
            host: LatencyUs { p50: 4.5, p99: 5.5, p999: 6.5 },
            node: LatencyUs { p50: 7.5, p99: 8.5, p999: 9.5 },
            room: LatencyUs { p50: 10.5, p99: 11.5, p999: 12.5 },
        },
    }
}

#[test]
fn golden_statistics_and_status() {
    let mut golden = golden!("statistics");
    add(&mut golden, "run", &run());
    let tenant = TenantStatistics {
        tenant: 1,
        runs: 2,
        processes: 3,
        resident_bytes: 4,
        borrowed_bytes: 11,
        cached_bytes: 12,
        mempool_bytes: 5,
        remote_bytes: 6,
        disk_bytes: 47,
        faults: 7,
        cache_hits: 48,
        remote_reads: 8,
        evictions: 9,
        lost_pages: 10,
    };
    let session =
        SessionStatistics { tenant: 1, pid: 2, extents: 3, bytes: 4, stocked_bytes: 5, requests: 6 };
    let status = AgentStatus {
        host: 1,
        mempool_bytes: 2,
        mempool_used_bytes: 3,
        cached_bytes: 4,
        borrowed_bytes: 5,
        available_bytes: 6,
        keep_free_bytes: 7,
        nodes: vec![NodeStatus {
            id: 1,
            memory_bytes: 2,
            free_bytes: 3,
            is_disk: false,
            failure: Some("away".into()),
        }],
        missing_nodes: vec![super::MissingNode { id: 2, since_s: 3 }],
        tenants: vec![tenant],
        users: vec![UserStatistics { tenant: 1, allocated_bytes: 2, refused: 3 }],
        sessions: vec![session],
        runs: vec![run()],
    };
    add(&mut golden, "agent", &status);
    golden.check();
}
