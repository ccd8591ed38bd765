//! Tests of the state machines step by step, and of their limits.

mod damaged;
mod driver;

use aquifer_fabric::Host;
use aquifer_fabric::sim::{SimFabric, SimOptions};
use aquifer_fabric::{Identity, Key, KeyEntry, Tenant};
use aquifer_pool::cache::{NodeCache, NumberSource, search_start};
use aquifer_pool::client::NODES_MAX;
use aquifer_pool::layout::Layout;
use aquifer_pool::op::{
    ATTEMPTS_MAX, AllocManyOp, AllocOp, CONTENDED_AFTER, FreeOp, Grant, GrantBatch, OpError, Outcomes,
    READ_WORDS_MAX, StateMachine, Step, StepResult, StretchOp, WordAccess, WordAt,
};
use aquifer_pool::size::{SECTION_BYTES, SECTION_SPANS};
use aquifer_pool::word::{AlignedRun, LogEntry, SectionWord, SpanState, SpanWord, record_of};
use aquifer_pool::{NodeId, NodeMemory, PoolClient, PoolError, SizeClass};

use driver::TestWords;

const ME: Host = Host(1);
const OTHER: Host = Host(2);

#[test]
fn operations_cost_the_documented_number_of_actions() {
    let (mut words, mut cache) = TestWords::new(1);
    let chunk = AllocOp::new(ME, SizeClass::CHUNK);
    let (first, actions) = words.run(&mut cache, chunk.clone());
    assert_eq!(actions, 3, "A0, A2, A3 with A8");
    let (second, actions) = words.run(&mut cache, chunk);
    assert_eq!(actions, 2, "A1, A8");
    assert_eq!(words.free(&mut cache, FreeOp::new(ME, first.expect("room"))), (Ok(()), 2), "K, F1");
    assert_eq!(words.free(&mut cache, FreeOp::new(ME, second.expect("room"))), (Ok(()), 4), "K, F3, F4, F6");
    let (whole, actions) = words.run(&mut cache, AllocOp::new(ME, SizeClass::SECTION));
    assert_eq!(actions, 2, "A7, A8: A0 has surveyed the whole section");
    assert_eq!(words.free(&mut cache, FreeOp::new(ME, whole.expect("room"))), (Ok(()), 3), "K, F5");
    let half = || AllocOp::new(ME, SizeClass::new(4).expect("a class"));
    let (first, _) = words.run(&mut cache, half());
    let (_, actions) = words.run(&mut cache, half());
    assert_eq!(actions, 2, "A1, A8: the full hint is not set yet");
    assert_eq!(words.free(&mut cache, FreeOp::new(ME, first.expect("room"))), (Ok(()), 3), "K, F1, F2");
    assert_eq!(words.run(&mut cache, half()).1, 2, "A1, A8: it might be stale by now");
    let (third, actions) = words.run(&mut cache, half());
    assert_eq!(actions, 2, "A2, with A4 and A5 of the span before, and A3 with A8");
    assert_eq!(words.section_state(0), SpanState::Full);
    assert_eq!(words.free(&mut cache, FreeOp::new(ME, third.expect("room"))), (Ok(()), 4), "K, F3, F4, F6");
}

/// For any number of search starts, no two are nearer than a third of the distance of evenly spread
/// ones.
#[test]
fn hosts_and_clients_begin_far_apart() {
    for count in [2, 5, 64, 300, 4095] {
        let of_hosts = (1..=count).map(|host| search_start(Host(host), 7)).collect();
        let of_clients = (0..count).map(|client| search_start(ME, client.into())).collect();
        for mut places in [of_hosts, of_clients] {
            let places: &mut Vec<u64> = &mut places;
            places.sort_unstable();
            let next = places.iter().cycle().skip(1);
            let nearest = places.iter().zip(next).map(|(one, other)| other.wrapping_sub(*one)).min();
            assert!(nearest > Some(u64::MAX / u64::from(count) / 3), "{count}: {nearest:?}");
        }
    }
}

#[test]
fn several_extents_cost_one_action_each_and_one_more() {
    let (mut words, mut cache) = TestWords::new(2);
    let (outcome, actions) = words.run(&mut cache, AllocManyOp::new(ME, SizeClass::CHUNK, 64));
    let grants = outcome.expect("room").grants;
    let chunks: Vec<u32> = grants.iter().map(|grant| grant.chunk % 512).collect();
    assert_eq!(chunks, (0..64).collect::<Vec<_>>());
    assert_eq!(
        actions, 68,
        "A0, A2, A3, 31 of A1; A2 with A4 and A5 of the first span, A3, 31 of A1, the last A8"
    );
    for grant in &grants {
        let entry = KeyEntry(words.at(WordAt::chunk_key(grant.chunk), 1)[0]);
        assert_eq!(entry, KeyEntry::open(grant.key, Tenant(0)));
        let record = LogEntry(words.at(WordAt::chunk_entry(grant.chunk), 1)[0]).of_span();
        assert!(matches!(record, Ok(Some(log)) if log.host == ME), "{record:?}");
    }
}

/// A process was killed after K of a free; the next process resumes the free.
#[test]
fn a_resumed_free_succeeds_although_its_key_is_revoked() {
    for k in [0, 5, 9] {
        let (mut words, mut cache) = TestWords::new(1);
        let class = SizeClass::new(k).expect("a class");
        let grant = words.run(&mut cache, AllocOp::new(ME, class)).0.expect("room");
        let record = begin_to_free(&mut words, &mut cache, grant);
        assert_eq!(words.free(&mut cache, FreeOp::new(ME, grant)).0, Err(OpError::NotAllocated), "{k}");
        assert_eq!(words.free(&mut cache, FreeOp::new(ME, grant).resumed(record)).0, Ok(()), "{k}");
        assert_eq!(words.at(WordAt::key_of(grant), 1)[0] & 0xffff_ffff, 0, "{k}: no key is left");
        let again = FreeOp::new(ME, grant).resumed(record);
        assert_eq!(words.free(&mut cache, again).0, Err(OpError::NotAllocated), "{k}: it was freed");
    }
}

/// The killed process's free takes effect late, and another host allocates the place, at any step
/// of the resumed free: the key of the other host stays.
#[test]
fn a_resumed_free_does_not_revoke_a_key_of_another_host() {
    for (late, k) in (0..5).flat_map(|late| [(late, 0), (late, 5)]) {
        let (mut words, mut cache) = TestWords::new(1);
        let class = SizeClass::new(k).expect("a class");
        // This extent keeps the span open.
        words.run(&mut cache, AllocOp::new(ME, SizeClass::CHUNK)).0.expect("room");
        let grant = words.run(&mut cache, AllocOp::new(ME, class)).0.expect("room");
        let record = begin_to_free(&mut words, &mut cache, grant);
        let mut op = FreeOp::new(ME, grant).resumed(record);
        let mut step = op.start(&mut cache);
        let mut theirs = None;
        for number in 0.. {
            if number == late {
                theirs = Some(free_late_and_reallocate(&mut words, grant));
            }
            match step {
                Step::Post(action) => step = words.execute(&mut op, &mut cache, &action),
                Step::Done(_) => break,
            }
        }
        if let Some(theirs) = theirs {
            let entry = KeyEntry(words.at(WordAt::key_of(theirs), 1)[0]);
            assert_eq!(entry.key(), theirs.key, "{late}, {k}: the key of the other host stays");
            let mut cache = NodeCache::new(
                &Layout::new(1, 1).expect("a layout"),
                0,
                Tenant(0),
                NumberSource::counted(2, 64),
            );
            assert_eq!(
                words.free(&mut cache, FreeOp::new(OTHER, theirs)).0,
                Ok(()),
                "{late}, {k}: the other host owns it"
            );
        }
    }
}

/// Does only K of a free. Returns the record that the word has then.
fn begin_to_free(words: &mut TestWords, cache: &mut NodeCache, grant: Grant) -> u32 {
    let word = if grant.class.k() < 5 { WordAt::Span(grant.chunk / 32) } else { WordAt::Section(0) };
    let mut op = FreeOp::new(ME, grant);
    let mut step = op.start(cache);
    loop {
        let Step::Post(action) = step else { panic!("{step:?}") };
        let is_key = matches!(action.first_cas(), Some((WordAt::Key(_), ..)));
        step = words.execute(&mut op, cache, &action);
        if is_key {
            return record_of(words.at(word, 1)[0]);
        }
    }
}

/// Applies F1 or F5, and then an allocation of the place by another host.
fn free_late_and_reallocate(words: &mut TestWords, grant: Grant) -> Grant {
    let theirs = Grant { key: Key::of_run(grant.class.k(), 77), ..grant };
    let run = |first: u32| {
        AlignedRun::new(u8::try_from(first).expect("small"), grant.class.order()).expect("aligned")
    };
    if grant.class.k() < 5 {
        let (word, run) = (&mut words.spans[(grant.chunk / 32) as usize], run(grant.chunk % 32));
        if SpanWord(*word).holds(run) {
            *word = SpanWord(*word).free(run, ME).0;
        }
        *word = SpanWord(*word).allocate(run, OTHER).0;
    } else {
        let (word, run) = (&mut words.sections[0], run(grant.chunk / 32));
        if SectionWord(*word).all(run, SpanState::Full) {
            *word = SectionWord(*word).free(run, ME).0;
        }
        *word = SectionWord(*word).allocate(run, OTHER).0;
    }
    words.at(WordAt::key_of(grant), 1)[0] = KeyEntry::open(theirs.key, Tenant(0)).0;
    theirs
}

#[test]
fn a_client_that_finds_a_full_span_sets_its_full_hint() {
    let (mut words, mut cache) = TestWords::new(1);
    let half = |host| AllocOp::new(host, SizeClass::new(4).expect("a class"));
    (0..2).for_each(|_| assert!(words.run(&mut cache, half(ME)).0.is_ok()));
    assert_eq!(words.section_state(0), SpanState::Partial, "the full hint is not set yet");
    let layout = Layout::new(1, 1).expect("a layout");
    let mut theirs = NodeCache::new(&layout, 0, Tenant(0), NumberSource::counted(2, 64));
    (0..15).for_each(|_| assert!(words.run(&mut theirs, AllocOp::new(OTHER, SizeClass::SPAN)).0.is_ok()));
    assert_eq!(words.run(&mut theirs, half(OTHER)).0, Err(OpError::Full));
    assert_eq!(words.section_state(0), SpanState::Full);
    let (refused, actions) = words.run(&mut theirs, half(OTHER));
    assert_eq!((refused, actions), (Err(OpError::Full), 1), "R: no span is read any more");
}

/// Answers the actions before the next CAS: all spans are ready, and the record is in the log.
fn until_cas(
    op: &mut AllocOp,
    cache: &mut NodeCache,
    step: Step<Grant>,
    section: SectionWord,
) -> Step<Grant> {
    let Step::Post(action) = &step else { return step };
    let answer = match action.accesses() {
        [WordAccess::Read { at: WordAt::Section(0), count: 1 }] => vec![section.0],
        [WordAccess::Read { at: WordAt::Span(_), .. }, WordAccess::Read { .. }] => {
            vec![0; 2 * SECTION_SPANS as usize]
        }
        [WordAccess::Probe { at: WordAt::Log(_) }] => vec![LogEntry::of(section.0, 1).0],
        _ => return step,
    };
    let next = op.step(cache, StepResult(&answer));
    until_cas(op, cache, next, section)
}

#[test]
fn an_operation_fails_after_too_many_lost_races() {
    for (lost, busy) in [(ATTEMPTS_MAX, false), (ATTEMPTS_MAX + 1, true)] {
        let (_, mut cache) = TestWords::new(1);
        let mut op = AllocOp::new(ME, SizeClass::SPAN);
        let mut step = op.start(&mut cache);
        // Another host allocates and frees the last span again and again.
        let mut word = SectionWord::default();
        let last = AlignedRun::single(15);
        for _ in 0..lost {
            step = until_cas(&mut op, &mut cache, step, word);
            assert!(cas_of(&step).is_some(), "{step:?}");
            word = if word.all(last, SpanState::Empty) {
                word.allocate(last, OTHER)
            } else {
                word.free(last, OTHER)
            };
            step = op.step(&mut cache, StepResult(&[word.0]));
        }
        step = until_cas(&mut op, &mut cache, step, word);
        if busy {
            assert_eq!(step, Step::Done(Err(OpError::Busy { attempts: ATTEMPTS_MAX })));
        } else {
            assert!(matches!(cas_of(&step), Some((_, expected, _)) if expected == word.0), "{step:?}");
        }
    }
}

#[test]
fn the_contended_hint_is_set_after_too_many_lost_races() {
    let (mut words, mut cache) = TestWords::new(1);
    words.run(&mut cache, AllocOp::new(ME, SizeClass::CHUNK)).0.expect("room");
    let mut op = AllocOp::new(ME, SizeClass::CHUNK);
    let mut step = op.start(&mut cache);
    let mut word = SpanWord(words.spans[0]);
    for lost in 0..=CONTENDED_AFTER {
        if let Step::Post(action) = &step
            && matches!(action.accesses(), [WordAccess::Probe { at: WordAt::Log(_) }])
        {
            step = op.step(&mut cache, StepResult(&[LogEntry::of(word.0, 1).0]));
        }
        let is_of_span = matches!(cas_of(&step), Some((WordAt::Span(0), ..)));
        assert!(is_of_span, "after {lost} lost races: {step:?}");
        word = word.allocate(word.find(0).expect("free chunks"), OTHER);
        step = op.step(&mut cache, StepResult(&[word.0, 0]));
    }
    words.spans[0] = word.0;
    let Some((WordAt::Section(0), _, desired)) = cas_of(&step) else { panic!("{step:?}") };
    let Step::Post(hint) = step else { unreachable!("it has a CAS") };
    assert_eq!(SectionWord(desired).state(0), SpanState::Contended);
    // This client and others allocate elsewhere, until nothing else is free.
    step = words.execute(&mut op, &mut cache, &hint);
    step = until_cas(&mut op, &mut cache, step, SectionWord(words.sections[0]));
    assert!(matches!(cas_of(&step), Some((WordAt::Section(0), ..))), "A2: {step:?}");
    let (mut theirs, mut spans) = (
        NodeCache::new(&Layout::new(1, 1).expect("a layout"), 0, Tenant(0), NumberSource::counted(2, 64)),
        Vec::new(),
    );
    while let (Ok(grant), _) = words.run(&mut theirs, AllocOp::new(OTHER, SizeClass::SPAN)) {
        spans.push(grant);
    }
    assert_eq!(spans.len(), 15);
    let (grant, _) = words.run(&mut theirs, AllocOp::new(OTHER, SizeClass::CHUNK));
    assert!(grant.expect("the contended span has room").chunk < 32);
    assert_eq!(SectionWord(words.sections[0]).state(0), SpanState::Partial, "C2: no race was lost");
}

#[test]
fn a_search_reads_all_sections_in_bounded_pieces() {
    let count = 2 * READ_WORDS_MAX + 100;
    let (mut words, mut cache) = TestWords::new(count);
    let full = SectionWord::default().allocate(AlignedRun::new(0, 4).expect("all"), OTHER);
    words.sections.fill(full.0);
    let (result, actions) = words.run(&mut cache, AllocOp::new(ME, SizeClass::SECTION));
    assert_eq!(result, Err(OpError::Full));
    assert!(words.longest_read <= READ_WORDS_MAX);
    // Some sections are tried because the cache has them as empty; then all are read.
    assert!((2 + 3..=2 + 4).contains(&actions), "{actions} actions");
    let (result, actions) = words.run(&mut cache, AllocOp::new(ME, SizeClass::SECTION));
    assert_eq!(result, Err(OpError::Full));
    assert!((3..=4).contains(&actions), "{actions} READs");
    // A section that becomes free is found, wherever it is.
    for free in [0, 1, READ_WORDS_MAX, count - 1] {
        words.sections[free as usize] = full.free(AlignedRun::new(0, 4).expect("all"), OTHER).0;
        let (result, _) = words.run(&mut cache, AllocOp::new(ME, SizeClass::SECTION));
        let found = result.map(|Grant { chunk, class, .. }| (chunk, class));
        assert_eq!(found, Ok((free * 512, SizeClass::SECTION)));
    }
}

#[test]
fn a_stretch_is_allocated_whole_or_not_at_all() {
    let (mut words, mut cache) = TestWords::new(6);
    let full = SectionWord::default().allocate(AlignedRun::SECTION, OTHER);
    let mut op = StretchOp::new(ME, 3);
    let mut step = op.start(&mut cache);
    let first = loop {
        // Another host allocates the third section of the first attempt: two sections are rolled
        // back.
        if words.sections[4] != 0 && words.sections[5] == 0 {
            words.sections[5] = full.0;
        }
        match step {
            Step::Post(action) => step = words.execute(&mut op, &mut cache, &action),
            Step::Done(first) => break first.expect("three neighbouring sections are free"),
        }
    };
    assert_eq!((first.chunk, first.class), (0, SizeClass::SECTION));
    let is_allocated = |words: &TestWords| -> Vec<bool> {
        words
            .sections
            .iter()
            .map(|word| !SectionWord(*word).all(AlignedRun::SECTION, SpanState::Empty))
            .collect()
    };
    assert_eq!(is_allocated(&words), [true, true, true, false, false, true]);
    let keys: Vec<u64> = (0..6).map(|section| words.at(WordAt::section_key(section), 1)[0]).collect();
    assert!(keys[0] != 0 && keys[..3].iter().all(|key| *key == keys[0]), "one key for all: {keys:x?}");
    for count in [3, 7, 0] {
        assert_eq!(words.run(&mut cache, StretchOp::new(ME, count)).0, Err(OpError::Full), "{count}");
    }
    assert_eq!(is_allocated(&words), [true, true, true, false, false, true]);
    let (two, actions) = words.run(&mut cache, StretchOp::new(ME, 2));
    assert_eq!(two.map(|first| first.chunk), Ok(3 * 512));
    assert_eq!(actions, 4, "A0, A7, A8 with the next A7, A8");
    for section in 0..3 {
        let grant = Grant { chunk: section * 512, ..first };
        assert_eq!(words.free(&mut cache, FreeOp::new(ME, grant)), (Ok(()), 3), "K, F5");
    }
}

/// Sections of another tenant cost no lost race, and nothing is allocated and rolled back.
#[test]
fn a_stretch_skips_sections_of_another_tenant() {
    const FOREIGN: u32 = 150;
    let (mut words, mut cache) = TestWords::new(FOREIGN + 40);
    for section in 0..FOREIGN {
        let theirs = KeyEntry::closed(Tenant(9)).0;
        words.at(WordAt::span_key(section * SECTION_SPANS + section % SECTION_SPANS), 1)[0] = theirs;
    }
    let (first, actions) = words.run(&mut cache, StretchOp::new(ME, 40));
    assert_eq!(first.map(|first| first.chunk), Ok(FOREIGN * 512));
    assert!(
        words.sections[..FOREIGN as usize].iter().all(|word| *word == 0),
        "foreign sections are unchanged"
    );
    assert!(actions < 60, "R, A0 of 16 at a time, A7 and A8 of 40: {actions} trips");
}

#[test]
fn extents_allocated_before_an_error_are_returned() {
    let (mut words, mut cache) = TestWords::new(4);
    words.sections[0] = 0xdead;
    let (several, _) = words.run(&mut cache, AllocManyOp::new(ME, SizeClass::SECTION, 4));
    let GrantBatch { grants, failure } = several.expect("two sections are not damaged");
    assert_eq!(grants.iter().map(|grant| grant.chunk).collect::<Vec<_>>(), [1024, 1536]);
    assert!(matches!(failure, Some(OpError::Damaged { at: WordAt::Section(0), .. })), "{failure:?}");
    for grant in grants {
        assert_eq!(words.free(&mut cache, FreeOp::new(ME, grant)).0, Ok(()), "the key was written");
    }
}

#[test]
fn extents_of_one_span_are_freed_together() {
    let (mut words, mut cache) = TestWords::new(1);
    let (several, _) = words.run(&mut cache, AllocManyOp::new(ME, SizeClass::CHUNK, 64));
    let grants = several.expect("room").grants;
    let (first, second) = grants.split_at(32);
    // An extent of the second span was freed and now belongs to another host; one of the first is
    // in the list twice.
    words.free(&mut cache, FreeOp::new(ME, second[8])).0.expect("the extent is this host's");
    let mut theirs =
        NodeCache::new(&Layout::new(1, 1).expect("a layout"), 0, Tenant(0), NumberSource::counted(2, 64));
    words.run(&mut theirs, AllocManyOp::new(OTHER, SizeClass::SPAN, 1)).0.expect("room");
    let reused = words.run(&mut theirs, AllocOp::new(OTHER, SizeClass::CHUNK)).0.expect("room");
    assert_eq!(reused.chunk, second[8].chunk, "there is no other hole");
    let refused = |outcomes: Result<Outcomes, OpError>| -> Vec<usize> {
        let outcomes = outcomes.expect("each has an outcome").into_iter().enumerate();
        outcomes.filter(|(_, outcome)| outcome.is_err()).map(|(number, _)| number).collect()
    };
    let twice = first.iter().chain([&first[7]]).copied();
    let (outcomes, actions) = words.run(&mut cache, FreeOp::many(ME, twice));
    assert_eq!(
        (refused(outcomes), actions),
        (vec![32], 7),
        "K, F3, F4, which loses a race, L, F4, F6, and a read for the one named twice"
    );
    let (outcomes, actions) = words.run(&mut cache, FreeOp::many(ME, second.iter().copied()));
    assert_eq!(refused(outcomes), [8]);
    assert!(actions <= 7, "K, F1, a read, L, F1: {actions} trips");
    let bits: Vec<u32> =
        words.spans.iter().map(|word| SpanWord(*word).bits()).filter(|bits| *bits != 0).collect();
    assert_eq!(
        bits.iter().map(|bits| bits.count_ones()).sum::<u32>(),
        1,
        "the other host still owns its extent"
    );
    assert!(words.at(WordAt::key_of(reused), 1)[0] != 0, "and its key opens it");
}

/// The first extent of the list was freed before, and later ones overlap it.
#[test]
fn an_extent_that_overlaps_a_stale_one_is_freed() {
    let (mut words, mut cache) = TestWords::new(1);
    let pair = AllocOp::new(ME, SizeClass::new(1).expect("a class"));
    let stale = words.run(&mut cache, pair).0.expect("room");
    let kept = words.run(&mut cache, AllocOp::new(ME, SizeClass::CHUNK)).0.expect("room");
    words.free(&mut cache, FreeOp::new(ME, stale)).0.expect("the extent is this host's");
    let [one, two] =
        [(); 2].map(|()| words.run(&mut cache, AllocOp::new(ME, SizeClass::CHUNK)).0.expect("room"));
    assert_eq!((one.chunk, two.chunk), (stale.chunk, stale.chunk + 1));
    let (outcomes, _) = words.run(&mut cache, FreeOp::many(ME, [stale, one, two, kept]));
    assert_eq!(outcomes.expect("outcomes").as_slice(), [Err(OpError::NotAllocated), Ok(()), Ok(()), Ok(())]);
}

/// The next CAS, as place, expected and desired value.
fn cas_of<T>(step: &Step<T>) -> Option<(WordAt, u64, u64)> {
    match step {
        Step::Post(action) => action.first_cas(),
        Step::Done(_) => None,
    }
}

#[test]
fn a_client_has_a_limit_of_nodes() {
    let options = SimOptions { step_on_poll: true, ..SimOptions::default() };
    let fabric = SimFabric::new(1, options);
    let mut client = PoolClient::new(ME, Tenant(0));
    let who = Identity { host: ME, epoch: 1, tenant: Tenant(0) };
    for id in 0..=u16::try_from(NODES_MAX).expect("a small number") {
        let target = fabric.add_node();
        NodeMemory::create(&target, NodeId(id), SECTION_BYTES).expect("memory");
        let added = client.add_node(NodeId(id), fabric.connect(target.node(), who).expect("the node lives"));
        match added {
            Ok(()) => assert!(usize::from(id) < NODES_MAX),
            Err(PoolError::TooManyNodes { limit: NODES_MAX }) => {
                assert_eq!(usize::from(id), NODES_MAX)
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(client.nodes().count(), NODES_MAX);
    let extent = client.allocate(NodeId(7), SizeClass::SPAN).expect("room");
    client.free(extent).expect("the extent is this host's");
}

fn half(host: Host) -> AllocOp {
    AllocOp::new(host, SizeClass::new(4).expect("a class"))
}

/// Fills the first span, and begins an operation whose next CAS opens the second span and sets the
/// full hint of the first.
fn begin_setting_full_hint(
    words: &mut TestWords,
    cache: &mut NodeCache,
) -> (Vec<Grant>, AllocOp, Step<Grant>) {
    let filling = (0..2).map(|_| words.run(cache, half(ME)).0.expect("room")).collect();
    let mut op = half(ME);
    let step = op.start(cache);
    let Step::Post(action) = &step else { panic!("{step:?}") };
    let [WordAccess::Cas { at: WordAt::Section(0), desired, .. }, WordAccess::Probe { at: WordAt::Span(0) }] =
        *action.accesses()
    else {
        panic!("{step:?}, and not A2 with A4 and A5")
    };
    assert_eq!(SectionWord(desired).state(0), SpanState::Full);
    (filling, op, step)
}

#[test]
fn the_full_hint_of_a_span_that_is_not_full_any_more_is_cleared() {
    let (mut words, mut cache) = TestWords::new(1);
    let (filling, mut op, mut step) = begin_setting_full_hint(&mut words, &mut cache);
    // Another client of the same host frees half of the span. The full hint is not set yet, so that
    // client does not clear it.
    let mut other =
        NodeCache::new(&Layout::new(1, 1).expect("a layout"), 0, Tenant(0), NumberSource::counted(2, 64));
    words.free(&mut other, FreeOp::new(ME, filling[0])).0.expect("the extent is the host's");
    let mut states = Vec::new();
    while let Step::Post(action) = step {
        step = words.execute(&mut op, &mut cache, &action);
        states.push(words.section_state(0));
    }
    assert_eq!(states, [SpanState::Full, SpanState::Partial, SpanState::Partial], "A2, A6, A3");
    assert!(matches!(step, Step::Done(Ok(_))), "{step:?}");
    let (again, actions) = words.run(&mut cache, half(ME));
    assert_eq!((again.expect("room").chunk, actions), (filling[0].chunk, 2), "A1, A8");
}

/// After a client has seen a span full, and before it sets the full hint, the span is freed and
/// opened by another host.
#[test]
fn the_full_hint_is_not_set_on_a_span_that_another_host_opens() {
    let (mut words, mut cache) = TestWords::new(1);
    let (filling, mut op, mut step) = begin_setting_full_hint(&mut words, &mut cache);
    // Another client of the same host frees the span, and another host begins to open it.
    let fresh =
        || NodeCache::new(&Layout::new(1, 1).expect("a layout"), 0, Tenant(0), NumberSource::counted(2, 64));
    let mut other = fresh();
    for grant in filling {
        words.free(&mut other, FreeOp::new(ME, grant)).0.expect("the extent is the host's");
    }
    let (mut theirs, mut opening) = (fresh(), half(OTHER));
    let mut next = opening.start(&mut theirs);
    while words.section_state(0) != SpanState::Partial {
        let Step::Post(action) = next else { panic!("{next:?}, and not the span that became free") };
        next = words.execute(&mut opening, &mut theirs, &action);
    }
    while let Step::Post(action) = step {
        step = words.execute(&mut op, &mut cache, &action);
    }
    assert_eq!(
        words.section_state(0),
        SpanState::Partial,
        "the span is not full, and another host is opening it"
    );
    while let Step::Post(action) = next {
        next = words.execute(&mut opening, &mut theirs, &action);
    }
    assert!(matches!(next, Step::Done(Ok(_))), "{next:?}");
    assert_eq!(words.section_state(0), SpanState::Partial, "the span has free chunks");
}

#[test]
fn groups_of_one_section_are_freed_one_after_another() {
    let (mut words, mut cache) = TestWords::new(1);
    let grants = [5, 5, 6, 7].map(|k| {
        let class = SizeClass::new(k).expect("a class");
        words.run(&mut cache, AllocOp::new(ME, class)).0.expect("room")
    });
    let (outcomes, _) = words.run(&mut cache, FreeOp::many(ME, grants));
    assert_eq!(outcomes.expect("outcomes").as_slice(), [Ok(()); 4]);
    assert!(
        SectionWord(words.sections[0]).all(AlignedRun::SECTION, SpanState::Empty),
        "all of them are free"
    );
    assert!(grants.iter().all(|grant| KeyEntry(words.at(WordAt::key_of(*grant), 1)[0]).key() == Key(0)));
}
