//! Tests of guarantees of the simulated fabric alone: replay, reordering, and crashes that leave
//! prefixes.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use aquifer_fabric::sim::{SimEndpoint, SimFabric, SimOptions, SimTarget};
use aquifer_fabric::{
    Access, Completion, Endpoint, Host, Identity, LocalSlice, Memory, Region, RemoteAddr, Scope, Target,
    Tenant, Verb, Work, WorkError,
};

const SEEDS: u64 = 200;

struct SimScene {
    fabric: SimFabric,
    target: SimTarget,
    memory: Arc<Memory>,
    region: Region,
}

fn scene(seed: u64, options: SimOptions) -> SimScene {
    let fabric = SimFabric::new(seed, options);
    let target = fabric.add_node();
    let memory = Arc::new(Memory::create("region", 4096).unwrap());
    let region = target.register(Arc::clone(&memory), Access::ALL, Scope::Anyone).unwrap();
    SimScene { fabric, target, memory, region }
}

impl SimScene {
    fn endpoint(&self, host: u16) -> SimEndpoint {
        let who = Identity { host: Host(host), epoch: 1, tenant: Tenant(1) };
        self.fabric.connect_endpoint(self.target.node(), who).unwrap()
    }

    fn remote(&self, word: u64) -> RemoteAddr {
        RemoteAddr { addr: self.region.base + word * 8, key: self.region.key }
    }

    fn word(&self, word: usize) -> u64 {
        self.memory.atomic_u64(word * 8).load(Ordering::SeqCst)
    }

    /// Ten increments of one word.
    fn increments(&self, word: u64) -> Vec<Work> {
        let verb = Verb::FetchAdd { remote: self.remote(word), add: 1 };
        (0..10).map(|id| Work { id, verb, signalled: true }).collect()
    }
}

fn drain(endpoint: &mut SimEndpoint) -> Vec<Completion> {
    let mut out = Vec::new();
    endpoint.poll(&mut out, usize::MAX);
    out
}

/// Three hosts increment one word. The values found are the history.
fn history(seed: u64) -> (u64, Vec<u64>) {
    let scene = scene(seed, SimOptions::default());
    let mut endpoints = [scene.endpoint(1), scene.endpoint(2), scene.endpoint(3)];
    for endpoint in &mut endpoints {
        endpoint.post(&scene.increments(0)).unwrap();
    }
    scene.fabric.run();
    let found = endpoints.iter_mut().flat_map(drain).map(|done| done.outcome.unwrap());
    (scene.fabric.now_ns(), found.collect())
}

#[test]
fn a_seed_replays_exactly_and_seeds_differ() {
    let histories: HashSet<_> = (0..SEEDS).map(history).collect();
    assert!((0..SEEDS).all(|seed| histories.contains(&history(seed))));
    assert!(histories.len() as u64 > SEEDS * 9 / 10, "{} histories", histories.len());
}

#[test]
fn endpoints_keep_their_order_and_overtake_each_other() {
    let mut overtook = 0;
    for seed in 0..SEEDS {
        let (_, found) = history(seed);
        for one in found.chunks(10) {
            assert!(one.is_sorted(), "seed {seed}: an endpoint's own work was reordered: {one:?}");
        }
        overtook += u64::from(found[0] > 0);
    }
    assert!(overtook > SEEDS / 10, "the first to post came first in all but {overtook}");
}

#[test]
fn a_crashed_host_leaves_a_prefix_and_nothing_more() {
    let mut lengths = HashSet::new();
    for seed in 0..SEEDS {
        let scene = scene(seed, SimOptions::default());
        let local = Arc::new(Memory::create("local", 4096).unwrap());
        let mut endpoint = scene.endpoint(1);
        let key = endpoint.register_local(Arc::clone(&local)).unwrap();
        let write = |id: u64| {
            let local = LocalSlice { key, offset: id * 8, len: 8 };
            let remote = RemoteAddr { addr: scene.region.base + id * 8, key: scene.region.key };
            Work { id, verb: Verb::Write { local, remote }, signalled: true }
        };
        (0..10).for_each(|word| local.atomic_u64(word * 8).store(7, Ordering::SeqCst));
        endpoint.post(&(0..10).map(write).collect::<Vec<_>>()).unwrap();
        for _ in 0..seed % 8 {
            scene.fabric.step();
        }
        scene.fabric.crash_host(Host(1));
        // The host restarts and uses its memory for something else.
        (0..10).for_each(|word| local.atomic_u64(word * 8).store(99, Ordering::SeqCst));
        scene.fabric.run();
        let log: Vec<u64> = (0..10).map(|word| scene.word(word)).collect();
        let written = log.iter().take_while(|&&word| word == 7).count();
        assert!(log[written..].iter().all(|&word| word == 0), "seed {seed}: {log:?}");
        lengths.insert(written);
        assert_eq!(drain(&mut endpoint), []);
        endpoint.post(&[write(0), write(1)]).unwrap();
        let ends: Vec<_> = drain(&mut endpoint).iter().map(|done| done.outcome).collect();
        assert_eq!(ends, [Err(WorkError::PeerGone), Err(WorkError::Flushed)]);
    }
    assert!(lengths.contains(&0) && lengths.contains(&10) && lengths.len() > 8, "{lengths:?}");
}

#[test]
fn completions_never_claim_less_than_what_happened() {
    let (mut unsure, mut sure) = (0, 0);
    for seed in 0..SEEDS {
        let scene = scene(seed, SimOptions::default());
        let mut endpoint = scene.endpoint(1);
        endpoint.post(&scene.increments(0)).unwrap();
        for _ in 0..seed % 16 {
            scene.fabric.step();
        }
        if seed % 2 == 0 {
            scene.fabric.crash_node(scene.target.node());
        } else {
            scene.fabric.partition(Host(1), scene.target.node(), true);
        }
        scene.fabric.run();
        let done = drain(&mut endpoint);
        assert_eq!(done.len(), 10, "seed {seed}: all posted operations complete");
        let is_unknown = |outcome| matches!(outcome, Err(WorkError::PeerGone | WorkError::Timeout));
        let succeeded = done.iter().filter(|done| done.outcome.is_ok()).count() as u64;
        let unknown = done.iter().filter(|done| is_unknown(done.outcome)).count() as u64;
        let happened = scene.word(0);
        assert!(succeeded <= happened && happened <= succeeded + unknown, "seed {seed}: {done:?}");
        unsure += u64::from(happened > succeeded);
        sure += u64::from(happened == succeeded);
    }
    assert!(unsure > 20 && sure > 20, "lost answers {unsure}, lost requests {sure}");
}

#[test]
fn a_mended_link_lets_new_endpoints_in_but_does_not_revive_old_ones() {
    let scene = scene(1, SimOptions::default());
    let node = scene.target.node();
    let mut old = scene.endpoint(1);
    scene.fabric.partition(Host(1), node, true);
    let who = Identity { host: Host(1), epoch: 1, tenant: Tenant(1) };
    assert!(scene.fabric.connect(node, who).is_err());
    assert_eq!(scene.target.send(Host(1), b"lost"), 0);
    old.post(&scene.increments(0)).unwrap();
    scene.fabric.run();
    scene.fabric.partition(Host(1), node, false);
    assert_eq!(drain(&mut old)[0].outcome, Err(WorkError::Timeout));
    old.post(&scene.increments(0)[..1]).unwrap();
    assert_eq!(drain(&mut old)[0].outcome, Err(WorkError::Flushed));
    let mut new = scene.endpoint(1);
    new.post(&scene.increments(0)).unwrap();
    scene.fabric.run();
    assert!(drain(&mut new).iter().all(|done| done.outcome.is_ok()));
    assert_eq!(scene.word(0), 10);
}

#[test]
fn slow_hosts_take_their_time() {
    let options = SimOptions { delay_ns: 1000..1001, ..SimOptions::default() };
    let scene = scene(1, options);
    let (mut fast, mut slow) = (scene.endpoint(1), scene.endpoint(2));
    scene.fabric.slow(Host(2), 50);
    slow.post(&scene.increments(0)[..1]).unwrap();
    fast.post(&scene.increments(1)[..1]).unwrap();
    assert_eq!(scene.fabric.next_event_ns(), Some(1000));
    scene.fabric.advance_to(49_999);
    assert_eq!((scene.word(0), scene.word(1)), (0, 1));
    assert_eq!((drain(&mut slow).len(), drain(&mut fast).len()), (0, 1));
    scene.fabric.advance_to(50_000);
    assert_eq!((scene.word(0), scene.fabric.now_ns()), (1, 50_000));
    scene.fabric.run();
    assert_eq!((drain(&mut slow).len(), scene.fabric.now_ns()), (1, 100_000));
    assert!(!scene.fabric.step());
}

#[test]
fn polling_moves_time_if_asked_to() {
    let scene = scene(1, SimOptions { step_on_poll: true, ..SimOptions::default() });
    let mut endpoint = scene.endpoint(1);
    endpoint.post(&scene.increments(0)).unwrap();
    let mut done = Vec::new();
    while done.len() < 10 {
        endpoint.poll(&mut done, 10);
    }
    assert_eq!(scene.word(0), 10);
    assert_eq!(endpoint.poll(&mut done, 10), 0);
}

#[test]
fn a_waiting_target_plays_events_until_a_message_arrives() {
    let scene = scene(5, SimOptions::default());
    let SimScene { fabric, target, .. } = &scene;
    target.wait(Duration::from_millis(3));
    assert_eq!(fabric.now_ns(), 3_000_000, "nothing comes, and the time passes");
    let mut endpoint = scene.endpoint(1);
    let memory = Arc::new(Memory::create("local", 4096).unwrap());
    let key = endpoint.register_local(memory).unwrap();
    let verb = Verb::Send { local: LocalSlice { key, offset: 0, len: 3 } };
    endpoint.post(&[Work { id: 0, verb, signalled: true }]).unwrap();
    target.wait(Duration::MAX);
    let from = target.receive(&mut Vec::new()).expect("the message has arrived");
    assert!(target.reply(from.endpoint, b"hi"));
    target.wait(Duration::MAX);
    let mut out = Vec::new();
    assert!(endpoint.receive(&mut out) && out == b"hi", "no event is left");
}
