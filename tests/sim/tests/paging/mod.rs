//! The simulator of paging: modelled programs with threads, and the product's monitor, volume,
//! sender and pool client over the simulated fabric.
//!
//! Each page that a program reads is compared with what the program wrote. At the end all memory
//! must be free.

/// Prints a step, if one schedule is played alone (with `-- --nocapture`).
macro_rules! trace {
    ($($what:tt)*) => {
        if crate::paging::is_tracing() {
            println!($($what)*);
        }
    };
}

pub mod absence;
pub mod cluster;
mod counts;
mod death;
mod disk;
mod edge;
pub mod focus;
pub mod memory;
mod process;
mod program;
mod restart;
mod schedule;
mod withdrawal;
mod worker;
mod world;

use std::sync::OnceLock;

use aquifer_pager::Mutation;
use aquifer_sim::{Simulator, asked_seed};
use counts::PagingCounts;
use schedule::run;

const SIMULATOR: Simulator<Mutation, PagingCounts> = Simulator {
    name: "paging",
    play: run,
    regressions: &[
        290_254_544_516,
        865_554_945_951,
        299_394_557_480,
        889_168_747_441,
        406_009_922_251,
        91_801_522_897,
        416_515_158_369,
        444_023_734_228,
        5531,
    ],
    mutations: &[
        Mutation::ReclaimUnacknowledged,
        Mutation::KeepDiscarded,
        Mutation::TrustRemoveEvent,
        Mutation::ForgetForkReference,
        Mutation::ServeFaultsBeforeEvents,
        Mutation::ReadWhileMoving,
        Mutation::ForkWithoutFlush,
        Mutation::AcknowledgeEarly,
        Mutation::AcknowledgeFirst,
        Mutation::KeepIncomplete,
        Mutation::CopyWhileWriting,
        Mutation::RecordUnfinished,
        Mutation::FreeBeforeSwitch,
        Mutation::DropBeforeCopied,
        Mutation::MoveFenced,
        Mutation::ReturnEarly,
        Mutation::AcknowledgeDiskError,
        Mutation::CopyUnreadable,
        Mutation::ReuseLateBuffer,
        Mutation::SkipChecksum,
        Mutation::ForgetRelease,
        Mutation::TrustCopy,
        Mutation::AdoptFromOldList,
        Mutation::AdoptBeforeEvents,
        Mutation::TrustOrder,
        Mutation::TrustRegistration,
        Mutation::ApplyStaleUnmap,
        Mutation::WakeProtected,
        Mutation::RemapWhileLeaving,
        Mutation::ForgetMoving,
        Mutation::TryOnce,
        Mutation::StageBeforeCopying,
        Mutation::ForgetLeaving,
        Mutation::StageUnreadable,
        Mutation::IgnorePins,
        Mutation::ReuseStaging,
        Mutation::FillLost,
        Mutation::InheritAll,
        Mutation::DiscardInAreas,
    ],
};
const SCHEDULES: u64 = 2_000;
/// Each counted event must happen at least this often in the fixed schedules.
const COUNT_MIN: u64 = 10;

fn is_tracing() -> bool {
    static TRACING: OnceLock<bool> = OnceLock::new();
    *TRACING.get_or_init(|| asked_seed().is_some())
}

#[test]
fn every_page_is_correct_and_all_memory_is_freed() {
    let mut counts = PagingCounts::default();
    let has_all_replicas = SIMULATOR.play_fixed(SCHEDULES, |schedule| counts.add(&schedule));
    println!("{counts:?}");
    for (what, count) in counts.labelled().into_iter().filter(|_| has_all_replicas) {
        assert!(count >= COUNT_MIN, "the schedules had only {count} {what}");
    }
}

#[test]
fn every_mutation_is_noticed() {
    SIMULATOR.assert_mutations_noticed();
}

mod long {
    #[test]
    fn new_schedules_of_paging() {
        super::SIMULATOR.play_new();
    }
}
