//! One suite for every provider: what the interface promises, each of them must keep.

mod atomics;
mod data;
mod death;
mod harness;
mod keys;
mod limits;
mod messages;

use harness::{ShmHarness, SimHarness, TcpHarness, VerbsHarness};

macro_rules! conformance {
    ($($module:ident :: $test:ident),* $(,)?) => {
        mod shm {
            use super::*;
            $(#[test] fn $test() { $module::$test::<ShmHarness>(); })*
        }
        mod tcp {
            use super::*;
            $(#[test] fn $test() { $module::$test::<TcpHarness<false>>(); })*
        }
        mod tcp_sealed {
            use super::*;
            $(#[test] fn $test() { $module::$test::<TcpHarness<true>>(); })*
        }
        mod sim {
            use super::*;
            $(#[test] fn $test() { $module::$test::<SimHarness>(); })*
        }
        mod verbs {
            use super::*;
            $(#[test] #[ignore = "it takes an RDMA device: AQUIFER_VERBS_ADDRESS=ITS.IP.ADDRESS"] fn $test() {
                $module::$test::<VerbsHarness>();
            })*
        }
    };
}

conformance! {
    data::every_size_and_alignment_arrives,
    data::a_batch_takes_effect_in_order,
    data::a_read_has_what_was_there_before_what_comes_after_it,
    data::only_signalled_work_completes_unless_it_fails,
    data::empty_transfers_succeed,
    data::regions_are_announced_and_apart,
    atomics::compare_swap_tells_what_it_found,
    atomics::increments_of_several_endpoints_are_not_lost,
    atomics::misaligned_atomics_are_refused,
    keys::ranges_are_enforced_to_the_byte,
    keys::rights_are_enforced,
    keys::foreign_keys_are_refused,
    keys::forged_keys_are_refused,
    keys::a_stale_key_stays_stale_when_its_slot_is_bound_again,
    keys::windows_lie_inside_one_region,
    keys::unregistered_local_memory_is_refused,
    limits::the_queue_is_bounded,
    limits::long_transfers_are_refused,
    limits::endpoints_are_bounded_and_their_places_reused,
    limits::windows_are_bounded,
    limits::regions_are_bounded,
    limits::local_regions_are_bounded,
    messages::messages_go_both_ways_in_order,
    messages::the_receiver_is_bounded,
    messages::long_messages_are_refused,
    messages::messages_outlive_their_sender,
    death::work_after_the_death_of_the_target_is_told_then_flushed,
    death::a_dead_target_cannot_be_connected_to,
    death::a_fenced_host_is_stopped_and_kept_out,
    death::a_newer_epoch_of_a_host_shuts_the_older_out,
    death::a_fence_stops_earlier_epochs_only,
}
