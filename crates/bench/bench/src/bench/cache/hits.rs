//! Hit ratios at equal memory: gets by Zipf's law, and a set of each missed key.

use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::float;
use aquifer_bench::support::random::Random;
use aquifer_bench::support::report::{Column, Row, Table, Target};
use aquifer_bench::support::spread::Spread;

use super::connection::{Counts, Operation};
use super::items::{Items, Lengths, Lifetime};
use super::load::{Load, Pace};
use super::servers::{AQUIFER, MEMCACHED, Program, Programs, Settings};
use super::zipf::Zipf;

const CONNECTIONS: u32 = 16;
const DEPTH: usize = 10;
const SKEWS: [f64; 2] = [0.99, 1.2];
/// Seconds from the set of a key to its expiry, in the cells with expiry.
const EXPIRING: Lifetime = Lifetime::Seconds { min: 2, max: 12 };
/// Operations a second in the cells with expiry, so that the same items expire in each server.
const EXPIRING_PER_S: u32 = 40_000;
/// A measurement below this part of the rate is repeated.
const RATE_PART_MIN: f64 = 0.98;
const ATTEMPTS: usize = 3;
/// Least memory of a server with expiry.
const EXPIRING_MIB_MIN: u32 = 16;
const VALUE_BYTES: usize = 100;
/// Columns of the table: hit ratios in %, their difference in points, resident memory, operations.
const OURS: &str = "Aquifer %";
const PEER: &str = "memcached %";
const DIFFERENCE: &str = "difference";
const OUR_MIB: &str = "Aquifer MiB";
const PEER_MIB: &str = "memcached MiB";
const OUR_RATE: &str = "Aquifer k/s";
const PEER_RATE: &str = "memcached k/s";

/// Amount of work.
#[derive(Clone, Copy, Debug)]
pub struct Volume {
    /// Option `-m` of the servers.
    pub memory_mib: u32,
    /// Number of measured operations. The same number is played before, once all keys are set.
    pub operations: u32,
}

/// A cell.
#[derive(Clone, Copy, Debug)]
struct Cell {
    skew: f64,
    lengths: Lengths,
    lifetime: Lifetime,
    /// Sets of any key among the operations, in percent.
    sets: usize,
}

/// Results of one server in one cell.
#[derive(Clone, Copy, Debug)]
struct Measured {
    hit_percent: f64,
    resident_mib: f64,
    thousand_per_s: f64,
}

/// The cells.
fn cells() -> Vec<Cell> {
    let mut cells = Vec::new();
    for lengths in [Lengths::Fixed(VALUE_BYTES), Lengths::Mixed] {
        for skew in SKEWS {
            let lifetimes = [Lifetime::Unlimited, EXPIRING];
            cells.extend(lifetimes.map(|lifetime| Cell { skew, lengths, lifetime, sets: 0 }));
        }
        cells.push(Cell { skew: SKEWS[0], lengths, lifetime: Lifetime::Unlimited, sets: 30 });
    }
    cells
}

/// The number of cells.
pub fn count() -> usize {
    cells().len()
}

/// Measures all cells. `on_cell` is called before each of them.
///
/// # Errors
/// If a server cannot be used, a reply is wrong, or nothing was evicted.
pub fn table(
    programs: &Programs,
    volume: Volume,
    on_cell: &dyn Fn(&str),
) -> Result<(Table, Vec<Target>), BenchError> {
    let (mut rows, mut targets) = (Vec::new(), Vec::new());
    for cell in cells() {
        on_cell(&cell.name());
        let mut row = Row { name: cell.name(), figures: Default::default() };
        let mut ratios = [None, None];
        for program in programs.compatible() {
            let mut measured = cell.measure(programs, program, volume)?;
            for _ in 1..ATTEMPTS {
                if !cell.is_too_slow(measured) {
                    break;
                }
                measured = cell.measure(programs, program, volume)?;
            }
            let is_ours = program.name == AQUIFER;
            ratios[usize::from(!is_ours)] =
                Some(measured.hit_percent).filter(|_| !cell.is_too_slow(measured));
            let columns = if is_ours { [OURS, OUR_MIB, OUR_RATE] } else { [PEER, PEER_MIB, PEER_RATE] };
            let Measured { hit_percent, resident_mib, thousand_per_s } = measured;
            let values = [hit_percent, resident_mib, thousand_per_s].map(Spread::one);
            row.figures.extend(columns.into_iter().zip(values));
        }
        if let [Some(ours), Some(peer)] = ratios {
            let value = Spread::one(ours - peer);
            row.figures.insert(DIFFERENCE, value);
            targets.push(Target {
                name: format!("{}: hit ratio, points above {MEMCACHED}", cell.name()),
                value,
                bound: -0.2,
                at_most: false,
            });
        }
        rows.push(row);
    }
    let table = Table {
        title: "hit ratio at equal memory".into(),
        columns: [OURS, PEER, DIFFERENCE, OUR_MIB, PEER_MIB, OUR_RATE, PEER_RATE]
            .map(Column::middle)
            .to_vec(),
        pictured: Some(OURS),
        ratio: Some(PEER),
        rows,
    };
    Ok((table, targets))
}

impl Cell {
    fn name(&self) -> String {
        let lengths = match self.lengths {
            Lengths::Fixed(bytes) => format!("{bytes} B"),
            Lengths::Mixed => "50–4000 B".into(),
        };
        let lifetime = match self.lifetime {
            Lifetime::Unlimited => String::new(),
            Lifetime::Seconds { min, max } => format!(", {min}–{max} s"),
        };
        let sets = if self.sets > 0 { format!(", {} % sets", self.sets) } else { String::new() };
        format!("Zipf {}, {lengths}{lifetime}{sets}", self.skew)
    }

    fn expires(&self) -> bool {
        self.lifetime != Lifetime::Unlimited
    }

    /// Whether more items expired than should have, because the server or the load had too little
    /// processor time.
    fn is_too_slow(&self, measured: Measured) -> bool {
        self.expires() && measured.thousand_per_s * 1e3 < RATE_PART_MIN * f64::from(EXPIRING_PER_S)
    }

    /// Option `-m`. With short values that expire it is smaller, so that not all of them fit.
    fn memory_mib(&self, volume: Volume) -> u32 {
        if self.expires() && self.lengths != Lengths::Mixed {
            (volume.memory_mib / 4).max(EXPIRING_MIB_MIN)
        } else {
            volume.memory_mib
        }
    }

    /// Number of keys: keys and values have several times as many bytes as the memory.
    fn keys(&self, volume: Volume) -> u32 {
        let keys_per_mib = if self.lengths == Lengths::Mixed { 3125 } else { 31_250 };
        keys_per_mib * self.memory_mib(volume)
    }

    /// Number of measured operations: fewer if the memory holds fewer items, or if items expire.
    fn measured(&self, volume: Volume) -> usize {
        let parts = match self.lengths {
            _ if self.expires() => 1,
            Lengths::Mixed => 2,
            Lengths::Fixed(_) => 4,
        };
        (volume.operations / 4 * parts) as usize
    }

    /// Measures one server.
    fn measure(
        &self,
        programs: &Programs,
        program: &Program,
        volume: Volume,
    ) -> Result<Measured, BenchError> {
        let keys = self.keys(volume);
        let server = programs.start(program, Settings::with_memory(self.memory_mib(volume)))?;
        let mut load = Load::connect(&server, CONNECTIONS, Items::new(keys, self.lengths, self.lifetime))?;
        load.set_all(scattered(keys))?;
        let rate = self.expires().then_some(EXPIRING_PER_S);
        let pace = Pace { sets_missed: true, operations_per_s: rate, ..Pace::of_depth(DEPTH) };
        let mut operations = self.operations(keys);
        load.play(pace, None, &mut operations.by_ref().take(self.measured(volume)))?;
        if server.statistics()?.get("evictions").is_none_or(|evictions| *evictions == 0) {
            return Err(server.error(format!("{}: the server evicted nothing", self.name())));
        }
        let played = load.play(pace, None, &mut operations.take(self.measured(volume)))?;
        let Counts { hits, misses, .. } = played.counts;
        Ok(Measured {
            hit_percent: 100.0 * float(hits) / float(hits + misses),
            resident_mib: float(server.memory_bytes()) / f64::from(1 << 20),
            thousand_per_s: float(self.measured(volume) as u64) / played.elapsed.as_secs_f64() / 1e3,
        })
    }

    /// The operations, which are the same for each server.
    fn operations(&self, keys: u32) -> impl Iterator<Item = Operation> + use<> {
        let mut zipf = Zipf::new(keys, self.skew, 5);
        let (mut random, sets) = (Random(6), self.sets);
        std::iter::repeat_with(move || {
            let key = zipf.rank();
            if random.below(100) < sets { Operation::Set(key) } else { Operation::Get(key) }
        })
    }
}

/// All keys, so that frequent ones are spread over the order.
pub fn scattered(keys: u32) -> impl Iterator<Item = u32> {
    /// A prime that divides no number of keys here.
    const STEP: u64 = 1_000_003;
    (0..u64::from(keys))
        .map(move |number| u32::try_from(number * STEP % u64::from(keys)).expect("below a u32"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_key_is_set_once() {
        for keys in [1, 7, 20_000, 2_000_000] {
            let mut all: Vec<u32> = scattered(keys).collect();
            all.sort_unstable();
            assert!(all.iter().copied().eq(0..keys), "{keys}");
        }
    }

    #[test]
    fn each_cell_has_its_own_name() {
        let names: std::collections::BTreeSet<String> = cells().iter().map(Cell::name).collect();
        assert_eq!(names.len(), count());
        assert!(names.contains("Zipf 1.2, 50–4000 B, 2–12 s"), "{names:?}");
    }

    #[test]
    fn every_run_has_the_same_operations_and_its_part_of_sets() {
        let cell = Cell { skew: 0.99, lengths: Lengths::Mixed, lifetime: Lifetime::Unlimited, sets: 30 };
        let operations = || cell.operations(100).take(10_000).collect::<Vec<_>>();
        assert_eq!(operations(), operations());
        let sets = operations().iter().filter(|operation| matches!(operation, Operation::Set(_))).count();
        assert!((2800..3200).contains(&sets), "{sets}");
    }
}
