//! The idle memory of a host: the page cache and elastic runs have it until others need it. A
//! program checks every byte of its memory meanwhile.
//!
//! The agent reads how much memory is available from a file of the test.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Child;

use aquifer_tests_e2e::cluster::text;
use aquifer_tests_e2e::restart::restart_agent;
use aquifer_tests_e2e::run::{Running, status};
use aquifer_tests_e2e::{Cluster, build, eventually, processes};
use serde_json::Value;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
/// Bytes of the checker's memory, in MiB.
const WHOLE_MIB: u64 = 96;
/// Available memory of an idle host, in MiB.
pub(super) const IDLE_MIB: u64 = 16 << 10;

/// A file in place of `/proc/meminfo`.
pub(super) struct Meminfo(TempDir);

impl Meminfo {
    /// A host of which this is available.
    pub fn new(available_mib: u64) -> Self {
        let meminfo = Self(tempfile::tempdir().expect("a folder"));
        meminfo.set(available_mib);
        meminfo
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("meminfo")
    }

    /// Sets how much memory is available.
    fn set(&self, available_mib: u64) {
        let text = format!("MemTotal: {} kB\nMemAvailable: {} kB\n", IDLE_MIB << 10, available_mib << 10);
        let new = self.0.path().join("new");
        std::fs::write(&new, text).expect("our own folder");
        std::fs::rename(new, self.path()).expect("our own folder");
    }

    /// Starts a cluster on a host with this memory.
    pub fn up(&self) -> Cluster {
        let path = self.path();
        Cluster::up_in(&[("AQUIFER_MEMINFO", path.to_str().expect("a plain path"))], 2, "256M", &[])
    }
}

/// Starts a checker of [`WHOLE_MIB`] with options of `aquifer run`.
fn start(cluster: &mut Cluster, options: &[&str]) -> Running {
    let checker = build::programs().join("checker");
    let bytes = format!("{WHOLE_MIB}M");
    let program =
        [checker.to_str().expect("a plain path"), "pages", "--bytes", &bytes, "--rounds", "1000000"];
    cluster.set_run_options(options);
    Running::start(&mut cluster.run_command("24M", &program), false, Box::new(|| 0))
}

fn figure(of: &Value, name: &str) -> u64 {
    of[name].as_u64().unwrap_or_else(|| panic!("there is no {name}: {of:#}"))
}

/// Waits until the status of the agent and its only run fit.
fn await_status(cluster: &Cluster, what: &str, mut fits: impl FnMut(&Value, &Value) -> bool) {
    eventually(what, || {
        let status = status(cluster.agent_socket())?;
        status["runs"].as_array()?.first().filter(|run| fits(&status, run)).map(drop)
    });
}

/// Waits until pages of the run were filled again.
fn await_faults(cluster: &Cluster, counter: &str) {
    let mut first = None;
    await_status(cluster, &format!("{counter} to grow"), |_, run| {
        let now = figure(run, counter);
        now > *first.get_or_insert(now) + 100
    });
}

/// Ends the checker, which must not have seen wrong memory.
fn end(cluster: &Cluster, run: Running) {
    let program = eventually("the program", || processes::descendants(run.pid()).first().copied());
    processes::kill(program);
    let outcome = run.wait();
    assert!(!outcome.stderr.contains("FAILED"), "the program saw wrong memory: {}", outcome.stderr);
    cluster.assert_all_free();
}

#[test]
fn an_elastic_run_has_idle_memory_until_others_need_it() {
    let meminfo = Meminfo::new(IDLE_MIB);
    let mut cluster = meminfo.up();
    let run = start(&mut cluster, &["--local-max", "auto"]);
    let is_whole = |agent: &Value, run: &Value| {
        figure(run, "borrowed_bytes") >= 64 * MIB
            && figure(run, "resident_bytes") >= 90 * MIB
            && figure(agent, "borrowed_bytes") == figure(run, "borrowed_bytes")
    };
    let is_small = |_: &Value, run: &Value| figure(run, "resident_bytes") <= 32 * MIB;
    await_status(&cluster, "the run to be whole", is_whole);
    meminfo.set(0);
    await_status(&cluster, "it to give idle memory back", is_small);
    await_faults(&cluster, "faults");
    meminfo.set(IDLE_MIB);
    await_status(&cluster, "the run to be whole again", is_whole);
    restart_agent(&cluster);
    await_status(&cluster, "the run to be whole after a restart of the agent", is_whole);
    meminfo.set(0);
    await_status(&cluster, "it to give idle memory back after a restart", is_small);
    end(&cluster, run);
}

#[test]
fn an_elastic_run_has_no_more_than_its_largest_limit() {
    let meminfo = Meminfo::new(IDLE_MIB);
    let mut cluster = meminfo.up();
    let run = start(&mut cluster, &["--local-max", "48M"]);
    await_faults(&cluster, "evictions");
    await_status(&cluster, "the run to have what it may borrow", |_, run| {
        let resident = figure(run, "resident_bytes");
        figure(run, "limit_max_bytes") == 48 * MIB && (40 * MIB..=56 * MIB).contains(&resident)
    });
    let limit = |arguments: &[&str]| {
        let pid = run.pid().to_string();
        let output =
            cluster.command().args(["limit", &pid]).args(arguments).output().expect("it can be started");
        assert!(output.status.success(), "aquifer limit failed: {}", text(&output.stderr));
    };
    let too_small = ["limit", &run.pid().to_string(), "24M", "--max", "16M"];
    let refused = cluster.command().args(too_small).output().expect("it can be started");
    assert!(!refused.status.success() && text(&refused.stderr).contains("is less than"), "{refused:?}");
    limit(&["24M", "--max", "auto"]);
    await_status(&cluster, "the run to be whole", |_, run| figure(run, "resident_bytes") >= 90 * MIB);
    limit(&["32M", "--max", "32M"]);
    await_status(&cluster, "the run to be held at its limit", |_, run| {
        run["limit_max_bytes"].is_null() && figure(run, "resident_bytes") <= 36 * MIB
    });
    end(&cluster, run);
}

#[test]
fn runs_without_the_option_have_the_largest_limit_of_their_agent() {
    let meminfo = Meminfo::new(IDLE_MIB);
    let mut cluster = meminfo.up();
    processes::kill(cluster.daemon("agent", None));
    let agent = ["agent", "--local-max", "64M"];
    let _agent = Killed(cluster.command().args(agent).spawn().expect("it can be started"));
    eventually("the agent to serve", || status(cluster.agent_socket()));
    let run = start(&mut cluster, &[]);
    await_faults(&cluster, "evictions");
    await_status(&cluster, "the run to have what it may borrow", |_, run| {
        let resident = figure(run, "resident_bytes");
        figure(run, "limit_max_bytes") == 64 * MIB && (56 * MIB..=72 * MIB).contains(&resident)
    });
    end(&cluster, run);
}

#[test]
fn the_page_cache_returns_its_memory() {
    let meminfo = Meminfo::new(IDLE_MIB);
    let mut cluster = meminfo.up();
    let run = start(&mut cluster, &[]);
    await_status(&cluster, "pages to be cached", |agent, run| {
        figure(run, "cached_bytes") > 32 * MIB && figure(agent, "cached_bytes") >= figure(run, "cached_bytes")
    });
    await_faults(&cluster, "cache_hits");
    meminfo.set(0);
    await_status(&cluster, "the cache to be empty", |agent, _| figure(agent, "cached_bytes") == 0);
    await_faults(&cluster, "remote_reads");
    let bytes = mempool_memory(&cluster);
    assert!(bytes < 8 * MIB, "the mempool has {bytes} bytes of memory");
    meminfo.set(IDLE_MIB);
    await_faults(&cluster, "cache_hits");
    end(&cluster, run);
}

/// A process that is killed when this is dropped.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // Both fail only if the process has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A machine that borrows and lends: the page cache returns memory before the node lends less.
#[test]
fn the_cache_returns_memory_before_a_node_lends_less() {
    const LENT_MIB: u64 = 128;
    let meminfo = Meminfo::new(IDLE_MIB);
    let mut cluster = meminfo.up();
    let lent = format!("{LENT_MIB}M");
    let node = ["node", "--id", "3", "--memory", &lent, "--keep-free", "512M"];
    let _node = Killed(cluster.command().args(node).spawn().expect("it can be started"));
    cluster.await_nodes(3);
    let lent = |agent: &Value| {
        let nodes = agent["nodes"].as_array().expect("the agent has nodes");
        nodes.iter().find(|node| node["id"] == 3).map_or(0, |node| figure(node, "memory_bytes"))
    };
    let run = start(&mut cluster, &[]);
    await_status(&cluster, "pages to be cached", |agent, run| {
        figure(run, "cached_bytes") > 32 * MIB && lent(agent) == LENT_MIB * MIB
    });
    // Less than the agent keeps free, which is a GiB, and more than the node does.
    meminfo.set(768);
    await_status(&cluster, "the cache to be empty", |agent, _| {
        assert_eq!(lent(agent), LENT_MIB * MIB, "the node lends less before");
        figure(agent, "cached_bytes") == 0
    });
    meminfo.set(448);
    await_status(&cluster, "the node to lend less", |agent, _| lent(agent) < LENT_MIB * MIB);
    meminfo.set(IDLE_MIB);
    await_status(&cluster, "all to have memory again", |agent, run| {
        figure(run, "cached_bytes") > 0 && lent(agent) == LENT_MIB * MIB
    });
    let program = eventually("the program", || processes::descendants(run.pid()).first().copied());
    processes::kill(program);
    assert!(!run.wait().stderr.contains("FAILED"), "the program saw wrong memory");
}

/// Bytes of memory that the agent's mempool has.
fn mempool_memory(cluster: &Cluster) -> u64 {
    let folder = format!("/proc/{}/fd", cluster.daemon("agent", None));
    let entries = std::fs::read_dir(folder).expect("our own process").map_while(Result::ok);
    let mut mempools = entries.filter(|entry| {
        std::fs::read_link(entry.path()).is_ok_and(|file| file.to_string_lossy().contains("aquifer-mempool"))
    });
    let mempool = mempools.next().expect("the agent has a mempool");
    std::fs::metadata(mempool.path()).expect("our own process").blocks() * 512
}

mod long {
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    use aquifer_tests_e2e::SharedCluster;
    use aquifer_tests_e2e::postgres::Postgres;
    use aquifer_tests_e2e::redis::Redis;

    use super::*;

    /// A user whose programs start and end all the time.
    const CHURNING: u32 = 65_531;

    /// Has memory run short and lets it go again until `is_done`. Kills the agent now and then.
    fn squeeze(meminfo: &Meminfo, cluster: &Cluster, is_done: &AtomicBool) {
        for turn in 0u64.. {
            for available_mib in [0, 1100, IDLE_MIB, 700, IDLE_MIB] {
                meminfo.set(available_mib);
                eventually("the agent to see the available memory", || {
                    let status = status(cluster.agent_socket())?;
                    (figure(&status, "available_bytes") == available_mib * MIB).then_some(())
                });
            }
            if is_done.load(Relaxed) {
                return;
            }
            if turn.is_multiple_of(16) {
                restart_agent(cluster);
            }
        }
    }

    /// Ends the other threads, also if a check fails.
    struct Done<'a>(&'a AtomicBool);

    impl Drop for Done<'_> {
        fn drop(&mut self) {
            self.0.store(true, Relaxed);
        }
    }

    fn churn(shared: &SharedCluster, is_done: &AtomicBool) {
        let checker = shared.path("checker");
        let checker = checker.to_str().expect("a plain path");
        for test in ["pages", "fork", "mremap", "threads"].iter().cycle() {
            if is_done.load(Relaxed) {
                return;
            }
            let words =
                ["run", "--local", "12M", "--local-max", "auto", "--", checker, test, "--bytes", "32M"];
            let mut command = shared.command(CHURNING, &words);
            Running::start(&mut command, true, Box::new(|| 0)).wait().assert_success("a user's checker");
        }
    }

    #[test]
    fn programs_of_two_users_live_through_squeezes() {
        assert!(rustix::process::geteuid().is_root(), "needs root, to start programs of other users");
        let meminfo = Meminfo::new(IDLE_MIB);
        let path = meminfo.path();
        let environment = [("AQUIFER_MEMINFO", path.to_str().expect("a plain path"))];
        let mut shared = SharedCluster::up_in(&environment, 3, &[]);
        shared.cluster.set_run_options(&["--local-max", "auto"]);
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| squeeze(&meminfo, &shared.cluster, &is_done));
            scope.spawn(|| churn(&shared, &is_done));
            let done = Done(&is_done);
            let folder = tempfile::tempdir().expect("a folder");
            let redis = Redis::paged(&shared.cluster, folder.path(), 24 * MIB);
            let loaded = redis.check("load", "64M");
            let postgres = Postgres::start(&shared, "24M");
            postgres.fill_tables();
            let _ = postgres.ask("pgbench", &["-n", "-c", "4", "-t", "100"]);
            postgres.assert_balances(400);
            assert_eq!(redis.check("verify", "64M"), loaded, "what redis-server has in memory");
            drop(done);
            postgres.stop().assert_success("PostgreSQL on the pool");
            redis.stop().assert_success("redis on the pool");
        });
        shared.cluster.assert_all_free();
    }
}
