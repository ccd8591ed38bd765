//! Tests with real concurrency: threads that race, and processes that are killed.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use aquifer_fabric::shm::{self, ShmOptions, ShmTarget};
use aquifer_fabric::{
    Access, Completion, Endpoint, Host, Identity, Key, LocalSlice, Memory, Region, RemoteAddr, Scope, Target,
    Tenant, Verb, WindowSpec, Work, WorkError,
};

const WHO: Identity = Identity { host: Host(7), epoch: 1, tenant: Tenant(9) };
const REGION_BYTES: usize = 4 << 20;
const CHILD_ROLE: &str = "AQUIFER_FABRIC_TEST_ROLE";
const CHILD_PATH: &str = "AQUIFER_FABRIC_TEST_PATH";

fn node(path: &Path) -> (ShmTarget, Arc<Memory>, Region) {
    let target = ShmTarget::listen(path, ShmOptions::default()).unwrap();
    let memory = Arc::new(Memory::create("region", REGION_BYTES).unwrap());
    let region = target.register(Arc::clone(&memory), Access::ALL, Scope::Anyone).unwrap();
    (target, memory, region)
}

/// An endpoint with one local memory.
fn client(path: &Path) -> (Box<dyn Endpoint>, Arc<Memory>, LocalSlice) {
    let mut endpoint = shm::connect(path, WHO).unwrap();
    let memory = Arc::new(Memory::create("local", REGION_BYTES).unwrap());
    let key = endpoint.register_local(Arc::clone(&memory)).unwrap();
    (endpoint, memory, LocalSlice { key, offset: 0, len: 64 << 10 })
}

fn one(endpoint: &mut dyn Endpoint, verb: Verb) -> Result<u64, WorkError> {
    let mut done: Vec<Completion> = Vec::new();
    endpoint.post(&[Work { id: 0, verb, signalled: true }]).unwrap();
    assert_eq!(endpoint.poll(&mut done, 2), 1);
    done[0].outcome
}

#[test]
fn threads_lose_no_increment_and_see_no_torn_word() {
    const ROUNDS: u64 = 20_000;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("node");
    let (_target, memory, region) = node(&path);
    let remote = |word: u64| RemoteAddr { addr: region.base + word * 8, key: region.key };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let (mut endpoint, local, slice) = client(&path);
                let mut swapped = 0;
                while swapped < ROUNDS {
                    let read = Verb::Read { local: LocalSlice { len: 16, ..slice }, remote: remote(1) };
                    one(&mut *endpoint, read).unwrap();
                    let expected = local.atomic_u64(0).load(Ordering::Relaxed);
                    assert_eq!(expected >> 32, expected & 0xFFFF_FFFF, "a torn word was read");
                    let desired = expected + (1 << 32) + 1;
                    let swap = Verb::CompareSwap { remote: remote(1), expected, desired };
                    swapped += u64::from(one(&mut *endpoint, swap) == Ok(expected));
                    let add = Verb::FetchAdd { remote: remote(0), add: 1 };
                    one(&mut *endpoint, add).unwrap();
                }
            });
        }
    });
    let swaps = 4 * ROUNDS;
    assert!(memory.atomic_u64(0).load(Ordering::SeqCst) >= swaps);
    assert_eq!(memory.atomic_u64(8).load(Ordering::SeqCst), (swaps << 32) + swaps);
}

/// The property on which reuse of memory depends: once `invalidate` has returned, no access by the
/// key is in flight, not even the end of a copy.
#[test]
fn no_access_outlives_its_key() {
    const ROUNDS: u64 = 500;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("node");
    let (target, memory, region) = node(&path);
    let bytes = 64 << 10;
    let range = region.base..region.base + bytes;
    let window = WindowSpec { range, access: Access::READ_WRITE, scope: Scope::Anyone };
    let key = AtomicU64::new(0);
    let dead = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    let worked = AtomicU64::new(0);
    // Faults are counted and asserted later: a thread that panicked would leave the others waiting.
    let faults = Faults::default();
    std::thread::scope(|scope| {
        for writes in [false, true] {
            let (key, dead, stop, worked, path) = (&key, &dead, &stop, &worked, &path);
            let faults = &faults;
            scope.spawn(move || {
                let (mut endpoint, memory, local) = client(path);
                memory.write(0, &vec![0x11; 64 << 10]);
                while !stop.load(Ordering::SeqCst) {
                    let tried = key.load(Ordering::SeqCst);
                    let was_dead = dead.load(Ordering::SeqCst) == tried;
                    let remote_key = Key(u32::try_from(tried).unwrap());
                    let remote = RemoteAddr { addr: region.base, key: remote_key };
                    let verb =
                        if writes { Verb::Write { local, remote } } else { Verb::Read { local, remote } };
                    match one(&mut *endpoint, verb) {
                        Ok(_) => {
                            count(&faults.late, was_dead);
                            worked.fetch_add(1, Ordering::SeqCst);
                            let last = memory.atomic_u64((64 << 10) - 8).load(Ordering::Relaxed);
                            count(&faults.peeked, last == u64::MAX);
                        }
                        Err(error) => count(&faults.other, error != WorkError::RemoteAccess),
                    }
                }
            });
        }
        for _ in 0..ROUNDS {
            memory.write(0, &vec![0x22; 64 << 10]);
            let bound = target.bind(&window).unwrap();
            key.store(u64::from(bound.0), Ordering::SeqCst);
            let before = worked.load(Ordering::SeqCst);
            while worked.load(Ordering::SeqCst) == before {
                std::thread::yield_now();
            }
            target.invalidate(bound).unwrap();
            dead.store(u64::from(bound.0), Ordering::SeqCst);
            // The memory belongs to another user now. Its contents must neither change nor be read.
            memory.atomic_u64((64 << 10) - 8).store(u64::MAX, Ordering::SeqCst);
            memory.write(0, &vec![0xFF; 64 << 10]);
            let mut seen = vec![0; 64 << 10];
            for _ in 0..3 {
                std::thread::yield_now();
                memory.read(0, &mut seen);
                count(&faults.overwritten, seen.iter().any(|&byte| byte != 0xFF));
            }
        }
        stop.store(true, Ordering::SeqCst);
    });
    assert_eq!(faults.late.into_inner(), 0, "accesses began after their key was dead");
    assert_eq!(faults.peeked.into_inner(), 0, "reads found bytes from after the end of their key");
    assert_eq!(faults.overwritten.into_inner(), 0, "writes outlived their key");
    assert_eq!(faults.other.into_inner(), 0, "accesses failed for other causes");
}

#[derive(Default)]
struct Faults {
    late: AtomicU64,
    peeked: AtomicU64,
    overwritten: AtomicU64,
    other: AtomicU64,
}

fn count(counter: &AtomicU64, happened: bool) {
    counter.fetch_add(u64::from(happened), Ordering::SeqCst);
}

/// No operation of a fenced host may take effect once `fence` has returned.
#[test]
fn a_fence_stops_a_hammering_host() {
    let folder = tempfile::tempdir().unwrap();
    for _ in 0..50 {
        let path = folder.path().join("node");
        let (target, memory, region) = node(&path);
        let remote = RemoteAddr { addr: region.base, key: region.key };
        std::thread::scope(|scope| {
            let hammer = scope.spawn(|| {
                let mut endpoint = shm::connect(&path, WHO).unwrap();
                let verb = Verb::FetchAdd { remote, add: 1 };
                let batch = [Work { id: 0, verb, signalled: false }; 100];
                let mut done = Vec::new();
                while endpoint.poll(&mut done, 1) == 0 {
                    endpoint.post(&batch).unwrap();
                }
                assert_eq!(done[0].outcome, Err(WorkError::Fenced));
            });
            let word = memory.atomic_u64(0);
            while word.load(Ordering::SeqCst) < 1000 {
                std::thread::yield_now();
            }
            target.fence(WHO.host, WHO.epoch);
            let at_fence = word.load(Ordering::SeqCst);
            hammer.join().unwrap();
            assert_eq!(word.load(Ordering::SeqCst), at_fence);
        });
    }
}

/// A target refuses regions to a host that it has fenced. The error of the access is the fence.
#[test]
fn a_fence_during_a_request_for_a_region_is_reported_as_the_fence() {
    const ROUNDS: u64 = 40;
    const REGIONS: usize = 60;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("node");
    let target = ShmTarget::listen(&path, ShmOptions::default()).unwrap();
    let register = |_| {
        let memory = Arc::new(Memory::create("region", 4096).unwrap());
        target.register(memory, Access::ALL, Scope::Anyone).unwrap()
    };
    let regions: Vec<Region> = (0..REGIONS).map(register).collect();
    for epoch in 1..=ROUNDS {
        let accessed = AtomicU64::new(0);
        let mut endpoint = shm::connect(&path, Identity { epoch, ..WHO }).unwrap();
        let failure = std::thread::scope(|scope| {
            let accessing = scope.spawn(|| {
                regions.iter().cycle().find_map(|region| {
                    let remote = RemoteAddr { addr: region.base, key: region.key };
                    let outcome = one(&mut *endpoint, Verb::FetchAdd { remote, add: 1 });
                    accessed.fetch_add(1, Ordering::SeqCst);
                    outcome.err()
                })
            });
            while accessed.load(Ordering::SeqCst) < epoch {
                std::thread::yield_now();
            }
            target.fence(WHO.host, epoch);
            accessing.join().unwrap()
        });
        assert_eq!(failure, Some(WorkError::Fenced), "epoch {epoch}");
    }
}

/// Starts this test binary as another process, which plays a role in `as_child`.
fn spawn(role: &str, path: &Path) -> (Child, impl BufRead) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "shm::as_child", "--nocapture", "--test-threads=1"])
        .env(CHILD_ROLE, role)
        .env(CHILD_PATH, path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let output = BufReader::new(child.stdout.take().unwrap());
    (child, output)
}

/// Runs the roles of the child processes of the tests below. Without a role it checks that
/// connecting to a path without a target fails.
#[test]
fn as_child() {
    let path = std::env::var_os(CHILD_PATH).unwrap_or_else(|| "/nonexistent/node".into());
    let path = Path::new(&path);
    match std::env::var(CHILD_ROLE).as_deref() {
        Ok("target") => {
            let (_target, _, region) = node(path);
            println!("ready {} {}", region.base, region.key.0);
            let _ = std::io::stdin().read_line(&mut String::new());
        }
        Ok("initiator") => {
            let (mut endpoint, _, local) = client(path);
            let region = endpoint.regions()[0].clone();
            let remote = RemoteAddr { addr: region.base, key: region.key };
            let hello = Verb::Send { local: LocalSlice { len: 8, ..local } };
            one(&mut *endpoint, hello).unwrap();
            let long = Verb::Read { local: LocalSlice { len: 2 << 20, ..local }, remote };
            let batch = [Work { id: 0, verb: long, signalled: false }; 64];
            while endpoint.post(&batch).is_ok() && !endpoint.is_broken() {}
        }
        _ => assert!(shm::connect(path, WHO).is_err()),
    }
}

#[test]
fn a_killed_target_process_is_detected_under_load() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("node");
    let (mut child, output) = spawn("target", &path);
    let ready = output.lines().map(Result::unwrap).find(|line| line.contains("ready")).unwrap();
    let words: Vec<&str> = ready.split_whitespace().collect();
    let at = words.iter().position(|word| word.ends_with("ready")).unwrap();
    let (mut endpoint, _, local) = client(&path);
    let region = endpoint.regions()[0].clone();
    assert_eq!(words[at + 1..], [region.base.to_string(), region.key.0.to_string()]);
    let remote = RemoteAddr { addr: region.base, key: region.key };
    let idle = shm::connect(&path, WHO).unwrap();
    let mut outcomes = Vec::new();
    for round in 0_u64.. {
        if round == 1000 {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        outcomes.push(one(&mut *endpoint, Verb::Write { local, remote }));
        if outcomes.ends_with(&[Err(WorkError::Flushed); 2]) {
            break;
        }
    }
    assert!(outcomes[..1000].iter().all(|outcome| *outcome == Ok(64 << 10)));
    let failures: Vec<_> = outcomes.into_iter().filter(Result::is_err).collect();
    let flushed = Err(WorkError::Flushed);
    assert_eq!(failures, [Err(WorkError::PeerGone), flushed, flushed]);
    while !idle.is_broken() {
        std::thread::yield_now();
    }
    assert!(shm::connect(&path, WHO).is_err());
}

#[test]
fn a_killed_initiator_delays_no_other_and_frees_its_slot() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("node");
    let (target, _, region) = node(&path);
    let range = region.base..region.base + 64;
    let window = WindowSpec { range, access: Access::ALL, scope: Scope::Anyone };
    for _ in 0..5 {
        let key = target.bind(&window).unwrap();
        let (mut child, _output) = spawn("initiator", &path);
        let mut message = Vec::new();
        while target.receive(&mut message).is_none() {
            std::thread::yield_now();
        }
        assert_eq!(target.endpoints(), 1);
        child.kill().unwrap();
        // It was killed inside a batch in nearly all runs.
        target.invalidate(key).unwrap();
        target.fence(Host(6), 1);
        child.wait().unwrap();
        while target.endpoints() > 0 {
            std::thread::yield_now();
        }
    }
}
