//! Timed loops of operations and their bare counterparts.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::atomic::Ordering;
use std::time::Instant;

use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::float;
use aquifer_bench::support::interrupt;
use aquifer_bench::support::procs;
use aquifer_bench::support::spread::Spread;
use aquifer_fabric::{Verb, Work};

use super::link::Link;
use super::server::REGION_BYTES;

/// Amount of work.
#[derive(Clone, Copy, Debug)]
pub struct Volume {
    /// Rounds; in each, the operation and its counterpart alternate.
    pub rounds: usize,
    /// Bytes copied in a round, for large copies.
    pub bytes: usize,
    /// Most operations in a round.
    pub operations: usize,
}

impl Volume {
    /// For `--quick`: a few seconds.
    pub const QUICK: Self = Self { rounds: 5, bytes: 64 << 20, operations: 50_000 };
    /// For a full run: half a minute.
    pub const FULL: Self = Self { rounds: 15, bytes: 192 << 20, operations: 200_000 };

    fn operations_of(self, bytes: u32) -> usize {
        (self.bytes / usize::try_from(bytes).unwrap_or(usize::MAX)).clamp(64, self.operations)
    }
}

/// Kind of operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// READ, beside memcpy.
    Read,
    /// WRITE, beside memcpy.
    Write,
    /// CAS, beside a bare compare-exchange.
    CompareSwap,
    /// FAA, beside a bare fetch-add.
    FetchAdd,
}

/// Addresses of the operations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// One address.
    Hot,
    /// Random addresses in all the memory.
    Cold,
}

/// Times of an operation and of its bare counterpart, for each round.
#[derive(Clone, Debug)]
pub struct Pair {
    /// Kind of operation.
    pub kind: Kind,
    /// Length in bytes.
    pub bytes: u32,
    /// Addresses.
    pub place: Place,
    /// Operations posted at once.
    pub batch: usize,
    /// Times of the operation in ns.
    pub verb_ns: Vec<f64>,
    /// Times of the bare counterpart in ns.
    pub bare_ns: Vec<f64>,
}

/// Offsets in a random order that visits every slot once.
///
/// The step is odd and the number of slots is a power of two, so they have no common factor.
#[derive(Clone, Copy, Debug)]
struct Walk {
    slots: usize,
    slot_bytes: usize,
    at: usize,
    step: usize,
}

impl Walk {
    fn new(bytes: u32, place: Place) -> Self {
        // Small operations are a page apart and use different lines of a page, so that each line is
        // cold.
        let slot_bytes = usize::try_from(bytes).unwrap_or(REGION_BYTES).max(4096);
        let slots = if place == Place::Hot { 1 } else { REGION_BYTES / slot_bytes };
        Self { slots, slot_bytes, at: 0, step: 0x9E37_79B1 | 1 }
    }

    #[inline]
    fn next(&mut self, bytes: u32) -> usize {
        self.at = self.at.wrapping_add(self.step);
        // The middle bits of the sum vary more than its low ones.
        let slot = (self.at ^ (self.at >> 15)) % self.slots;
        let line = if bytes < 4096 && self.slots > 1 { (self.at >> 7) % 64 * 64 } else { 0 };
        slot * self.slot_bytes + line
    }
}

/// Measures a verb and its bare counterpart, one after the other in each round.
///
/// # Errors
/// If an operation fails, or a signal asks to stop.
pub fn pair(
    link: &mut Link,
    volume: Volume,
    kind: Kind,
    bytes: u32,
    place: Place,
    batch: usize,
) -> Result<Pair, BenchError> {
    let operations = volume.operations_of(bytes);
    let mut pair = Pair { kind, bytes, place, batch, verb_ns: Vec::new(), bare_ns: Vec::new() };
    // The first round maps pages and wakes the processor, and is not counted.
    for round in 0..=volume.rounds {
        interrupt::check()?;
        let mut walk = Walk::new(bytes, place);
        let bare_ns = match batch {
            1 => bare::<true>(link, &pair, operations, &mut walk),
            _ => bare::<false>(link, &pair, operations, &mut walk),
        };
        let mut walk = Walk::new(bytes, place);
        let verb_ns = verbs(link, &pair, operations, &mut walk)?;
        if round > 0 {
            pair.bare_ns.push(bare_ns);
            pair.verb_ns.push(verb_ns);
        }
    }
    Ok(pair)
}

/// Measures one operation at a time without a bare counterpart, in ns, for each round.
///
/// Unlike [`pair`], this needs no own memory of the size of the lent memory.
///
/// # Errors
/// If an operation fails, or a signal asks to stop.
pub fn verb(
    link: &mut Link,
    volume: Volume,
    kind: Kind,
    bytes: u32,
    place: Place,
) -> Result<Vec<f64>, BenchError> {
    let pair = Pair { kind, bytes, place, batch: 1, verb_ns: Vec::new(), bare_ns: Vec::new() };
    // One walk for all rounds, so that a round does not begin at addresses that the last one has
    // cached.
    let mut walk = Walk::new(bytes, place);
    let mut verb_ns = Vec::new();
    for round in 0..=volume.rounds {
        interrupt::check()?;
        let ns = verbs(link, &pair, volume.operations_of(bytes), &mut walk)?;
        // The first round maps pages and is not counted.
        if round > 0 {
            verb_ns.push(ns);
        }
    }
    Ok(verb_ns)
}

fn verbs(link: &mut Link, pair: &Pair, operations: usize, walk: &mut Walk) -> Result<f64, BenchError> {
    let mut works = Vec::with_capacity(pair.batch);
    let mut hot_word = 0;
    if pair.kind == Kind::CompareSwap && pair.place == Place::Hot {
        hot_word = link.all(&[work(link, pair, walk.next(pair.bytes), 0, 0)])?;
    }
    let rounds = operations.div_ceil(pair.batch);
    let start = Instant::now();
    for _ in 0..rounds {
        works.clear();
        for slot in 0..pair.batch {
            works.push(work(link, pair, walk.next(pair.bytes), slot, hot_word));
        }
        hot_word = link.all(&works)?;
    }
    Ok(per_operation_ns(start, rounds * pair.batch))
}

fn work(link: &Link, pair: &Pair, offset: usize, slot: usize, word: u64) -> Work {
    let remote = link.remote(offset);
    let local = link.slice(slot as u64 * u64::from(pair.bytes) % (1 << 19), pair.bytes);
    let verb = match pair.kind {
        Kind::Read => Verb::Read { local, remote },
        Kind::Write => Verb::Write { local, remote },
        Kind::CompareSwap => Verb::CompareSwap { remote, expected: word, desired: word.wrapping_add(1) },
        Kind::FetchAdd => Verb::FetchAdd { remote, add: 1 },
    };
    Work { id: slot as u64, verb, signalled: true }
}

/// Times the bare counterpart. With `ALONE`, each operation depends on the data of the one before.
fn bare<const ALONE: bool>(link: &Link, pair: &Pair, operations: usize, walk: &mut Walk) -> f64 {
    let len = usize::try_from(pair.bytes).unwrap_or(0);
    let (region, local) = (&link.bare, link.local());
    let mut word = 0;
    // Always zero, but unknown to the compiler: makes each address depend on the data before.
    let wait = black_box(0);
    let start = Instant::now();
    for operation in 0..operations.div_ceil(pair.batch) * pair.batch {
        let offset = walk.next(pair.bytes) + if ALONE { usize::from(word & wait != 0) } else { 0 };
        assert!(offset + len <= region.len());
        let beside = operation % pair.batch * len % (1 << 19);
        match pair.kind {
            Kind::Read => {
                // SAFETY: the range in `region` was checked, the one in `local` ends before 1 MiB,
                // and they are different mappings, which no other process writes.
                unsafe {
                    let from = region.as_ptr().add(offset);
                    black_box(local.as_ptr().add(beside)).copy_from_nonoverlapping(black_box(from), len);
                }
                word = local.atomic_u64(beside).load(Ordering::Relaxed);
            }
            // SAFETY: the range in `region` was checked, the one in `local` ends before 1 MiB,
            // and they are different mappings, which no other process writes.
            Kind::Write => unsafe {
                let to = region.as_ptr().add(offset);
                black_box(to).copy_from_nonoverlapping(black_box(local.as_ptr().add(beside)), len);
            },
            Kind::CompareSwap => {
                let swap = region.atomic_u64(offset).compare_exchange(
                    word,
                    word.wrapping_add(1),
                    Ordering::SeqCst,
                    Ordering::SeqCst,
                );
                word = swap.unwrap_or_else(|found| found);
            }
            Kind::FetchAdd => {
                word = region.atomic_u64(offset).fetch_add(1, Ordering::SeqCst);
            }
        }
    }
    black_box(word);
    per_operation_ns(start, operations.div_ceil(pair.batch) * pair.batch)
}

fn per_operation_ns(start: Instant, operations: usize) -> f64 {
    start.elapsed().as_secs_f64() * 1e9 / float(operations.max(1) as u64)
}

/// Times messages of 64 bytes to the serving process and back, one at a time.
///
/// # Errors
/// If a message fails, or the serving process has ended.
pub fn messages(link: &mut Link, volume: Volume) -> Result<BTreeMap<&'static str, Spread>, BenchError> {
    let trips = volume.operations / 5;
    let (mut p50_us, mut p99_us) = (Vec::new(), Vec::new());
    let cpu_us = |link: &Link| procs::cpu_us(std::process::id()) + procs::cpu_us(link.server());
    let before_us = cpu_us(link);
    for _ in 0..volume.rounds {
        interrupt::check()?;
        let mut times_us = Vec::with_capacity(trips);
        for _ in 0..trips {
            times_us.push(round_trip_us(link)?);
        }
        times_us.sort_by(f64::total_cmp);
        p50_us.push(times_us[trips / 2]);
        p99_us.push(times_us[trips * 99 / 100]);
    }
    // The kernel counts processor time in ticks of 10 ms, so only the sum of all rounds is precise.
    let per_trip_us = float(cpu_us(link) - before_us) / float((trips * volume.rounds) as u64);
    let figures = [("p50 µs", p50_us), ("p99 µs", p99_us), ("CPU µs", vec![per_trip_us])];
    Ok(figures.into_iter().filter_map(|(name, values)| Some((name, Spread::of(&values)?))).collect())
}

fn round_trip_us(link: &mut Link) -> Result<f64, BenchError> {
    let mut message = Vec::with_capacity(64);
    let start = Instant::now();
    let local = link.slice(0, 64);
    link.all(&[Work { id: 0, verb: Verb::Send { local }, signalled: true }])?;
    while !link.receive(&mut message) {
        if link.is_broken() {
            return Err(BenchError::Fabric { reason: "the other process is gone".into() });
        }
        std::hint::spin_loop();
    }
    Ok(start.elapsed().as_secs_f64() * 1e6)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::super::server;
    use super::*;

    const TINY: Volume = Volume { rounds: 2, bytes: 1 << 20, operations: 256 };

    #[test]
    fn a_cold_walk_covers_the_memory_and_stays_inside() {
        for bytes in [8, 64, 4096, 65_536] {
            let mut walk = Walk::new(bytes, Place::Cold);
            let offsets: Vec<usize> = (0..2000).map(|_| walk.next(bytes)).collect();
            let distinct: HashSet<_> = offsets.iter().collect();
            assert!(distinct.len() > 1000, "{bytes}: {} of 2000 are distinct", distinct.len());
            let end = usize::try_from(bytes).unwrap();
            assert!(offsets.iter().all(|offset| offset + end <= REGION_BYTES && offset % 8 == 0));
        }
        let mut hot = Walk::new(64, Place::Hot);
        assert!((0..100).all(|_| hot.next(64) == 0));
    }

    #[test]
    fn every_verb_is_measured_beside_its_counterpart() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("target");
        let target = server::lend(&path, server::filled(REGION_BYTES).unwrap()).unwrap();
        let mut link = Link::connect(&path, REGION_BYTES).unwrap();
        for kind in [Kind::Read, Kind::Write, Kind::CompareSwap, Kind::FetchAdd] {
            for place in [Place::Hot, Place::Cold] {
                let pair = pair(&mut link, TINY, kind, 64, place, 16).unwrap();
                assert_eq!((pair.verb_ns.len(), pair.bare_ns.len()), (2, 2));
                assert!(pair.verb_ns.iter().chain(&pair.bare_ns).all(|&ns| ns > 0.0));
            }
        }
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut message = Vec::new();
                let mut answered = 0;
                while answered < TINY.rounds * (TINY.operations / 5) {
                    answered += usize::from(server::echo(&target, &mut message));
                }
            });
            let figures = messages(&mut link, TINY).unwrap();
            assert!(figures["p50 µs"].median > 0.0);
        });
    }

    #[test]
    fn a_missing_server_is_reported() {
        let error = Link::connect(std::path::Path::new("/nowhere/target"), 0).unwrap_err().to_string();
        assert!(error.contains("/nowhere/target"), "{error}");
    }
}
