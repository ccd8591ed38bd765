//! Unprivileged users on the agent of root. The agent uses kernel features that the users may not
//! use, and users cannot access runs of each other.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use aquifer_tests_e2e::cluster::text;
use aquifer_tests_e2e::run::Running;
use aquifer_tests_e2e::{SharedCluster, eventually, processes};
use aquifer_tests_support::skip;
use serde_json::Value;

const ANNE: u32 = 65_533;
const BERT: u32 = 65_532;

/// A cluster with helpers for runs of users.
struct Guests(SharedCluster);

impl Guests {
    fn start(&self, uid: u32, limit: &str, test: &[&str]) -> Running {
        let checker = self.0.path("checker");
        let mut words = vec!["run", "--local", limit, "--", checker.to_str().expect("a plain path")];
        words.extend(test);
        Running::start(&mut self.0.command(uid, &words), true, Box::new(|| 0))
    }

    fn runs(&self, uid: u32) -> Vec<Value> {
        let output = self.0.command(uid, &["status", "--json"]).output().expect("setpriv can be started");
        assert!(output.status.success(), "{}", text(&output.stderr));
        let status: Value = serde_json::from_slice(&output.stdout).expect("it is JSON");
        status["agent"]["runs"].as_array().expect("the agent tells of runs").clone()
    }
}

/// Whether this process can start programs of other users, which needs root.
fn can_change_user() -> bool {
    let can = rustix::process::geteuid().is_root() && Path::new("/usr/bin/setpriv").exists();
    if !can {
        skip("only root can be another user");
    }
    can
}

#[test]
fn users_without_rights_run_on_roots_agent_and_fork() {
    if !can_change_user() {
        return;
    }
    let shared = Guests(SharedCluster::up());
    for test in ["pages", "fork"] {
        let outcome = shared.start(ANNE, "24M", &[test, "--bytes", "64M"]).wait();
        outcome.assert_success("a user's run on root's agent");
    }
    // As after `su`: the folders in the environment are root's.
    let mut command = shared.0.command(ANNE, &["run", "--local", "24M", "--", "true"]);
    command.env("AQUIFER_STATE", shared.0.cluster.state()).env("HOME", "/root");
    let output = command.output().expect("setpriv can be started");
    assert!(output.status.success(), "{}", text(&output.stderr));
    shared.0.cluster.assert_all_free();
}

#[test]
fn a_users_runs_are_closed_to_another_user() {
    if !can_change_user() {
        return;
    }
    let shared = Guests(SharedCluster::up());
    let run = shared.start(ANNE, "24M", &["pages", "--bytes", "64M", "--rounds", "1000000"]);
    eventually("Anne to see her run", || {
        let runs = shared.runs(ANNE);
        (runs.len() == 1 && runs[0]["evictions"].as_u64()? > 0).then_some(())
    });
    assert_eq!(shared.runs(BERT), Vec::<Value>::new(), "Bert sees nothing of it");
    let pid = run.pid().to_string();
    let refused = shared.0.command(BERT, &["limit", &pid, "8M"]).output().expect("setpriv can be started");
    assert!(!refused.status.success() && text(&refused.stderr).contains("does not run on the pool"));
    let changed = shared.0.command(ANNE, &["limit", &pid, "32M"]).output().expect("setpriv can be started");
    assert!(changed.status.success(), "{}", text(&changed.stderr));
    let program = processes::descendants(run.pid()).pop().expect("the program");
    let environ = Command::new("setpriv")
        .args(["--reuid", &BERT.to_string(), "--regid", &BERT.to_string(), "--clear-groups", "cat"])
        .arg(format!("/proc/{program}/environ"))
        .output()
        .expect("setpriv can be started");
    assert!(!environ.status.success(), "the run's token is Anne's secret");
    processes::kill(program);
    let outcome = run.wait();
    assert!(!outcome.stderr.contains("FAILED"), "the program saw wrong memory: {}", outcome.stderr);
    shared.0.cluster.assert_all_free();
}

#[test]
fn an_agent_serves_only_its_own_user_by_default() {
    if !can_change_user() {
        return;
    }
    let shared = Guests(SharedCluster::up());
    let own = shared.0.cluster.state().join("agent.sock");
    std::fs::set_permissions(&own, Permissions::from_mode(0o666)).expect("our own socket");
    std::fs::set_permissions(shared.0.cluster.state(), Permissions::from_mode(0o711))
        .expect("our own folder");
    let output =
        shared.0.command(ANNE, &["run", "--local", "24M", "--", "true"]).env("AQUIFER_AGENT", &own).output();
    std::fs::set_permissions(shared.0.cluster.state(), Permissions::from_mode(0o700))
        .expect("our own folder");
    assert!(!output.expect("setpriv can be started").status.success(), "the private socket is no way in");
}

/// Programs of root that change their user use root's own socket, so all users can connect to it.
#[test]
fn roots_own_socket_serves_only_programs_of_its_runs() {
    if !can_change_user() {
        return;
    }
    let shared = Guests(SharedCluster::up());
    for words in [&["status"][..], &["limit", "1", "64M"], &["run", "--local", "64M", "--", "true"]] {
        let mut command = shared.0.command(ANNE, words);
        command.env("AQUIFER_AGENT", shared.0.cluster.agent_socket());
        let output = command.output().expect("setpriv can be started");
        let said = text(&output.stderr) + &text(&output.stdout);
        assert!(said.contains("another user's"), "{words:?}: {said}");
        assert!(!output.status.success() || words == ["status"], "{words:?}");
    }
}

/// The runs of a user that wait for room in the pool.
fn waiting_runs(shared: &Guests, uid: u32) -> Vec<Value> {
    shared.runs(uid).into_iter().filter(|run| run["short_of_room"].is_string()).collect()
}

fn end(run: Running) {
    let program = eventually("the program", || processes::descendants(run.pid()).first().copied());
    processes::kill(program);
    let outcome = run.wait();
    assert!(!outcome.stderr.contains("FAILED"), "wrong memory: {}", outcome.stderr);
}

#[test]
fn a_user_that_fills_the_pool_waits_before_the_others() {
    if !can_change_user() {
        return;
    }
    let shared = Guests(SharedCluster::up());
    let small = shared.start(BERT, "8M", &["pages", "--bytes", "16M", "--rounds", "1000000"]);
    eventually("a run of the other user", || (!shared.runs(BERT).is_empty()).then_some(()));
    let greedy = shared.start(ANNE, "16M", &["pages", "--bytes", "640M"]);
    eventually("the greedy run to wait", || (!waiting_runs(&shared, ANNE).is_empty()).then_some(()));
    let later = shared.start(BERT, "12M", &["pages", "--bytes", "20M"]).wait();
    later.assert_success("a run of the other user");
    assert!(!later.stderr.contains("waits for room"), "{}", later.stderr);
    // It may have got the memory of the run that has ended, and waits again then.
    eventually("the greedy run to wait for memory that is left to others", || {
        let waiting = waiting_runs(&shared, ANNE);
        let reason = waiting.first()?["short_of_room"].as_str()?;
        reason.contains("left to runs that have less").then_some(())
    });
    end(small);
    end(greedy);
    shared.0.cluster.assert_all_free();
}

#[test]
fn the_runs_of_a_user_have_no_more_than_their_quota() {
    if !can_change_user() {
        return;
    }
    let shared = Guests(SharedCluster::up_with(2, &["--pages-per-user", "24M"]));
    let program = ["pages", "--bytes", "64M"];
    let first = shared.start(ANNE, "16M", &program);
    eventually("a run to wait", || (!waiting_runs(&shared, ANNE).is_empty()).then_some(()));
    let runs = shared.runs(ANNE);
    let reason = runs[0]["short_of_room"].as_str().unwrap_or_default();
    assert!(reason.contains("quota") && reason.contains("24 MiB"), "{runs:#?}");
    assert!(runs[0]["remote_bytes"].as_u64().unwrap() <= 24 << 20, "{runs:#?}");
    shared.start(BERT, "16M", &["pages", "--bytes", "32M"]).wait().assert_success("another user's run");
    end(first);
    shared.0.cluster.assert_all_free();
}
