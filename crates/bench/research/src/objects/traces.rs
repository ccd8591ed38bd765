//! The allocations of three tests of Redis (§4.4.3).

use std::collections::VecDeque;

use aquifer_bench::support::random::Random;

const KEY_BYTES: u32 = 8;
/// Capacity of the cache in the second test.
const CAPACITY: u64 = 100 << 20;

/// A test of Redis.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trace {
    /// 10,000 keys with values of 1 to 16 KiB.
    Values,
    /// A cache of 100 MiB: 700,000 values of 150 bytes, then 170,000 of 300 bytes.
    Cache,
    /// Five structures of 160 KiB and 50,000 values of 150 bytes, of which 25,000 are removed.
    Removal,
}

/// All traces, in the paper's order.
pub const TRACES: [Trace; 3] = [Trace::Values, Trace::Cache, Trace::Removal];

/// A heap that allocates and frees the objects of a trace.
pub trait TraceHeap {
    /// An object.
    type Object;

    /// Allocates an object.
    fn allocate(&mut self, bytes: u32) -> Self::Object;

    /// Frees an object.
    fn free(&mut self, object: Self::Object);
}

impl Trace {
    /// Allocates and frees the objects of the trace.
    pub fn play(self, heap: &mut impl TraceHeap) {
        match self {
            Self::Values => play_values(heap),
            Self::Cache => play_cache(heap),
            Self::Removal => play_removal(heap),
        }
    }
}

fn play_values(heap: &mut impl TraceHeap) {
    let mut random = Random::new(20);
    for _ in 0..10_000 {
        let bytes = 1024 + u32::try_from(random.word_below(15 * 1024 + 1)).expect("small");
        heap.allocate(KEY_BYTES);
        heap.allocate(bytes);
    }
}

fn play_cache(heap: &mut impl TraceHeap) {
    let mut random = Random::new(21);
    let (mut cached, mut bytes) = (VecDeque::new(), 0);
    for (count, value) in [(700_000, 150), (170_000, 300)] {
        for _ in 0..count {
            let pair = u64::from(KEY_BYTES + value);
            cached.push_back((pair, [heap.allocate(KEY_BYTES), heap.allocate(value)]));
            bytes += pair;
            while bytes > CAPACITY {
                // Redis samples keys and evicts the oldest of them, so nearly the oldest.
                let oldest = random.word_below(5.min(cached.len() as u64));
                let at = usize::try_from(oldest).expect("it is an index");
                let Some((evicted, objects)) = cached.remove(at) else { break };
                bytes -= evicted;
                objects.into_iter().for_each(|object| heap.free(object));
            }
        }
    }
}

fn play_removal(heap: &mut impl TraceHeap) {
    for _ in 0..5 {
        heap.allocate(160 << 10);
    }
    let values: Vec<_> = (0..50_000).map(|_| [heap.allocate(KEY_BYTES), heap.allocate(150)]).collect();
    values.into_iter().skip(25_000).flatten().for_each(|object| heap.free(object));
}
