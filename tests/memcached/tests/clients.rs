//! The test program of libmemcached.

use std::collections::BTreeMap;
use std::process::Command;

use aquifer_tests_memcached::Server;
use aquifer_tests_support::skip;

use crate::Servers;

/// Options of the protocols that `aquifer cache` speaks; `-b` would be the binary one.
const PROTOCOLS: [&str; 1] = ["-a"];

/// The tests of memccapable, and whether they passed.
fn memccapable(server: &Server, protocol: &str) -> BTreeMap<String, bool> {
    let output = Command::new("memccapable")
        // Seconds to wait for a reply.
        .args(["-h", "127.0.0.1", "-p", &server.port().to_string(), "-t", "60", protocol])
        .output()
        .expect("memccapable can be started");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let results: BTreeMap<String, bool> = text
        .lines()
        .filter_map(|line| line.strip_suffix(']')?.rsplit_once('['))
        .map(|(name, result)| (name.trim().to_owned(), result == "pass"))
        .collect();
    assert!(!results.is_empty(), "memccapable printed no results: {text}");
    results
}

#[test]
fn memccapable_passes_where_memcached_passes() {
    if Command::new("memccapable").arg("-?").output().is_err() {
        skip("libmemcached-tools is not installed");
        return;
    }
    let Some(servers) = Servers::start(&[]) else { return };
    for protocol in PROTOCOLS {
        let expected = memccapable(&servers.memcached, protocol);
        assert!(expected.values().any(|passed| *passed), "memcached passes none: {expected:?}");
        assert_eq!(memccapable(&servers.aquifer, protocol), expected);
    }
}
