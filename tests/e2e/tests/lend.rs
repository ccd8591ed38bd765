//! A node lends more and less while a program has most of its memory there and checks every byte.

use std::os::unix::fs::MetadataExt;

use aquifer_tests_e2e::cluster::text;
use aquifer_tests_e2e::run::{Running, status};
use aquifer_tests_e2e::{Cluster, build, eventually, processes};
use serde_json::Value;

const MIB: u64 = 1 << 20;

fn lend(cluster: &Cluster, words: &[&str]) {
    let output = cluster.command().arg("lend").args(words).output().expect("it can be started");
    assert!(output.status.success(), "aquifer lend failed: {}", text(&output.stderr));
}

fn node(cluster: &Cluster, name: &str) -> u64 {
    cluster.status()["nodes"][0][name].as_u64().expect("a figure")
}

/// Bytes of the node's memory that the system has allocated.
fn allocated_bytes(cluster: &Cluster) -> u64 {
    let folder = format!("/proc/{}/fd", cluster.daemon("node", Some(1)));
    let files = std::fs::read_dir(folder).expect("it lives").map(|file| file.expect("it is listed").path());
    let is_memory = |path: &std::path::PathBuf| {
        std::fs::read_link(path).is_ok_and(|target| target.to_string_lossy().contains("memfd:aquifer-pool"))
    };
    let memory = files.into_iter().find(is_memory);
    std::fs::metadata(memory.expect("the node has memory")).expect("it is open").blocks() * 512
}

fn await_run(cluster: &Cluster, what: &str, mut fits: impl FnMut(&Value) -> bool) {
    eventually(what, || {
        let status = status(cluster.agent_socket())?;
        status["runs"].as_array()?.first().filter(|run| fits(run)).map(drop)
    });
}

fn a_program_continues_while_its_node_is_resized(fabric: &str) {
    let options = ["--memory-max", "256M", "--mempool", "16M", "--fabric", fabric];
    let cluster = Cluster::up_with(1, "128M", &options);
    let checker = build::programs().join("checker");
    let program = [checker.to_str().expect("a plain path"), "pages", "--bytes", "96M", "--rounds", "1000000"];
    let run = Running::start(&mut cluster.run_command("16M", &program), false, Box::new(|| 0));
    await_run(&cluster, "most of it to be on the node", |run| {
        run["remote_bytes"].as_u64().is_some_and(|bytes| bytes >= 60 * MIB)
    });
    lend(&cluster, &["2M", "--no-wait"]);
    // The node takes free memory only.
    eventually("it to have taken what is free", || {
        (node(&cluster, "memory_bytes") < 128 * MIB).then_some(())
    });
    lend(&cluster, &["256M"]);
    assert_eq!(node(&cluster, "memory_bytes"), 256 * MIB);
    let mut faults = None;
    await_run(&cluster, "faults to be served", |run| {
        let now = run["faults"].as_u64().expect("a figure");
        now > *faults.get_or_insert(now) + 10_000
    });
    assert!(allocated_bytes(&cluster) >= 60 * MIB);
    lend(&cluster, &["0", "--no-wait"]);
    eventually("it to have taken what is free", || {
        (node(&cluster, "memory_bytes") < 200 * MIB).then_some(())
    });
    assert!(node(&cluster, "memory_bytes") > 0, "a program uses it");
    let program = eventually("the program", || processes::descendants(run.pid()).first().copied());
    processes::kill(program);
    let outcome = run.wait();
    assert!(!outcome.stderr.contains("FAILED"), "the program saw wrong memory: {}", outcome.stderr);
    // All memory is free now, so the node returns it to the system, except the metadata.
    lend(&cluster, &["0"]);
    assert!(allocated_bytes(&cluster) < 8 * MIB);
    lend(&cluster, &["64M"]);
    cluster.assert_all_free();
}

#[test]
fn a_program_continues_while_its_node_lends_less_and_more() {
    a_program_continues_while_its_node_is_resized("shm");
}

#[test]
fn a_program_continues_while_its_node_lends_less_and_more_over_tcp() {
    a_program_continues_while_its_node_is_resized("tcp");
}
