//! Tests of TCP connections: broken connections, stalled peers, hostile peers.

mod golden;
mod many;
mod relay;
mod stored;
mod strangers;
mod tickets;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use aquifer_fabric::ClusterKey;
use aquifer_fabric::handshake::RefusalCode;
use aquifer_fabric::tcp::{self, ConnectOptions, Rate, TcpOptions, TcpTarget};
use aquifer_fabric::{
    Access, Completion, Endpoint, EndpointError, Host, Identity, Key, LocalKey, LocalSlice, Memory,
    MessageHandler, Region, RemoteAddr, Scope, Sender, Target, Tenant, TenantCounters, Verb, WindowSpec,
    Work, WorkError,
};

const KEY: ClusterKey = ClusterKey([3; 32]);
const WHO: Identity = Identity { host: Host(7), epoch: 1, tenant: Tenant(9) };
const REGION_BYTES: usize = 4 << 20;

/// A target that permits plain traffic: [`crate::conformance`] tests both.
fn node(options: TcpOptions) -> (TcpTarget, Arc<Memory>, Region) {
    let options = TcpOptions { encrypt: false, ..options };
    let target = TcpTarget::listen("127.0.0.1:0".parse().unwrap(), &KEY, options).unwrap();
    let memory = Arc::new(Memory::create("region", REGION_BYTES).unwrap());
    let region = target.register(Arc::clone(&memory), Access::ALL, Scope::Anyone).unwrap();
    (target, memory, region)
}

struct TcpClient {
    endpoint: Box<dyn Endpoint>,
    memory: Arc<Memory>,
    local: LocalKey,
}

/// Timeout of each wait of a test, long enough for the slowest machine.
const TEST_TIMEOUT: Duration = Duration::from_secs(30);

fn try_client(address: SocketAddr, who: Identity) -> Result<TcpClient, EndpointError> {
    try_client_reconnecting_for(address, who, ConnectOptions::default().reconnect_time)
}

fn try_client_reconnecting_for(
    address: SocketAddr,
    who: Identity,
    reconnect_time: Duration,
) -> Result<TcpClient, EndpointError> {
    let options = ConnectOptions {
        encrypt: false,
        operation_time: TEST_TIMEOUT,
        reconnect_time,
        ..ConnectOptions::default()
    };
    let mut endpoint = tcp::connect(address, &KEY, who, options)?;
    let memory = Arc::new(Memory::create("local", REGION_BYTES).unwrap());
    let local = endpoint.register_local(Arc::clone(&memory)).unwrap();
    Ok(TcpClient { endpoint, memory, local })
}

fn client(address: SocketAddr) -> TcpClient {
    try_client(address, WHO).unwrap()
}

impl TcpClient {
    fn slice(&self, offset: u64, len: u32) -> LocalSlice {
        LocalSlice { key: self.local, offset, len }
    }

    fn wait(&mut self, count: usize) -> Vec<Completion> {
        let mut done = Vec::new();
        while done.len() < count {
            let wanted = count - done.len();
            if self.endpoint.poll(&mut done, wanted) == 0 {
                self.endpoint.wait(Duration::from_millis(50));
            }
        }
        done
    }

    fn one(&mut self, verb: Verb) -> Result<u64, WorkError> {
        self.endpoint.post(&[Work { id: 0, verb, signalled: true }]).unwrap();
        self.wait(1)[0].outcome
    }
}

#[test]
fn threads_lose_no_increment_and_see_no_torn_word() {
    const ROUNDS: u64 = 500;
    let (target, memory, region) = node(TcpOptions { threads: 2, ..TcpOptions::default() });
    let remote = |word: u64| RemoteAddr { addr: region.base + word * 8, key: region.key };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut client = client(target.address());
                let mut swapped = 0;
                while swapped < ROUNDS {
                    let local = client.slice(0, 16);
                    client.one(Verb::Read { local, remote: remote(1) }).unwrap();
                    let expected = client.memory.atomic_u64(0).load(Ordering::Relaxed);
                    assert_eq!(expected >> 32, expected & 0xFFFF_FFFF, "a torn word was read");
                    let desired = expected + (1 << 32) + 1;
                    let swap = Verb::CompareSwap { remote: remote(1), expected, desired };
                    swapped += u64::from(client.one(swap) == Ok(expected));
                    client.one(Verb::FetchAdd { remote: remote(0), add: 1 }).unwrap();
                }
            });
        }
    });
    let swaps = 4 * ROUNDS;
    assert!(memory.atomic_u64(0).load(Ordering::SeqCst) >= swaps);
    assert_eq!(memory.atomic_u64(8).load(Ordering::SeqCst), (swaps << 32) + swaps);
}

/// The property on which reuse of memory depends, for a WRITE that arrives in many pieces.
#[test]
fn no_access_outlives_its_key() {
    const ROUNDS: u64 = 100;
    const BYTES: u32 = 1 << 20;
    let (target, memory, region) = node(TcpOptions { threads: 2, ..TcpOptions::default() });
    let range = region.base..region.base + u64::from(BYTES);
    let window = WindowSpec { range, access: Access::READ_WRITE, scope: Scope::Anyone };
    let (key, stop, worked) = (AtomicU64::new(0), AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut client = client(target.address());
            client.memory.write(0, &vec![0x11; BYTES as usize]);
            while !stop.load(Ordering::SeqCst) {
                let key = Key(u32::try_from(key.load(Ordering::SeqCst)).unwrap());
                let local = client.slice(0, BYTES);
                let outcome =
                    client.one(Verb::Write { local, remote: RemoteAddr { addr: region.base, key } });
                worked.fetch_add(u64::from(outcome.is_ok()), Ordering::SeqCst);
            }
        });
        for _ in 0..ROUNDS {
            let bound = target.bind(&window).unwrap();
            let before = worked.load(Ordering::SeqCst);
            key.store(u64::from(bound.0), Ordering::SeqCst);
            while worked.load(Ordering::SeqCst) == before {
                std::thread::yield_now();
            }
            target.invalidate(bound).unwrap();
            memory.write(0, &vec![0xFF; BYTES as usize]);
            let mut seen = vec![0; BYTES as usize];
            for _ in 0..3 {
                std::thread::yield_now();
                memory.read(0, &mut seen);
                if seen.iter().any(|byte| *byte != 0xFF) {
                    stop.store(true, Ordering::SeqCst);
                    panic!("a write outlived its key");
                }
            }
        }
        stop.store(true, Ordering::SeqCst);
    });
}

/// Transfers of the greatest length, in both directions and with a full queue: no bytes are mixed
/// up when both ends apply back-pressure.
#[test]
fn deep_queues_of_long_transfers_arrive_whole() {
    let (target, memory, region) = node(TcpOptions::default());
    let mut client = client(target.address());
    let stamp = |at: usize| u8::try_from(at % 251).unwrap();
    let bytes: Vec<u8> = (0..2 << 20).map(stamp).collect();
    memory.write(0, &bytes);
    let remote = |addr: u64| RemoteAddr { addr: region.base + addr, key: region.key };
    let (first, second) = (client.slice(0, 1 << 20), client.slice(1 << 20, 1 << 20));
    let mut batch = Vec::new();
    for id in 0..30 {
        batch.push(Work { id, verb: Verb::Read { local: first, remote: remote(id) }, signalled: true });
        let back = Verb::Write { local: second, remote: remote(2 << 20) };
        batch.push(Work { id: 100 + id, verb: back, signalled: true });
    }
    client.memory.write(1 << 20, &bytes[..1 << 20]);
    client.endpoint.post(&batch).unwrap();
    let done = client.wait(60);
    assert!(done.iter().zip(&batch).all(|(done, work)| done.id == work.id && done.outcome == Ok(1 << 20)));
    let mut seen = vec![0; 1 << 20];
    client.memory.read(0, &mut seen);
    assert!(seen == bytes[29..29 + (1 << 20)], "the last READ stands");
    memory.read(2 << 20, &mut seen);
    assert!(seen == bytes[..1 << 20]);
}

#[test]
fn a_tenant_is_limited_to_its_rate() {
    let rate = Rate { bytes_per_s: None, operations_per_s: Some(2000) };
    let (target, _, region) = node(TcpOptions { rate, threads: 2, ..TcpOptions::default() });
    let (mut greedy, mut modest) = (client(target.address()), None);
    let remote = RemoteAddr { addr: region.base, key: region.key };
    let add = |id| Work { id, verb: Verb::FetchAdd { remote, add: 1 }, signalled: true };
    let start = Instant::now();
    for _ in 0..4 {
        greedy.endpoint.post(&(0..150).map(add).collect::<Vec<_>>()).unwrap();
        let modest = modest.get_or_insert_with(|| {
            try_client(target.address(), Identity { tenant: Tenant(10), ..WHO }).unwrap()
        });
        assert!(modest.one(Verb::FetchAdd { remote, add: 1 }).is_ok());
        greedy.wait(150);
    }
    // 200 pass as a burst, and a batch is charged when it is done: at least 125 ms for the rest. A
    // slow machine only takes longer.
    assert!(start.elapsed() >= Duration::from_millis(100), "{:?}", start.elapsed());
}

/// While one endpoint keeps the target busy, an operation of another waits only for those before
/// it.
#[test]
fn a_flood_of_one_endpoint_delays_no_other() {
    const OPERATIONS: usize = 200;
    let (target, _, region) = node(TcpOptions::default());
    let mut modest = try_client(target.address(), Identity { tenant: Tenant(10), ..WHO }).unwrap();
    let remote = RemoteAddr { addr: region.base, key: region.key };
    let stop = AtomicBool::new(false);
    let served_of_flood = || {
        let served = target.tenant_counters();
        served.iter().find(|(tenant, _)| *tenant == WHO.tenant).map_or(0, |(_, served)| served.operations)
    };
    let depth = u64::try_from(modest.endpoint.limits().queue_depth).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut greedy = client(target.address());
            let verb = Verb::Read { local: greedy.slice(0, 16 << 10), remote };
            let reads: Vec<Work> = (0..depth).map(|id| Work { id, verb, signalled: true }).collect();
            greedy.endpoint.post(&reads).unwrap();
            while !stop.load(Ordering::SeqCst) {
                let done = greedy.wait(1).len();
                greedy.endpoint.post(&reads[..done]).unwrap();
            }
            greedy.wait(reads.len());
        });
        while served_of_flood() < depth {
            std::thread::yield_now();
        }
        let mut passes = || {
            let passed = (0..OPERATIONS).filter(|_| {
                let before = served_of_flood();
                assert!(modest.one(Verb::FetchAdd { remote, add: 1 }).is_ok());
                served_of_flood() - before <= 2 * depth
            });
            passed.count()
        };
        // Threads of this test may be descheduled now and then, and for longer if others use the
        // processors.
        let passed = [(); 3].map(|()| passes());
        stop.store(true, Ordering::SeqCst);
        assert!(
            passed.iter().any(|passed| *passed >= OPERATIONS / 2),
            "{passed:?} of {OPERATIONS} passed in time"
        );
    });
}

#[test]
fn operations_and_bytes_are_counted_by_tenant() {
    let (target, _, region) = node(TcpOptions { threads: 2, ..TcpOptions::default() });
    assert_eq!((target.endpoints(), target.tenant_counters()), (0, vec![]));
    let remote = RemoteAddr { addr: region.base, key: region.key };
    let outside = RemoteAddr { addr: region.base + REGION_BYTES as u64, key: region.key };
    let mut first = client(target.address());
    let local = first.slice(0, 5000);
    first.one(Verb::Write { local, remote }).unwrap();
    first.one(Verb::Read { local, remote }).unwrap();
    first.one(Verb::FetchAdd { remote, add: 1 }).unwrap();
    first.one(Verb::Read { local, remote: outside }).unwrap_err();
    let mine = (WHO.tenant, TenantCounters { operations: 4, bytes: 10_000 });
    assert_eq!((target.endpoints(), target.tenant_counters()), (1, vec![mine]));
    let mut other = try_client(target.address(), Identity { tenant: Tenant(3), ..WHO }).unwrap();
    other.one(Verb::FetchAdd { remote, add: 1 }).unwrap();
    let others = (Tenant(3), TenantCounters { operations: 1, bytes: 0 });
    assert_eq!((target.endpoints(), target.tenant_counters()), (2, vec![others, mine]));
    // Counters stay when the endpoints are gone, and grow when they return.
    drop((first, other));
    while target.endpoints() > 0 {
        std::thread::yield_now();
    }
    assert_eq!(target.tenant_counters(), [others, mine]);
    client(target.address()).one(Verb::FetchAdd { remote, add: 1 }).unwrap();
    let grown = (WHO.tenant, TenantCounters { operations: 5, bytes: 10_000 });
    assert_eq!(target.tenant_counters(), [others, grown]);
}

#[test]
fn an_initiator_with_another_key_is_refused() {
    let (target, _, _) = node(TcpOptions::default());
    let other = ClusterKey([4; 32]);
    let refused = tcp::connect(target.address(), &other, WHO, ConnectOptions::default());
    match refused {
        Err(EndpointError::Refused { refusal, .. }) => assert_eq!(refusal.code, RefusalCode::WrongKey),
        other => panic!("{other:?}"),
    }
    assert_eq!(target.endpoints(), 0);
}

/// Answers each message with its sender's host and the message itself.
#[derive(Debug)]
struct Echo;

impl MessageHandler for Echo {
    fn handle(&self, from: Sender, message: &[u8], answer: &mut Vec<u8>) {
        answer.extend_from_slice(&from.who.host.0.to_le_bytes());
        answer.extend_from_slice(message);
    }
}

#[test]
fn a_handler_answers_the_endpoint_that_asked() {
    const ROUNDS: u32 = 200;
    let (target, _memory, _region) = node(TcpOptions::default());
    target.answer_messages(Arc::new(Echo));
    // Both endpoints are of one host. Only the endpoint that asks receives the answer.
    let (mut asking, mut other) = (client(target.address()), client(target.address()));
    for round in 0..ROUNDS {
        let text = round.to_le_bytes();
        asking.memory.write(0, &text);
        let local = asking.slice(0, 4);
        assert_eq!(asking.one(Verb::Send { local }), Ok(4));
        let mut answer = Vec::new();
        while !asking.endpoint.receive(&mut answer) {
            asking.endpoint.wait(Duration::from_millis(50));
        }
        assert_eq!(answer, [&WHO.host.0.to_le_bytes()[..], &text].concat());
    }
    assert!(!other.endpoint.receive(&mut Vec::new()));
    assert_eq!(target.receive(&mut Vec::new()), None);
}
