//! Runs whose pages have copies on a disk (Valet, Table 3), with programs that check every byte.

use aquifer_tests_e2e::cluster::text;
use aquifer_tests_e2e::only_run::{await_faults, end_checker, figure, figures};
use aquifer_tests_e2e::restart::{restart_node, start_missing};
use aquifer_tests_e2e::run::{Running, mempool_share};
use aquifer_tests_e2e::{Cluster, build, eventually, processes};
use rustix::process::Signal;
use serde_json::Value;

const MIB: u64 = 1 << 20;
/// Bytes of the checker, of which 16 MiB are resident.
const CHECKED: &str = "80M";
/// Least bytes of it that are on nodes.
const REMOTE: u64 = 60 * MIB;

/// A cluster with a disk, and no page cache, in which pages outlive their nodes.
fn cluster_with_disk(nodes: usize, memory: &str, options: &[&str]) -> Cluster {
    let common = ["--disk", "512M", "--cache-per-user", "0", "--memory-max", "512M"];
    Cluster::up_with(nodes, memory, &[&common, options].concat())
}

fn start_checker(cluster: &Cluster, replicas: usize, backup: &str) -> Running {
    let mut command = cluster.command();
    command.args(["run", "--replicas", &replicas.to_string(), "--backup", backup, "--local", "16M", "--"]);
    command.arg(build::programs().join("checker"));
    command.args(["pages", "--bytes", CHECKED, "--rounds", "1000000"]);
    Running::start(&mut command, false, mempool_share(cluster.agent_socket()))
}

fn kill_node(cluster: &Cluster, node: usize) {
    processes::signal(cluster.daemon("node", Some(node)), Signal::KILL);
}

/// Waits until a figure of the only run is at least this.
fn await_figure(cluster: &Cluster, name: &str, least: u64) {
    eventually(name, || (figure(cluster, name)? >= least).then_some(()));
}

/// Waits until all pages have the copies that their run asks for.
fn await_all_copies(cluster: &Cluster, replicas: u64, disk_bytes: u64) {
    eventually("all copies of all pages", || {
        let is_complete = figure(cluster, "degraded_slabs")? == 0
            && figure(cluster, "remote_bytes")? >= replicas * REMOTE
            && figure(cluster, "disk_bytes")? >= disk_bytes;
        is_complete.then_some(())
    });
}

fn lend(cluster: &Cluster, memory: &str) {
    let output = cluster.command().args(["lend", "--node", "1", memory]).output().expect("it can be started");
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[test]
fn pages_without_room_in_memory_go_to_a_disk_and_return() {
    let cluster = cluster_with_disk(1, "32M", &[]);
    let run = start_checker(&cluster, 1, "if-needed");
    await_figure(&cluster, "disk_bytes", 20 * MIB);
    await_faults(&cluster, 5000);
    let notice = || {
        let stderr = run.stderr_so_far();
        stderr.contains("some are on a disk").then_some(stderr)
    };
    let stderr = eventually("the notice", notice);
    lend(&cluster, "512M");
    eventually("all pages to be in memory", || {
        (figure(&cluster, "disk_bytes")? == 0 && figure(&cluster, "displaced_slabs")? == 0).then_some(())
    });
    await_faults(&cluster, 5000);
    assert_eq!(stderr.matches("some are on a disk").count(), 1, "the user is told once: {stderr}");
    end_checker(&cluster, run);
    eventually("all memory to be free", || {
        let status = cluster.status();
        let is_free = |node: &Value| node["free_bytes"].as_u64() == node["memory_bytes"].as_u64();
        status["nodes"].as_array()?.iter().all(is_free).then_some(())
    });
}

#[test]
fn the_only_memory_node_may_be_lost_if_there_always_is_a_backup() {
    let cluster = cluster_with_disk(1, "256M", &[]);
    let run = start_checker(&cluster, 1, "always");
    await_all_copies(&cluster, 1, REMOTE);
    kill_node(&cluster, 1);
    await_faults(&cluster, 5000);
    await_figure(&cluster, "displaced_slabs", 1);
    start_missing(&cluster, "Started node-1");
    await_all_copies(&cluster, 1, REMOTE);
    // Now the copy on the disk may be lost.
    kill_node(&cluster, 2);
    await_faults(&cluster, 5000);
    end_checker(&cluster, run);
}

#[test]
fn a_run_without_backups_waits_instead() {
    let cluster = cluster_with_disk(1, "32M", &[]);
    let run = start_checker(&cluster, 1, "never");
    eventually("the run to wait for room", || figures(&cluster)?["short_of_room"].as_str().map(drop));
    assert_eq!(figure(&cluster, "disk_bytes"), Some(0));
    lend(&cluster, "512M");
    await_faults(&cluster, 5000);
    end_checker(&cluster, run);
}

#[test]
fn a_disk_node_that_is_killed_returns_with_its_pages() {
    let cluster = cluster_with_disk(1, "32M", &["--keep-memory"]);
    let run = start_checker(&cluster, 1, "if-needed");
    await_figure(&cluster, "disk_bytes", 20 * MIB);
    for _ in 0..2 {
        await_faults(&cluster, 2000);
        restart_node(&cluster, 2);
    }
    await_faults(&cluster, 5000);
    end_checker(&cluster, run);
}

mod long {
    use super::*;

    /// All cells of the paper's Table 3, with one more replica than it has: in each, all nodes are
    /// killed that the cell can spare.
    #[test]
    fn each_cell_survives_the_loss_of_what_it_can_spare() {
        for replicas in 1..=3 {
            for backup in ["never", "if-needed", "always"] {
                eprintln!("{replicas} replicas, backup {backup}");
                survive(replicas, backup);
            }
        }
    }

    fn survive(replicas: usize, backup: &str) {
        let cluster = cluster_with_disk(replicas, "160M", &[]);
        let run = start_checker(&cluster, replicas, backup);
        let of_backup = if backup == "always" { REMOTE } else { 0 };
        await_all_copies(&cluster, replicas as u64, of_backup);
        let spared = if backup == "always" { replicas } else { replicas - 1 };
        for node in 1..=spared {
            kill_node(&cluster, node);
        }
        await_faults(&cluster, 5000);
        if spared > 0 && backup != "never" {
            // What is missing is made on the disk.
            await_figure(&cluster, "disk_bytes", REMOTE);
            await_faults(&cluster, 5000);
        }
        if spared > 0 {
            start_missing(&cluster, "Started node-1");
        }
        await_all_copies(&cluster, replicas as u64, of_backup);
        if backup == "if-needed" {
            eventually("no backup to be left", || (figure(&cluster, "disk_bytes")? == 0).then_some(()));
        }
        await_faults(&cluster, 5000);
        end_checker(&cluster, run);
    }

    /// A node and then the other one is lost, with time in between for a backup on the disk.
    #[test]
    fn both_memory_nodes_may_be_lost_one_after_the_other() {
        let cluster = cluster_with_disk(2, "160M", &[]);
        let run = start_checker(&cluster, 2, "if-needed");
        await_all_copies(&cluster, 2, 0);
        kill_node(&cluster, 1);
        eventually("a backup in the place of the lost replicas", || {
            let is_complete =
                figure(&cluster, "disk_bytes")? >= REMOTE && figure(&cluster, "degraded_slabs")? == 0;
            is_complete.then_some(())
        });
        kill_node(&cluster, 2);
        await_faults(&cluster, 5000);
        end_checker(&cluster, run);
    }
}
