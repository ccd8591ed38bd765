//! Recovery time: freeing a million chunks of a dead host on one node, after its lease has ended.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Instant;

use aquifer_bench::BenchError;
use aquifer_bench::support::folder;
use aquifer_bench::support::progress;
use aquifer_bench::support::report::{Column, Row, Table, Target as Aim};
use aquifer_bench::support::spread::Spread;
use aquifer_fabric::ClusterKey;
use aquifer_fabric::shm::{self, ShmTarget};
use aquifer_fabric::tcp::{self, ConnectOptions, TcpTarget};
use aquifer_fabric::{EndpointError, FabricAddress, Host, Identity, Target, Tenant};
use aquifer_pool::cache::{NodeCache, NumberSource};
use aquifer_pool::layout::Layout;
use aquifer_pool::op::{AllocOp, OpError, RecoverOp, Recovered, StateMachine, Step, StepResult, WordAt};
use aquifer_pool::size::SECTION_CHUNKS;
use aquifer_pool::{NodeId, NodeMemory, PoolError, SizeClass, recover_node};

use super::allocators::Allocator;
use super::model::{MORE_NS, ONE_WAY_NS};
use super::words::NodeWords;

/// Sections of a million chunks.
const SECTIONS: u32 = (1 << 20) / SECTION_CHUNKS;
const NODE: NodeId = NodeId(1);
const DEAD: Host = Host(1);
const TENANT: Tenant = Tenant(0);
/// Extents of 4 KiB, as many as there are chunks, and of 128 KiB.
const CASES: [(u8, &str); 2] = [(0, "of 4 KiB, s"), (5, "of 128 KiB, s")];
const ROWS: [&str; 3] = ["the model, over one connection", "over shm", "over tcp"];

/// Why the recovery of a node failed.
#[derive(Debug, thiserror::Error)]
enum RecoveryError {
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// Measures; returns a table and targets.
///
/// # Errors
/// If a node cannot be created, or memory of the dead host is not freed.
pub fn measure(rounds: usize) -> Result<(Table, Vec<Aim>), BenchError> {
    let folder = folder::temporary()?;
    let socket = folder.path().join("node.sock");
    let anywhere = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let key = ClusterKey::generate().map_err(|error| failed(&error))?;
    let shm = ShmTarget::listen(&socket, shm::ShmOptions::default()).map_err(|error| failed(&error))?;
    let tcp =
        TcpTarget::listen(anywhere, &key, tcp::TcpOptions::default()).map_err(|error| failed(&error))?;
    let address = tcp.address();
    let nodes = [
        Node::new(&shm, FabricAddress::Shm(socket), None)?,
        Node::new(&tcp, FabricAddress::Tcp(address), Some(key))?,
    ];
    let mut rows: Vec<Row> =
        ROWS.iter().map(|name| Row { name: (*name).into(), figures: BTreeMap::new() }).collect();
    let mut aims = Vec::new();
    let bar = progress::bar(CASES.len() * (1 + nodes.len() * rounds));
    for (k, column) in CASES {
        let class = SizeClass::new(k).unwrap_or(SizeClass::CHUNK);
        bar.set_message(format!("recovery: extents {column}"));
        let held = held(class).map_err(|error| failed(&format!("{error:?}")))?;
        let mut seconds =
            vec![vec![modelled_s(held.clone()).map_err(|error| failed(&format!("{error:?}")))?]];
        bar.inc(1);
        for node in &nodes {
            let mut times = Vec::new();
            for _ in 0..rounds {
                times.push(node.recovered_in_s(&held)?);
                bar.inc(1);
            }
            seconds.push(times);
        }
        for ((row, times), name) in rows.iter_mut().zip(seconds).zip(ROWS) {
            let Some(spread) = Spread::of(&times) else { continue };
            row.figures.insert(column, spread);
            let name = format!("recovery of a million chunks in extents {column}, {name}");
            aims.push(Aim { name, value: spread, bound: 2.0, at_most: true });
        }
    }
    bar.finish_and_clear();
    let columns = CASES.map(|(_, column)| Column::full(column)).to_vec();
    let title = "recovery: a million chunks of a dead host, on one node".into();
    Ok((Table { title, columns, pictured: None, ratio: None, rows }, aims))
}

fn failed(error: &dyn std::fmt::Display) -> BenchError {
    BenchError::Allocator { reason: error.to_string() }
}

/// A node in this process.
struct Node {
    node_memory: NodeMemory,
    reach: FabricAddress,
    key: Option<ClusterKey>,
    /// Epoch of the next recovering host.
    epoch: std::cell::Cell<u64>,
}

impl Node {
    fn new(target: &dyn Target, reach: FabricAddress, key: Option<ClusterKey>) -> Result<Self, BenchError> {
        let layout = layout();
        let node_memory =
            NodeMemory::create(target, NODE, layout.data_bytes()).map_err(|error| failed(&error))?;
        Ok(Self { node_memory, reach, key, epoch: std::cell::Cell::new(1) })
    }

    /// Makes the dead host the owner of the extents, and measures their recovery.
    fn recovered_in_s(&self, held: &NodeWords) -> Result<f64, BenchError> {
        let layout = self.node_memory.layout;
        let parts = [
            (WordAt::Section(0), &held.sections),
            (WordAt::Span(0), &held.spans),
            (WordAt::Key(0), &held.keys),
            (WordAt::Log(0), &held.logs),
        ];
        for (first, words) in parts {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            let at = usize::try_from(layout.word_at(first)).unwrap_or(usize::MAX);
            self.node_memory.memory.write(at, &bytes);
        }
        let epoch = self.epoch.replace(self.epoch.get() + 1);
        let who = Identity { host: DEAD, epoch, tenant: TENANT };
        let (reach, key, options) = (&self.reach, self.key.as_ref(), ConnectOptions::default());
        let start = Instant::now();
        let recovered =
            recover_node::<RecoveryError>(NODE, DEAD, TENANT, &|| Ok(reach.connect(who, key, &options)?));
        let time_s = start.elapsed().as_secs_f64();
        let recovered = recovered.map_err(|error| failed(&error))?;
        check(&recovered)?;
        if self.node_memory.free_bytes() != layout.data_bytes() {
            return Err(failed(&"memory of the dead host was not freed"));
        }
        Ok(time_s)
    }
}

fn check(recovered: &Recovered) -> Result<(), BenchError> {
    if recovered.chunks == u64::from(SECTIONS * SECTION_CHUNKS) && recovered.unowned == 0 {
        return Ok(());
    }
    Err(failed(&format!("recovery did not free all extents: {recovered:?}")))
}

fn layout() -> Layout {
    Layout::new(NODE.0, SECTIONS).expect("4 GiB fit")
}

fn cache() -> NodeCache {
    NodeCache::new(&layout(), 1, TENANT, NumberSource::counted(1, 64))
}

/// Metadata of a node whose memory is all allocated by one host.
fn held(class: SizeClass) -> Result<NodeWords, OpError> {
    let (mut words, mut cache) = (NodeWords::new(Allocator::Pool, SECTIONS), cache());
    for _ in 0..SECTIONS * SECTION_CHUNKS / class.chunks() {
        run(&mut words, &mut cache, AllocOp::new(DEAD, class)).0?;
    }
    Ok(words)
}

/// Recovery time with the cost model.
fn modelled_s(mut held: NodeWords) -> Result<f64, OpError> {
    let (recovered, time_ns) = run(&mut held, &mut cache(), RecoverOp::new(DEAD, DEAD));
    check(&recovered?).map_err(|_| OpError::NotAllocated)?;
    Ok(std::time::Duration::from_nanos(time_ns).as_secs_f64())
}

/// Runs a state machine on the words; returns its time in ns with the cost model.
fn run<M: StateMachine>(
    words: &mut NodeWords,
    cache: &mut NodeCache,
    mut machine: M,
) -> (Result<M::Output, OpError>, u64) {
    let (mut results, mut time_ns) = (Vec::new(), 0);
    let mut step = machine.start(cache);
    loop {
        match step {
            Step::Done(result) => return (result, time_ns),
            Step::Post(action) => {
                let arrived = words.carry_out(&action, &mut results);
                time_ns += 2 * ONE_WAY_NS + MORE_NS * arrived.operations.saturating_sub(1);
                step = machine.step(cache, StepResult(&results));
            }
        }
    }
}
