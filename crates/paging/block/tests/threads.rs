//! Tests of a block volume with many threads over the simulated fabric, with the pump in its own
//! thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use aquifer_block::{BlockError, BlockVolume, Mover, Pump, PumpThread};
use aquifer_fabric::sim::{Rng, SimFabric, SimNodeId, SimOptions, SimTarget};
use aquifer_fabric::{Endpoint, EndpointError, Host, Identity, Tenant};
use aquifer_pager::{BLOCK_PAGES, Budget, Connector, Mempool, PAGE_BYTES};
use aquifer_pool::{NodeId, NodeMemory, PoolClient};

const TEST_TIMEOUT: Duration = Duration::from_secs(60);
const NODE_BYTES: u64 = 16 << 20;

#[derive(Debug)]
struct TestNodes {
    fabric: SimFabric,
    nodes: Vec<SimNodeId>,
}

impl Connector for TestNodes {
    fn connect(&self, node: NodeId) -> Result<Box<dyn Endpoint>, EndpointError> {
        let who = Identity { host: Host(1), epoch: 1, tenant: Tenant(0) };
        self.fabric.connect(self.nodes[usize::from(node.0)], who)
    }
}

struct BlockTest {
    nodes: Arc<TestNodes>,
    volume: Arc<BlockVolume>,
    mempool: Arc<Mempool>,
}

impl BlockTest {
    fn new(bytes: u64, blocks: usize, room_timeout: Duration) -> Self {
        let fabric = SimFabric::new(7, SimOptions { step_on_poll: true, ..SimOptions::default() });
        let targets: Vec<SimTarget> = (0..2).map(|_| fabric.add_node()).collect();
        for (id, target) in (0..).zip(&targets) {
            NodeMemory::create(target, NodeId(id), NODE_BYTES).unwrap();
        }
        let nodes = Arc::new(TestNodes { fabric, nodes: targets.iter().map(SimTarget::node).collect() });
        let mempool = Arc::new(Mempool::new(blocks * BLOCK_PAGES * PAGE_BYTES).unwrap());
        let budget = Arc::new(Budget::new(64 << 20));
        let volume = BlockVolume::new(bytes, Arc::clone(&mempool), budget, room_timeout).unwrap();
        Self { nodes, volume, mempool }
    }

    fn pool(&self) -> PoolClient {
        let mut pool = PoolClient::new(Host(1), Tenant(0));
        for node in [NodeId(0), NodeId(1)] {
            pool.add_node(node, self.nodes.connect(node).unwrap()).unwrap();
        }
        pool
    }

    fn pump(&self) -> Pump {
        Pump::new(Arc::clone(&self.volume), self.connector(), self.pool(), 3)
    }

    fn mover(&self) -> Mover {
        Mover::new(Arc::clone(&self.volume), self.connector()).unwrap()
    }

    fn connector(&self) -> Arc<dyn Connector> {
        Arc::clone(&self.nodes) as Arc<dyn Connector>
    }

    fn used_bytes(&self) -> u64 {
        let mut pool = self.pool();
        let mut used = 0;
        for node in [NodeId(0), NodeId(1)] {
            pool.refresh(node).unwrap();
            used += pool.total_bytes(node) - pool.free_bytes(node);
        }
        used
    }
}

/// Fills a page with words that identify the page and its version.
fn fill(page: u64, version: u64, out: &mut [u8]) {
    for (at, word) in (0u64..).zip(out.chunks_exact_mut(8)) {
        word.copy_from_slice(&(page << 40 | version << 16 | at).to_le_bytes());
    }
}

/// The version of a page's bytes, or `None` if they are not of one version. Zeros are version 0.
fn version_of(page: u64, bytes: &[u8]) -> Option<u64> {
    let word = |at: usize| u64::from_le_bytes(bytes[at * 8..at * 8 + 8].try_into().unwrap());
    if bytes.iter().all(|byte| *byte == 0) {
        return Some(0);
    }
    let version = word(0) >> 16 & 0xff_ffff;
    let mut expected = vec![0; bytes.len()];
    fill(page, version, &mut expected);
    (expected == bytes).then_some(version)
}

#[test]
fn readers_find_no_torn_stale_or_wrong_page() {
    const PAGES: u64 = 600;
    const WRITERS: u64 = 2;
    let setup = BlockTest::new(PAGES * PAGE_BYTES as u64, 3, TEST_TIMEOUT);
    let pump = PumpThread::start(setup.pump(), setup.mover(), Vec::new).unwrap();
    // For each page: the newest version whose write has returned, and the newest whose write has
    // begun.
    let written: Vec<AtomicU64> = (0..PAGES).map(|_| AtomicU64::new(0)).collect();
    let begun: Vec<AtomicU64> = (0..PAGES).map(|_| AtomicU64::new(0)).collect();
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (setup, written, begun) = (&setup, &written, &begun);
            scope.spawn(move || {
                let mut rng = Rng::new(writer);
                let mut reader = setup.volume.reader(setup.connector()).unwrap();
                let mut bytes = vec![0; PAGE_BYTES];
                for version in 1..=8_000 {
                    let page = rng.below(PAGES / WRITERS) * WRITERS + writer;
                    fill(page, version, &mut bytes);
                    let at = usize::try_from(page).unwrap();
                    begun[at].store(version, SeqCst);
                    setup.volume.write(&mut reader, page * PAGE_BYTES as u64, &bytes).unwrap();
                    written[at].store(version, SeqCst);
                }
            });
        }
        for number in 0..2 {
            let (setup, written, begun) = (&setup, &written, &begun);
            scope.spawn(move || {
                let mut rng = Rng::new(100 + number);
                let mut reader = setup.volume.reader(setup.connector()).unwrap();
                for _ in 0..3_000 {
                    let first = rng.below(PAGES - 16);
                    let range = usize::try_from(first).unwrap()..usize::try_from(first).unwrap() + 16;
                    let before: Vec<u64> =
                        written[range.clone()].iter().map(|page| page.load(SeqCst)).collect();
                    let mut bytes = vec![0xee; 16 * PAGE_BYTES];
                    let read = setup.volume.read(&mut reader, first * PAGE_BYTES as u64, &mut bytes).unwrap();
                    assert_eq!(read, bytes.len());
                    for ((page, bytes), before) in (first..).zip(bytes.chunks_exact(PAGE_BYTES)).zip(before) {
                        let version =
                            version_of(page, bytes).unwrap_or_else(|| panic!("page {page} is torn or wrong"));
                        let after = begun[usize::try_from(page).unwrap()].load(SeqCst);
                        assert!(
                            (before..=after).contains(&version),
                            "page {page}: {before} <= {version} <= {after}"
                        );
                    }
                }
            });
        }
    });
    let stats = setup.volume.stats();
    assert!(stats.remote_reads > 0 && stats.remote_writes > 0, "{stats:?}");
    pump.stop();
    assert_eq!((setup.used_bytes(), setup.mempool.free_block_count()), (0, setup.mempool.blocks()));
}

#[test]
fn concurrent_writes_to_parts_of_a_page_are_all_kept() {
    const PAGES: u64 = 300;
    const PART: usize = PAGE_BYTES / 4;
    let setup = BlockTest::new(PAGES * PAGE_BYTES as u64, 2, TEST_TIMEOUT);
    let pump = PumpThread::start(setup.pump(), setup.mover(), Vec::new).unwrap();
    std::thread::scope(|scope| {
        for part in 0..4u8 {
            let setup = &setup;
            scope.spawn(move || {
                let mut reader = setup.volume.reader(setup.connector()).unwrap();
                for round in 0..3u8 {
                    for page in 0..PAGES {
                        let offset = page * PAGE_BYTES as u64 + u64::from(part) * PART as u64;
                        setup.volume.write(&mut reader, offset, &[part * 16 + round + 1; PART]).unwrap();
                    }
                }
            });
        }
    });
    setup.volume.flush().unwrap();
    let mut reader = setup.volume.reader(setup.connector()).unwrap();
    let mut bytes = vec![0; PAGE_BYTES];
    for page in 0..PAGES {
        setup.volume.read(&mut reader, page * PAGE_BYTES as u64, &mut bytes).unwrap();
        for (part, found) in (0..4u8).zip(bytes.chunks_exact(PART)) {
            assert!(found.iter().all(|byte| *byte == part * 16 + 3), "page {page}, part {part}");
        }
    }
    pump.stop();
    assert_eq!(setup.used_bytes(), 0);
}

#[test]
fn ranges_outside_the_volume_are_refused() {
    let setup = BlockTest::new(16 * PAGE_BYTES as u64, 2, TEST_TIMEOUT);
    let mut reader = setup.volume.reader(setup.connector()).unwrap();
    let bytes = setup.volume.bytes();
    let mut out = [0xee; 100];
    assert_eq!(setup.volume.read(&mut reader, bytes - 100, &mut out).unwrap(), 100);
    assert_eq!(out, [0; 100]);
    setup.volume.write(&mut reader, bytes - 100, &[1; 100]).unwrap();
    setup.volume.discard(&mut reader, bytes - 50, 50).unwrap();
    assert_eq!(setup.volume.read(&mut reader, bytes - 100, &mut out).unwrap(), 100);
    assert_eq!((out[49], out[50]), (1, 0), "a part of a page is discarded as well");
    for (offset, len) in [(bytes - 99, 100), (bytes, 1), (u64::MAX, 1), (u64::MAX - 50, 100)] {
        let mut out = vec![0; len];
        let refused = |result: Result<(), BlockError>| matches!(result, Err(BlockError::OutOfRange { .. }));
        assert!(refused(setup.volume.read(&mut reader, offset, &mut out).map(drop)), "{offset}");
        assert!(refused(setup.volume.write(&mut reader, offset, &out)), "{offset}");
        assert!(refused(setup.volume.discard(&mut reader, offset, len as u64)), "{offset}");
    }
    assert!(setup.volume.discard(&mut reader, 4096, u64::MAX).is_err());
    setup.pump().close();
}

#[test]
fn zero_pages_and_discarded_pages_use_no_memory() {
    let setup = BlockTest::new(512 * PAGE_BYTES as u64, 2, TEST_TIMEOUT);
    let pump = PumpThread::start(setup.pump(), setup.mover(), Vec::new).unwrap();
    let mut reader = setup.volume.reader(setup.connector()).unwrap();
    setup.volume.write(&mut reader, 0, &vec![0; 512 * PAGE_BYTES]).unwrap();
    setup.volume.flush().unwrap();
    assert_eq!(setup.used_bytes(), 0);
    setup.volume.write(&mut reader, 0, &vec![7; 512 * PAGE_BYTES]).unwrap();
    setup.volume.flush().unwrap();
    assert!(setup.used_bytes() >= 512 * PAGE_BYTES as u64);
    assert_eq!(setup.volume.stats().remote_writes, 512);
    setup.volume.discard(&mut reader, 0, 512 * PAGE_BYTES as u64).unwrap();
    let mut out = vec![1; 512 * PAGE_BYTES];
    setup.volume.read(&mut reader, 0, &mut out).unwrap();
    assert!(out.iter().all(|byte| *byte == 0));
    pump.stop();
    assert_eq!(setup.used_bytes(), 0);
}

#[test]
fn a_write_without_room_fails_and_changes_nothing() {
    // Without a pump, the mempool is all the room there is.
    let setup = BlockTest::new(512 * PAGE_BYTES as u64, 2, Duration::ZERO);
    let mut reader = setup.volume.reader(setup.connector()).unwrap();
    let room = 2 * BLOCK_PAGES;
    let mut page = vec![0; PAGE_BYTES];
    for number in 0..room as u64 {
        fill(number, 1, &mut page);
        setup.volume.write(&mut reader, number * PAGE_BYTES as u64, &page).unwrap();
    }
    let beyond = room as u64 * PAGE_BYTES as u64;
    let error = setup.volume.write(&mut reader, beyond, &page).unwrap_err();
    assert!(error.to_string().contains("no room"), "{error}");
    assert!(matches!(setup.volume.write(&mut reader, 5, &[1]), Err(BlockError::NoRoom { .. })));
    for number in 0..room as u64 {
        setup.volume.read(&mut reader, number * PAGE_BYTES as u64, &mut page).unwrap();
        assert_eq!(version_of(number, &page), Some(1));
    }
    assert!(setup.volume.last_refusal().is_some(), "the reason is kept for people");
    setup.pump().close();
    assert!(matches!(setup.volume.write(&mut reader, 0, &page), Err(BlockError::Closed)));
    assert_eq!(setup.mempool.free_block_count(), 2);
}
