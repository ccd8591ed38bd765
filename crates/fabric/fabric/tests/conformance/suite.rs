//! The list of the suite's tests, so that each provider runs all of them.

/// Every test of the suite, over a [`super::harness::Harness`].
macro_rules! conformance {
    ($harness:ty) => {
        conformance_without_messages!($harness);
        each_test! { $harness;
            messages::messages_go_both_ways_in_order,
            messages::the_receiver_is_bounded,
            messages::long_messages_are_refused,
            messages::messages_outlive_their_sender,
            messages::a_reply_reaches_the_endpoint_that_asked,
            messages::numbers_of_endpoints_are_never_reused,
        }
    };
}

/// The tests of the suite for endpoints that receive no messages.
macro_rules! conformance_without_messages {
    ($harness:ty) => {
        each_test! { $harness;
            data::every_size_and_alignment_arrives,
            data::a_batch_takes_effect_in_order,
            data::a_read_returns_the_bytes_before_later_operations,
            data::only_signalled_work_completes_unless_it_fails,
            data::empty_transfers_succeed,
            data::regions_are_announced_and_apart,
            atomics::compare_swap_returns_the_value_found,
            atomics::increments_of_several_endpoints_are_not_lost,
            atomics::misaligned_atomics_are_refused,
            keys::ranges_are_enforced_to_the_byte,
            keys::rights_are_enforced,
            keys::foreign_keys_are_refused,
            keys::forged_keys_are_refused,
            keys::a_stale_key_stays_invalid_when_its_slot_is_bound_again,
            keys::windows_lie_inside_one_region,
            keys::a_table_opens_runs_to_tenants,
            keys::expel_ends_accesses_by_revoked_keys,
            keys::a_table_must_fit_its_region,
            keys::unregistered_local_memory_is_refused,
            limits::the_queue_is_bounded,
            limits::long_transfers_are_refused,
            limits::endpoints_are_bounded_and_their_slots_reused,
            limits::windows_are_bounded,
            limits::regions_are_bounded,
            limits::local_regions_are_bounded,
            death::work_after_the_death_of_the_target_fails_then_is_flushed,
            death::a_dead_target_cannot_be_connected_to,
            death::a_fenced_host_is_stopped_and_refused,
            death::a_newer_epoch_of_a_host_fences_the_older,
            death::a_fence_stops_earlier_epochs_only,
        }
    };
}

/// Makes a test of each function of the suite.
macro_rules! each_test {
    ($harness:ty; $($module:ident :: $test:ident),* $(,)?) => {
        $(#[test] fn $test() { super::$module::$test::<$harness>(); })*
    };
}
