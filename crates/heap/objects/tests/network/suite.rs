//! The tests of heaps over a network: allocate, write, read one-sidedly, compact, and use the old
//! pointers.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use aquifer_fabric::tcp::{self, ConnectOptions, TcpOptions, TcpTarget};
use aquifer_fabric::{Admission, ClusterKey, Endpoint, EndpointError, Host, Limits, Target, Tenant, Ticket};
use aquifer_objects::access::AccessError;
use aquifer_objects::client::queue::{HeapQueue, Operation, QUEUE_DEPTH};
use aquifer_objects::client::{ClientError, DirectRead, HeapClient, HeapRoute, ReadCounts};
use aquifer_objects::pointer::Pointer;
use aquifer_objects::service::{HeapService, MESSAGE_BYTES_MAX, TICKET_SERVICE};
use aquifer_objects::slot::ReadVerdict;
use aquifer_objects::wire::Refused;

pub const KEY: ClusterKey = ClusterKey([5; 32]);
pub const SERVICE: u8 = TICKET_SERVICE;
const OURS: Tenant = Tenant(1000);
const THEIRS: Tenant = Tenant(1001);
/// Most memory of all heaps of the service.
const MEMORY_BYTES: u64 = 64 << 20;
const OBJECT_SIZE: u32 = 100;
const OBJECT_BYTES: usize = OBJECT_SIZE as usize;

/// Connects to a device with a ticket.
type ConnectDevice = fn(SocketAddr, &Ticket) -> Result<Box<dyn Endpoint>, EndpointError>;

/// A target that serves the memory of heaps without translation, for reads.
#[derive(Clone)]
pub struct Device {
    pub target: Arc<dyn Target>,
    pub connect: ConnectDevice,
    pub address: SocketAddr,
}

/// A service of heaps.
pub struct HeapNode {
    target: Arc<TcpTarget>,
    device: Option<Device>,
    service: Arc<HeapService>,
}

/// A target for tickets.
pub fn listen() -> Arc<TcpTarget> {
    let limits = Limits { message_bytes_max: MESSAGE_BYTES_MAX, ..Limits::default() };
    let options = TcpOptions {
        limits,
        regions_max: 64,
        admission: Admission::Tickets(SERVICE),
        ..TcpOptions::default()
    };
    Arc::new(TcpTarget::listen("127.0.0.1:0".parse().unwrap(), &KEY, options).unwrap())
}

impl HeapNode {
    pub fn start(device: Option<Device>) -> Self {
        let target = listen();
        let service = Arc::new(HeapService::new(3, MEMORY_BYTES, None, None));
        if let Some(device) = &device {
            service.serve_by_devices(&device.target, MEMORY_BYTES / 2);
        }
        service.open_through(&(Arc::clone(&target) as Arc<dyn Target>));
        target.answer_messages(Arc::clone(&service) as _);
        Self { target, device, service }
    }

    fn client(&self, tenant: Tenant) -> HeapClient {
        client_at(self.target.address(), self.device.clone(), tenant)
    }

    /// Whether memory that is free is returned to the system.
    fn returns_memory(&self) -> bool {
        self.device.is_none()
    }

    fn allocated_bytes(&self) -> u64 {
        self.service.report(OURS).unwrap().allocated_bytes
    }
}

fn client_at(address: SocketAddr, device: Option<Device>, tenant: Tenant) -> HeapClient {
    let ticket = Ticket { tenant, host: Host(4), epoch: 1, expiry_s: u64::MAX, service: SERVICE };
    let options = ConnectOptions { operation_time: Duration::from_secs(30), ..ConnectOptions::default() };
    let connect = move || {
        let failed = |source| AccessError::Connect { node: 3, source };
        let control = tcp::connect_with_ticket(address, &ticket, &ticket.secret(&KEY), options.clone());
        let control = control.map_err(failed)?;
        Ok(match &device {
            None => HeapRoute::Remote(control),
            Some(device) => {
                let device = (device.connect)(device.address, &ticket).map_err(failed)?;
                HeapRoute::Device { control, device }
            }
        })
    };
    HeapClient::connect_by(Box::new(connect)).unwrap()
}

/// The bytes of a version of an object: each part contains the version.
fn bytes_of(object: u64, version: u64) -> [u8; OBJECT_BYTES] {
    let mut bytes = [0; OBJECT_BYTES];
    for part in bytes.chunks_mut(8) {
        let word = (object << 32 | version).to_le_bytes();
        part.copy_from_slice(&word[..part.len()]);
    }
    bytes
}

/// The object and the version of bytes.
///
/// # Panics
/// If they are not of one version.
fn version_of(bytes: &[u8; OBJECT_BYTES]) -> (u64, u64) {
    let word = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    let (object, version) = (word >> 32, word & 0xffff_ffff);
    assert_eq!(*bytes, bytes_of(object, version), "torn");
    (object, version)
}

fn allocate_all(client: &mut HeapClient, count: u64) -> Vec<Pointer> {
    let allocate = |object| {
        let mut pointer = client.allocate(OBJECT_SIZE).unwrap();
        client.write(&mut pointer, &bytes_of(object, 1)).unwrap();
        pointer
    };
    (0..count).map(allocate).collect()
}

/// Checks that the service has read only objects whose direct reads took too long many times.
fn assert_direct(counts: ReadCounts, reads: u64) {
    assert_eq!((counts.direct + counts.by_service, counts.corrected), (reads, 0), "{counts:?}");
    assert!(counts.by_service * 16 <= counts.busy, "{counts:?}");
}

pub fn pointers_stay_valid_through_a_compaction_and_memory_is_returned(node: &HeapNode) {
    let mut client = node.client(OURS);
    let mut pointers: Vec<(u64, Pointer)> = (0..).zip(allocate_all(&mut client, 2000)).collect();
    let mut out = [0; OBJECT_BYTES];
    for (object, pointer) in &mut pointers {
        client.get(pointer, &mut out).unwrap();
        assert_eq!(version_of(&out), (*object, 1));
    }
    assert_direct(client.counts(), 2000);
    let full = node.allocated_bytes();
    // Four of five objects are freed, in all blocks alike.
    let (kept, freed): (Vec<_>, Vec<_>) = pointers.into_iter().partition(|(object, _)| object % 5 == 0);
    for (_, pointer) in &freed {
        client.free(*pointer).unwrap();
    }
    assert_eq!(node.allocated_bytes(), full, "each block still has objects");
    let merges = node.service.compact(OURS, u64::MAX);
    assert!(merges > 30, "{merges} merges");
    let report = node.service.report(OURS).unwrap();
    assert!(report.held_bytes * 10 <= report.live_bytes * 12, "{report:?}");
    let is_returned = report.allocated_bytes * 10 <= report.live_bytes * 12;
    assert_eq!(is_returned, node.returns_memory(), "{report:?}");
    // Without a scan of the block, the service corrects the pointers.
    let mut other = node.client(OURS);
    other.set_scans(false);
    for (object, pointer) in &kept {
        other.get(&mut pointer.clone(), &mut out).unwrap();
        assert_eq!(version_of(&out), (*object, 1));
    }
    assert_eq!(other.counts().scanned, 0);
    assert!(node.service.report(OURS).unwrap().corrections > 0);
    for (object, pointer) in &kept {
        // The pointer as it was allocated.
        let mut pointer = *pointer;
        client.get(&mut pointer, &mut out).unwrap();
        assert_eq!(version_of(&out), (*object, 1));
        // A read that takes long is not valid, wherever the object is.
        let verdict = client.direct_read(pointer, &mut out).unwrap();
        assert_ne!(verdict, ReadVerdict::Elsewhere, "the pointer is corrected");
        let is_old = client.write(&mut pointer, &bytes_of(*object, 2)).unwrap();
        if is_old {
            client.release(&mut pointer).unwrap();
            assert!(!client.write(&mut pointer, &bytes_of(*object, 3)).unwrap(), "not after its release");
        }
    }
    let counts = client.counts();
    assert!(counts.corrected > 0 && counts.scanned > 0, "some objects have other slots: {counts:?}");
    for (_, pointer) in freed {
        let mut pointer = pointer;
        let error = client.get(&mut pointer, &mut out).unwrap_err();
        assert!(matches!(error, ClientError::Refused(Refused::NoObject)), "{error}");
    }
}

pub fn other_tenants_and_wrong_pointers_get_nothing(node: &HeapNode) {
    let (mut ours, mut theirs) = (node.client(OURS), node.client(THEIRS));
    let pointers = allocate_all(&mut ours, 10);
    let mut out = [0; OBJECT_BYTES];
    for pointer in &pointers {
        let error = theirs.get(&mut pointer.clone(), &mut out).unwrap_err();
        assert!(matches!(error, ClientError::Refused(Refused::NoObject)), "{error}");
        assert!(theirs.free(*pointer).is_err());
    }
    let good = pointers[0];
    let wrong = [
        Pointer { address: good.address + 8, ..good },
        Pointer { address: good.address ^ 1 << 43, ..good },
        Pointer { address: u64::MAX >> 16, ..good },
        Pointer { number: pointers[1].number, address: 1 << 30, ..good },
        Pointer { heap: good.heap + 1, ..good },
        Pointer { node: good.node ^ 7, ..good },
        Pointer { node: good.node + 1, ..good },
    ];
    for pointer in wrong {
        match ours.get(&mut pointer.clone(), &mut out) {
            // The slot is only a hint, and the connection is to the right heap.
            Ok(()) => assert_eq!(version_of(&out), (0, 1), "{pointer:?}"),
            Err(error) => assert!(matches!(error, ClientError::Refused(Refused::NoObject)), "{error}"),
        }
    }
    let mut large = vec![7; 32_000];
    let mut pointer = ours.allocate(32_000).unwrap();
    ours.write(&mut pointer, &large).unwrap();
    large.fill(0);
    ours.get(&mut pointer, &mut large).unwrap();
    assert!(large.iter().all(|byte| *byte == 7));
    assert!(matches!(ours.allocate(65 << 20), Err(ClientError::Refused(Refused::TooLarge))));
}

pub fn reads_are_never_torn_while_objects_are_written_and_merged(node: &HeapNode) {
    const OBJECTS: u64 = 400;
    const ROUNDS: u64 = 40;
    let mut owner = node.client(OURS);
    // Of five objects one stays, so that each block is sparse, and each round merges two.
    let (mut pointers, mut passing) = (Vec::new(), Vec::new());
    for object in 0..OBJECTS {
        let mut pointer = owner.allocate(OBJECT_SIZE).unwrap();
        owner.write(&mut pointer, &bytes_of(object, 1)).unwrap();
        pointers.push(pointer);
        passing.extend((0..4).map(|_| owner.allocate(OBJECT_SIZE).unwrap()));
    }
    passing.into_iter().for_each(|pointer| owner.free(pointer).unwrap());
    // The least version that a reader must find.
    let written: Vec<AtomicU64> = (0..OBJECTS).map(|_| AtomicU64::new(1)).collect();
    let is_over = AtomicBool::new(false);
    let reads = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let (mut client, mut out, mut reads) = (node.client(OURS), [0; OBJECT_BYTES], 0_u64);
            // The last pass is after all merges.
            let mut is_last = false;
            while !is_last {
                is_last = is_over.load(Ordering::SeqCst);
                for (object, pointer) in (0..).zip(&pointers) {
                    let least = written[object].load(Ordering::SeqCst);
                    client.get(&mut pointer.clone(), &mut out).unwrap();
                    let (found, version) = version_of(&out);
                    assert_eq!(found, object as u64);
                    assert!(version >= least, "version {version} of {object} is older than {least}");
                    reads += 1;
                }
            }
            (reads, client.counts())
        });
        let mut merges = 0;
        for round in 2..2 + ROUNDS {
            for (object, pointer) in (0_u64..).zip(&pointers) {
                owner.write(&mut pointer.clone(), &bytes_of(object, round)).unwrap();
                written[usize::try_from(object).unwrap()].store(round, Ordering::SeqCst);
            }
            merges += node.service.compact(OURS, 1);
        }
        is_over.store(true, Ordering::SeqCst);
        assert!(merges > ROUNDS / 2, "{merges} merges");
        reader.join().unwrap()
    });
    let (reads, counts) = reads;
    println!("{reads} reads: {counts:?}");
    assert!(counts.direct > 0 && counts.corrected > 0, "{counts:?}");
}

/// The bytes of a version of a large object: each word contains the version.
fn large(len: usize, version: u64) -> Vec<u8> {
    let words = (0..len as u64).step_by(8).flat_map(|at| (version << 32 | at).to_le_bytes());
    words.take(len).collect()
}

/// The version of the bytes of a large object.
///
/// # Panics
/// If they are not of one version.
fn large_version(bytes: &[u8]) -> u64 {
    let version = u64::from_le_bytes(bytes[..8].try_into().unwrap()) >> 32;
    assert!(*bytes == large(bytes.len(), version), "torn: version {version}");
    version
}

pub fn large_objects_are_written_and_read_whole(node: &HeapNode) {
    let mut client = node.client(OURS);
    for len in [32_761, 100_000, 1 << 20, (5 << 20) + 3] {
        let mut pointer = client.create(&large(len, 1)).unwrap();
        let mut out = vec![0; len];
        client.get(&mut pointer, &mut out).unwrap();
        assert_eq!(large_version(&out), 1);
        let old = pointer;
        client.write(&mut pointer, &large(len, 2)).unwrap();
        assert_eq!(pointer, old, "the object keeps its address");
        client.get(&mut pointer, &mut out).unwrap();
        assert_eq!(large_version(&out), 2);
        // The rest stays.
        let first = len - 5;
        client.write(&mut pointer, &large(len, 3)[..first]).unwrap();
        client.get(&mut pointer, &mut out).unwrap();
        assert_eq!(large_version(&out[..first / 8 * 8]), 3);
        assert_eq!(out[..first], large(len, 3)[..first]);
        assert_eq!(out[first..], large(len, 2)[first..]);
        let offset = u32::try_from(len / 2 / 8 * 8).unwrap();
        client.write_at(&mut pointer, offset, b"in place").unwrap();
        client.get(&mut pointer, &mut out).unwrap();
        assert_eq!(&out[offset as usize..][..8], b"in place");
        client.free(pointer).unwrap();
        let error = client.get(&mut pointer, &mut out).unwrap_err();
        assert!(matches!(error, ClientError::Refused(Refused::NoObject)), "{error}");
    }
    let report = node.service.report(OURS).unwrap();
    assert_eq!((report.objects, report.held_bytes, report.addresses), (0, 0, 0));
    assert!(report.allocated_bytes < 1 << 20 || !node.returns_memory(), "{report:?}");
    // A large write needs memory for the whole object a second time.
    let mut pointer = client.create(&large(20 << 20, 1)).unwrap();
    let error = client.write(&mut pointer, &large(20 << 20, 2)).unwrap_err();
    assert!(matches!(error, ClientError::Refused(Refused::Full)), "{error}");
    let mut out = vec![0; 20 << 20];
    client.get(&mut pointer, &mut out).unwrap();
    assert_eq!(large_version(&out), 1);
    assert_eq!(node.service.report(OURS).unwrap().objects, 1, "the other object is freed");
}

pub fn large_reads_are_never_torn_while_objects_are_replaced(node: &HeapNode) {
    const BYTES: usize = 300_000;
    let mut writer = node.client(OURS);
    let mut pointer = writer.create(&large(BYTES, 1)).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..2)
            .map(|_| {
                let (mut reader, mut pointer, done) = (node.client(OURS), pointer, &done);
                scope.spawn(move || {
                    let (mut last, mut reads) = (0, 0);
                    let mut out = vec![0; BYTES];
                    while !done.load(Ordering::Relaxed) || reads < 20 {
                        reader.get(&mut pointer, &mut out).unwrap();
                        let version = large_version(&out);
                        assert!(version >= last, "version {version} after {last}");
                        last = version;
                        reads += 1;
                    }
                })
            })
            .collect();
        for version in 2..200 {
            writer.write(&mut pointer, &large(BYTES, version)).unwrap();
        }
        done.store(true, Ordering::Relaxed);
        readers.into_iter().for_each(|reader| reader.join().unwrap());
    });
    assert_eq!(node.service.report(OURS).unwrap().objects, 1);
}

pub fn a_conditional_write_is_made_by_one_of_several_clients(node: &HeapNode) {
    const CLIENTS: u64 = 4;
    const ROUNDS: u64 = 100;
    let root = node.client(OURS).root(64).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..CLIENTS {
            let mut client = node.client(OURS);
            scope.spawn(move || {
                let mut pointer = client.root(64).unwrap();
                assert_eq!(pointer.number, root.number, "all find the same object");
                let mut done = 0;
                while done < ROUNDS {
                    let mut out = [0; 8];
                    client.get(&mut pointer, &mut out).unwrap();
                    let count = u64::from_le_bytes(out);
                    match client.write_if(&mut pointer, count, &(count + 1).to_le_bytes()) {
                        Ok(_) => done += 1,
                        Err(ClientError::Refused(Refused::Changed)) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
    });
    let mut client = node.client(OURS);
    for refused in [
        client.write_if(&mut { root }, 0, &[0; 40_000]).unwrap_err(),
        client.write_at(&mut { root }, 0, &[0; 40_000]).unwrap_err(),
        client.get(&mut { root }, &mut [0; 1000]).unwrap_err(),
    ] {
        assert!(matches!(refused, ClientError::Refused(Refused::TooLarge)), "{refused}");
    }
    let mut out = [0; 8];
    node.client(OURS).get(&mut { root }, &mut out).unwrap();
    assert_eq!(u64::from_le_bytes(out), CLIENTS * ROUNDS);
}

pub fn many_objects_are_read_in_one_batch(node: &HeapNode) {
    let mut client = node.client(OURS);
    let pointers = allocate_all(&mut client, 300);
    let freed = pointers[7];
    let mut outs = vec![[0; OBJECT_BYTES]; pointers.len()];
    let reads = pointers.iter().zip(&mut outs).map(|(pointer, out)| DirectRead::new(*pointer, out));
    let mut reads: Vec<_> = reads.collect();
    client.get_many(&mut reads).unwrap();
    drop(reads);
    for (object, out) in (0..).zip(&outs) {
        assert_eq!(version_of(out), (object, 1));
    }
    assert_direct(client.counts(), 300);
    client.free(freed).unwrap();
    let reads = pointers.iter().zip(&mut outs).map(|(pointer, out)| DirectRead::new(*pointer, out));
    let error = client.get_many(&mut reads.collect::<Vec<_>>()).unwrap_err();
    assert!(matches!(error, ClientError::Refused(Refused::NoObject)), "{error}");
}

pub fn operations_end_with_completions(node: &HeapNode) {
    const OBJECTS: u64 = 200;
    let queue = HeapQueue::new(node.client(OURS)).unwrap();
    let take = |id| {
        let end = queue.wait(Duration::from_secs(30)).unwrap();
        assert_eq!(end.id, id, "operations end in the order in which they began");
        end.result
    };
    assert!(queue.poll().is_none() && queue.wait(Duration::MAX).is_none(), "none was begun");
    for object in 0..OBJECTS {
        assert_eq!(queue.begin(Operation::Create(bytes_of(object, 1).to_vec())), Ok(object));
    }
    let pointers: Vec<Pointer> = (0..OBJECTS).map(|object| take(object).unwrap().pointer).collect();
    queue.begin(Operation::Write(pointers[7], bytes_of(7, 2).to_vec())).unwrap();
    queue.begin(Operation::Free(pointers[8])).unwrap();
    // Reads after a write and a free, and beside one that fails.
    for pointer in &pointers {
        queue.begin(Operation::Get(*pointer, OBJECT_BYTES)).unwrap();
    }
    assert!(!take(OBJECTS).unwrap().is_old);
    take(OBJECTS + 1).unwrap();
    for object in 0..OBJECTS {
        match take(OBJECTS + 2 + object) {
            Ok(done) => {
                let found = version_of(&done.bytes.try_into().unwrap());
                assert_eq!(found, (object, if object == 7 { 2 } else { 1 }));
            }
            Err(error) => assert!(object == 8 && matches!(error, ClientError::Refused(Refused::NoObject))),
        }
    }
    // A program that polls no completions cannot begin more operations.
    let full = (0..).find_map(|_| queue.begin(Operation::Get(pointers[0], 8)).err());
    assert_eq!(full, Some(Operation::Get(pointers[0], 8)));
    let ends = std::iter::from_fn(|| queue.wait(Duration::MAX));
    assert_eq!(ends.count(), QUEUE_DEPTH);
    queue.begin(Operation::Release(pointers[0])).unwrap();
    queue.begin(Operation::Allocate(0)).unwrap();
    // Operations in progress are discarded when the queue ends.
    drop(queue);
}

/// Defines the tests of this file, each with a new service with the `$device`.
macro_rules! tests {
    ($device:expr) => {
        $crate::tests! { $device =>
            operations_end_with_completions
            pointers_stay_valid_through_a_compaction_and_memory_is_returned
            other_tenants_and_wrong_pointers_get_nothing
            reads_are_never_torn_while_objects_are_written_and_merged
            large_objects_are_written_and_read_whole
            large_reads_are_never_torn_while_objects_are_replaced
            a_conditional_write_is_made_by_one_of_several_clients
            many_objects_are_read_in_one_batch
        }
    };
    ($device:expr => $($name:ident)*) => {
        $(#[test]
        fn $name() {
            $crate::suite::$name(&$crate::suite::HeapNode::start($device));
        })*
    };
}
pub(crate) use tests;
