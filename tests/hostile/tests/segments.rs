//! Attacks of a program with segments stop no segments of other users.

use std::process::Stdio;

use aquifer_tests_e2e::cluster::text;
use aquifer_tests_e2e::eventually;

use crate::user::{ANNE, Attack, MALLORY, Victim};

/// Lists the segments as another user.
fn lists(victim: &Victim) {
    let mut command = victim.0.command(ANNE, &["segment", "list"]);
    let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
    let mut child = child.expect("setpriv can be started");
    let status = eventually("the list of segments", || child.try_wait().expect("it is our child"));
    let output = child.wait_with_output().expect("it has ended");
    assert!(status.success(), "{}", text(&output.stderr));
}

/// Memory of deallocated segments counts to no user's limit, so none may be left.
#[test]
fn memory_of_deallocated_segments_is_returned() {
    let victim = Victim::up();
    victim.repels(&mut victim.attacker("kept-segments"));
}

#[test]
fn locked_memories_stop_no_segments_of_others() {
    let victim = Victim::up();
    let device = victim.fuse_device();
    let folder = victim.0.private_folder("mount", MALLORY);
    let attack = Attack::start(victim.attacker("locked-segments").arg(device).arg(folder));
    lists(&victim);
    attack.end();
}
