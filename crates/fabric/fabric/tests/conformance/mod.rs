//! One conformance suite for every provider. This module runs it over the providers that need no
//! device; `verbs.rs` runs it over RDMA devices.

#[macro_use]
mod suite;

mod atomics;
mod data;
mod death;
mod harness;
mod keys;
mod limits;
mod messages;
mod movable;
mod providers;
mod regions;
mod waiting;

/// The suite, and the tests of functions that only software targets have.
macro_rules! soft_conformance {
    ($harness:ty) => {
        conformance!($harness);
        each_test! { $harness;
            movable::accesses_are_translated_unit_by_unit,
            movable::units_that_are_not_there_are_refused,
            movable::a_stored_word_moves_addresses_and_keeps_keys,
            movable::reads_of_a_batch_find_memory_in_order,
            movable::a_map_must_fit_and_an_old_key_has_its_old_addresses,
            regions::endpoints_use_regions_that_are_registered_later,
            regions::a_removed_region_is_open_to_no_key,
            regions::a_removed_key_table_opens_nothing,
            regions::slots_of_regions_are_reused_with_fresh_keys,
            regions::no_access_outlives_its_region,
            regions::read_only_memory_is_registered_for_reads_only,
            regions::read_only_local_memory_is_refused,
        }
    };
}

mod shm {
    soft_conformance!(super::providers::ShmHarness);
    each_test! { super::providers::ShmHarness; waiting::a_waiting_target_is_woken_by_a_message }
}

mod tcp {
    soft_conformance!(super::providers::TcpHarness<false>);
    each_test! { super::providers::TcpHarness<false>; waiting::a_waiting_target_is_woken_by_a_message }
}

mod tcp_sealed {
    soft_conformance!(super::providers::TcpHarness<true>);
    each_test! { super::providers::TcpHarness<true>; waiting::a_waiting_target_is_woken_by_a_message }
}

mod sim {
    soft_conformance!(super::providers::SimHarness);
}

mod multiplexed {
    conformance_without_messages!(super::providers::MultiplexedHarness);
}
