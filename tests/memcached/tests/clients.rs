//! The test program of libmemcached, and the tests of pymemcache.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use aquifer_tests_memcached::Server;
use aquifer_tests_support::skip;

use crate::Servers;

/// Options of the text and the binary protocol.
const PROTOCOLS: [&str; 2] = ["-a", "-b"];
/// The fewest tests of pymemcache that need a server.
const PYMEMCACHE_TESTS_MIN: usize = 90;

/// Runs memccapable. Returns the names of its tests, and whether each has passed.
fn memccapable(server: &Server, protocol: &str) -> BTreeMap<String, bool> {
    let output = Command::new("memccapable")
        // `-t` is the timeout of a reply in seconds.
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

/// Runs the tests of pymemcache that need a server. Returns how many passed, or the output if one
/// fails.
fn pymemcache(server: &Server, tools: &Path) -> Result<usize, String> {
    let output = Command::new("python3")
        .args(["-m", "pytest", "-p", "no:cacheprovider", "-c", "/dev/null", "-q", "-m", "integration"])
        .args(["--server=127.0.0.1", &format!("--port={}", server.port()), "--rootdir"])
        .arg(tools)
        .arg("--ignore")
        // These tests need a compression library.
        .arg(tools.join("pymemcache/test/test_compression.py"))
        .arg(tools.join("pymemcache/test"))
        .env("PYTHONPATH", tools)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .output()
        .expect("python3 can be started");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let words: Vec<&str> = text.split_whitespace().collect();
    let passed = words.windows(2).find(|words| words[1].starts_with("passed"));
    match passed.and_then(|words| words[0].parse().ok()) {
        Some(passed) if output.status.success() => Ok(passed),
        _ => Err(format!("{text}{}", String::from_utf8_lossy(&output.stderr))),
    }
}

#[test]
fn the_tests_of_pymemcache_pass() {
    let tools = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tools");
    let tools = tools.canonicalize().unwrap_or(tools);
    if !tools.join("pymemcache/test").is_dir() {
        skip("pymemcache is not installed: run scripts/install-deps.sh test");
        return;
    }
    let Some(servers) = Servers::start(&[]) else { return };
    let [expected, passed] = servers.both().map(|server| pymemcache(server, &tools));
    assert!(expected.as_ref().is_ok_and(|passed| *passed >= PYMEMCACHE_TESTS_MIN), "{expected:?}");
    assert_eq!(passed, expected);
}
