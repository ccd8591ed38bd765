//! All allocators on this machine: a node in another process, and clients with an endpoint each,
//! over shared memory and over TCP.

mod clients;
mod counted;
mod replay;
mod round;
mod rpc;
mod server;

use std::collections::BTreeMap;

use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::float;
use aquifer_bench::support::report::{Column, Row, Table, Target};
use aquifer_bench::support::serving::ServingProcess;
use aquifer_bench::support::spread::{Spread, mean_us, permille_us};
use aquifer_bench::support::{interrupt, progress};
use aquifer_fabric::ClusterKey;
use aquifer_fabric::tcp::ConnectOptions;
use aquifer_fabric::{Endpoint, FabricAddress, Host, Identity, Tenant};
use aquifer_pool::SizeClass;

use clients::{AllocClient, RealAllocator};
pub use replay::replay;
use round::Measured;
pub use server::serve_at;

/// Cluster key of the bench's processes; it need not be secret.
const KEY: ClusterKey = ClusterKey([13; 32]);
/// Sections of the node: 2 GiB.
const NODE_SECTIONS: u32 = 1024;
/// Size classes of the tables: 4 KiB, 64 KiB and 2 MiB.
const CLASSES: [u8; 3] = [0, 4, 9];
const CLIENTS: [usize; 4] = [1, 4, 16, 128];

/// A serving process, and its addresses.
#[derive(Debug)]
struct Node {
    process: ServingProcess,
    reaches: [FabricAddress; 2],
}

impl Node {
    fn start() -> Result<Self, BenchError> {
        let (process, said, path) = ServingProcess::start("alloc")?;
        let tcp = FabricAddress::parse("tcp", &said)
            .map_err(|reason| BenchError::Fabric { reason: reason.to_string() })?;
        Ok(Self { process, reaches: [FabricAddress::Shm(path), tcp] })
    }
}

/// Connects clients of an allocator. Host numbers are unique over all allocators, since an RPC
/// server sends its answer to the host number.
fn connect(
    reach: &FabricAddress,
    allocator: RealAllocator,
    clients: usize,
) -> Result<Vec<AllocClient>, BenchError> {
    let failed = |reason: String| BenchError::Fabric { reason: format!("{}: {reason}", allocator.name()) };
    let first = RealAllocator::ALL.iter().position(|other| *other == allocator).unwrap_or(0) * 256;
    let connect = |number: usize| {
        let host = Host(u16::try_from(first + number + 1).unwrap_or(u16::MAX));
        let who = Identity { host, epoch: 1, tenant: Tenant(0) };
        let endpoint: Box<dyn Endpoint> = reach
            .connect(who, Some(&KEY), &ConnectOptions { encrypt: false, ..ConnectOptions::default() })
            .map_err(|error| failed(error.to_string()))?;
        AllocClient::new(allocator, host, endpoint).map_err(failed)
    };
    (0..clients).map(connect).collect()
}

/// Size and clients of a table.
#[derive(Clone, Copy, Debug)]
struct Case {
    fabric: usize,
    class: SizeClass,
    clients: usize,
}

/// Measures `rounds` rounds of `allocations` allocations; returns tables and targets.
///
/// # Errors
/// If the serving process cannot be started, or an allocator fails.
pub fn measure(rounds: usize, allocations: usize) -> Result<(Vec<Table>, Vec<Target>), BenchError> {
    let node = Node::start()?;
    let classes = CLASSES.into_iter().filter_map(SizeClass::new);
    let of_class = |class| CLIENTS.map(|clients| (class, clients));
    let of_fabric = |(class, clients)| [0, 1].map(|fabric| Case { fabric, class, clients });
    let mut cases: Vec<Case> = classes.flat_map(of_class).flat_map(of_fabric).collect();
    cases.sort_by_key(|case| case.fabric);
    let bar = progress::bar(cases.len() * rounds);
    let (mut tables, mut targets) = (Vec::new(), Vec::new());
    for case in cases {
        bar.set_message(case.name(&node));
        let mut all: Vec<Vec<Measured>> = vec![Vec::new(); RealAllocator::ALL.len()];
        // The first round is not counted: it maps the metadata.
        for round in 0..=rounds {
            for (allocator, all) in RealAllocator::ALL.into_iter().zip(&mut all) {
                interrupt::check()?;
                let clients = connect(&node.reaches[case.fabric], allocator, case.clients)?;
                let measured = round::play(clients, node.process.pid(), case.class, allocations)?;
                if round > 0 {
                    all.push(measured);
                }
            }
            if round > 0 {
                bar.inc(1);
            }
        }
        targets.extend(case.target(&node, &all));
        tables.push(table(&format!("for real, {}", case.name(&node)), &all));
    }
    bar.finish_and_clear();
    Ok((tables, targets))
}

impl Case {
    fn name(self, node: &Node) -> String {
        let size = match self.class.bytes() >> 10 {
            kib if kib < 1024 => format!("{kib} KiB"),
            kib => format!("{} MiB", kib >> 10),
        };
        let plural = if self.clients == 1 { "" } else { "s" };
        format!("over {}: {size}, {} client{plural}", node.reaches[self.fabric].provider(), self.clients)
    }

    /// The target for the node's processor time, which exists over TCP only.
    fn target(self, node: &Node, all: &[Vec<Measured>]) -> Option<Target> {
        if !matches!(node.reaches[self.fabric], FabricAddress::Tcp(_)) {
            return None;
        }
        let of = |allocator| {
            let at = RealAllocator::ALL.iter().position(|other| *other == allocator)?;
            Some(all[at].iter().map(Measured::node_cpu_us).collect::<Vec<f64>>())
        };
        let value = Spread::of_ratios(&of(RealAllocator::Pool)?, &of(RealAllocator::Rpc)?)?;
        let name = format!("{}: the node's CPU for each, ÷ RPC's", self.name(node));
        Some(Target { name, value, bound: 1.0 / 3.0, at_most: true })
    }
}

fn table(title: &str, all: &[Vec<Measured>]) -> Table {
    let rows = RealAllocator::ALL
        .iter()
        .zip(all)
        .map(|(allocator, rounds)| row(allocator.name(), rounds))
        .rev()
        .collect();
    let columns =
        ["mean µs", "p50 µs", "p99 µs", "trips", "CASes", "failed CASes", "node's CPU µs", "free µs"];
    let with_spread = ["mean µs", "node's CPU µs"];
    let column = |name| if with_spread.contains(&name) { Column::full(name) } else { Column::middle(name) };
    Table {
        title: title.to_owned(),
        columns: columns.map(column).to_vec(),
        pictured: Some("mean µs"),
        ratio: Some("node's CPU µs"),
        rows,
    }
}

fn row(name: &str, rounds: &[Measured]) -> Row {
    let figure = |of: &dyn Fn(&Measured) -> f64| Spread::of(&rounds.iter().map(of).collect::<Vec<f64>>());
    let each = |of: fn(&Measured) -> u64| figure(&|round| float(of(round)) / round.count());
    let figures = [
        ("mean µs", figure(&|of| mean_us(&of.latencies_ns))),
        ("p50 µs", figure(&|of| permille_us(&of.latencies_ns, 500))),
        ("p99 µs", figure(&|of| permille_us(&of.latencies_ns, 990))),
        ("trips", each(|of| of.counts.trips)),
        ("CASes", each(|of| of.counts.swaps)),
        ("failed CASes", each(|of| of.counts.lost)),
        ("node's CPU µs", figure(&Measured::node_cpu_us)),
        ("free µs", figure(&Measured::free_us)),
    ];
    let figures: BTreeMap<_, _> =
        figures.into_iter().filter_map(|(name, spread)| Some((name, spread?))).collect();
    Row { name: name.into(), figures }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use aquifer_fabric::shm::{self, ShmTarget};

    use super::clients::Allocation;
    use super::*;

    /// Start and length of an allocation, in the unit of its allocator.
    fn place(allocation: Allocation) -> (u64, u64) {
        match allocation {
            Allocation::Chunk(chunk, class) => (u64::from(chunk) * 4096, class.bytes()),
            Allocation::Entries(held) => (u64::from(held.first) * 4096, held.class.bytes()),
            Allocation::Extent(extent) => (extent.addr, extent.class.bytes()),
            Allocation::Nothing => (0, 0),
        }
    }

    #[test]
    fn each_allocator_allocates_and_frees_distinct_extents() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("target");
        let target = Arc::new(ShmTarget::listen(&path, shm::ShmOptions::default()).unwrap());
        let rpc_server = server::lend(&*target).unwrap();
        let served = Arc::clone(&target);
        std::thread::spawn(move || server::serve_rpcs(&*served, rpc_server));
        let reach = FabricAddress::Shm(path);
        for allocator in RealAllocator::ALL.into_iter().filter(|allocator| *allocator != RealAllocator::Trip)
        {
            let mut clients = connect(&reach, allocator, 2).unwrap();
            let mut held = Vec::new();
            for k in (0..SizeClass::COUNT).chain(0..SizeClass::COUNT) {
                for (number, client) in clients.iter_mut().enumerate() {
                    held.push((number, client.allocate(SizeClass::new(k).unwrap()).unwrap()));
                }
            }
            let mut places: Vec<(u64, u64)> = held.iter().map(|(_, allocation)| place(*allocation)).collect();
            places.sort_unstable();
            assert!(
                places.windows(2).all(|two| two[0].0 + two[0].1 <= two[1].0),
                "{allocator:?}: {places:?}"
            );
            for (number, allocation) in held {
                clients[number].free(allocation).unwrap();
            }
            let measured = round::play(clients, std::process::id(), SizeClass::CHUNK, 400).unwrap();
            assert!(measured.count() > 0.0 && measured.frees > 0, "{allocator:?}");
            assert!(measured.counts.trips >= measured.latencies_ns.len() as u64, "{allocator:?}");
        }
    }
}
