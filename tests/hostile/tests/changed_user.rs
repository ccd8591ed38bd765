//! A program that root has started, and that has become another user, stops no program of root.

use std::process::Command;

use crate::user::{Attack, MALLORY, Victim};

fn no_program_of_root_is_stopped(victim: &Victim) {
    let program = victim.0.path("attacker");
    let program = program.to_str().expect("a plain path");
    let paged = Attack::start(&mut victim.0.cluster.run_command("24M", &[program, "fill", "40"]));
    let mut attack = Command::new(program);
    attack.args(["changed-user", &MALLORY.to_string()]);
    let attack = Attack::start(attack.env("AQUIFER_AGENT", victim.0.cluster.agent_socket()));
    let words = ["run", "--local", "24M", "--", "true"];
    let status = victim.0.cluster.command().args(words).status().expect("aquifer can be started");
    assert!(status.success(), "root gets no new connection");
    attack.end();
    paged.end();
}

#[test]
fn a_program_that_becomes_another_user_ends_no_program_of_root() {
    no_program_of_root_is_stopped(&Victim::up());
}

#[test]
fn a_program_that_becomes_another_user_ends_no_program_of_root_without_passrights() {
    no_program_of_root_is_stopped(&Victim::up_in(&[("AQUIFER_TEST_NO_PASSRIGHTS", "1")]));
}
