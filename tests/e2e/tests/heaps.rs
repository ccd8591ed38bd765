//! Heaps of objects: programs reach them by tickets of their agent; the services are killed, and
//! every object is read back.

use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use aquifer_client::{Extent, Session};
use aquifer_objects::client::{ClientError, HeapClient};
use aquifer_objects::pointer::Pointer;
use aquifer_objects::service::report::HeapReport;
use aquifer_objects::wire::Refused;
use aquifer_tests_e2e::checked::Random;
use aquifer_tests_e2e::cluster::text;
use aquifer_tests_e2e::restart::{restart_agent, restart_heaps, restart_node};
use aquifer_tests_e2e::{Cluster, build, eventually};
use tempfile::TempDir;

const SIZES: [usize; 5] = [8, 24, 100, 500, 3000];
/// One object in this many is a large one.
const LARGE_ONE_IN: usize = 40;
const LARGE_BYTES: usize = 200_000;

pub(super) fn up() -> Cluster {
    Cluster::up_with(1, "160M", &["--heap-memory", "128M"])
}

/// A client that shares memory with the service.
pub(super) fn client(cluster: &Cluster) -> HeapClient {
    HeapClient::connect_at(cluster.agent_socket().to_owned(), None).expect("there is a service of heaps")
}

/// A client over TCP.
pub(super) fn remote_client(cluster: &Cluster) -> HeapClient {
    let agent = cluster.agent_socket().to_owned();
    HeapClient::connect_remotely(agent, None).expect("there is a service of heaps")
}

/// The bytes of a version of an object: each word is the version's stamp.
fn bytes_of(stamp: u64, size: usize) -> Vec<u8> {
    stamp.to_le_bytes().into_iter().cycle().take(size).collect()
}

/// An object with its expected bytes.
struct CheckedObject {
    pointer: Pointer,
    size: usize,
    stamp: u64,
    /// The stamp of a write whose outcome is unknown.
    pending: Option<u64>,
}

/// A client with the expected bytes of each of its objects.
pub(super) struct CheckedHeap {
    client: HeapClient,
    objects: Vec<CheckedObject>,
    random: Random,
    stamp: u64,
    /// Requests whose outcome is unknown, because the service was killed.
    pub(super) unknown: u64,
}

impl CheckedHeap {
    pub(super) fn new(client: HeapClient, seed: u64) -> Self {
        Self { client, objects: Vec::new(), random: Random(seed), stamp: 0, unknown: 0 }
    }

    /// The result, or none if its outcome is unknown.
    fn known<T>(&mut self, result: Result<T, ClientError>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(ClientError::Connection(_) | ClientError::Timeout) => {
                self.unknown += 1;
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    pub(super) fn operate(&mut self) {
        let count = self.objects.len();
        match self.random.below(10) {
            0..4 if count < 3000 => self.allocate(),
            0..6 if count > 0 => self.write(),
            6 if count > 0 => self.free(),
            _ if count > 0 => {
                let at = self.random.below(count);
                self.check(at);
            }
            _ => self.allocate(),
        }
    }

    fn allocate(&mut self) {
        let is_large = self.random.below(LARGE_ONE_IN) == 0;
        let size = if is_large { LARGE_BYTES } else { SIZES[self.random.below(SIZES.len())] };
        let result = self.client.allocate(u32::try_from(size).expect("small"));
        let Some(pointer) = self.known(result) else { return };
        self.objects.push(CheckedObject { pointer, size, stamp: 0, pending: None });
    }

    fn write(&mut self) {
        let at = self.random.below(self.objects.len());
        self.stamp += 1;
        let stamp = self.stamp;
        let object = &mut self.objects[at];
        let bytes = bytes_of(stamp, object.size);
        let result = self.client.write(&mut object.pointer, &bytes);
        let is_known = self.known(result).is_some();
        let object = &mut self.objects[at];
        if is_known {
            (object.stamp, object.pending) = (stamp, None);
        } else {
            object.pending = Some(stamp);
            // Only one write may be pending, so the outcome is determined at once.
            while self.objects[at].pending.is_some() {
                self.check(at);
            }
        }
    }

    fn free(&mut self) {
        let at = self.random.below(self.objects.len());
        self.free_at(at);
    }

    pub(super) fn free_all(&mut self) {
        while !self.objects.is_empty() {
            self.free_at(self.objects.len() - 1);
        }
    }

    fn free_at(&mut self, at: usize) {
        let object = self.objects.swap_remove(at);
        let mut out = vec![0; object.size];
        loop {
            let result = self.client.free(object.pointer);
            match result {
                Err(ClientError::Refused(Refused::NoObject)) if self.unknown > 0 => break,
                result => {
                    if self.known(result).is_some() {
                        break;
                    }
                }
            }
        }
        let found = self.client.get(&mut object.pointer.clone(), &mut out);
        assert!(matches!(found, Err(ClientError::Refused(Refused::NoObject))), "{found:?}");
    }

    /// Reads an object and compares it.
    fn check(&mut self, at: usize) {
        let object = &mut self.objects[at];
        let mut out = vec![0; object.size];
        let result = self.client.get(&mut object.pointer, &mut out);
        if self.known(result).is_none() {
            return;
        }
        let object = &mut self.objects[at];
        if let Some(pending) = object.pending.take()
            && out == bytes_of(pending, object.size)
        {
            object.stamp = pending;
        }
        assert_eq!(out, bytes_of(object.stamp, object.size), "{:?}", object.pointer);
    }

    pub(super) fn check_all(&mut self) {
        (0..self.objects.len()).for_each(|at| self.check(at));
    }
}

/// Ends the program when the test fails, too.
pub(super) struct OnDrop<'a>(pub(super) &'a AtomicBool);

impl Drop for OnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

pub(super) fn reports(cluster: &Cluster) -> Vec<HeapReport> {
    let output = cluster.command().args(["heap", "list", "--json"]).output().expect("aquifer can be started");
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("it is JSON")
}

#[test]
fn objects_outlive_their_service_and_their_agent() {
    let cluster = up();
    let mut heap = CheckedHeap::new(client(&cluster), 7);
    (0..2000).for_each(|_| heap.operate());
    restart_heaps(&cluster, 1);
    heap.check_all();
    restart_agent(&cluster);
    (0..500).for_each(|_| heap.operate());
    restart_heaps(&cluster, 1);
    heap.check_all();
    let mut other = CheckedHeap { client: remote_client(&cluster), ..heap };
    other.check_all();
    (0..500).for_each(|_| other.operate());
    let mut heap = CheckedHeap { client: client(&cluster), ..other };
    heap.check_all();
    assert!(heap.objects.len() > 500);
}

#[test]
fn nothing_is_lost_over_tcp_while_services_are_killed() {
    kill_services(remote_client);
}

#[test]
fn nothing_is_lost_in_shared_memory_while_services_are_killed() {
    kill_services(client);
}

fn kill_services(client: fn(&Cluster) -> HeapClient) {
    const KILLS_MIN: usize = 6;
    const KILLS_MAX: usize = 100;
    let cluster = up();
    let (is_over, interrupted) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let mut heap = CheckedHeap::new(client(&cluster), 99);
            while !is_over.load(Ordering::SeqCst) {
                heap.operate();
                interrupted.store(heap.unknown, Ordering::SeqCst);
            }
            heap.check_all();
        });
        let _end = OnDrop(&is_over);
        for kills in 0..KILLS_MAX {
            if kills >= KILLS_MIN && interrupted.load(Ordering::SeqCst) > 0 {
                break;
            }
            let progress = || reports(&cluster).first().map_or(0, |report| report.objects);
            let before = progress();
            eventually("the program to continue", || {
                (progress() != before || worker.is_finished()).then_some(())
            });
            assert!(!worker.is_finished(), "the program has ended");
            restart_heaps(&cluster, 1);
        }
        is_over.store(true, Ordering::SeqCst);
        worker.join().expect("all is as it was written");
    });
    assert!(interrupted.load(Ordering::SeqCst) > 0, "no request was interrupted");
}

#[test]
fn memory_returns_after_most_objects_are_freed() {
    let cluster = up();
    let mut client = client(&cluster);
    let mut pointers: Vec<Pointer> =
        (0..20_000).map(|_| client.allocate(400).expect("there is room")).collect();
    let held = reports(&cluster)[0].allocated_bytes;
    // Four of five, everywhere.
    let kept: Vec<Pointer> = pointers.iter().copied().step_by(5).collect();
    pointers.retain(|pointer| !kept.contains(pointer));
    pointers.into_iter().for_each(|pointer| client.free(pointer).expect("it is there"));
    eventually("the memory is returned", || {
        let report = &reports(&cluster)[0];
        (report.allocated_bytes * 10 <= report.live_bytes * 12).then_some(())
    });
    let uid = rustix::process::geteuid().as_raw().to_string();
    let compacted = cluster.command().args(["heap", "compact", &uid]).output().expect("it can be started");
    assert!(text(&compacted.stdout).starts_with("node 1: merges: "), "{compacted:?}");
    let report = &reports(&cluster)[0];
    assert!(report.allocated_bytes * 4 < held && report.objects == 4000, "{report:?}");
    let mut out = [1; 400];
    for pointer in kept {
        client.get(&mut pointer.clone(), &mut out).expect("it is there");
        assert_eq!(out, [0; 400]);
    }
}

/// Number of extents of 2 MiB that a program can allocate now.
fn extents_to_be_had(cluster: &Cluster) -> usize {
    let mut session = Session::open_at(cluster.agent_socket()).expect("the agent serves");
    let extents: Vec<Extent> = std::iter::from_fn(|| session.allocate(2 << 20).ok()).collect();
    session.free_many(&extents).expect("they are ours");
    extents.len()
}

#[test]
fn heaps_allocate_memory_of_the_pool_and_return_what_compaction_frees() {
    const OBJECT_BYTES: u32 = 4000;
    const OBJECTS: usize = 10_000;
    let cluster =
        Cluster::up_with(1, "96M", &["--heap-memory", "96M", "--keep-memory", "--extents-per-user", "96M"]);
    let mut heap = client(&cluster);
    assert_eq!(extents_to_be_had(&cluster), 48);
    // What was just freed can be had when the node has cleared it.
    let mut allocate = || eventually("there is room", || heap.allocate(OBJECT_BYTES).ok());
    let mut pointers: Vec<Pointer> = (0..OBJECTS).map(|_| allocate()).collect();
    let filled = extents_to_be_had(&cluster);
    assert!((20..=48 - 19).contains(&filled), "{filled}");
    // A new process of the node holds as much, and one of the service says what it has.
    restart_node(&cluster, 1);
    eventually("the node holds the memory again", || (extents_to_be_had(&cluster) == filled).then_some(()));
    restart_heaps(&cluster, 1);
    heap.read(&mut pointers[0].clone(), &mut [0; 8]).expect("the service is back");
    assert!(extents_to_be_had(&cluster) <= filled, "it is held while there is no service");
    // Four of five, everywhere.
    let kept: Vec<Pointer> = pointers.iter().copied().step_by(5).collect();
    pointers.retain(|pointer| !kept.contains(pointer));
    pointers.into_iter().for_each(|pointer| heap.free(pointer).expect("it is there"));
    eventually("others can have the memory", || (extents_to_be_had(&cluster) >= 48 - 8).then_some(()));
    kept.into_iter()
        .for_each(|pointer| heap.read(&mut pointer.clone(), &mut [0; 8]).map(drop).expect("it stays"));
}

#[test]
fn a_heap_is_full_when_others_have_the_pool() {
    let cluster = Cluster::up_with(1, "32M", &["--heap-memory", "32M", "--extents-per-user", "32M"]);
    let mut heap = client(&cluster);
    let mut session = Session::open_at(cluster.agent_socket()).expect("the agent serves");
    let extents: Vec<Extent> = std::iter::from_fn(|| session.allocate(2 << 20).ok()).collect();
    assert_eq!(extents.len(), 16);
    let error = heap.allocate(100).expect_err("there is no memory");
    assert_eq!(error.to_string(), "the heap is full");
    session.free(extents[0]).expect("it is ours");
    eventually("there is memory again", || heap.allocate(100).ok());
}

#[test]
fn a_heap_stops_at_its_limit_and_says_so() {
    let cluster = up();
    let mut client = client(&cluster);
    let first = client.allocate(1000).expect("there is room");
    let uid = rustix::process::geteuid().as_raw().to_string();
    let limited = cluster.command().args(["heap", "limit", &uid, "1M"]).output().expect("it can be started");
    assert!(limited.status.success(), "{}", text(&limited.stderr));
    let error = (0..10_000).find_map(|_| client.allocate(1000).err()).expect("there is a limit");
    assert_eq!(error.to_string(), "the heap is full");
    restart_heaps(&cluster, 1);
    client.read(&mut first.clone(), &mut [0; 8]).expect("the service is back");
    assert!(matches!(client.allocate(1000), Err(ClientError::Refused(Refused::Full))), "the limit is kept");
    client.free(first).expect("it is there");
    client.allocate(1000).expect("there is room again");
}

#[test]
fn programs_in_c_use_a_heap() {
    let cluster = up();
    let folder = TempDir::new().expect("a folder");
    let source =
        std::fs::read_to_string(build::root().join("tests/e2e/programs/heap.c")).expect("its source");
    let header = format!("-I{}", build::root().join("bindings/c").display());
    let libraries = build::binary().parent().expect("it lies in a folder").to_owned();
    let library = format!("-L{}", libraries.display());
    let flags = ["-Wall", "-Wextra", "-Werror", &header, "-Wl,--no-as-needed", &library, "-laquifer"];
    let program = build::compile(folder.path(), "heap", &source, &flags);
    let mut command = Command::new(program);
    command.env("LD_LIBRARY_PATH", &libraries).env("AQUIFER_AGENT", cluster.agent_socket());
    let output = command.output().expect("it can be started");
    assert_eq!(text(&output.stdout), "done\n", "{}", text(&output.stderr));
    assert_eq!(reports(&cluster)[0].objects, 1, "the root is left");
}
