//! Whatever lies in a node's memory, and whenever it came there: no client panics, and none goes on for ever.

use aquifer_fabric::{Host, Key};
use aquifer_pool::SizeClass;
use aquifer_pool::cache::NodeCache;
use aquifer_pool::op::{AllocOp, FreeOp, Grant, Machine, OpError, RecoverOp, Step, StretchOp};
use aquifer_pool::size::SECTION_CHUNKS;
use aquifer_pool::word::{Run, SectionWord, SpanWord};
use proptest::prelude::*;

use super::driver::Words;

const SECTIONS: u32 = 2;
/// No operation needs more: the most that races may cost, and looking at everything in between.
const ACTIONS_MAX: usize = 200_000;

#[derive(Clone, Debug)]
enum What {
    Allocate(u8),
    /// So many sections.
    Stretch(u32),
    /// One that was taken, by its number.
    Free(prop::sample::Index),
    /// One that nobody gave us.
    FreeForged(u8, u32, u32),
    Recover(u16),
}

/// A word is not what it was any more.
#[derive(Clone, Debug)]
struct Damage {
    table: u8,
    /// Beyond the end it begins anew.
    place: usize,
    how: How,
}

#[derive(Clone, Debug)]
enum How {
    Set(u64),
    Flip(u8),
    /// As some host might have left it.
    TakenSpan(u8, u8, u16),
    TakenGroup(u8, u8, u16),
    OpenedSpan(u8, u16),
}

/// An operation, and what happens to the memory after so many of its actions.
#[derive(Clone, Debug)]
struct Event {
    what: What,
    damage: Vec<(usize, Damage)>,
}

fn damage() -> impl Strategy<Value = Damage> {
    let how = prop_oneof![
        any::<u64>().prop_map(How::Set),
        (0..64_u8).prop_map(How::Flip),
        Just(How::Set(0)),
        (0..32_u8, 0..5_u8, 1..5_u16).prop_map(|(first, order, host)| How::TakenSpan(first, order, host)),
        (0..16_u8, 0..5_u8, 1..5_u16).prop_map(|(first, order, host)| How::TakenGroup(first, order, host)),
        (0..16_u8, 1..5_u16).prop_map(|(first, host)| How::OpenedSpan(first, host)),
    ];
    (0..4_u8, any::<usize>(), how).prop_map(|(table, place, how)| Damage { table, place, how })
}

fn event() -> impl Strategy<Value = Event> {
    let what = prop_oneof![
        4 => (0..SizeClass::COUNT).prop_map(What::Allocate),
        1 => (0..=SECTIONS).prop_map(What::Stretch),
        3 => any::<prop::sample::Index>().prop_map(What::Free),
        1 => (0..SizeClass::COUNT, any::<u32>(), any::<u32>()).prop_map(|(k, at, key)| What::FreeForged(k, at, key)),
        1 => (1..5_u16).prop_map(What::Recover),
    ];
    let damage = prop::collection::vec((0..12_usize, damage()), 0..3);
    (what, damage).prop_map(|(what, damage)| Event { what, damage })
}

impl Damage {
    fn strike(&self, words: &mut Words) {
        let table = match self.table {
            0 => &mut words.sections,
            1 => &mut words.spans,
            2 => &mut words.log,
            _ => &mut words.keys,
        };
        let place = self.place % table.len();
        let word = &mut table[place];
        let run = |first: u8, order: u8| Run::new(first >> order << order, order).expect("it is aligned");
        *word = match self.how {
            How::Set(value) => value,
            How::Flip(bit) => *word ^ 1 << bit,
            How::TakenSpan(first, order, host) => SpanWord(*word).allocate(run(first, order), Host(host)).0,
            How::TakenGroup(first, order, host) => {
                SectionWord(*word).allocate(run(first, order), Host(host)).0
            }
            How::OpenedSpan(first, host) => SectionWord(*word).open(first, Host(host)).0,
        };
    }
}

/// Run a machine to its end while the memory is being damaged.
fn run<M: Machine>(
    words: &mut Words,
    cache: &mut NodeCache,
    mut op: M,
    damage: &[(usize, Damage)],
) -> Result<M::Output, OpError> {
    let mut step = op.start(cache);
    for number in 0..ACTIONS_MAX {
        damage.iter().filter(|(at, _)| *at == number).for_each(|(_, damage)| damage.strike(words));
        match step {
            Step::Done(result) => return result,
            Step::Post(action) => step = words.carry_out(&mut op, cache, &action),
        }
    }
    panic!("it does not end");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(4_000) })]
    #[test]
    fn no_memory_makes_a_client_panic_or_go_on_for_ever(events in prop::collection::vec(event(), 1..40)) {
        let (mut words, mut cache) = Words::new(SECTIONS);
        let me = Host(1);
        let mut taken: Vec<Grant> = Vec::new();
        for Event { what, damage } in &events {
            match what {
                What::Allocate(k) => {
                    let op = AllocOp::new(me, SizeClass::new(*k).unwrap());
                    taken.extend(run(&mut words, &mut cache, op, damage).ok());
                }
                What::Stretch(count) => {
                    if let Ok(first) = run(&mut words, &mut cache, StretchOp::new(me, *count), damage) {
                        let section = |at| Grant { chunk: first.chunk + at * SECTION_CHUNKS, ..first };
                        taken.extend((0..*count).map(section));
                    }
                }
                What::Free(_) if taken.is_empty() => {}
                What::Free(which) => {
                    let grant = taken.swap_remove(which.index(taken.len()));
                    run(&mut words, &mut cache, FreeOp::new(me, grant), damage).ok();
                }
                What::FreeForged(k, at, key) => {
                    let class = SizeClass::new(*k).unwrap();
                    let chunk = at % (SECTIONS * SECTION_CHUNKS) / class.chunks() * class.chunks();
                    let grant = Grant { chunk, class, key: Key(*key) };
                    run(&mut words, &mut cache, FreeOp::new(me, grant), damage).ok();
                }
                What::Recover(dead) => {
                    run(&mut words, &mut cache, RecoverOp::new(me, Host(*dead)), damage).ok();
                }
            }
        }
    }
}

/// What a READ brings may be no word that ever was.
#[test]
fn a_word_that_a_read_has_torn_holds_nobody_up() {
    for place in 0..16 {
        let (mut words, mut cache) = Words::new(1);
        let set = |value| Damage { table: 1, place, how: How::Set(value) };
        // So it is when it is read, and never else.
        let torn = [(0, set(1)), (1, set(0))];
        let section = run(&mut words, &mut cache, AllocOp::new(Host(1), SizeClass::SECTION), &torn);
        section.expect("all is free");
    }
}
