//! Damaged memory: a client that finds any words at any moment neither panics nor runs for ever.

use aquifer_fabric::{Host, Key};
use aquifer_pool::SizeClass;
use aquifer_pool::cache::NodeCache;
use aquifer_pool::op::{AllocOp, FreeOp, Grant, OpError, RecoverOp, StateMachine, Step, StretchOp};
use aquifer_pool::size::SECTION_CHUNKS;
use aquifer_pool::word::{AlignedRun, SectionWord, SpanWord};
use proptest::prelude::*;

use super::driver::TestWords;

const SECTIONS: u32 = 2;
/// Bound of the actions of an operation, with the most lost races and reads of all words in
/// between.
const ACTIONS_MAX: usize = 200_000;

/// An operation of a client.
#[derive(Clone, Debug)]
enum OpKind {
    Allocate(u8),
    /// Allocates a stretch of this number of sections.
    Stretch(u32),
    /// Frees an extent that was allocated.
    Free(prop::sample::Index),
    /// Frees an extent that was not allocated.
    FreeForged(u8, u32, u32),
    Recover(u16),
}

/// A change of a word that no host makes.
#[derive(Clone, Debug)]
struct WordDamage {
    table: u8,
    /// The index in the table, modulo its length.
    place: usize,
    how: WordChange,
}

#[derive(Clone, Debug)]
enum WordChange {
    Set(u64),
    Flip(u8),
    /// A change that a host could have made.
    AllocatedRun(u8, u8, u16),
    AllocatedGroup(u8, u8, u16),
    OpenedSpan(u8, u16),
}

/// An operation, and the damage that happens before the action with each index.
#[derive(Clone, Debug)]
struct DamagedOp {
    what: OpKind,
    damage: Vec<(usize, WordDamage)>,
}

fn damage() -> impl Strategy<Value = WordDamage> {
    let how = prop_oneof![
        any::<u64>().prop_map(WordChange::Set),
        (0..64_u8).prop_map(WordChange::Flip),
        Just(WordChange::Set(0)),
        (0..32_u8, 0..5_u8, 1..5_u16)
            .prop_map(|(first, order, host)| WordChange::AllocatedRun(first, order, host)),
        (0..16_u8, 0..5_u8, 1..5_u16)
            .prop_map(|(first, order, host)| WordChange::AllocatedGroup(first, order, host)),
        (0..16_u8, 1..5_u16).prop_map(|(first, host)| WordChange::OpenedSpan(first, host)),
    ];
    (0..4_u8, any::<usize>(), how).prop_map(|(table, place, how)| WordDamage { table, place, how })
}

fn event() -> impl Strategy<Value = DamagedOp> {
    let what = prop_oneof![
        4 => (0..SizeClass::COUNT).prop_map(OpKind::Allocate),
        1 => (0..=SECTIONS).prop_map(OpKind::Stretch),
        3 => any::<prop::sample::Index>().prop_map(OpKind::Free),
        1 => (0..SizeClass::COUNT, any::<u32>(), any::<u32>())
            .prop_map(|(k, at, key)| OpKind::FreeForged(k, at, key)),
        1 => (1..5_u16).prop_map(OpKind::Recover),
    ];
    let damage = prop::collection::vec((0..12_usize, damage()), 0..3);
    (what, damage).prop_map(|(what, damage)| DamagedOp { what, damage })
}

impl WordDamage {
    fn apply(&self, words: &mut TestWords) {
        let table = match self.table {
            0 => &mut words.sections,
            1 => &mut words.spans,
            2 => &mut words.log,
            _ => &mut words.keys,
        };
        let place = self.place % table.len();
        let word = &mut table[place];
        let run = |first: u8, order: u8| {
            AlignedRun::new(first >> order << order, order).expect("the run is aligned")
        };
        *word = match self.how {
            WordChange::Set(value) => value,
            WordChange::Flip(bit) => *word ^ 1 << bit,
            WordChange::AllocatedRun(first, order, host) => {
                SpanWord(*word).allocate(run(first, order), Host(host)).0
            }
            WordChange::AllocatedGroup(first, order, host) => {
                SectionWord(*word).allocate(run(first, order), Host(host)).0
            }
            WordChange::OpenedSpan(first, host) => SectionWord(*word).open(first, Host(host)).0,
        };
    }
}

/// Runs a state machine to its end while the memory is damaged.
fn run<M: StateMachine>(
    words: &mut TestWords,
    cache: &mut NodeCache,
    mut op: M,
    damage: &[(usize, WordDamage)],
) -> Result<M::Output, OpError> {
    let mut step = op.start(cache);
    for number in 0..ACTIONS_MAX {
        damage.iter().filter(|(at, _)| *at == number).for_each(|(_, damage)| damage.apply(words));
        match step {
            Step::Done(result) => return result,
            Step::Post(action) => step = words.execute(&mut op, cache, &action),
        }
    }
    panic!("the operation does not end");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(4_000) })]
    #[test]
    fn no_memory_makes_a_client_panic_or_run_for_ever(events in prop::collection::vec(event(), 1..40)) {
        let (mut words, mut cache) = TestWords::new(SECTIONS);
        let me = Host(1);
        let mut allocated: Vec<Grant> = Vec::new();
        for DamagedOp { what, damage } in &events {
            match what {
                OpKind::Allocate(k) => {
                    let op = AllocOp::new(me, SizeClass::new(*k).unwrap());
                    allocated.extend(run(&mut words, &mut cache, op, damage).ok());
                }
                OpKind::Stretch(count) => {
                    if let Ok(first) = run(&mut words, &mut cache, StretchOp::new(me, *count), damage) {
                        let section = |at| Grant { chunk: first.chunk + at * SECTION_CHUNKS, ..first };
                        allocated.extend((0..*count).map(section));
                    }
                }
                OpKind::Free(_) if allocated.is_empty() => {}
                OpKind::Free(which) => {
                    let grant = allocated.swap_remove(which.index(allocated.len()));
                    run(&mut words, &mut cache, FreeOp::new(me, grant), damage).ok();
                }
                OpKind::FreeForged(k, at, key) => {
                    let class = SizeClass::new(*k).unwrap();
                    let chunk = at % (SECTIONS * SECTION_CHUNKS) / class.chunks() * class.chunks();
                    let grant = Grant { chunk, class, key: Key(*key) };
                    run(&mut words, &mut cache, FreeOp::new(me, grant), damage).ok();
                }
                OpKind::Recover(dead) => {
                    run(&mut words, &mut cache, RecoverOp::new(me, Host(*dead)), damage).ok();
                }
            }
        }
    }
}

/// A READ may return a word that never was in memory.
#[test]
fn a_torn_word_does_not_block_a_client() {
    for place in 0..16 {
        let (mut words, mut cache) = TestWords::new(1);
        let set = |value| WordDamage { table: 1, place, how: WordChange::Set(value) };
        // The word has this value only when it is read.
        let torn = [(0, set(1)), (1, set(0))];
        let section = run(&mut words, &mut cache, AllocOp::new(Host(1), SizeClass::SECTION), &torn);
        section.expect("all is free");
    }
}
