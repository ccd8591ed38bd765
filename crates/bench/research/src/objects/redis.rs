//! Figures 18 and 19: memory in use after the allocations of three tests of Redis, by the number of
//! threads that allocate (§4.4.3).

use std::collections::BTreeMap;
use std::path::Path;

use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::float;
use aquifer_bench::support::interrupt;
use aquifer_bench::support::random::Random;
use aquifer_bench::support::report::{Column, Row, Table, Target};
use aquifer_bench::support::spread::Spread;
use aquifer_objects::class::{Class, ClassId, FRAME_BYTES};

use super::id_mode::IdMode;
use super::modelled_heap::{ModelledHeap, ModelledObject};
use super::preloaded;
use super::schemes::{ALL, CORM_0, NUMBERS, Scheme};
use super::traces::{TRACES, Trace, TraceHeap};

const THREADS: [u16; 6] = [1, 2, 4, 8, 16, 32];
const MIB: f64 = 1024.0 * 1024.0;
const IDEAL: &str = "ideal";
const PEER: &str = "malloc";

/// The tables in MiB of one figure, and its targets. `mesh` is a library that replaces malloc, as a
/// peer.
///
/// # Errors
/// If the bench is interrupted, or `mesh` cannot be loaded.
pub fn tables(is_hybrid: bool, mesh: Option<&Path>) -> Result<(Vec<Table>, Vec<Target>), BenchError> {
    let figure = if is_hybrid { "Fig. 19, hybrid" } else { "Fig. 18, vanilla" };
    let mut tables = Vec::new();
    let mut worst: f64 = 0.0;
    for (number, trace) in (1..).zip(TRACES) {
        let mut rows = Vec::new();
        for threads in THREADS {
            interrupt::check()?;
            let mut figures = BTreeMap::new();
            for scheme in ALL {
                let used = play(trace, scheme, threads, is_hybrid);
                figures.extend(Spread::of(&[used.held / MIB]).map(|spread| (scheme.name, spread)));
                if scheme == NUMBERS {
                    figures.extend(Spread::of(&[used.live / MIB]).map(|spread| (IDEAL, spread)));
                }
            }
            if let Some(library) = mesh {
                let bytes = preloaded::measure(library, number, threads)?;
                figures.extend(Spread::of(&[bytes / MIB]).map(|spread| (PEER, spread)));
            }
            let of =
                |scheme: Scheme| figures.get(scheme.name).map_or(f64::NAN, |spread: &Spread| spread.median);
            worst = worst.max(of(NUMBERS) / of(CORM_0));
            rows.push(Row { name: format!("{threads} threads"), figures });
        }
        let names = ALL.iter().map(|scheme| scheme.name).chain([IDEAL]).chain(mesh.map(|_| PEER));
        tables.push(Table {
            title: format!("{figure}: MiB in use after redis-mem-t{number}, blocks of 1 MiB"),
            columns: names.map(Column::middle).collect(),
            pictured: None,
            ratio: None,
            rows,
        });
    }
    let name = format!("{figure}: Aquifer ÷ CoRM-0, worst cell");
    let value = Spread { min: worst, median: worst, max: worst };
    let target = is_hybrid.then_some(Target { name, value, bound: 1.0, at_most: true });
    Ok((tables, target.into_iter().collect()))
}

/// Bytes of the blocks, and of the slots in use.
#[derive(Clone, Copy, Debug)]
struct Used {
    held: f64,
    live: f64,
}

/// An object of a trace.
#[derive(Clone, Copy, Debug)]
struct TraceObject {
    /// The heap and the object in it; `None` for a large object.
    place: Option<(usize, ModelledObject)>,
    bytes: u32,
}

/// Plays a trace, and compacts.
fn play(trace: Trace, scheme: Scheme, threads: u16, is_hybrid: bool) -> Used {
    let mut player = Player::new(scheme, threads, is_hybrid);
    trace.play(&mut player);
    player.compact()
}

/// The heaps of one scheme. With the hybrid scheme a second one has the classes with too many
/// slots.
struct Player {
    scheme: Scheme,
    heaps: Vec<ModelledHeap>,
    is_hybrid: bool,
    threads: u16,
    random: Random,
    /// Random ids.
    ids: Random,
    large_bytes: u64,
}

impl Player {
    fn new(scheme: Scheme, threads: u16, is_hybrid: bool) -> Self {
        let heap = |mode: IdMode| ModelledHeap::new(mode, scheme.may_split, threads);
        Self {
            scheme,
            heaps: vec![heap(scheme.mode), heap(IdMode::Offsets)],
            is_hybrid,
            threads,
            random: Random::new(18),
            ids: Random::new(19),
            large_bytes: 0,
        }
    }

    fn compact(mut self) -> Used {
        let mut used = Used { held: float(self.large_bytes), live: float(self.large_bytes) };
        for heap in &mut self.heaps {
            let classes: Vec<(ClassId, Class)> = heap.classes().iter().collect();
            for (id, class) in classes {
                if self.scheme.merges {
                    heap.compact(id);
                }
                // With the scheme's header instead of Aquifer's.
                let (blocks, objects) = heap.class_usage(id, class);
                let slot_bytes = self.scheme.slot_bytes(class.payload_bytes());
                used.held += float(blocks) * f64::from(class.slots()) * slot_bytes;
                used.live += float(objects) * slot_bytes;
            }
        }
        used
    }
}

impl TraceHeap for Player {
    type Object = TraceObject;

    fn allocate(&mut self, bytes: u32) -> TraceObject {
        // The thread is random (§4.4.3).
        let worker = u16::try_from(self.random.word_below(u64::from(self.threads))).expect("small");
        let Some(class) = self.heaps[0].classes().class_for(bytes) else {
            self.large_bytes += u64::from(bytes).next_multiple_of(FRAME_BYTES);
            return TraceObject { place: None, bytes };
        };
        let slots = self.heaps[0].classes().get(class).expect("it exists").slots();
        let at = usize::from(self.is_hybrid && !self.scheme.mode.can_compact(slots));
        let ids = &mut self.ids;
        let object = self.heaps[at].allocate(worker, class, &mut || ids.word_below(u64::MAX));
        TraceObject { place: Some((at, object)), bytes }
    }

    fn free(&mut self, object: TraceObject) {
        match object.place {
            Some((heap, object)) => self.heaps[heap].free(object),
            None => self.large_bytes -= u64::from(object.bytes).next_multiple_of(FRAME_BYTES),
        }
    }
}
