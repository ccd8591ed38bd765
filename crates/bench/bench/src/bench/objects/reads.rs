//! Figure 11: reads of objects beside raw copies and raw READs, over shared memory and TCP.
//!
//! A real cluster serves the heap, in a process of its own. Each round reads objects by all
//! methods, one after the other, in a random order: all of them many times in shared memory, and
//! every eighth once over TCP and by the service. Copies are out of other memory of the same size,
//! plainly, and with a header that is compared, as in FaRM.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::float;
use aquifer_bench::support::cluster::Cluster;
use aquifer_bench::support::interrupt;
use aquifer_bench::support::report::{Column, Row, Table, Target};
use aquifer_bench::support::spread::Spread;
use aquifer_fabric::{Completion, Endpoint, LocalKey, LocalSlice, Memory, Region, RemoteAddr, Verb, Work};
use aquifer_objects::access::request_access;
use aquifer_objects::class::{Class, Classes};
use aquifer_objects::client::HeapClient;
use aquifer_objects::pointer::{BlockAddress, Pointer};

use super::live::fill;
use super::worker::WorkerHeap;

const SIZES: [u32; 6] = [8, 32, 128, 256, 1000, 4000];
const HEAP_BYTES: u64 = 256 << 20;
const ROUNDS: usize = 7;

/// Number of reads by each method in one round.
#[derive(Clone, Copy)]
struct Volume {
    objects: usize,
    /// Reads in shared memory for each object.
    repeats: usize,
    /// Every `stride`-th object is read over a network, or by the service.
    stride: usize,
}

/// Measures objects of all sizes. Returns the table and the targets.
pub fn tables(is_quick: bool) -> Result<(Vec<Table>, Vec<Target>), BenchError> {
    let volume = if is_quick {
        Volume { objects: 4000, repeats: 20, stride: 8 }
    } else {
        Volume { objects: 20_000, repeats: 50, stride: 8 }
    };
    let cluster = Cluster::up_with_heaps(64 << 20, HEAP_BYTES)?;
    let agent = cluster.state().join("agent.sock");
    let (mut rows, mut targets) = (Vec::new(), Vec::new());
    for size in SIZES {
        interrupt::check()?;
        let measured = Measured::of(&agent, size, volume)?;
        targets.extend(measured.targets(size));
        rows.push(measured.row(size));
    }
    let columns = [
        "shm ns",
        "copy ns",
        "copy ÷ shm",
        "FaRM ns",
        "FaRM ÷ shm",
        "shm service ns",
        "tcp µs",
        "READ µs",
        "READ ÷ tcp",
        "tcp service µs",
        "tcp worker µs",
    ];
    let table = Table {
        title: "figure 11: direct reads beside raw copies, raw READs, and reads by the service".into(),
        columns: columns.map(Column::full).to_vec(),
        pictured: None,
        ratio: None,
        rows,
    };
    Ok((vec![table], targets))
}

/// Times of one read, for each round.
#[derive(Default)]
struct Measured {
    shared: Vec<f64>,
    copy: Vec<f64>,
    /// Reads with headers as in FaRM, at fixed addresses.
    fixed: Vec<f64>,
    shared_service: Vec<f64>,
    remote: Vec<f64>,
    raw: Vec<f64>,
    remote_service: Vec<f64>,
    /// Reads by a service that hands requests to a worker.
    worker: Vec<f64>,
}

impl Measured {
    fn of(agent: &Path, size: u32, volume: Volume) -> Result<Self, BenchError> {
        let mut shared = HeapClient::connect_at(agent.to_owned(), None).map_err(BenchError::heap)?;
        let mut remote = HeapClient::connect_remotely(agent.to_owned(), None).map_err(BenchError::heap)?;
        let mut pointers: Vec<Pointer> = Vec::with_capacity(volume.objects);
        let bytes = vec![7; size as usize];
        for _ in 0..volume.objects {
            let mut pointer = shared.allocate(size).map_err(BenchError::heap)?;
            shared.write(&mut pointer, &bytes).map_err(BenchError::heap)?;
            pointers.push(pointer);
        }
        shuffle(&mut pointers);
        let some: Vec<Pointer> = pointers.iter().copied().step_by(volume.stride).collect();
        let own = Copies::new(volume.objects, size)?;
        let mut raw = RawReads::connect(agent, size)?;
        let mut worker = WorkerHeap::start()?;
        let handed = fill(&mut worker.client, some.len(), size as usize)?;
        let mut out = vec![0; size as usize];
        let mut measured = Self::default();
        for _ in 0..ROUNDS {
            interrupt::check()?;
            let times = volume.repeats * pointers.len();
            measured.shared.push(time(times, 1e9, || {
                for _ in 0..volume.repeats {
                    for pointer in &pointers {
                        shared.get(&mut pointer.clone(), &mut out).map_err(BenchError::heap)?;
                        std::hint::black_box(&out);
                    }
                }
                Ok(())
            })?);
            measured.copy.push(time(times, 1e9, || {
                for _ in 0..volume.repeats {
                    own.read_all(&mut out);
                }
                Ok(())
            })?);
            measured.fixed.push(time(times, 1e9, || {
                for _ in 0..volume.repeats {
                    own.read_all_checked(&mut out);
                }
                Ok(())
            })?);
            measured.shared_service.push(time(some.len(), 1e9, || read_all(&mut shared, &some, &mut out))?);
            measured.remote.push(time(some.len(), 1e6, || get_all(&mut remote, &some, &mut out))?);
            measured
                .raw
                .push(time(some.len(), 1e6, || some.iter().try_for_each(|pointer| raw.read(*pointer)))?);
            measured.remote_service.push(time(some.len(), 1e6, || read_all(&mut remote, &some, &mut out))?);
            measured
                .worker
                .push(time(handed.len(), 1e6, || read_all(&mut worker.client, &handed, &mut out))?);
        }
        pointers.into_iter().try_for_each(|pointer| shared.free(pointer).map_err(BenchError::heap))?;
        Ok(measured)
    }

    fn row(&self, size: u32) -> Row {
        let spread = |values: &[f64]| Spread::of(values).expect("they were measured");
        let ratio =
            |ours: &[f64], theirs: &[f64]| Spread::of_ratios(theirs, ours).expect("they were measured");
        let figures = [
            ("shm ns", spread(&self.shared)),
            ("copy ns", spread(&self.copy)),
            ("copy ÷ shm", ratio(&self.shared, &self.copy)),
            ("FaRM ns", spread(&self.fixed)),
            ("FaRM ÷ shm", ratio(&self.shared, &self.fixed)),
            ("shm service ns", spread(&self.shared_service)),
            ("tcp µs", spread(&self.remote)),
            ("READ µs", spread(&self.raw)),
            ("READ ÷ tcp", ratio(&self.remote, &self.raw)),
            ("tcp service µs", spread(&self.remote_service)),
            ("tcp worker µs", spread(&self.worker)),
        ];
        Row { name: format!("{size} B"), figures: figures.into_iter().collect() }
    }

    fn targets(&self, size: u32) -> Vec<Target> {
        let target = |what: &str, theirs: &[f64], ours: &[f64], bound| Target {
            name: format!("{size} B: {what}"),
            value: Spread::of_ratios(theirs, ours).expect("they were measured"),
            bound,
            at_most: false,
        };
        vec![
            target(
                "read by the service ÷ direct read in shared memory",
                &self.shared_service,
                &self.shared,
                3.0,
            ),
            target("raw READ ÷ direct read over TCP", &self.raw, &self.remote, 0.97),
            target("read by the service ÷ direct read over TCP", &self.remote_service, &self.remote, 1.0),
            target("read by a worker ÷ direct read over TCP", &self.worker, &self.remote, 1.2),
        ]
    }
}

fn read_all(client: &mut HeapClient, pointers: &[Pointer], out: &mut [u8]) -> Result<(), BenchError> {
    pointers
        .iter()
        .try_for_each(|pointer| client.read(&mut pointer.clone(), out).map(drop).map_err(BenchError::heap))
}

fn get_all(client: &mut HeapClient, pointers: &[Pointer], out: &mut [u8]) -> Result<(), BenchError> {
    pointers.iter().try_for_each(|pointer| client.get(&mut pointer.clone(), out).map_err(BenchError::heap))
}

/// The time of one of `count` operations, in parts of a second.
fn time(count: usize, parts: f64, run: impl FnOnce() -> Result<(), BenchError>) -> Result<f64, BenchError> {
    let began = Instant::now();
    run()?;
    Ok(began.elapsed().as_secs_f64() * parts / float(count as u64))
}

/// Copies out of shared memory of the same size, in a random order.
struct Copies {
    memory: Memory,
    places: Vec<usize>,
}

impl Copies {
    fn new(objects: usize, size: u32) -> Result<Self, BenchError> {
        let class = class_of(size);
        let slot = class.slot_bytes as usize;
        let memory = Memory::create("aquifer-bench-copies", (objects * slot).next_multiple_of(4096))
            .map_err(BenchError::heap)?;
        memory.write(0, &vec![1; objects * slot]);
        let mut places: Vec<usize> = (0..objects).map(|object| object * slot).collect();
        shuffle(&mut places);
        Ok(Self { memory, places })
    }

    fn read_all(&self, out: &mut [u8]) {
        for place in &self.places {
            self.memory.read(place + 8, out);
            std::hint::black_box(&out);
        }
    }
}

impl Copies {
    /// Reads all objects, and compares the header of each before and after, as FaRM does, whose
    /// objects never move.
    fn read_all_checked(&self, out: &mut [u8]) {
        for place in &self.places {
            loop {
                let before = self.memory.load_u64(*place);
                self.memory.read(place + 8, out);
                fence(Ordering::Acquire);
                if self.memory.load_u64(*place) == before {
                    break;
                }
            }
            std::hint::black_box(&out);
        }
    }
}

/// READs of the bytes of objects, without their headers.
struct RawReads {
    endpoint: Box<dyn Endpoint>,
    local: LocalKey,
    regions: Vec<Region>,
    class: Class,
    size: u32,
    completions: Vec<Completion>,
}

impl RawReads {
    fn connect(agent: &Path, size: u32) -> Result<Self, BenchError> {
        let (access, _) = request_access(agent, None).map_err(BenchError::heap)?;
        let mut endpoint = access.connect().map_err(BenchError::heap)?;
        let memory = Arc::new(Memory::create("aquifer-bench-reads", 64 << 10).map_err(BenchError::heap)?);
        let local = endpoint.register_local(memory).map_err(BenchError::heap)?;
        let regions = endpoint.regions().iter().filter(|region| region.key.0 != 0).cloned().collect();
        Ok(Self { endpoint, local, regions, class: class_of(size), size, completions: Vec::new() })
    }

    fn read(&mut self, pointer: Pointer) -> Result<(), BenchError> {
        let (block, offset) = BlockAddress::containing(pointer.address).expect("the heap has made it");
        let region = &self.regions[usize::from(block.order)];
        let addr = region.base + u64::from(block.number) * self.class.address_bytes() + offset + 8;
        let local = LocalSlice { key: self.local, offset: 0, len: self.size };
        let verb = Verb::Read { local, remote: RemoteAddr { addr, key: region.key } };
        self.endpoint.post(&[Work { id: 1, verb, signalled: true }]).map_err(BenchError::heap)?;
        self.completions.clear();
        while self.endpoint.poll(&mut self.completions, 1) == 0 {
            self.endpoint.wait(Duration::from_secs(1));
        }
        self.completions[0].outcome.map(drop).map_err(BenchError::heap)
    }
}

fn class_of(size: u32) -> Class {
    let classes = Classes::standard();
    classes.class_for(size).and_then(|id| classes.get(id)).expect("it is no large object")
}

fn shuffle<T>(values: &mut [T]) {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for at in (1..values.len()).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        values.swap(at, usize::try_from(state >> 16).expect("64 bits") % (at + 1));
    }
}
