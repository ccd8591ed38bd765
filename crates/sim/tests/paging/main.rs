//! The pager's protocol: modelled programs with threads, the real monitor, volume, sender and pool client, over the simulated
//! fabric. What a program reads is held against what it wrote; in the end everything must have been given back.

/// Tell what happens, when one schedule is played alone (`-- --nocapture` shows it).
macro_rules! tell {
    ($($what:tt)*) => {
        if crate::is_telling() {
            println!($($what)*);
        }
    };
}

mod absence;
mod cluster;
mod death;
mod edge;
mod memory;
mod process;
mod program;
mod restart;
mod schedule;
mod world;

use std::cell::Cell;
use std::sync::{Once, OnceLock};

use aquifer_pager::Mutation;
use aquifer_sim::{asked_seed, first_failure, play_all};
use schedule::run;
use world::Seen;

/// `make test-long` plays more: AQUIFER_SCHEDULES says how many.
const SCHEDULES: u64 = 20_000;
/// A fault must show within so many schedules.
const MUTANT_SCHEDULES: u64 = 80_000;

fn schedules() -> u64 {
    std::env::var("AQUIFER_SCHEDULES")
        .map_or(SCHEDULES, |text| text.parse().expect("AQUIFER_SCHEDULES is a number"))
}

fn is_telling() -> bool {
    static TELLING: OnceLock<bool> = OnceLock::new();
    *TELLING.get_or_init(|| asked_seed().is_some())
}

thread_local! {
    /// Whether panics of this thread are expected, and need no words.
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Silence the panics of this thread only: other tests run beside it.
fn quiet() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !QUIET.get() {
                usual(panic);
            }
        }));
    });
    QUIET.set(true);
}

#[test]
fn every_page_is_what_was_written_and_all_is_given_back() {
    let mut seen = Seen::default();
    play_all(schedules(), |seed| run(seed, Mutation::None), |schedule| seen.add(&schedule));
    println!("{seen:?}");
    if asked_seed().is_none() {
        for (what, count) in seen.counts() {
            assert!(count > 100, "the schedules had only {count} {what}");
        }
    }
}

/// Schedules are played from `likely` on, and then those before it.
fn assert_caught(mutation: Mutation, likely: u64) {
    if asked_seed().is_some() {
        return;
    }
    quiet();
    let failure = first_failure((likely..MUTANT_SCHEDULES).chain(0..likely), |seed| run(seed, mutation));
    QUIET.set(false);
    let Some((seed, error)) = failure else {
        panic!("{mutation:?} was not noticed within {MUTANT_SCHEDULES} schedules")
    };
    println!("{mutation:?}: schedule {seed}: {error}");
}

macro_rules! mutants {
    ($($name:ident: $mutation:ident $(near $likely:literal)?,)*) => {
        $(#[test]
        fn $name() {
            assert_caught(Mutation::$mutation, 0 $(+ $likely)?);
        })*
    };
}

// Of those that show seldom: near which schedule they have.
mutants! {
    a_dropped_update_flag_is_noticed: DropUpdateFlag near 13_300,
    reclaiming_what_is_unacknowledged_is_noticed: ReclaimUnacknowledged,
    keeping_what_was_given_up_is_noticed: KeepDiscarded,
    trusting_a_remove_event_is_noticed: TrustRemoveEvent,
    a_forgotten_reference_of_a_fork_is_noticed: ForgetForkReference,
    serving_faults_before_events_is_noticed: ServeFaultsBeforeEvents,
    taking_during_events_is_noticed: TakeDuringEvents near 4_200,
    a_fork_without_a_flush_is_noticed: ForkWithoutFlush,
    an_early_acknowledgement_is_noticed: AcknowledgeEarly,
    acknowledging_after_the_first_copy_is_noticed: AcknowledgeFirst near 3_600,
    copying_what_is_written_is_noticed: CopyWhileWriting near 21_750,
    an_unfinished_copy_is_noticed: RecordUnfinished,
    a_buffer_with_a_late_answer_is_noticed: ReuseLateBuffer near 4_200,
    a_skipped_checksum_is_noticed: SkipChecksum,
    a_forgotten_release_is_noticed: ForgetRelease,
    trusting_a_copy_is_noticed: TrustCopy,
    adopting_without_proof_is_noticed: AdoptUnproved near 3_300,
    adopting_before_what_was_heard_is_noticed: AdoptBehind near 8_200,
    heeding_the_unmapping_of_a_move_is_noticed: HeedVacating near 800,
    waking_without_allowing_is_noticed: WakeProtected,
    a_remap_without_waiting_is_noticed: RemapWhileLeaving,
    forgetting_that_a_move_was_begun_is_noticed: ForgetMoving near 1_700,
    reading_only_once_is_noticed: TryOnce near 4_450,
    taking_in_while_something_is_under_way_is_noticed: TakeInBusy near 49_950,
    noting_a_move_before_its_bytes_is_noticed: NoteBeforeMoving near 950,
    a_restart_that_forgets_what_was_leaving_is_noticed: ForgetLeaving,
    a_restart_that_sets_no_blocks_aside_is_noticed: ReserveNothing near 450,
}
