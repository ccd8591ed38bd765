//! Tests of the multiplexer: users that share one endpoint.

use std::sync::Arc;
use std::time::Duration;

use aquifer_fabric::multiplex::{MultiplexedEndpoint, Multiplexer};
use aquifer_fabric::tcp::{self, ConnectOptions, TcpOptions, TcpTarget};
use aquifer_fabric::{
    Access, ClusterKey, Completion, Endpoint, Host, Identity, LocalSlice, Memory, Region, RemoteAddr, Scope,
    Target, Tenant, Verb, Work,
};

const KEY: ClusterKey = ClusterKey([9; 32]);
const WHO: Identity = Identity { host: Host(7), epoch: 1, tenant: Tenant(9) };
const REGION_BYTES: usize = 1 << 20;
const USERS: usize = 4;
/// Timeout of each wait of a test, long enough for the slowest machine.
const TEST_TIMEOUT: Duration = Duration::from_secs(30);

struct Node {
    target: TcpTarget,
    memory: Arc<Memory>,
    region: Region,
}

impl Node {
    fn start() -> Self {
        let target = TcpTarget::listen("127.0.0.1:0".parse().unwrap(), &KEY, TcpOptions::default()).unwrap();
        let memory = Arc::new(Memory::create("region", REGION_BYTES).unwrap());
        let region = target.register(Arc::clone(&memory), Access::ALL, Scope::Anyone).unwrap();
        Self { target, memory, region }
    }

    fn multiplexer(&self) -> Multiplexer {
        let options = ConnectOptions { operation_time: TEST_TIMEOUT, ..ConnectOptions::default() };
        let endpoint = tcp::connect(self.target.address(), &KEY, WHO, options).unwrap();
        Multiplexer::new(endpoint, USERS).unwrap()
    }

    fn word(&self, index: u64) -> RemoteAddr {
        RemoteAddr { addr: self.region.base + index * 8, key: self.region.key }
    }
}

fn user(multiplexer: &Multiplexer) -> MultiplexedEndpoint {
    multiplexer.add_user().expect("there is room")
}

/// Waits for `count` completions as a thread does that sleeps.
fn wait(endpoint: &mut dyn Endpoint, count: usize) -> Vec<Completion> {
    let mut done = Vec::new();
    while done.len() < count {
        endpoint.wait(TEST_TIMEOUT);
        endpoint.poll(&mut done, count);
    }
    done
}

#[test]
fn each_user_gets_its_own_completions() {
    let node = Node::start();
    let multiplexer = node.multiplexer();
    std::thread::scope(|scope| {
        for number in 0..USERS as u64 {
            let (mut endpoint, node) = (user(&multiplexer), &node);
            scope.spawn(move || {
                let local = Arc::new(Memory::create("local", 4096).unwrap());
                let key = endpoint.register_local(Arc::clone(&local)).unwrap();
                for round in 1..200_u64 {
                    local.write(0, &(round * 100 + number).to_le_bytes());
                    let slice = |offset| LocalSlice { key, offset, len: 8 };
                    let (write, read) = (
                        Verb::Write { local: slice(0), remote: node.word(number) },
                        Verb::Read { local: slice(8), remote: node.word(number) },
                    );
                    // Both users of one thread's turn use the same identifiers.
                    let batch = [(1, write, false), (round, read, true)];
                    let batch = batch.map(|(id, verb, signalled)| Work { id, verb, signalled });
                    endpoint.post(&batch).unwrap();
                    let done = wait(&mut endpoint, 1);
                    assert_eq!(done, [Completion { id: round, outcome: Ok(8) }]);
                    let mut found = [0; 8];
                    local.read(8, &mut found);
                    assert_eq!(u64::from_le_bytes(found), round * 100 + number);
                }
            });
        }
    });
    let mut word = [0; 8];
    node.memory.read(0, &mut word);
    assert_eq!(u64::from_le_bytes(word), 19_900);
}

#[test]
fn a_dropped_user_leaves_when_its_operations_are_done() {
    let node = Node::start();
    let multiplexer = node.multiplexer();
    let mut users: Vec<_> = (0..USERS).map(|_| user(&multiplexer)).collect();
    assert!(multiplexer.add_user().is_none());
    let mut leaver = users.pop().expect("there are users");
    let add = Verb::FetchAdd { remote: node.word(3), add: 1 };
    let batch: Vec<_> = (0..8).map(|id| Work { id, verb: add, signalled: true }).collect();
    leaver.post(&batch).unwrap();
    let drain = leaver.drain_handle();
    drop(leaver);
    if let Some(mut drain) = drain {
        drain.drain().unwrap();
    }
    while multiplexer.users() == USERS {
        std::thread::yield_now();
    }
    let mut word = [0; 8];
    node.memory.read(24, &mut word);
    assert_eq!(u64::from_le_bytes(word), 8, "posted operations take effect");
    users.push(user(&multiplexer));
}

#[test]
fn memories_of_users_that_have_gone_count() {
    let node = Node::start();
    let multiplexer = node.multiplexer();
    let limit = user(&multiplexer).limits().local_regions_max;
    for _ in 0..USERS {
        let mut endpoint = user(&multiplexer);
        for _ in 0..limit {
            endpoint.register_local(Arc::new(Memory::create("local", 4096).unwrap())).unwrap();
        }
        assert!(endpoint.register_local(Arc::new(Memory::create("local", 4096).unwrap())).is_err());
    }
    assert!(multiplexer.add_user().is_none(), "no user could register a memory");
}

#[test]
fn a_broken_endpoint_breaks_all_users_and_accepts_no_work() {
    let Node { target, region, .. } = Node::start();
    let options = ConnectOptions { reconnect_time: Duration::ZERO, ..ConnectOptions::default() };
    let endpoint = tcp::connect(target.address(), &KEY, WHO, options).unwrap();
    let multiplexer = Multiplexer::new(endpoint, USERS).unwrap();
    let mut users = [user(&multiplexer), user(&multiplexer)];
    drop(target);
    let verb = Verb::FetchAdd { remote: RemoteAddr { addr: region.base, key: region.key }, add: 1 };
    for endpoint in &mut users {
        endpoint.post(&[Work { id: 1, verb, signalled: false }]).unwrap();
    }
    for endpoint in &mut users {
        assert!(wait(endpoint, 1)[0].outcome.is_err());
        assert!(endpoint.is_broken());
    }
    assert!(multiplexer.add_user().is_none());
}
