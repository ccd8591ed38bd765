//! Children that a partly evicted program creates by each system call, with memory of each kind.
//!
//! Parent and child check and rewrite all their pages, with a running agent, and with agents that
//! are killed at each stage of a child's creation.

use aquifer_tests_e2e::cluster::text;
use aquifer_tests_e2e::restart::{await_time, figure, restart_agent};
use aquifer_tests_e2e::run::{Running, run_plainly};
use aquifer_tests_e2e::{Cluster, build};
use aquifer_tests_support::skip;

/// The checker's memory and its limit. At times three processes have that memory.
const BYTES: &str = "32M";
const LIMIT: &str = "12M";
/// Most agents that are killed under one program.
const STORM_MAX: usize = 6;

/// Checks that create a child with its own memory, with libc and without.
const FORKED: [&str; 5] = ["by-fork", "by-fork-alone", "by-clone", "by-raw-clone", "by-raw-clone3"];
/// Checks that create a child that shares its parent's memory until it executes a program.
const EXECUTED: [&str; 3] = ["by-vfork", "by-clone-vm", "by-spawn"];

/// Places and limits in which a child cannot connect to the agent by itself.
const HIDDEN: [&str; 3] = ["chroot", "namespaces", "fullest-fork"];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum AgentDies {
    Never,
    /// Pages are evicted, and there is no child.
    BeforeTheChild,
    /// Repeatedly, as soon as another agent runs.
    AllTheTime,
    /// Faults of a child are served.
    AfterTheChild,
}

fn check(cluster: &Cluster, way: &str, dies: AgentDies) {
    let checker = build::programs().join("checker");
    let rounds = if dies == AgentDies::Never { "1" } else { "3" };
    let program = [checker.to_str().expect("a plain path"), way, "--bytes", BYTES, "--rounds", rounds];
    let plain = run_plainly(&program, true);
    plain.assert_success("the plain run");
    let mut run = Running::start(&mut cluster.run_command(LIMIT, &program), true, Box::new(|| 0));
    let died = kill_agents(cluster, &mut run, way, dies);
    let outcome = run.wait();
    outcome.assert_success(&format!("{way}, under {died} agents that died ({dies:?}),"));
    assert_eq!(text(&outcome.stdout), text(&plain.stdout), "{way}, {dies:?}");
    assert!(died > 0 || dies == AgentDies::Never, "{way}: it had ended before its agent died");
    println!("{way}, {dies:?}: {died} agents died");
    cluster.assert_all_free();
}

/// Kills agents; returns their number.
fn kill_agents(cluster: &Cluster, run: &mut Running, way: &str, dies: AgentDies) -> usize {
    let figure = |name| figure(cluster, name).unwrap_or(0);
    let has_child = || figure("processes") > 1;
    let is_paged = || figure("evictions") > 0;
    let is_time = || match dies {
        AgentDies::Never => false,
        AgentDies::BeforeTheChild => is_paged() && !has_child(),
        AgentDies::AllTheTime => figure("faults") > 0,
        AgentDies::AfterTheChild => is_paged() && (has_child() || EXECUTED.contains(&way)),
    };
    let times = match dies {
        AgentDies::Never => 0,
        AgentDies::AllTheTime => STORM_MAX,
        AgentDies::BeforeTheChild | AgentDies::AfterTheChild => 1,
    };
    for died in 0..times {
        if !await_time(run, "the time for an agent to die", is_time) {
            return died;
        }
        restart_agent(cluster);
    }
    times
}

fn check_all(ways: &[&str], dies: AgentDies) {
    let cluster = Cluster::up(2, "256M");
    for way in ways {
        check(&cluster, way, dies);
    }
}

#[test]
fn forked_children_have_pages_of_their_own() {
    check_all(&FORKED, AgentDies::Never);
}

#[test]
fn children_in_their_parents_memory_see_its_contents() {
    check_all(&EXECUTED, AgentDies::Never);
}

mod long {
    use super::*;

    #[test]
    fn children_are_created_while_agents_die() {
        check_all(&FORKED, AgentDies::AllTheTime);
        check_all(&EXECUTED, AgentDies::AllTheTime);
    }

    #[test]
    fn hidden_children_are_created_while_agents_die() {
        if !rustix::process::geteuid().is_root() {
            return skip("only root can change its root");
        }
        check_all(&HIDDEN, AgentDies::AllTheTime);
        check_all(&HIDDEN, AgentDies::AfterTheChild);
        check_all(&HIDDEN, AgentDies::BeforeTheChild);
    }

    #[test]
    fn children_survive_the_agent_that_adopted_them() {
        check_all(&FORKED, AgentDies::AfterTheChild);
        check_all(&EXECUTED, AgentDies::AfterTheChild);
    }

    #[test]
    fn children_are_created_after_the_parents_agent_has_died() {
        check_all(&FORKED, AgentDies::BeforeTheChild);
        check_all(&EXECUTED, AgentDies::BeforeTheChild);
    }
}
