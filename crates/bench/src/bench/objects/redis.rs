//! Figures 18 and 19: memory in use after the allocations of three tests of Redis, by the number of
//! threads that allocate (§4.4.3).

use std::collections::BTreeMap;
use std::path::Path;

use aquifer_objects::class::{BLOCK_ORDER_MAX, Class, ClassId, Classes, FRAME_BYTES};
use aquifer_objects::heap::{Heap, HeapSettings, Mover, Replacement};
use aquifer_objects::id::IdMode;
use aquifer_objects::pointer::BlockAddress;
use aquifer_objects::space::FrameRun;

use super::preloaded;
use super::schemes::{ALL, CORM_0, NUMBERS, Scheme};
use super::traces::{TRACES, Trace, TraceHeap};
use crate::bench::BenchError;
use crate::bench::packing::Random;
use crate::bench::support::bytes::float;
use crate::bench::support::interrupt;
use crate::bench::support::report::{Column, Row, Table, Target};
use crate::bench::support::spread::Spread;

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
    /// The heap and the pointer; `None` for a large object.
    place: Option<(usize, u64, u64)>,
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
    heaps: Vec<Heap>,
    is_hybrid: bool,
    threads: u16,
    random: Random,
    /// Random ids, or the next number.
    ids: Random,
    next: u64,
    large_bytes: u64,
}

impl Player {
    fn new(scheme: Scheme, threads: u16, is_hybrid: bool) -> Self {
        let heap = |mode: IdMode| {
            Heap::new(HeapSettings {
                classes: Classes::with_blocks(BLOCK_ORDER_MAX),
                mode,
                may_split: scheme.may_split,
                workers: threads,
                frames_max: 1 << 22,
            })
        };
        Self {
            scheme,
            heaps: vec![heap(scheme.mode), heap(IdMode::Offsets)],
            is_hybrid,
            threads,
            random: Random::new(18),
            ids: Random::new(19),
            next: 0,
            large_bytes: 0,
        }
    }

    fn compact(mut self) -> Used {
        let mut used = Used { held: float(self.large_bytes), live: float(self.large_bytes) };
        for heap in &mut self.heaps {
            let classes: Vec<(ClassId, Class)> = heap.classes().iter().collect();
            for (id, class) in classes {
                if self.scheme.merges {
                    heap.compact(id, u64::MAX, &mut NoBytes);
                }
                // What the scheme's header takes, in place of ours.
                let usage = heap.class_usage(id);
                let slot_bytes = self.scheme.slot_bytes(class.payload_bytes());
                let blocks = float(usage.held_bytes / class.block_bytes());
                used.held += blocks * f64::from(class.slots()) * slot_bytes;
                used.live += float(usage.objects) * slot_bytes;
            }
        }
        used
    }
}

impl TraceHeap for Player {
    type Object = TraceObject;

    fn allocate(&mut self, bytes: u32) -> TraceObject {
        // The thread is random (§4.4.3).
        let worker = u16::try_from(self.random.below(u64::from(self.threads))).expect("small");
        let Some(class) = self.heaps[0].classes().class_for(bytes) else {
            self.large_bytes += u64::from(bytes).next_multiple_of(FRAME_BYTES);
            return TraceObject { place: None, bytes };
        };
        let slots = self.heaps[0].classes().get(class).expect("it exists").slots();
        let at = usize::from(self.is_hybrid && !self.scheme.mode.can_compact(slots));
        let (ids, next, mode) = (&mut self.ids, &mut self.next, self.scheme.mode);
        let mut draw = || {
            *next += 1;
            if mode == IdMode::Numbers { *next } else { ids.below(u64::MAX) }
        };
        let allocated =
            self.heaps[at].allocate(worker, class, &mut draw, &mut NoBytes).expect("the heap is large");
        TraceObject { place: Some((at, allocated.address, allocated.id)), bytes }
    }

    fn free(&mut self, object: TraceObject) {
        match object.place {
            Some((heap, address, id)) => {
                self.heaps[heap].free(address, id, &mut NoBytes).expect("it was allocated");
            }
            None => self.large_bytes -= u64::from(object.bytes).next_multiple_of(FRAME_BYTES),
        }
    }
}

/// There are no bytes to move.
struct NoBytes;

impl Mover for NoBytes {
    fn add(&mut self, _: FrameRun, _: ClassId, _: BlockAddress) {}
    fn begin_merge(&mut self, _: FrameRun, _: &[FrameRun]) {}
    fn lock(&mut self, _: FrameRun, _: &[(u32, u64)], _: Class) {}
    fn copy(&mut self, _: (FrameRun, u32), _: (FrameRun, u32), _: Class, _: Option<u32>) {}
    fn rehome(&mut self, _: (FrameRun, u32), _: Option<u32>) {}
    fn replace(&mut self, _: &Replacement) {}
    fn name(&mut self, _: BlockAddress, _: [Option<FrameRun>; 2]) {}
    fn free(&mut self, _: FrameRun) {}
    fn clear(&mut self, _: FrameRun) {}
    fn end_merge(&mut self) {}
}
