//! The simulator of membership: hosts, nodes and a directory that stall, stop, end or are cut off,
//! and recoveries of hosts that are dead or only seem so.
//!
//! The registry of nodes, recoveries and retries are those of the product, in virtual time.
//! Invariants: a host continues until a node fences it, and no memory of the host is freed before.
//! A host is claimed only after its grace time. Kept memory is lost only if its node was away for
//! as long as the memory is kept. At the end, only hosts with valid leases own memory.

mod actions;
mod caches;
mod counts;
mod end;
mod heaps;
mod host;
mod link;
mod machine;
mod node;
mod program;
mod random;
mod scenarios;
mod world;

use aquifer_host::Mutation;
use aquifer_mutation::Mutations;
use aquifer_sim::Simulator;
use counts::MembershipCounts;
use random::run;

const SIMULATOR: Simulator<Mutation, MembershipCounts> =
    Simulator { name: "membership", play: run, regressions: &[688_640_325_853], mutations: Mutation::ALL };
const SCHEDULES: u64 = 1_000;
/// Each counted event must happen at least this often in the fixed schedules.
const COUNT_MIN: u64 = 30;

#[test]
fn random_schedules_keep_the_invariants() {
    let mut counts = MembershipCounts::default();
    let is_whole = SIMULATOR.play_fixed(SCHEDULES, |schedule| counts.add(&schedule));
    println!("{counts:?}");
    for (what, count) in counts.labelled().into_iter().filter(|_| is_whole) {
        assert!(count >= COUNT_MIN, "the schedules had only {count} {what}");
    }
}

#[test]
fn every_mutation_is_noticed() {
    SIMULATOR.assert_mutations_noticed();
}

#[test]
fn each_row_of_the_tables_has_its_outcome() {
    let wrong = [scenarios::play_all(), heaps::play_all(), caches::play_all()].concat();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_program_that_waits_past_its_deadline_is_noticed() {
    let wrong = aquifer_channel::Mutation::WaitPastDeadline.while_active(scenarios::play_all);
    assert!(wrong.iter().any(|row| row.contains("another host may own")), "{wrong:?}");
}

/// Compares the rows in the document with those that are played.
#[test]
fn all_rows_of_the_tables_are_played() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/formats/directory.md");
    let text = std::fs::read_to_string(path).expect("the document");
    let cells = text.lines().filter_map(|line| line.strip_prefix("| `")?.split(" | ").next());
    let names = cells.flat_map(|cell| cell.split(", ")).map(|name| name.trim_matches('`'));
    let holders = ["agent-", "node-", "kept-", "heap-", "segment-", "cache-"];
    // Keys of the directory have a slash.
    let is_row = |name: &&str| holders.iter().any(|holder| name.starts_with(holder)) && !name.contains('/');
    let written: Vec<&str> = names.filter(is_row).collect();
    let played = scenarios::names().chain(heaps::names()).chain(caches::names());
    assert_eq!(sorted(written), sorted(played.collect()));
}

fn sorted(mut names: Vec<&str>) -> Vec<&str> {
    names.sort_unstable();
    names
}

mod long {
    #[test]
    fn new_schedules_of_membership() {
        super::SIMULATOR.play_new();
    }
}
