//! Properties of control words: of any 64 bits, and of words that the protocol produces.

use aquifer_fabric::Host;
use aquifer_pool::word::{AlignedRun, InlineLog, LogOp, STAMPS, SectionWord, SpanState, SpanWord};
use proptest::prelude::*;

fn runs(order_max: u8) -> impl Strategy<Value = AlignedRun> {
    let aligned = |(first, order): (u8, u8)| AlignedRun::new(first >> order << order, order).unwrap();
    (0..32_u8, 0..=order_max).prop_map(aligned)
}

fn hosts() -> impl Strategy<Value = Host> {
    (1..=4095_u16).prop_map(Host)
}

fn groups() -> impl Strategy<Value = AlignedRun> {
    let aligned = |(first, order): (u8, u8)| AlignedRun::new(first >> order << order, order).unwrap();
    (0..16_u8, 0..=4_u8).prop_map(aligned)
}

/// A span's word after some changes.
fn spans() -> impl Strategy<Value = SpanWord> {
    prop::collection::vec((runs(4), hosts(), any::<bool>()), 0..24).prop_map(|changes| {
        changes.into_iter().fold(SpanWord::default(), |word, (run, host, allocates)| {
            if allocates && word.bits() & run.mask() == 0 {
                word.allocate(run, host)
            } else if word.holds(run) {
                word.free(run, host)
            } else {
                word
            }
        })
    })
}

/// A section's word after some changes.
fn sections() -> impl Strategy<Value = SectionWord> {
    prop::collection::vec((groups(), hosts(), 0..5), 0..24).prop_map(|changes| {
        changes.into_iter().fold(SectionWord::default(), |word, (run, host, what)| {
            let single = run.first();
            match (what, word.state(single)) {
                (0, SpanState::Empty) => word.open(single, host),
                (1, SpanState::Partial | SpanState::Contended) => word.close(single, host),
                (2, SpanState::Partial) => word.hint(single, SpanState::Full),
                (3, SpanState::Partial) => word.hint(single, SpanState::Contended),
                _ if word.all(run, SpanState::Empty) => word.allocate(run, host),
                _ if word
                    .log()
                    .ok()
                    .flatten()
                    .is_some_and(|log| log.op == LogOp::Alloc && log.run == run) =>
                {
                    word.free(run, host)
                }
                _ => word,
            }
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_bits_are_checked_without_panic(bits in any::<u64>()) {
        let (span, section) = (SpanWord(bits), SectionWord(bits));
        prop_assert_eq!(span.check().is_ok() && span.log().is_err(), false);
        prop_assert_eq!(section.check().is_ok() && section.log().is_err(), false);
        let counted: usize = [SpanState::Empty, SpanState::Partial, SpanState::Contended, SpanState::Full]
            .map(|state| section.spans_in(state).inspect(|&i| assert_eq!(section.state(i), state)).count())
            .iter()
            .sum();
        prop_assert_eq!(counted, 16);
    }

    #[test]
    fn a_run_that_is_found_is_free_and_the_first(bits in any::<u32>(), order in 0..=4_u8) {
        let word = SpanWord(bits.into());
        let free = |first: u8| AlignedRun::new(first, order).filter(|run| bits & run.mask() == 0);
        prop_assert_eq!(word.find(order), (0..32).find_map(free));
    }

    #[test]
    fn a_group_that_is_found_is_empty_and_the_first(bits in any::<u32>(), order in 0..=4_u8) {
        let word = SectionWord(bits.into());
        let empty = |first: u8| {
            let is_empty = |i: u8| word.state(i) == SpanState::Empty;
            AlignedRun::new(first, order).filter(|run| (first..first + run.len()).all(is_empty))
        };
        prop_assert_eq!(word.find(order), (0..16).find_map(empty));
    }

    #[test]
    fn spans_stay_legal_and_logs_record_the_change(word in spans(), run in runs(4), host in hosts()) {
        prop_assert_eq!(word.check(), Ok(()));
        let stamp = word.log().unwrap().map_or(0, |log| log.stamp);
        let Some(run) = word.find(run.order()) else { return Ok(()) };
        let allocated = word.allocate(run, host);
        prop_assert_eq!(allocated.check(), Ok(()));
        prop_assert_eq!(allocated.bits(), word.bits() | run.mask());
        let log = InlineLog { op: LogOp::Alloc, run, host, stamp: (stamp + 1) % STAMPS };
        prop_assert_eq!(allocated.log(), Ok(Some(log)));
        let freed = allocated.free(run, host);
        prop_assert_eq!(freed.check(), Ok(()));
        prop_assert_eq!(freed.bits(), word.bits());
        let op = if word.is_closed() { LogOp::Close } else { LogOp::Free };
        prop_assert_eq!(freed.log().unwrap().map(|log| log.op), Some(op));
    }

    #[test]
    fn sections_stay_legal_and_logs_record_the_change(word in sections(), run in groups(), host in hosts()) {
        prop_assert_eq!(word.check(), Ok(()));
        let Some(run) = word.find(run.order()) else { return Ok(()) };
        let allocated = word.allocate(run, host);
        prop_assert_eq!(allocated.check(), Ok(()));
        prop_assert!(allocated.all(run, SpanState::Full));
        let record = allocated.log().unwrap().map(|log| (log.op, log.run, log.host));
        prop_assert_eq!(record, Some((LogOp::Alloc, run, host)));
        let freed = allocated.free(run, host);
        prop_assert_eq!((freed.check(), freed.bits()), (Ok(()), word.bits()));
        let opened = word.open(run.first(), host);
        prop_assert_eq!((opened.check(), opened.state(run.first())), (Ok(()), SpanState::Partial));
    }

    #[test]
    fn hints_keep_the_record_and_advance_the_timestamp(word in sections(), index in 0..16_u8) {
        let word = if word.state(index) == SpanState::Empty { word.open(index, Host(5)) } else { word };
        if word.state(index) != SpanState::Partial {
            return Ok(());
        }
        let hinted = word.hint(index, SpanState::Full);
        prop_assert_eq!(hinted.check(), Ok(()));
        prop_assert_eq!(hinted.state(index), SpanState::Full);
        let (before, after) = (word.log().unwrap().unwrap(), hinted.log().unwrap().unwrap());
        prop_assert_eq!((before.op, before.run, before.host), (after.op, after.run, after.host));
        prop_assert_eq!(after.stamp, (before.stamp + 1) % STAMPS);
    }
}

#[test]
fn the_timestamp_wraps() {
    let (run, host) = (AlignedRun::single(3), Host(4095));
    let mut word = SpanWord::default();
    for turn in 1..=u32::from(STAMPS) + 1 {
        word = if word.is_closed() { word.allocate(run, host) } else { word.free(run, host) };
        let stamp = word.log().unwrap().unwrap().stamp;
        assert_eq!(u32::from(stamp), turn % u32::from(STAMPS));
        assert_eq!(word.check(), Ok(()));
    }
}

#[test]
fn the_layout_of_the_bits_is_the_documented_one() {
    let span = SpanWord::default().allocate(AlignedRun::new(4, 2).unwrap(), Host(0xabc));
    // op 2, run number 8 + 1, host 0xabc, stamp 1; chunks 4 to 7.
    assert_eq!(span.0, (2 << 61) | (9 << 55) | (0xabc << 43) | (1 << 32) | 0xf0);
    let section = SectionWord::default().open(3, Host(1)).allocate(AlignedRun::new(8, 3).unwrap(), Host(2));
    // op 2, run number 2 + 1, host 2, stamp 2; span 3 is 01, spans 8 to 15 are 11.
    assert_eq!(section.0, (2 << 61) | (3 << 55) | (2 << 43) | (2 << 32) | 0xffff_0040);
}

#[test]
fn illegal_words_are_refused() {
    let allocated = SpanWord::default().allocate(AlignedRun::single(0), Host(1)).0;
    for (what, word) in [
        ("bits without a log", 1),
        ("no host", (2 << 61) | (32 << 55) | (1 << 32) | 1),
        ("no run", (2 << 61) | (1 << 43) | (1 << 32) | 1),
        ("unknown operation 5", (5 << 61) | (32 << 55) | (1 << 43) | 1),
        ("no operation but a stamp", 1 << 32),
        ("allocated, but the bit is clear", allocated & !1),
        ("opened, which is only in sections' words", (1 << 61) | (32 << 55) | (1 << 43) | 1),
        ("all 32 allocated at once", (2 << 61) | (1 << 55) | (1 << 43) | 0xffff_ffff),
        ("closed, but a bit is set", (4 << 61) | (32 << 55) | (1 << 43) | 2),
    ] {
        assert!(SpanWord(word).check().is_err(), "{what}");
    }
    for (what, word) in [
        ("codes without a log", 1_u64),
        ("a run of 32 places", (2 << 61) | (63 << 55) | (1 << 43) | 3),
        ("allocated, but partial", (2 << 61) | (16 << 55) | (1 << 43) | 1),
        ("opened, but empty", (1 << 61) | (16 << 55) | (1 << 43)),
        ("closed, but partial", (4 << 61) | (16 << 55) | (1 << 43) | 1),
        ("two spans opened at once", (1 << 61) | (8 << 55) | (1 << 43) | 5),
    ] {
        assert!(SectionWord(word).check().is_err(), "{what}");
    }
}
