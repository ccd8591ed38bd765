//! Attacks on the memory and the descriptors of the agent: the attacker is ended, the agent serves.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};

use aquifer_tests_e2e::cluster::{find, text};
use aquifer_tests_e2e::{SharedCluster, eventually};
use serde_json::Value;

use crate::user::{ANNE, Attack, MALLORY, Victim};

/// Descriptors of each daemon of a small cluster.
const DESCRIPTORS: usize = 1024;
/// The first of the subordinate ids of the hostile user.
const SUBORDINATE: u32 = 700_000;

#[test]
fn a_page_table_cannot_outgrow_the_limit() {
    let victim = Victim::up();
    let output = victim.paged_attacker("sparse", "32M").output().expect("setpriv can be started");
    let said = text(&output.stderr);
    assert!(said.contains("page table"), "{}: {said}", output.status);
    victim.0.cluster.assert_all_free();
    let another = victim.0.command(MALLORY, &["run", "--local", "24M", "--", "true"]).output();
    assert!(another.expect("setpriv can be started").status.success(), "the agent serves on");
}

/// A cluster of daemons that can have few descriptors, on a machine where ids belong to the hostile
/// user.
fn small_victim() -> Victim {
    let start = |folder: &Path| {
        let ranges = folder.join("subuid");
        std::fs::write(&ranges, format!("{MALLORY}:{SUBORDINATE}:65536\n")).expect("our own folder");
        let mount = format!("mount --bind {} /etc/subuid", ranges.display());
        format!(
            "unshare --mount sh -c '{mount} && exec \"$0\" \"$@\"' prlimit --nofile={DESCRIPTORS} \
             setpriv --bounding-set=-sys_resource"
        )
    };
    Victim::of(SharedCluster::up_through(2, start))
}

/// Checks that another user's program runs while users use up their shares of the agent.
fn leave_descriptors(users: &[u32]) {
    let victim = small_victim();
    let attack = |user: &u32| Attack::start(&mut victim.attacker_as(*user, "use-up-descriptors"));
    let attacks: Vec<_> = users.iter().map(attack).collect();
    let checker = victim.0.path("checker");
    let checker = checker.to_str().expect("a plain path");
    let options = ["run", "--local", "16M", "--", checker, "pages", "--bytes", "40M", "--rounds", "1"];
    let output = victim.0.command(ANNE, &options).output().expect("setpriv can be started");
    assert!(output.status.success(), "{}", text(&output.stderr));
    attacks.into_iter().for_each(Attack::end);
    eventually("the share to be free again", || {
        let again = victim.0.command(MALLORY, &["run", "--local", "24M", "--", "true"]).output();
        again.expect("setpriv can be started").status.success().then_some(())
    });
}

#[test]
fn a_user_leaves_descriptors_of_the_agent_to_others() {
    leave_descriptors(&[MALLORY]);
}

#[test]
fn a_user_has_one_share_with_all_of_its_ids() {
    leave_descriptors(&[MALLORY, SUBORDINATE, SUBORDINATE + 1, SUBORDINATE + 2]);
}

#[test]
fn an_idle_run_does_not_keep_the_mempool_from_others() {
    let victim = Victim::of(SharedCluster::up_with(2, &["--mempool", "16M"]));
    // The share of the run is as large as the mempool.
    let idle = Attack::start(victim.paged_attacker("fill", "512M").arg("700"));
    let program = victim.0.path("attacker");
    let words = ["run", "--local", "16M", "--", program.to_str().expect("a plain path"), "fill", "160"];
    let other = Attack::start(&mut victim.0.command(ANNE, &words));
    eventually("the other run to be within its limit", || {
        let status = victim.0.cluster.status();
        let runs = find(&status, "runs").and_then(Value::as_array).expect("runs");
        let run = runs.iter().find(|run| run["tenant"] == ANNE).expect("it runs");
        (run["resident_bytes"].as_u64() < Some(40 << 20)).then_some(())
    });
    other.end();
    idle.end();
}

/// A run that needs more room than the pool has, and waits for it.
struct FillingRun(Child);

impl FillingRun {
    fn start(victim: &Victim, mib: &str) -> Self {
        let mut command = victim.paged_attacker("fill", "32M");
        let mut filling = command.arg(mib).stderr(Stdio::piped()).spawn().expect("setpriv can be started");
        let mut said = BufReader::new(filling.stderr.take().expect("it is piped")).lines();
        let is_full = |line: std::io::Result<String>| line.expect("text").contains("waits for room");
        assert!(said.any(is_full), "the pool is larger");
        Self(filling)
    }

    fn end(mut self) {
        self.0.kill().expect("it runs");
        self.0.wait().expect("it ends");
    }
}

/// Checks that another user's program of this size finds room.
fn serves_other(victim: &Victim, bytes: &str) {
    let checker = victim.0.path("checker");
    let checker = checker.to_str().expect("a plain path");
    let options = ["run", "--local", "16M", "--wait-for-room", "20s", "--", checker];
    let mut other = victim.0.command(ANNE, &options);
    let output = other.args(["pages", "--bytes", bytes, "--rounds", "2"]).output();
    let output = output.expect("setpriv can be started");
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[test]
fn a_user_that_fills_the_pool_leaves_a_share_to_others() {
    let victim = Victim::of(SharedCluster::up_with(1, &[]));
    let filling = FillingRun::start(&victim, "600");
    serves_other(&victim, "20M");
    filling.end();
}

#[test]
fn extents_of_a_user_leave_a_share_of_the_pool_to_others() {
    let victim = Victim::of(SharedCluster::up_with(1, &[]));
    let filling = FillingRun::start(&victim, "600");
    let extents = Attack::start(&mut victim.attacker("fill-by-extents"));
    serves_other(&victim, "20M");
    extents.end();
    filling.end();
}

/// The other user's program needs more than its share of the memory.
#[test]
fn a_user_that_fills_the_disk_leaves_a_share_to_others() {
    let victim = Victim::of(SharedCluster::up_with(1, &["--disk", "256M", "--cache-per-user", "0"]));
    let filling = FillingRun::start(&victim, "900");
    serves_other(&victim, "28M");
    filling.end();
}
