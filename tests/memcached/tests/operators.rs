//! Tests of operation: options, files with secrets, the tools of memcached, and drained servers.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Output};

use aquifer_tests_e2e::build;
use aquifer_tests_memcached::Server;
use aquifer_tests_memcached::cluster::{Cluster, LONG_PARTITION_TIMEOUT};
use aquifer_tests_support::skip;
use rustix::process::Signal;

use crate::{Servers, start_aquifer};

/// The path of memcached-tool in Debian.
const TOOL: &str = "/usr/share/memcached/scripts/memcached-tool";

/// Runs `aquifer cache` until it ends by itself.
fn cache(arguments: &[&str]) -> Output {
    let mut command = Command::new(build::binary());
    command.arg("cache").args(arguments).output().expect("the binary can be started")
}

/// Returns the error with which `aquifer cache` does not start.
fn refusal(arguments: &[&str]) -> String {
    let output = cache(&[&["-p", "0"], arguments].concat());
    assert!(!output.status.success(), "{arguments:?}");
    String::from_utf8(output.stderr).expect("text")
}

#[test]
fn the_version_and_the_licence_are_printed() {
    let text = |option: &str| {
        let output = cache(&[option]);
        assert!(output.status.success(), "{option}");
        String::from_utf8(output.stdout).expect("text")
    };
    let server = start_aquifer(&[]);
    let version = server.connect().request("version\r\n");
    let version = String::from_utf8(version).expect("text").trim().replace("VERSION", "memcached");
    for option in ["-V", "--version"] {
        assert!(text(option).contains(&version), "{}", text(option));
    }
    assert!(text("-i").contains("LICENSE-2.0") || text("-i").to_lowercase().contains("license"));
}

#[test]
fn a_file_of_items_that_others_can_change_is_refused() {
    let folder = tempfile::tempdir_in("/dev/shm").expect("there is a file system in memory");
    let at = |name: &str| folder.path().join(name).display().to_string();
    fs::write(at("other"), "something").expect("the folder is writable");
    symlink(at("other"), at("link")).expect("the folder is writable");
    let refused = refusal(&["-s", &at("socket"), "-e", &at("link")]);
    assert!(refused.contains("symbolic link"), "{refused}");
    fs::set_permissions(at("other"), Permissions::from_mode(0o666)).expect("the path belongs to this user");
    let refused = refusal(&["-s", &at("socket"), "-e", &at("other")]);
    assert!(refused.contains("mode 666"), "{refused}");
    assert_eq!(fs::read(at("other")).expect("the file exists"), b"something");
}

#[test]
fn a_file_of_users_that_others_can_read_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("users");
    let socket = folder.path().join("socket").display().to_string();
    fs::write(&path, "user:pass\n").expect("the folder is writable");
    for mode in [0o644, 0o604, 0o620] {
        fs::set_permissions(&path, Permissions::from_mode(mode)).expect("the path belongs to this user");
        let refused = refusal(&["-s", &socket, "-Y", &path.display().to_string()]);
        assert!(refused.contains(&format!("mode {mode:o}")), "{refused}");
    }
    fs::set_permissions(&path, Permissions::from_mode(0o640)).expect("the path belongs to this user");
    drop(start_aquifer(&["-Y", &path.display().to_string()]));
}

/// The keys that `lru_crawler metadump` lists.
fn listed(server: &Server) -> BTreeSet<String> {
    let mut connection = server.connect();
    connection.send(b"lru_crawler metadump all\r\n");
    let reply = String::from_utf8(connection.receive_until(b"END\r\n")).expect("text");
    let lines = reply.strip_suffix("END\r\n").expect("the list has an end").lines();
    lines
        .map(|line| {
            let words: Vec<&str> = line.split(' ').collect();
            let names: Vec<&str> = words.iter().filter_map(|word| Some(word.split_once('=')?.0)).collect();
            assert_eq!(names, ["key", "exp", "la", "cas", "fetch", "cls", "size"], "{line}");
            words[0].to_owned()
        })
        .collect()
}

#[test]
fn all_keys_are_listed() {
    let server = start_aquifer(&[]);
    assert_eq!(listed(&server), BTreeSet::new());
    let mut connection = server.connect();
    let mut expected = BTreeSet::new();
    // More than the replies of one turn.
    for number in 0..20_000 {
        let request = format!("set key-{number}! 0 0 1 noreply\r\nx\r\n");
        connection.send(request.as_bytes());
        expected.insert(format!("key=key-{number}%21"));
    }
    assert_eq!(connection.request("get key-1!\r\n"), b"VALUE key-1! 0 1\r\nx\r\nEND\r\n");
    assert!(listed(&server) == expected);
    let server = start_aquifer(&["-X"]);
    assert_eq!(server.connect().request("lru_crawler metadump all\r\n"), b"ERROR metadump not allowed\r\n");
}

#[test]
fn the_tool_of_memcached_lists_and_dumps_keys() {
    if !Path::new(TOOL).exists() {
        skip("memcached-tool is not installed");
        return;
    }
    let Some(servers) = Servers::start(&[]) else { return };
    for (mode, shown) in [("keys", "key=a"), ("dump", "add a 0")] {
        let server = &servers.aquifer;
        assert_eq!(server.connect().request("set a 0 0 1\r\nx\r\n"), b"STORED\r\n");
        let mut command = Command::new(TOOL);
        let output = command.arg(format!("127.0.0.1:{}", server.port())).arg(mode).output();
        let text = String::from_utf8(output.expect("the tool can be started").stdout).expect("text");
        assert!(text.contains(shown), "{mode}: {text}");
    }
}

#[test]
fn the_file_of_options_of_debian_is_read() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("memcached.conf");
    fs::write(&path, "# comment\n-d\nlogfile /var/log/memcached.log\n-m 96 # MiB\n-C\n").expect("writable");
    let server = start_aquifer(&["--memcached-conf", path.to_str().expect("text")]);
    let settings = String::from_utf8(server.connect().request("stats settings\r\n")).expect("text");
    assert!(settings.contains("STAT cas_enabled no\r\n"), "{settings}");
    // The command line overrides the file.
    assert!(settings.contains(&format!("STAT maxbytes {}\r\n", 64 << 20)), "{settings}");
}

#[test]
fn the_last_server_claims_all_partitions_although_it_drains() {
    let cluster = Cluster::start(&LONG_PARTITION_TIMEOUT);
    let first = cluster.add();
    cluster.wait_for_partitions();
    let second = cluster.add();
    cluster.wait_for("on 2 servers");
    let drained = cluster.operate(&["drain", "2"]);
    assert!(drained.status.success(), "{drained:?}");
    let text = String::from_utf8(drained.stdout).expect("text");
    assert!(text.contains("aquifer cache drain 2 --undo"), "{text}");
    let status = String::from_utf8(cluster.operate(&["status"]).stdout).expect("text");
    assert!(status.contains("aquifer cache drain 2 --undo"), "{status}");
    let _killed = first.end_by(Signal::KILL);
    cluster.wait_for("128 partitions on 1 servers");
    assert_eq!(second.connect().request("set a 0 0 1\r\nx\r\n"), b"STORED\r\n");
}
