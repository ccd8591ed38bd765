//! Hand-overs between hosts over TCP: each read returns the value that was written last.

mod support;

use std::sync::Arc;
use std::time::Duration;

use aquifer_fabric::Memory;
use aquifer_segments::host::{Arrival, ProcessIdentity, SegmentError, SegmentHost, SegmentKey};
use support::{Records, TestKeeper, name, open};

const TENANT: u32 = 1000;
const SEGMENT: SegmentKey = SegmentKey { tenant: TENANT, id: 5 };
const PAGE: usize = 4096;
const PAGES: u32 = 70;
const BYTES: u64 = PAGES as u64 * PAGE as u64;

struct Cluster {
    records: Records,
    hosts: Vec<SegmentHost>,
    keepers: Vec<Arc<TestKeeper>>,
}

impl Cluster {
    fn start(hosts: u16) -> Self {
        let mut cluster = Self { records: Records::new(), hosts: Vec::new(), keepers: Vec::new() };
        (1..=hosts).for_each(|host| cluster.add(host));
        cluster
    }

    fn add(&mut self, host: u16) {
        let keeper = Arc::<TestKeeper>::default();
        let started = self.records.start(host, 2 * BYTES, &keeper);
        open(&started, TENANT);
        self.hosts.push(started);
        self.keepers.push(keeper);
    }

    /// Ends the process of an agent, and starts the next one.
    fn restart(&mut self, at: usize) {
        let life = self.hosts[at].life();
        drop(self.hosts.remove(at));
        self.hosts.insert(at, self.records.start(life.host, 2 * BYTES, &self.keepers[at]));
        open(&self.hosts[at], TENANT);
    }

    fn transfer(&self, from: usize, to: usize) -> Arc<Memory> {
        self.hosts[from].connect(SEGMENT, &name(&self.hosts[to])).unwrap();
        self.hosts[from].transfer(SEGMENT).unwrap();
        let arrival = receive(&self.hosts[to]);
        assert_eq!((arrival.segment, arrival.is_partial), (SEGMENT, true));
        assert!(!self.hosts[from].owns(SEGMENT) && self.hosts[to].owns(SEGMENT));
        arrival.data
    }
}

fn receive(host: &SegmentHost) -> Arrival {
    host.receive(TENANT, &name(host), Duration::from_secs(10)).unwrap()
}

fn allocate(host: &SegmentHost) -> Arc<Memory> {
    host.allocate(SEGMENT, BYTES, &name(host)).unwrap().data
}

fn value_of(memory: &Memory, page: u32) -> u64 {
    let mut bytes = [0; PAGE];
    memory.read(page as usize * PAGE, &mut bytes);
    let words = bytes.as_chunks::<8>().0;
    assert!(words.iter().all(|word| *word == words[0]), "page {page} is torn");
    u64::from_le_bytes(words[0])
}

fn write(memory: &Memory, page: u32, value: u64) {
    let bytes: Vec<u8> = value.to_le_bytes().into_iter().cycle().take(PAGE).collect();
    memory.write(page as usize * PAGE, &bytes);
}

#[test]
fn a_segment_moves_and_its_pages_follow() {
    let cluster = Cluster::start(2);
    let memory = allocate(&cluster.hosts[0]);
    (0..PAGES).for_each(|page| write(&memory, page, u64::from(page) + 1));
    let error = cluster.hosts[0].allocate(SEGMENT, BYTES, "p").unwrap_err();
    assert!(matches!(error, SegmentError::Exists(SEGMENT)), "{error}");
    let memory = cluster.transfer(0, 1);
    assert!(matches!(cluster.hosts[0].pull(SEGMENT, 0), Err(SegmentError::NotOwned(_))));
    for page in [69, 0, 63, 64, 63] {
        cluster.hosts[1].pull(SEGMENT, page).unwrap();
        assert_eq!(value_of(&memory, page), u64::from(page) + 1);
    }
    write(&memory, 63, 1000);
    cluster.hosts[1].pull_all(SEGMENT).unwrap();
    for page in 0..PAGES {
        let wanted = if page == 63 { 1000 } else { u64::from(page) + 1 };
        assert_eq!(value_of(&memory, page), wanted);
    }
    // The first host has freed its copy, and receives the segment again.
    let memory = cluster.transfer(1, 0);
    cluster.hosts[0].pull(SEGMENT, 63).unwrap();
    assert_eq!(value_of(&memory, 63), 1000);
}

#[test]
fn a_segment_can_be_handed_over_before_its_pages_are_pulled() {
    const MOVES: u64 = 300;
    let cluster = Cluster::start(3);
    let (mut owner, mut random) = (0, 88_172_645_463_325_252_u64);
    let mut below = move |bound: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random >> 33) % bound
    };
    let mut memory = allocate(&cluster.hosts[0]);
    let mut values = vec![0; PAGES as usize];
    let (mut scattered, mut touches) = (0, 0);
    for change in 1..=MOVES {
        for _ in 0..below(20) {
            let page = u32::try_from(below(u64::from(PAGES))).unwrap();
            cluster.hosts[owner].pull(SEGMENT, page).unwrap();
            assert_eq!(value_of(&memory, page), values[page as usize], "page {page} after {change} moves");
            values[page as usize] = change * 1000 + u64::from(page);
            write(&memory, page, values[page as usize]);
            touches += 1;
        }
        let to = (owner + 1 + usize::try_from(below(2)).unwrap()) % 3;
        match cluster.hosts[owner].connect(SEGMENT, &name(&cluster.hosts[to])) {
            Ok(()) if below(5) == 0 => cluster.hosts[owner].abort(SEGMENT).unwrap(),
            Ok(()) => {
                cluster.hosts[owner].transfer(SEGMENT).unwrap();
                memory = receive(&cluster.hosts[to]).data;
                owner = to;
            }
            Err(SegmentError::Scattered(_)) => {
                cluster.hosts[owner].pull_all(SEGMENT).unwrap();
                scattered += 1;
            }
            Err(error) => panic!("{error}"),
        }
    }
    cluster.hosts[owner].pull_all(SEGMENT).unwrap();
    for (page, value) in (0..).zip(&values) {
        assert_eq!(value_of(&memory, page), *value);
    }
    println!("{touches} touches, and {scattered} times all pages were pulled");
    assert!(scattered > 10 && touches > 1000);
}

#[test]
fn a_hand_over_to_a_target_that_dies_before_the_message_is_retracted() {
    let mut cluster = Cluster::start(2);
    let memory = allocate(&cluster.hosts[0]);
    write(&memory, 3, 77);
    let dead = name(&cluster.hosts[1]);
    cluster.hosts[0].connect(SEGMENT, &dead).unwrap();
    drop(cluster.hosts.pop());
    // While the target's life lasts, it is unknown whether it has received the message.
    std::thread::scope(|scope| {
        let source = &cluster.hosts[0];
        let transfer = scope.spawn(|| source.transfer(SEGMENT));
        while source.owns(SEGMENT) {
            std::thread::yield_now();
        }
        cluster.records.end_life(2);
        let error = transfer.join().unwrap().unwrap_err();
        assert!(matches!(error, SegmentError::Declined(SEGMENT)), "{error}");
        assert!(source.owns(SEGMENT));
        assert!(source.receive(TENANT, &name(source), Duration::ZERO).is_none(), "the process still has it");
    });
    assert_eq!(value_of(&memory, 3), 77);
    let error = cluster.hosts[0].connect(SEGMENT, &dead).unwrap_err();
    assert!(matches!(error, SegmentError::NoProcess(_)), "{error}");
    cluster.add(3);
    let memory = cluster.transfer(0, 1);
    cluster.hosts[1].pull(SEGMENT, 3).unwrap();
    assert_eq!(value_of(&memory, 3), 77);
    // Now the host that has the pages dies.
    drop(cluster.hosts.remove(0));
    cluster.records.end_life(1);
    let error = cluster.hosts[0].pull(SEGMENT, 4).unwrap_err();
    assert_eq!(error.to_string(), "page 4 of segment 5 of user 1000 is lost: the host that had it has died");
    cluster.hosts[0].pull(SEGMENT, 3).unwrap();
    assert_eq!(value_of(&memory, 3), 77);
}

#[test]
fn a_segment_is_handed_over_only_to_processes_of_the_tenant() {
    let cluster = Cluster::start(2);
    let [first, second] = &cluster.hosts[..] else { unreachable!() };
    let _memory = allocate(first);
    second.open_process(TENANT + 1, "other", None, &[]).unwrap();
    let errors = [
        first.connect(SEGMENT, "other").unwrap_err(),
        first.connect(SEGMENT, "worker-1").unwrap_err(),
        first.open_process(TENANT, "worker-2", None, &[]).unwrap_err(),
        first.open_process(TENANT, "a/b", None, &[]).unwrap_err(),
        first.open_process(TENANT, &"n".repeat(65), None, &[]).unwrap_err(),
        first.allocate(SegmentKey { id: 6, ..SEGMENT }, 4097, "p").unwrap_err(),
        first.allocate(SegmentKey { id: 6, ..SEGMENT }, BYTES + 4096, "p").unwrap_err(),
        second.connect(SEGMENT, "worker-1").unwrap_err(),
        second.transfer(SEGMENT).unwrap_err(),
        first.transfer(SEGMENT).unwrap_err(),
    ];
    assert!(matches!(
        errors,
        [
            SegmentError::NoProcess(_),
            SegmentError::NoProcess(_),
            SegmentError::NameTaken(_),
            SegmentError::Name(_),
            SegmentError::Name(_),
            SegmentError::Length(4097),
            SegmentError::Limit { .. },
            SegmentError::NotOwned(_),
            SegmentError::NotOwned(_),
            SegmentError::Declined(_),
        ]
    ));
    // A closed process accepts no segment.
    first.connect(SEGMENT, "worker-2").unwrap();
    first.abort(SEGMENT).unwrap();
    second.close_process(TENANT, "worker-2").unwrap();
    assert!(matches!(first.connect(SEGMENT, "worker-2"), Err(SegmentError::NoProcess(_))));
    first.open_process(TENANT, "worker-2", None, &[]).unwrap();
    assert!(first.owns(SEGMENT));
}

#[test]
fn a_segment_is_passed_on_between_processes_of_a_host() {
    let cluster = Cluster::start(2);
    let [first, second] = &cluster.hosts[..] else { unreachable!() };
    let memory = allocate(first);
    write(&memory, 3, 77);
    first.open_process(TENANT, "neighbour", None, &[]).unwrap();
    first.connect(SEGMENT, "neighbour").unwrap();
    first.transfer(SEGMENT).unwrap();
    assert!(!first.is_owned_by(SEGMENT, "worker-1") && first.is_owned_by(SEGMENT, "neighbour"));
    let arrival = first.receive(TENANT, "neighbour", Duration::from_secs(10)).unwrap();
    assert!(!arrival.is_partial && Arc::ptr_eq(&arrival.data, &memory));
    first.connect(SEGMENT, "worker-2").unwrap();
    first.transfer(SEGMENT).unwrap();
    let arrival = receive(second);
    second.pull(SEGMENT, 3).unwrap();
    assert_eq!(value_of(&arrival.data, 3), 77);
    // A process that ends leaves the segment to the next one of its name, even if it did not
    // receive it.
    for _ in 0..2 {
        second.close_process(TENANT, "worker-2").unwrap();
        assert_eq!(second.list(TENANT)[0].process, "worker-2");
        second.open_process(TENANT, "worker-2", None, &[]).unwrap();
    }
    let arrival = receive(second);
    assert_eq!((arrival.segment, arrival.is_partial), (SEGMENT, true));
    assert!(second.receive(TENANT, "worker-2", Duration::ZERO).is_none());
}

/// The process of the last successful connect receives the segment; after an abort, none does.
#[test]
fn a_connect_replaces_the_previous_one() {
    let cluster = Cluster::start(2);
    let [first, second] = &cluster.hosts[..] else { unreachable!() };
    let _memory = allocate(first);
    first.open_process(TENANT, "neighbour", None, &[]).unwrap();
    second.open_process(TENANT, "other", None, &[]).unwrap();
    first.connect(SEGMENT, "worker-2").unwrap();
    first.connect(SEGMENT, "other").unwrap();
    first.transfer(SEGMENT).unwrap();
    assert!(second.is_owned_by(SEGMENT, "other"));
    second.connect(SEGMENT, "worker-1").unwrap();
    second.connect(SEGMENT, "worker-2").unwrap();
    second.transfer(SEGMENT).unwrap();
    assert!(second.is_owned_by(SEGMENT, "worker-2"));
    for connect in ["other", "worker-1"] {
        second.connect(SEGMENT, connect).unwrap();
        second.abort(SEGMENT).unwrap();
        assert!(matches!(second.transfer(SEGMENT), Err(SegmentError::Declined(_))));
        second.connect(SEGMENT, connect).unwrap();
        second.connect(SEGMENT, "absent").unwrap_err();
        assert!(matches!(second.transfer(SEGMENT), Err(SegmentError::Declined(_))));
    }
    assert!(second.is_owned_by(SEGMENT, "worker-2"));
}

#[test]
fn a_segment_is_deallocated_and_its_number_used_again() {
    let cluster = Cluster::start(2);
    let [first, second] = &cluster.hosts[..] else { unreachable!() };
    let address = first.allocate(SEGMENT, BYTES, "worker-1").unwrap().address;
    cluster.transfer(0, 1);
    assert!(matches!(first.deallocate(SEGMENT), Err(SegmentError::NotOwned(_))));
    second.pull(SEGMENT, 3).unwrap();
    second.connect(SEGMENT, "worker-1").unwrap();
    assert!(matches!(second.deallocate(SEGMENT), Err(SegmentError::Busy(_))));
    second.abort(SEGMENT).unwrap();
    second.deallocate(SEGMENT).unwrap();
    assert!(second.list(TENANT).is_empty() && !second.owns(SEGMENT));
    // Hand-overs of the new segment are not taken for those of the former one.
    for (owner, other) in [(1, 0), (0, 1)] {
        let arrival = cluster.hosts[owner].allocate(SEGMENT, BYTES, &name(&cluster.hosts[owner])).unwrap();
        assert_eq!(arrival.address, address);
        write(&arrival.data, 3, 70 + owner as u64);
        let memory = cluster.transfer(owner, other);
        cluster.hosts[other].pull_all(SEGMENT).unwrap();
        assert_eq!(value_of(&memory, 3), 70 + owner as u64);
        assert_eq!(value_of(&memory, 4), 0);
        cluster.hosts[other].deallocate(SEGMENT).unwrap();
    }
}

/// The target has memory of the former length, because it was prepared, and it is not notified when
/// a prepared hand-over is retracted.
#[test]
fn a_target_prepares_for_another_length_of_the_same_number() {
    let cluster = Cluster::start(2);
    let [first, second] = &cluster.hosts[..] else { unreachable!() };
    for pages in [1, 3, 2] {
        first.allocate(SEGMENT, pages * PAGE as u64, "worker-1").unwrap();
        first.connect(SEGMENT, "worker-2").unwrap();
        first.abort(SEGMENT).unwrap();
        first.deallocate(SEGMENT).unwrap();
    }
    let memory = first.allocate(SEGMENT, BYTES, "worker-1").unwrap().data;
    write(&memory, 3, 7);
    let memory = cluster.transfer(0, 1);
    second.pull_all(SEGMENT).unwrap();
    assert_eq!(value_of(&memory, 3), 7);
}

/// Number of descriptors of this process for the bytes of segments.
fn count_descriptors() -> usize {
    let links = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| entry.unwrap().path().read_link().ok());
    links.filter(|link| link.to_string_lossy().starts_with("/memfd:aquifer-segment (")).count()
}

/// The memory is freed although programs keep descriptors of it, and agents have registered it with
/// their connections to each other.
#[test]
fn memory_of_deallocated_segments_is_freed() {
    let cluster = Cluster::start(2);
    let [first, second] = &cluster.hosts[..] else { unreachable!() };
    for _ in 0..40 {
        let sent = allocate(first);
        write(&sent, 3, 7);
        let received = cluster.transfer(0, 1);
        second.pull_all(SEGMENT).unwrap();
        assert_eq!(value_of(&received, 3), 7);
        second.deallocate(SEGMENT).unwrap();
        for kept in [sent, received] {
            while kept.allocated_bytes().unwrap() > 0 {
                std::thread::yield_now();
            }
        }
    }
    assert!(count_descriptors() < 40, "{} descriptors", count_descriptors());
}

#[test]
fn many_small_segments_of_a_user_leave_room_for_those_of_another() {
    const OTHER: u32 = TENANT + 1;
    let cluster = Cluster::start(1);
    let host = &cluster.hosts[0];
    let own = name(host);
    for id in 0..100 {
        host.allocate(SegmentKey { tenant: TENANT, id }, PAGE as u64, &own).unwrap();
    }
    open(host, OTHER);
    host.allocate(SegmentKey { tenant: OTHER, id: 0 }, PAGE as u64, &own).unwrap();
}

#[test]
fn concurrent_requests_do_not_exceed_the_limit() {
    let cluster = Cluster::start(1);
    let host = &cluster.hosts[0];
    for _ in 0..20 {
        let allocated: Vec<SegmentKey> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|id| {
                    let segment = SegmentKey { tenant: TENANT, id };
                    scope.spawn(move || (segment, host.allocate(segment, BYTES, &name(host))))
                })
                .collect();
            let ends = threads.into_iter().map(|thread| thread.join().unwrap());
            ends.filter_map(|(segment, allocated)| match allocated {
                Ok(_) => Some(segment),
                Err(SegmentError::Limit { .. }) => None,
                Err(error) => panic!("{error}"),
            })
            .collect()
        });
        assert_eq!(allocated.len(), 2);
        for segment in allocated {
            assert!(!host.is_gone(segment).unwrap());
            host.deallocate(segment).unwrap();
            assert!(host.is_gone(segment).unwrap());
        }
    }
}

/// Agents are restarted between the calls of hand-overs and pulls: no page is lost, and missing
/// pages are pulled from the new addresses of their copies.
#[test]
fn segments_outlive_the_process_of_their_agent() {
    let mut cluster = Cluster::start(3);
    let memory = allocate(&cluster.hosts[0]);
    (0..PAGES).for_each(|page| write(&memory, page, u64::from(page) + 1));
    cluster.restart(0);
    let memory = receive(&cluster.hosts[0]).data;
    write(&memory, 0, 100);
    // An intent is retracted: the process has to connect again.
    cluster.hosts[0].connect(SEGMENT, "worker-2").unwrap();
    cluster.restart(0);
    assert!(matches!(cluster.hosts[0].transfer(SEGMENT), Err(SegmentError::Declined(_))));
    let memory = receive(&cluster.hosts[0]).data;
    write(&memory, 1, 101);
    // A prepared target is still prepared after a restart.
    cluster.hosts[0].connect(SEGMENT, "worker-2").unwrap();
    cluster.restart(1);
    cluster.hosts[0].transfer(SEGMENT).unwrap_or_else(|error| {
        // The connection ended with the process, so the source must query the outcome.
        assert!(matches!(error, SegmentError::Unknown(_) | SegmentError::Declined(_)), "{error}");
        while !cluster.hosts[0].owns(SEGMENT) && !cluster.hosts[1].owns(SEGMENT) {
            std::thread::yield_now();
        }
    });
    if cluster.hosts[0].owns(SEGMENT) {
        cluster.hosts[0].connect(SEGMENT, "worker-2").unwrap();
        cluster.hosts[0].transfer(SEGMENT).unwrap();
    }
    let memory = receive(&cluster.hosts[1]).data;
    cluster.hosts[1].pull(SEGMENT, 0).unwrap();
    assert_eq!(value_of(&memory, 0), 100);
    write(&memory, 0, 200);
    // The source is restarted at another address, with other keys.
    cluster.restart(0);
    cluster.hosts[1].pull(SEGMENT, 1).unwrap();
    assert_eq!(value_of(&memory, 1), 101);
    // The target is restarted with the pages that it has pulled, and pulls the others.
    cluster.restart(1);
    let arrival = receive(&cluster.hosts[1]);
    assert!(arrival.is_partial);
    assert_eq!((value_of(&arrival.data, 0), value_of(&arrival.data, 1)), (200, 101));
    cluster.hosts[1].pull(SEGMENT, 2).unwrap();
    assert_eq!(value_of(&arrival.data, 2), 3);
    // The segment is handed over while both hosts have pages, and both are restarted.
    let memory = cluster.transfer(1, 2);
    (0..2).for_each(|host| cluster.restart(host));
    cluster.hosts[2].pull_all(SEGMENT).unwrap();
    for (page, wanted) in (0..PAGES).zip([200, 101].into_iter().chain(3..)) {
        assert_eq!(value_of(&memory, page), wanted, "page {page}");
    }
    cluster.hosts[2].deallocate(SEGMENT).unwrap();
    cluster.restart(2);
    assert!(!cluster.hosts[2].owns(SEGMENT));
    assert_eq!(cluster.keepers[2].len(), 0);
}

/// A running process keeps its segments and its name when its agent is restarted, and another
/// process cannot take them over.
#[test]
fn a_process_keeps_its_segments_when_its_agent_is_restarted() {
    let mut cluster = Cluster::start(1);
    let own = ProcessIdentity::of(std::process::id());
    let mut other = std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
    let other_identity = ProcessIdentity::of(other.id());
    cluster.hosts[0].open_process(TENANT, "own", own, &[]).unwrap();
    cluster.hosts[0].open_process(TENANT, "other", other_identity, &[]).unwrap();
    let segment = |id| SegmentKey { tenant: TENANT, id };
    let tenure = cluster.hosts[0].allocate(segment(1), 4096, "own").unwrap().tenure;
    let held = |ids: [u64; 3]| ids.map(|id| (id, tenure));
    cluster.hosts[0].allocate(segment(2), 4096, "own").unwrap();
    cluster.hosts[0].allocate(segment(3), 4096, "other").unwrap();
    cluster.restart(0);
    let host = &cluster.hosts[0];
    for (name, identity) in [("own", other_identity), ("own", None), ("other", own)] {
        let error = host.open_process(TENANT, name, identity, &held([1, 2, 3])).unwrap_err();
        assert!(matches!(error, SegmentError::NameTaken(_)), "{error}");
    }
    assert_eq!(host.open_process(TENANT, "own", own, &held([1, 3, 4])).unwrap().0, [1]);
    let arrival = host.receive(TENANT, "own", Duration::ZERO).unwrap();
    assert_eq!(arrival.segment.id, 2, "the process had not received this one");
    assert!(host.receive(TENANT, "own", Duration::ZERO).is_none());
    // The process has ended: the next one of its name receives its segments.
    drop(other.stdin.take());
    other.wait().unwrap();
    assert!(host.open_process(TENANT, "other", own, &[]).unwrap().0.is_empty());
    assert_eq!(host.receive(TENANT, "other", Duration::ZERO).unwrap().segment.id, 3);
}

/// A process that repeats its request for the outcome of a hand-over may have received the segment
/// again meanwhile.
#[test]
fn a_segment_that_returns_begins_a_new_tenure() {
    let mut cluster = Cluster::start(2);
    let own = ProcessIdentity::of(std::process::id());
    for name in ["own", "other"] {
        cluster.hosts[0].open_process(TENANT, name, own, &[]).unwrap();
    }
    let first = cluster.hosts[0].allocate(SEGMENT, BYTES, "own").unwrap().tenure;
    for (from, to) in [("own", "other"), ("other", "own")] {
        assert!(cluster.hosts[0].is_owned_by(SEGMENT, from));
        cluster.hosts[0].connect(SEGMENT, to).unwrap();
        cluster.hosts[0].transfer(SEGMENT).unwrap();
    }
    let second = cluster.hosts[0].receive(TENANT, "own", Duration::ZERO).unwrap().tenure;
    assert!(!cluster.hosts[0].is_tenure(SEGMENT, "own", first));
    assert!(cluster.hosts[0].is_tenure(SEGMENT, "own", second));
    assert!(!cluster.hosts[0].is_tenure(SEGMENT, "other", second));
    // The process opens at the next agent before it knows the outcome of its first hand-over, and
    // receives the segment again.
    cluster.restart(0);
    let held = cluster.hosts[0].open_process(TENANT, "own", own, &[(SEGMENT.id, first)]).unwrap();
    assert_eq!(held, (Vec::new(), Vec::new()));
    assert_eq!(cluster.hosts[0].receive(TENANT, "own", Duration::ZERO).unwrap().tenure, second);
    // The same between hosts: the agent still knows the previous tenure after the hand-over.
    cluster.hosts[0].connect(SEGMENT, &name(&cluster.hosts[1])).unwrap();
    cluster.hosts[0].transfer(SEGMENT).unwrap();
    assert!(cluster.hosts[0].is_tenure(SEGMENT, "own", second));
    receive(&cluster.hosts[1]);
    cluster.hosts[1].connect(SEGMENT, "own").unwrap();
    cluster.hosts[1].transfer(SEGMENT).unwrap();
    let third = cluster.hosts[0].receive(TENANT, "own", Duration::from_secs(10)).unwrap().tenure;
    assert!(third != second && !cluster.hosts[0].is_tenure(SEGMENT, "own", second));
    assert!(cluster.hosts[0].is_tenure(SEGMENT, "own", third));
}

/// After a hand-over that the target declines at the last moment, the process has its segment
/// again.
#[test]
fn pages_are_pulled_after_a_retracted_hand_over() {
    let mut cluster = Cluster::start(3);
    let memory = allocate(&cluster.hosts[0]);
    (0..PAGES).for_each(|page| write(&memory, page, u64::from(page) + 1));
    let memory = cluster.transfer(0, 1);
    cluster.hosts[1].connect(SEGMENT, "worker-3").unwrap();
    // The next process of the target's agent has no segments, as if the keeper had ended, too.
    cluster.keepers[2] = Arc::default();
    cluster.restart(2);
    let error = cluster.hosts[1].transfer(SEGMENT).unwrap_err();
    if matches!(error, SegmentError::Unknown(_)) {
        while !cluster.hosts[1].owns(SEGMENT) {
            std::thread::yield_now();
        }
    }
    for page in [5, 69] {
        cluster.hosts[1].pull(SEGMENT, page).unwrap();
        assert_eq!(value_of(&memory, page), u64::from(page) + 1);
    }
    cluster.hosts[1].pull_all(SEGMENT).unwrap();
    assert!((0..PAGES).all(|page| value_of(&memory, page) == u64::from(page) + 1));
}

/// Discarded pages stay lost when the agent is restarted: a program sees neither zeros nor older
/// bytes.
#[test]
fn discarded_pages_stay_lost() {
    let mut cluster = Cluster::start(2);
    let memory = allocate(&cluster.hosts[0]);
    (0..PAGES).for_each(|page| write(&memory, page, 1));
    // The first host has older bytes of each page.
    let memory = cluster.transfer(0, 1);
    (0..PAGES).for_each(|page| cluster.hosts[1].pull(SEGMENT, page).unwrap());
    (0..PAGES).for_each(|page| write(&memory, page, 2));
    let memory = cluster.transfer(1, 0);
    cluster.hosts[0].pull(SEGMENT, 5).unwrap();
    cluster.hosts[0].discard(SEGMENT).unwrap();
    for _ in 0..2 {
        cluster.hosts[0].pull(SEGMENT, 5).unwrap();
        assert_eq!(value_of(&memory, 5), 2);
        let error = cluster.hosts[0].pull(SEGMENT, 6).unwrap_err();
        assert!(matches!(error, SegmentError::Lost { page: 6, .. }), "{error}");
        cluster.restart(0);
    }
}

/// A descriptor that is no userfaultfd could make a thread of the agent wait for ever.
#[test]
fn only_a_userfaultfd_is_served() {
    let cluster = Cluster::start(1);
    let _memory = allocate(&cluster.hosts[0]);
    let (reader, mut writer) = std::io::pipe().unwrap();
    std::io::Write::write_all(&mut writer, &[0x12; 32]).unwrap();
    for fd in [reader.into(), std::fs::File::open("/dev/zero").unwrap().into()] {
        let error = cluster.hosts[0].serve_faults(SEGMENT, fd, true).unwrap_err();
        assert!(error.to_string().contains("no userfaultfd"), "{error}");
    }
}
