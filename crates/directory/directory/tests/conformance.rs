//! The conformance suite, which runs over every implementation of the directory.

mod harness;
mod numbers;
mod suite;

use harness::{InEtcd, InProcess, OverSocket, Simulated};

/// Defines a test for each function of the suite and each implementation.
macro_rules! conformance {
    ($($test:ident),* $(,)?) => {
        mod in_process { $(#[test] fn $test() { super::suite::$test(&super::InProcess::start()); })* }
        mod over_socket { $(#[test] fn $test() { super::suite::$test(&super::OverSocket::start()); })* }
        mod in_etcd { $(#[test] fn $test() { super::suite::$test(&super::InEtcd::start()); })* }
        mod simulated { $(#[test] fn $test() { super::suite::$test(&super::Simulated::start()); })* }
    };
}

conformance!(
    put_get_delete,
    list_is_ordered_and_by_prefix,
    versions_are_revisions,
    a_transaction_is_all_or_nothing,
    a_transaction_may_not_change_a_key_twice,
    contended_increments_are_all_counted,
    one_of_many_wins_an_absent_key,
    keys_are_deleted_with_their_lease,
    a_lease_lasts_while_it_is_kept_alive,
    a_revoked_lease_is_gone,
    no_key_is_attached_to_an_ended_lease,
    epochs_increase,
    ttl_limits,
    a_watch_reports_all_changes_in_order,
    a_watch_reports_the_end_of_a_lease,
    a_watch_continues_from_a_revision,
    a_listing_and_a_watch_leave_no_gap,
    a_watch_reports_changes_of_threads_completely_and_in_order,
    a_watch_that_is_too_old_is_refused,
    a_watch_begins_after_compacted_revisions,
    an_ended_lease_is_named,
    a_long_listing_has_one_revision,
    key_limits,
    value_limits,
    list_limits,
    transaction_limits,
    hosts_are_claimed_in_turn,
    hosts_claimed_at_once_differ,
    a_dead_hosts_number_is_free_once_it_owns_nothing,
    an_invalid_record_of_a_host_does_not_block_other_recoveries,
    a_host_that_resumes_in_time_keeps_its_number,
    a_node_number_has_one_holder,
);
