//! Regions of which a part is not in memory.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

use aquifer_fabric::tcp::{TcpOptions, TcpTarget};
use aquifer_fabric::{
    Access, Memory, PageStore, Region, Registration, RemoteAddr, Scope, StoredPages, Target, TargetError,
    Verb, WindowSpec, Work, WorkError,
};
use parking_lot::Mutex;

use super::{TcpClient, client, node};

/// Offset of the part that is stored elsewhere.
const STORED_AT: u64 = 1 << 20;
const STORED_BYTES: u64 = 2 << 20;

/// A store in plain memory.
#[derive(Debug, Default)]
struct TestStore {
    bytes: Mutex<Vec<u8>>,
    writes: AtomicUsize,
    is_broken: AtomicBool,
}

impl TestStore {
    fn access(&self, access: impl FnOnce(&mut Vec<u8>)) -> Result<(), WorkError> {
        if self.is_broken.load(SeqCst) {
            return Err(WorkError::Storage);
        }
        access(&mut self.bytes.lock());
        Ok(())
    }
}

fn at(offset: u64) -> usize {
    usize::try_from(offset - STORED_AT).unwrap()
}

impl PageStore for TestStore {
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), WorkError> {
        self.access(|bytes| out.copy_from_slice(&bytes[at(offset)..][..out.len()]))
    }

    fn write(&self, offset: u64, written: &mut [u8]) -> Result<(), WorkError> {
        self.writes.fetch_add(1, SeqCst);
        self.access(|bytes| bytes[at(offset)..][..written.len()].copy_from_slice(written))?;
        written.fill(0xdd);
        Ok(())
    }

    fn clear(&self, range: Range<u64>) {
        self.bytes.lock()[at(range.start)..at(range.end)].fill(0);
    }
}

struct StoredRegion {
    target: TcpTarget,
    memory: Arc<Memory>,
    store: Arc<TestStore>,
    region: Region,
}

fn registration(memory: &Arc<Memory>, store: Arc<TestStore>, range: Range<u64>) -> Registration {
    let stored = Some(StoredPages { range, store });
    Registration { stored, ..Registration::plain(Arc::clone(memory), Access::ALL, Scope::Anyone) }
}

fn stored_region() -> StoredRegion {
    let (target, memory, _) = node(TcpOptions { threads: 2, ..TcpOptions::default() });
    let store = Arc::new(TestStore::default());
    store.bytes.lock().resize(usize::try_from(STORED_BYTES).unwrap(), 0);
    let range = STORED_AT..STORED_AT + STORED_BYTES;
    let region = target.register_as(registration(&memory, Arc::clone(&store), range)).unwrap();
    StoredRegion { target, memory, store, region }
}

impl StoredRegion {
    fn remote(&self, offset: u64) -> RemoteAddr {
        RemoteAddr { addr: self.region.base + offset, key: self.region.key }
    }

    fn read(&self, client: &mut TcpClient, offset: u64, len: u32) -> Result<Vec<u8>, WorkError> {
        let local = client.slice(0, len);
        client.one(Verb::Read { local, remote: self.remote(offset) })?;
        let mut out = vec![0; len as usize];
        client.memory.read(0, &mut out);
        Ok(out)
    }

    fn write(&self, client: &mut TcpClient, offset: u64, bytes: &[u8]) -> Result<u64, WorkError> {
        client.memory.write(0, bytes);
        let local = client.slice(0, u32::try_from(bytes.len()).unwrap());
        client.one(Verb::Write { local, remote: self.remote(offset) })
    }
}

fn stamped(len: usize) -> Vec<u8> {
    (0..len).map(|at| u8::try_from(at % 251).unwrap()).collect()
}

#[test]
fn a_write_reaches_the_store_whole_and_no_memory() {
    let region = stored_region();
    let mut client = client(region.target.address());
    // The longest transfer, which arrives in many parts.
    let bytes = stamped(1 << 20);
    assert_eq!(region.write(&mut client, STORED_AT + 8192, &bytes), Ok(1 << 20));
    assert_eq!(region.store.writes.load(SeqCst), 1, "the parts of a WRITE are written together");
    assert!(region.read(&mut client, STORED_AT + 8192, 1 << 20).unwrap() == bytes);
    assert_eq!(region.read(&mut client, STORED_AT + 8193, 77).unwrap(), bytes[1..78]);
    let mut memory = vec![1; 1 << 20];
    region.memory.read(usize::try_from(STORED_AT).unwrap() + 8192, &mut memory);
    assert!(memory.iter().all(|byte| *byte == 0), "the bytes are not in the region's memory");
}

#[test]
fn the_rest_of_the_region_is_memory() {
    let region = stored_region();
    let mut client = client(region.target.address());
    region.write(&mut client, 4096, b"in memory").unwrap();
    assert_eq!(region.read(&mut client, 4096, 9).unwrap(), b"in memory");
    let add = Verb::FetchAdd { remote: region.remote(8192), add: 3 };
    assert_eq!(client.one(add), Ok(0));
    assert_eq!(region.store.writes.load(SeqCst), 0);
    // READs of both parts in one batch, whose answers come in order.
    region.write(&mut client, STORED_AT, &stamped(4096)).unwrap();
    let batch: Vec<Work> = [4096, STORED_AT, 4096, STORED_AT]
        .into_iter()
        .zip(0..)
        .map(|(offset, id)| {
            let local = client.slice(id * 4096, 4096);
            Work { id, verb: Verb::Read { local, remote: region.remote(offset) }, signalled: true }
        })
        .collect();
    client.endpoint.post(&batch).unwrap();
    assert!(client.wait(4).iter().zip(&batch).all(|(done, work)| done.id == work.id && done.outcome.is_ok()));
    let mut out = [0; 4096];
    client.memory.read(3 * 4096, &mut out);
    assert!(out[..] == stamped(4096));
    client.memory.read(2 * 4096, &mut out);
    assert_eq!(&out[..9], b"in memory");
}

#[test]
fn accesses_across_the_bound_and_atomics_are_refused() {
    let region = stored_region();
    let mut client = client(region.target.address());
    let refused = Err(WorkError::RemoteAccess);
    for offset in [STORED_AT - 4096, STORED_AT + STORED_BYTES - 4096] {
        assert_eq!(region.read(&mut client, offset, 8192), refused, "{offset:#x}");
        assert_eq!(region.write(&mut client, offset, &[1; 8192]), Err(WorkError::RemoteAccess));
    }
    let remote = region.remote(STORED_AT);
    assert_eq!(client.one(Verb::FetchAdd { remote, add: 1 }), Err(WorkError::RemoteAccess));
    let swap = Verb::CompareSwap { remote, expected: 0, desired: 1 };
    assert_eq!(client.one(swap), Err(WorkError::RemoteAccess));
    assert_eq!(region.store.writes.load(SeqCst), 0);
}

#[test]
fn an_error_of_the_store_is_one_of_the_operation_only() {
    let region = stored_region();
    let mut client = client(region.target.address());
    region.write(&mut client, STORED_AT, &stamped(4096)).unwrap();
    region.store.is_broken.store(true, SeqCst);
    assert_eq!(region.read(&mut client, STORED_AT, 4096), Err(WorkError::Storage));
    assert_eq!(region.write(&mut client, STORED_AT, &[1; 4096]), Err(WorkError::Storage));
    assert!(!client.endpoint.is_broken(), "the endpoint stays usable");
    region.store.is_broken.store(false, SeqCst);
    assert!(region.read(&mut client, STORED_AT, 4096).unwrap() == stamped(4096));
}

#[test]
fn a_write_by_a_key_that_is_gone_does_not_reach_the_store() {
    let region = stored_region();
    let mut client = client(region.target.address());
    let start = region.region.base + STORED_AT;
    let window = WindowSpec { range: start..start + 4096, access: Access::READ, scope: Scope::Anyone };
    let key = region.target.bind(&window).unwrap();
    let remote = RemoteAddr { addr: start, key };
    let local = client.slice(0, 4096);
    assert_eq!(client.one(Verb::Read { local, remote }), Ok(4096));
    assert_eq!(client.one(Verb::Write { local, remote }), Err(WorkError::RemoteAccess));
    region.target.invalidate(key).unwrap();
    assert_eq!(client.one(Verb::Read { local, remote }), Err(WorkError::RemoteAccess));
    assert_eq!(region.store.writes.load(SeqCst), 0);
}

#[test]
fn wrong_ranges_and_other_providers_are_refused() {
    let (target, memory, _) = node(TcpOptions::default());
    let store = || Arc::new(TestStore::default());
    for range in [1..4096, 0..4095, 4096..4096, 0..(memory.len() as u64 + 4096)] {
        let refused = target.register_as(registration(&memory, store(), range.clone()));
        assert!(matches!(refused, Err(TargetError::OutOfRange { .. })), "{range:?}: {refused:?}");
    }
    let folder = tempfile::tempdir().unwrap();
    let options = aquifer_fabric::shm::ShmOptions::default();
    let shm = aquifer_fabric::shm::ShmTarget::listen(&folder.path().join("s"), options).unwrap();
    let refused = shm.register_as(registration(&memory, store(), 0..4096));
    assert!(matches!(refused, Err(TargetError::Unsupported { .. })), "{refused:?}");
}
