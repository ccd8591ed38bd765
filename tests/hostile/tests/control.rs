//! Programs that overwrite the memory that they share with the agent: their runs end with them.

use aquifer_tests_e2e::restart::restart_agent;

use crate::user::{Attack, Victim};

/// Names of the bytes that the attacker writes.
const CONTENTS: [&str; 4] = ["zeros", "ones", "last", "random"];

#[test]
fn a_run_ends_although_its_control_memory_was_overwritten() {
    let victim = Victim::up();
    for contents in CONTENTS {
        // The agent may end the program when its worker fails.
        let output = victim.paged_attacker("overwrite-control", "16M").arg(contents).output();
        let _ended = output.expect("setpriv can be started");
        victim.0.cluster.assert_all_free();
    }
}

#[test]
fn a_run_whose_control_memory_was_overwritten_ends_with_its_agent() {
    let victim = Victim::up();
    for contents in CONTENTS {
        let _attack = Attack::start(victim.paged_attacker("overwrite-control-and-wait", "16M").arg(contents));
        restart_agent(&victim.0.cluster);
        // No agent can serve a program whose control memory is not valid.
        victim.0.cluster.assert_all_free();
    }
}
