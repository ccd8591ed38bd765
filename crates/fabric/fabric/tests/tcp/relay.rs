//! Connections through a relay that cuts them at random. The outcome of every operation must still
//! be known.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use aquifer_fabric::tcp::{TcpOptions, TcpTarget};
use aquifer_fabric::{Completion, RemoteAddr, Target, Verb, Work, WorkError};

use super::{TEST_TIMEOUT, WHO, client, node, try_client_reconnecting_for};

/// Forwards connections to an address. In rough mode, each connection is cut after some bytes.
pub struct Relay {
    pub address: SocketAddr,
    rough: Arc<AtomicBool>,
    pub cuts: Arc<AtomicU64>,
    /// The number of first connections whose bytes are held back.
    held: Arc<AtomicU64>,
    /// Connections that the target has closed, and connections that the initiator has closed, once
    /// all bytes were forwarded.
    ended: [Arc<AtomicU64>; 2],
    /// The connections of initiators.
    connections: Arc<Mutex<Vec<TcpStream>>>,
}

/// A connection is cut after at most this many bytes in one direction.
const CUT_AFTER_MAX: u64 = 60_000;

impl Relay {
    pub fn start(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let relay = Self {
            address: listener.local_addr().unwrap(),
            rough: Arc::new(AtomicBool::new(false)),
            cuts: Arc::new(AtomicU64::new(0)),
            held: Arc::default(),
            ended: Default::default(),
            connections: Arc::default(),
        };
        let connections = Arc::clone(&relay.connections);
        let (rough, cuts) = (Arc::clone(&relay.rough), Arc::clone(&relay.cuts));
        let (all_held, ended) = (Arc::clone(&relay.held), relay.ended.clone());
        std::thread::spawn(move || {
            let mut seed = 1_u64;
            let mut number = 0;
            while let Ok((from, _)) = listener.accept() {
                let Ok(onward) = TcpStream::connect(to) else { break };
                number += 1;
                connections.lock().unwrap().push(from.try_clone().unwrap());
                for (mut source, mut sink, ended) in [
                    (from.try_clone().unwrap(), onward.try_clone().unwrap(), &ended[1]),
                    (onward.try_clone().unwrap(), from.try_clone().unwrap(), &ended[0]),
                ] {
                    let (held, ended) = (Arc::clone(&all_held), Arc::clone(ended));
                    seed =
                        seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let mut left = 2000 + (seed >> 33) % CUT_AFTER_MAX;
                    let (rough, cuts) = (Arc::clone(&rough), Arc::clone(&cuts));
                    std::thread::spawn(move || {
                        let mut buffer = [0; 4096];
                        let mut is_cut = false;
                        while let Ok(bytes @ 1..) = source.read(&mut buffer) {
                            let bytes = if rough.load(Ordering::SeqCst) {
                                bytes.min(usize::try_from(left).unwrap())
                            } else {
                                bytes
                            };
                            while held.load(Ordering::SeqCst) >= number {
                                std::thread::yield_now();
                            }
                            if sink.write_all(&buffer[..bytes]).is_err() {
                                is_cut = true;
                                break;
                            }
                            left = left.saturating_sub(bytes as u64);
                            if left == 0 && rough.load(Ordering::SeqCst) {
                                cuts.fetch_add(1, Ordering::SeqCst);
                                is_cut = true;
                                break;
                            }
                        }
                        // The end that closed sends no more. The other end must still read the
                        // bytes that were sent, and then closes, too.
                        let _ = sink.shutdown(if is_cut { Shutdown::Both } else { Shutdown::Write });
                        if is_cut {
                            let _ = source.shutdown(Shutdown::Both);
                        }
                        ended.fetch_add(1, Ordering::SeqCst);
                    });
                }
            }
        });
        relay
    }

    /// Cuts all connections.
    fn cut(&self) {
        for connection in self.connections.lock().unwrap().drain(..) {
            connection.shutdown(Shutdown::Both).unwrap();
        }
    }

    pub fn set_rough(&self, rough: bool) {
        self.rough.store(rough, Ordering::SeqCst);
    }
}

/// Increments, writes, reads and messages while connections break: each is done exactly once.
#[test]
fn broken_connections_lose_and_double_nothing() {
    const ROUNDS_MIN: u64 = 60;
    const ROUNDS_MAX: u64 = 6000;
    const CUTS_MIN: u64 = 10;
    let (target, memory, region) = node(TcpOptions::default());
    let relay = Relay::start(target.address());
    let mut client = try_client_reconnecting_for(relay.address, WHO, TEST_TIMEOUT).unwrap();
    relay.set_rough(true);
    let remote = |addr: u64| RemoteAddr { addr: region.base + addr, key: region.key };
    let cuts = || relay.cuts.load(Ordering::SeqCst);
    let mut rounds = 0;
    // The lengths at which connections break are random.
    while rounds < ROUNDS_MIN || rounds < ROUNDS_MAX && cuts() <= CUTS_MIN {
        let round = rounds;
        rounds += 1;
        let mut batch: Vec<Work> = (0..20)
            .map(|id| Work { id, verb: Verb::FetchAdd { remote: remote(0), add: 1 }, signalled: true })
            .collect();
        client.memory.write(0, &[u8::try_from(round % 256).unwrap(); 4096]);
        let (written, read) = (client.slice(0, 4096), client.slice(4096, 4096));
        batch.push(Work {
            id: 20,
            verb: Verb::Write { local: written, remote: remote(4096) },
            signalled: true,
        });
        batch.push(Work { id: 21, verb: Verb::Read { local: read, remote: remote(4096) }, signalled: true });
        let number = client.slice(8192, 8);
        client.memory.write(8192, &round.to_le_bytes());
        batch.push(Work { id: 22, verb: Verb::Send { local: number }, signalled: true });
        client.endpoint.post(&batch).unwrap();
        let done = client.wait(23);
        for (at, done) in done[..20].iter().enumerate() {
            assert_eq!(done.outcome, Ok(round * 20 + at as u64), "round {round}");
        }
        assert!(done.iter().zip(0..).all(|(done, id)| done.id == id && done.outcome.is_ok()), "{done:?}");
        let mut seen = [0; 4096];
        client.memory.read(4096, &mut seen);
        assert!(seen.iter().all(|byte| u64::from(*byte) == round % 256));
        exchange(&target, &mut client, round);
    }
    assert_eq!(memory.atomic_u64(0).load(Ordering::SeqCst), rounds * 20);
    assert!(cuts() > CUTS_MIN, "the connections were cut {} times only", cuts());
    assert_eq!(target.endpoints(), 1, "the session was never replaced");
}

/// A sent message arrives once, and so does its answer.
fn exchange(target: &TcpTarget, client: &mut super::TcpClient, round: u64) {
    let mut message = Vec::new();
    assert_eq!(target.receive(&mut message).map(|from| from.who), Some(WHO));
    assert_eq!(message, round.to_le_bytes());
    assert_eq!(target.receive(&mut message), None);
    assert_eq!(target.send(WHO.host, &message), 1);
    let mut answer = Vec::new();
    while !client.endpoint.receive(&mut answer) {
        // An idle endpoint detects the broken connection when it is used.
        let _ = client.endpoint.poll(&mut Vec::<Completion>::new(), 1);
        std::thread::yield_now();
    }
    assert_eq!(answer, message);
}

/// Operations in flight of a dropped endpoint are done, unless the endpoint was drained.
#[test]
fn drained_operations_do_not_take_effect() {
    for is_ended in [false, true] {
        let (target, memory, region) = node(TcpOptions::default());
        let relay = Relay::start(target.address());
        let mut client = client(relay.address);
        let add = Verb::FetchAdd { remote: RemoteAddr { addr: region.base, key: region.key }, add: 1 };
        assert_eq!(client.one(add), Ok(0));
        assert!(client.endpoint.drain_handle().is_none(), "all operations are answered");
        relay.held.store(1, Ordering::SeqCst);
        client.endpoint.post(&[Work { id: 1, verb: add, signalled: true }]).unwrap();
        let mut drain = client.endpoint.drain_handle().expect("an operation is not answered");
        drop(client);
        if is_ended {
            drain.drain().expect("the target answers");
        }
        relay.held.store(0, Ordering::SeqCst);
        while relay.ended.iter().any(|ended| ended.load(Ordering::SeqCst) == 0) {
            std::thread::yield_now();
        }
        assert_eq!(memory.atomic_u64(0).load(Ordering::SeqCst), if is_ended { 1 } else { 2 });
    }
}

/// A target that is gone is distinguished from a broken connection.
#[test]
fn a_target_that_is_gone_is_not_waited_for() {
    let (target, _, region) = node(TcpOptions::default());
    let mut client = client(target.address());
    let remote = RemoteAddr { addr: region.base, key: region.key };
    assert_eq!(client.one(Verb::FetchAdd { remote, add: 1 }), Ok(0));
    drop(target);
    assert_eq!(client.one(Verb::FetchAdd { remote, add: 1 }), Err(WorkError::PeerGone));
    assert_eq!(client.one(Verb::FetchAdd { remote, add: 1 }), Err(WorkError::Flushed));
    assert!(client.endpoint.is_broken());
    let mut drain = client.endpoint.drain_handle().expect("the outcome of an operation is unknown");
    drain.drain().expect("the target is gone");
}

/// A host that is fenced while its connection is broken receives that error, also for operations
/// that it posts afterwards.
#[test]
fn a_fence_is_distinguished_from_a_broken_connection() {
    for is_idle in [false, true] {
        let (target, _, region) = node(TcpOptions::default());
        let relay = Relay::start(target.address());
        let mut client = client(relay.address);
        let add = Verb::FetchAdd { remote: RemoteAddr { addr: region.base, key: region.key }, add: 1 };
        assert_eq!(client.one(add), Ok(0));
        if !is_idle {
            relay.held.store(1, Ordering::SeqCst);
            client.endpoint.post(&[Work { id: 1, verb: add, signalled: true }]).unwrap();
        }
        target.fence(WHO.host, WHO.epoch);
        relay.cut();
        relay.held.store(0, Ordering::SeqCst);
        // An idle endpoint detects the broken connection when its user waits.
        while is_idle && !client.endpoint.is_broken() {
            client.endpoint.wait(std::time::Duration::from_millis(1));
            assert_eq!(client.endpoint.poll(&mut Vec::<Completion>::new(), 1), 0);
        }
        let outcome = if is_idle { client.one(add) } else { client.wait(1)[0].outcome };
        assert_eq!(outcome, Err(WorkError::Fenced), "idle: {is_idle}");
    }
}

/// A machine that vanished does not even refuse connections. While the endpoint reconnects, its
/// thread is not blocked.
#[test]
fn an_unresponsive_target_blocks_no_thread() {
    const POLLS_MIN: u32 = 20;
    let (target, _, region) = node(TcpOptions::default());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let onward = TcpStream::connect(target.address()).unwrap();
    let cut = Arc::new(AtomicBool::new(false));
    let wire = std::thread::spawn({
        let cut = Arc::clone(&cut);
        move || {
            let (from, _) = listener.accept().unwrap();
            let pumps = [(&from, &onward), (&onward, &from)].map(|(source, sink)| {
                let (mut source, mut sink) = (source.try_clone().unwrap(), sink.try_clone().unwrap());
                std::thread::spawn(move || std::io::copy(&mut source, &mut sink))
            });
            while !cut.load(Ordering::SeqCst) {
                std::thread::park();
            }
            for end in [&from, &onward] {
                let _ = end.shutdown(Shutdown::Both);
            }
            let _ends = pumps.map(|pump| pump.join());
            // The listener accepts no further connection.
            listener
        }
    });
    let mut client = client(address);
    let remote = RemoteAddr { addr: region.base, key: region.key };
    let add = Verb::FetchAdd { remote, add: 1 };
    assert_eq!(client.one(add), Ok(0));
    cut.store(true, Ordering::SeqCst);
    wire.thread().unpark();
    let _listener = wire.join().unwrap();
    client.endpoint.post(&[Work { id: 0, verb: add, signalled: true }]).unwrap();
    let (mut polls, mut done) = (0, Vec::new());
    while client.endpoint.poll(&mut done, 1) == 0 {
        polls += 1;
        client.endpoint.wait(std::time::Duration::from_millis(5));
    }
    assert_eq!(done[0].outcome, Err(WorkError::PeerGone));
    assert!(polls >= POLLS_MIN, "the thread was blocked: {polls} polls");
    assert!(client.endpoint.is_broken());
}
