//! Descriptors whose last close waits for ever: others are served, and a killed agent is replaced.

use std::os::unix::fs::MetadataExt;
use std::process::Command;

use aquifer_channel::exiting::is_exiting;
use aquifer_tests_e2e::cluster::text;
use aquifer_tests_e2e::restart::restart_agent;
use aquifer_tests_e2e::{Cluster, SharedCluster, eventually, processes};
use rustix::process::Signal;

use crate::user::{ANNE, Attack, MALLORY, Victim};

/// The environment of a cluster that runs as on a kernel without `SO_PASSRIGHTS`.
const WITHOUT_PASSRIGHTS: [(&str, &str); 1] = [("AQUIFER_TEST_NO_PASSRIGHTS", "1")];

fn serves_others(victim: &Victim) {
    for words in [&["status"][..], &["run", "--local", "24M", "--", "true"]] {
        let output = victim.0.command(ANNE, words).output().expect("setpriv can be started");
        assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
    }
}

/// Stops the cluster during an attack.
fn stops(victim: &Victim) {
    let output = victim.0.cluster.command().arg("down").output().expect("aquifer can be started");
    assert!(output.status.success(), "{}", text(&output.stderr));
}

/// Checks that others are served during an attack, also by the agent that replaces a killed one,
/// and that the cluster can be stopped.
fn repels(victim: &Victim, attack: &mut Command) {
    repels_and_restarts(victim, attack, restart_agent);
}

/// Checks that others are served during an attack, also after `restart` has replaced a killed
/// agent, and that the cluster can be stopped.
fn repels_and_restarts(victim: &Victim, attack: &mut Command, restart: impl FnOnce(&Cluster)) {
    let running = Attack::start(attack);
    serves_others(victim);
    restart(&victim.0.cluster);
    serves_others(victim);
    let again = Attack::start(attack);
    serves_others(victim);
    stops(victim);
    running.end();
    again.end();
}

fn lingering_sockets(victim: &Victim) {
    repels(victim, &mut victim.attacker("lingering-sockets"));
}

#[test]
fn lingering_sockets_stop_no_other_user() {
    lingering_sockets(&Victim::up());
}

#[test]
fn lingering_sockets_stop_no_other_user_without_passrights() {
    lingering_sockets(&Victim::up_in(&WITHOUT_PASSRIGHTS));
}

fn waiting_files(victim: &Victim) {
    let device = victim.fuse_device();
    let folder = victim.0.private_folder("mount", MALLORY);
    repels(victim, victim.attacker("waiting-files").arg(device).arg(folder));
}

#[test]
fn files_whose_close_waits_stop_no_other_user() {
    waiting_files(&Victim::up());
}

#[test]
fn files_whose_close_waits_stop_no_other_user_without_passrights() {
    waiting_files(&Victim::up_in(&WITHOUT_PASSRIGHTS));
}

/// Kills the agent, whose process may remain as long as an attack lasts, and starts another.
fn replace_agent(cluster: &Cluster) {
    let agent = cluster.daemon("agent", None);
    processes::signal(agent, Signal::KILL);
    eventually("the agent is gone", || is_exiting(agent).then_some(()));
    let again = cluster.command().arg("up").output().expect("aquifer can be started");
    assert!(again.status.success(), "{}", text(&again.stderr));
}

fn locked_memories(victim: &Victim) {
    let device = victim.fuse_device();
    let folder = victim.0.private_folder("mount", MALLORY);
    let mut attack = victim.attacker("locked-memories");
    repels_and_restarts(victim, attack.arg(device).arg(folder), replace_agent);
}

#[test]
fn locked_memories_stop_no_other_user() {
    locked_memories(&Victim::up());
}

#[test]
fn locked_memories_stop_no_other_user_without_passrights() {
    locked_memories(&Victim::up_in(&WITHOUT_PASSRIGHTS));
}

mod long {
    use super::*;

    /// Starts an agent of which the kernel keeps what is left when it is killed: here in the close
    /// of a file that it has inherited. That holds the lock and the connections to the keeper and
    /// the gateway. Returns the process that serves the file.
    fn start_agent_that_cannot_end(victim: &Victim) -> u32 {
        let cluster = &victim.0.cluster;
        let folder = victim.0.private_folder("mount", 0);
        let signal = victim.0.path("wait");
        processes::kill(cluster.daemon("agent", None));
        let mut up = Command::new(victim.0.path("attacker"));
        up.arg("inherited-file").arg(victim.fuse_device()).arg(folder).arg(&signal);
        up.arg(victim.0.path("aquifer")).arg("--state").arg(cluster.state()).arg("up");
        let output = up.output().expect("the attacker can be started");
        assert!(output.status.success(), "{}", text(&output.stderr));
        let server = text(&output.stdout).lines().next().and_then(|line| line.parse().ok());
        std::fs::write(&signal, "").expect("our own folder");
        server.expect("its number")
    }

    #[test]
    fn an_agent_that_cannot_end_is_replaced() {
        let victim = Victim::up();
        let cluster = &victim.0.cluster;
        let server = start_agent_that_cannot_end(&victim);
        let lock = || std::fs::metadata(cluster.state().join("agent.lock")).expect("a lock").ino();
        let lock_before = lock();
        replace_agent(cluster);
        assert_ne!(lock(), lock_before, "what is left of it has let the lock go");
        serves_others(&victim);
        processes::signal(server, Signal::KILL);
    }

    /// The supervisor detects the killed agent although the process does not end.
    #[test]
    fn an_agent_that_cannot_end_is_replaced_by_the_supervisor() {
        let victim = Victim::of(SharedCluster::up_with_supervisor(2));
        let cluster = &victim.0.cluster;
        let supervisor = cluster.daemon("supervisor", None);
        processes::signal(supervisor, Signal::STOP);
        let server = start_agent_that_cannot_end(&victim);
        processes::signal(supervisor, Signal::CONT);
        let agent = cluster.daemon("agent", None);
        processes::signal(agent, Signal::KILL);
        let lock = cluster.state().join("agent.lock");
        let inode = || std::fs::metadata(&lock).expect("a lock").ino();
        let inode_before = inode();
        eventually("another agent to serve", || {
            let process = std::fs::read_to_string(&lock).ok()?.trim_end().parse::<u32>().ok()?;
            (agent != process && !cluster.status()["agent"].is_null()).then_some(())
        });
        assert_ne!(inode(), inode_before, "what is left of it has let the lock go");
        processes::signal(server, Signal::KILL);
    }
}
