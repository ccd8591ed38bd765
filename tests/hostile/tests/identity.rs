//! Attacks on the agent's knowledge of which process has which memory.

use crate::user::Victim;

#[test]
fn a_userfaultfd_of_another_process_is_refused() {
    let victim = Victim::up();
    victim.repels(&mut victim.attacker("foreign-userfaultfd"));
}

#[test]
fn a_blocking_userfaultfd_does_not_stop_its_monitor() {
    let victim = Victim::up();
    victim.repels(&mut victim.paged_attacker("clear-nonblocking", "24M"));
}

#[test]
fn a_monitor_that_was_made_to_wait_ends_with_its_program() {
    let victim = Victim::up();
    victim.repels(&mut victim.paged_attacker("hold-up-monitors", "24M"));
}
