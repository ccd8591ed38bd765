//! Names and types of statistics, and the counters of a known workload.

use std::collections::BTreeMap;

use aquifer_tests_memcached::server::memcached_is_installed;
use aquifer_tests_memcached::stats::{Kind, stats, values};
use aquifer_tests_memcached::{Options, Program, Server};

use crate::{Servers, start_aquifer};

/// Statistics that only memcached has, by the start of their names, with the reason.
const SPECIFIC: [(&str, &str); 16] = [
    ("read_buf_", "pools of buffers of memcached's threads"),
    ("response_obj_", "pools of replies of memcached's threads"),
    ("reserved_fds", "descriptors of memcached's threads"),
    ("malloc_fails", "a server without memory for itself ends"),
    ("libevent", "the event library of memcached"),
    ("slab_", "pages of slab classes"),
    ("slabs_", "pages of slab classes"),
    ("lru_", "threads that maintain the queues of slab classes"),
    ("lrutail_", "threads that maintain the queues of slab classes"),
    ("moves_", "queues of slab classes"),
    ("direct_reclaims", "queues of slab classes"),
    ("crawler_", "the thread that searches the queues for expired items"),
    ("log_", "the logger of `watch`"),
    ("unexpected_napi_ids", "threads by network queue (-N)"),
    ("round_robin_fallback", "threads by network queue (-N)"),
    ("evicted_active", "the queue of items that are read often"),
];

/// Settings that clients and exporters read.
const SETTINGS: [&str; 19] = [
    "maxbytes",
    "maxconns",
    "tcpport",
    "udpport",
    "inter",
    "verbosity",
    "evictions",
    "domain_socket",
    "shutdown_command",
    "num_threads",
    "detail_enabled",
    "cas_enabled",
    "auth_enabled_sasl",
    "auth_enabled_ascii",
    "item_size_max",
    "maxconns_fast",
    "flush_enabled",
    "dump_enabled",
    "idle_timeout",
];

/// Statistics of each class that `memcached-tool display` reads.
const ITEMS: [&str; 5] = ["number", "age", "evicted", "evicted_time", "outofmemory"];
const SLABS: [&str; 4] = ["chunk_size", "total_pages", "total_chunks", "used_chunks"];

/// Starts a memcached with all its statistics, and `aquifer cache`. Both have one item.
fn servers_with_an_item() -> Option<[Server; 2]> {
    memcached_is_installed().then(|| {
        let memcached = Server::start(Options::new(Program::Memcached).with_background_threads());
        let servers = [memcached, start_aquifer(&[])];
        for server in &servers {
            assert_eq!(server.connect().request("set k 0 0 1\r\na\r\n"), b"STORED\r\n");
        }
        servers
    })
}

/// Replaces the numbers of classes and connections in names by `#`, as in `items:#:number`.
fn without_numbers(stats: BTreeMap<String, Kind>) -> BTreeMap<String, Kind> {
    let word = |word: &str| if word.parse::<u64>().is_ok() { "#".to_owned() } else { word.to_owned() };
    let name = |name: &str| name.split(':').map(word).collect::<Vec<String>>().join(":");
    stats.into_iter().map(|(full, kind)| (name(&full), kind)).collect()
}

/// Asserts that all names are present and of the kind that memcached has.
fn assert_has(command: &str, names: impl IntoIterator<Item = String>) {
    let Some(servers) = servers_with_an_item() else { return };
    let [expected, actual] =
        servers.each_ref().map(|server| without_numbers(stats(&mut server.connect(), command)));
    let wrong: Vec<String> = names
        .into_iter()
        .filter(|name| actual.get(name) != expected.get(name))
        .map(|name| format!("{name}: {:?} instead of {:?}", actual.get(&name), expected[&name]))
        .collect();
    assert!(
        wrong.is_empty(),
        "{command} lacks statistics, or has them as another type:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn general_statistics_have_the_names_and_types_of_memcached() {
    let Some([memcached, _]) = servers_with_an_item() else { return };
    let names = stats(&mut memcached.connect(), "stats").into_keys();
    let is_specific = |name: &str| SPECIFIC.iter().any(|(start, _)| name.starts_with(start));
    assert_has("stats", names.filter(|name| !is_specific(name)));
}

#[test]
fn settings_have_the_names_and_types_of_memcached() {
    assert_has("stats settings", SETTINGS.map(str::to_owned));
}

#[test]
fn memcached_tool_finds_what_it_displays() {
    assert_has("stats items", ITEMS.map(|name| format!("items:#:{name}")));
    let slabs = SLABS.map(|name| format!("#:{name}"));
    assert_has("stats slabs", slabs.into_iter().chain(["active_slabs", "total_malloced"].map(str::to_owned)));
}

#[test]
fn connections_and_sizes_have_the_names_and_types_of_memcached() {
    assert_has("stats conns", ["#:addr", "#:state", "#:secs_since_last_cmd"].map(str::to_owned));
    assert_has("stats sizes", ["sizes_status"].map(str::to_owned));
}

#[test]
fn statistics_by_prefix_can_be_read() {
    let Some(servers) = Servers::start(&[]) else { return };
    for server in servers.both() {
        let mut connection = server.connect();
        let on = connection.request("stats detail on\r\n");
        // A server need not support statistics by prefix.
        assert!(on == b"OK\r\n" || on.starts_with(b"SERVER_ERROR "), "{}", on.escape_ascii());
        connection.request("set prefix:1 0 0 1\r\na\r\n");
        let dump = connection.request("stats detail dump\r\n");
        let lines = dump.strip_suffix(b"END\r\n").expect("the dump has an end");
        let is_prefix =
            |line: &[u8]| line.is_empty() || line.starts_with(b"PREFIX prefix get 0 hit 0 set 1 del 0");
        assert!(lines.split(|byte| *byte == b'\n').all(is_prefix), "{}", dump.escape_ascii());
        assert_eq!(connection.request("stats detail off\r\n"), b"OK\r\n");
        let usage = b"CLIENT_ERROR usage: stats detail on|off|dump\r\n";
        assert_eq!(connection.request("stats detail\r\n"), usage);
    }
}

/// A workload that changes each counter of [`COUNTERS`].
const WORKLOAD: &str = concat!(
    "set a 0 0 1\r\n1\r\nset b 0 0 1\r\nx\r\nadd a 0 0 1\r\nx\r\nget a b missing\r\n",
    "incr a 1\r\nincr missing 1\r\ndecr a 1\r\ndecr missing 1\r\ntouch a 0\r\ntouch missing 0\r\n",
    "cas a 0 0 1 1000000\r\nx\r\ncas missing 0 0 1 1\r\nx\r\ndelete b\r\ndelete missing\r\n",
);

const COUNTERS: [&str; 17] = [
    "cmd_get",
    "cmd_set",
    "cmd_flush",
    "cmd_touch",
    "get_hits",
    "get_misses",
    "delete_hits",
    "delete_misses",
    "incr_hits",
    "incr_misses",
    "decr_hits",
    "decr_misses",
    "cas_misses",
    "cas_badval",
    "touch_hits",
    "touch_misses",
    "curr_items",
];

#[test]
fn counters_of_a_workload_are_equal() {
    let Some(servers) = Servers::start(&[]) else { return };
    let [expected, actual] = servers.both().map(|server| {
        let mut connection = server.connect();
        connection.request(WORKLOAD);
        let values = values(&mut connection, "stats");
        COUNTERS.map(|name| (name, values.get(name).cloned()))
    });
    assert_eq!(actual, expected);
}

#[test]
fn a_reset_sets_counters_to_zero() {
    let Some(servers) = Servers::start(&[]) else { return };
    for server in servers.both() {
        let mut connection = server.connect();
        connection.request(WORKLOAD);
        assert_eq!(connection.request("stats reset\r\n"), b"RESET\r\n");
        let values = values(&mut connection, "stats");
        // The end of each batch is found by a get that misses.
        for name in ["cmd_set", "cmd_touch", "get_hits", "delete_hits", "incr_misses", "total_items"] {
            assert_eq!(values[name], "0", "{name} of {:?}", server.options());
        }
        assert_eq!(values["curr_items"], "1", "{:?}", server.options());
    }
}
