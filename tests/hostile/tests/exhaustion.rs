//! Attacks on the memory and the descriptors of the agent: the attacker is ended, the agent serves.

use aquifer_tests_e2e::cluster::text;

use crate::user::{MALLORY, Victim};

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
