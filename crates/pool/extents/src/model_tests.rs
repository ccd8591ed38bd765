//! Seeded schedules of a session over a model of the pool. The agent is killed at any step, and the
//! next agent resumes from the book.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use aquifer_fabric::{Key, Memory, Tenant};
use aquifer_ipc::ring::{ExtentName, RingAnswer, RingRequest, RingStatus, TransferRange};
use aquifer_pool::{Extent, NodeId, SizeClass, Stretch};

use crate::book::Book;
use crate::core::{ExtentPool, SessionCore, Transfer, UserAccount, UserAccounts};

/// Panic payload of an agent that is killed.
struct AgentKilled;

thread_local! {
    /// Kill points until the agent is killed; 0: it is not killed.
    static KILL_POINTS_LEFT: Cell<u32> = const { Cell::new(0) };
}

/// A point at which the agent may be killed.
pub(crate) fn kill_point() {
    let left = KILL_POINTS_LEFT.get();
    if left > 0 {
        KILL_POINTS_LEFT.set(left - 1);
        if left == 1 {
            resume_unwind(Box::new(AgentKilled));
        }
    }
}

const NODES: u16 = 2;
const NODE_BYTES: u64 = 8 << 20;
const QUOTA_BYTES: u64 = 12 << 20;
/// Smallest size class that programs allocate.
const CLASS_MIN: u8 = 6;

/// State that outlives an agent: the nodes' memory, and the ring's data.
#[derive(Debug, Default)]
struct ModelMemory {
    allocated: BTreeMap<(NodeId, u64), Extent>,
    contents: HashMap<(NodeId, u64), u32>,
    data: HashMap<u32, u32>,
    next_key: u32,
    /// Nodes whose connection has broken.
    lost: Vec<NodeId>,
    unreachable: Vec<NodeId>,
    /// READs and WRITEs that reached a node.
    transfers: u32,
    now: Duration,
    /// The time in which the nodes clear a section; `None` if there is nothing to clear.
    clearing_interval: Option<Duration>,
}

impl ModelMemory {
    fn is_free(&self, node: NodeId, addr: u64, bytes: u64) -> bool {
        let overlaps = |extent: &Extent| {
            extent.node == node && extent.addr < addr + bytes && addr < extent.addr + extent.class.bytes()
        };
        !self.allocated.values().any(overlaps)
    }

    fn allocate(&mut self, class: SizeClass) -> Option<Extent> {
        self.allocate_row(class, 1)
    }

    /// Allocates `count` neighbouring extents under one key; returns the first.
    fn allocate_row(&mut self, class: SizeClass, count: u32) -> Option<Extent> {
        let bytes = class.bytes() * u64::from(count);
        for node in (0..NODES).map(NodeId) {
            for addr in (0..NODE_BYTES).step_by(usize::try_from(class.bytes()).unwrap()) {
                if addr + bytes <= NODE_BYTES && self.is_free(node, addr, bytes) {
                    self.next_key += 1;
                    let first = Extent { node, addr, class, key: Key(self.next_key) };
                    for addr in (addr..addr + bytes).step_by(usize::try_from(class.bytes()).unwrap()) {
                        self.allocated.insert((node, addr), Extent { addr, ..first });
                        self.contents.insert((node, addr), 0);
                    }
                    return Some(first);
                }
            }
        }
        None
    }
}

#[derive(Clone, Debug, Default)]
struct ModelPool(Rc<RefCell<ModelMemory>>);

impl ModelPool {
    fn free_one(&self, extent: &Extent) -> bool {
        kill_point();
        if self.0.borrow().unreachable.contains(&extent.node) {
            return false;
        }
        let freed = self.0.borrow_mut().allocated.remove(&(extent.node, extent.addr));
        assert_eq!(freed, Some(*extent), "only an allocated extent is freed");
        kill_point();
        true
    }
}

impl ExtentPool for ModelPool {
    fn begin_allocation(&self) -> Option<aquifer_pool::OperationGuard> {
        None
    }

    fn allocate(&mut self, class: SizeClass) -> Result<Extent, RingStatus> {
        kill_point();
        let extent = self.0.borrow_mut().allocate(class).ok_or(RingStatus::Full)?;
        kill_point();
        Ok(extent)
    }

    fn allocate_many(&mut self, class: SizeClass, count: u32) -> Result<Vec<Extent>, RingStatus> {
        let first = self.allocate(class)?;
        let rest = (1..count).map_while(|_| self.allocate(class).ok());
        Ok(std::iter::once(first).chain(rest).collect())
    }

    fn allocate_stretch(&mut self, sections: u32) -> Result<Stretch, RingStatus> {
        kill_point();
        let first = self.0.borrow_mut().allocate_row(SizeClass::SECTION, sections).ok_or(RingStatus::Full)?;
        kill_point();
        Ok(Stretch { first, sections })
    }

    fn clearing_progress(&self, _sections: u32) -> Option<u64> {
        let memory = self.0.borrow();
        memory.clearing_interval.map(|interval| memory.now.as_secs() / interval.as_secs())
    }

    fn last_record(&self, extent: Extent) -> u32 {
        extent.key.0
    }

    fn free(&mut self, extents: &[Extent]) -> Vec<bool> {
        extents.iter().map(|extent| self.free_one(extent)).collect()
    }

    fn resume_free(&mut self, extent: Extent, record: u32) -> bool {
        kill_point();
        let place = (extent.node, extent.addr);
        if self.0.borrow().unreachable.contains(&extent.node) {
            return false;
        }
        if self.0.borrow().allocated.get(&place).is_some_and(|extent| extent.key.0 == record) {
            self.free_one(&extent);
        }
        true
    }

    fn is_connected(&self, node: NodeId) -> bool {
        !self.0.borrow().unreachable.contains(&node)
    }

    fn transfer(&mut self, transfers: &[Transfer]) -> Vec<RingStatus> {
        let mut outcomes = Vec::new();
        for each in transfers {
            kill_point();
            let mut memory = self.0.borrow_mut();
            memory.transfers += 1;
            let place = (each.extent.node, each.extent.addr);
            let is_right = memory.allocated.get(&place) == Some(&each.extent);
            if is_right && each.is_write {
                let value = memory.data[&each.range.data];
                memory.contents.insert(place, value);
            } else if is_right {
                let value = memory.contents[&place];
                memory.data.insert(each.range.data, value);
            }
            outcomes.push(if is_right { RingStatus::Done } else { RingStatus::Refused });
        }
        outcomes
    }

    fn drain_lost_nodes(&mut self) -> Vec<NodeId> {
        std::mem::take(&mut self.0.borrow_mut().lost)
    }

    fn quota_bytes(&self) -> u64 {
        QUOTA_BYTES
    }

    fn has_room(&mut self, _bytes: u64) -> bool {
        true
    }

    fn now(&self) -> Duration {
        self.0.borrow().now
    }

    fn pause(&mut self, time: Duration) {
        self.0.borrow_mut().now += time;
    }
}

/// A session, its agents one after another, and the source of random choices.
struct SessionPlay {
    pool: ModelPool,
    book: Memory,
    session: Option<SessionCore<ModelPool>>,
    random: u64,
    has_kills: bool,
    kills: u32,
}

impl SessionPlay {
    fn new(seed: u64) -> Self {
        Self::of_user(seed, ModelPool::default(), UserAccounts::default().of(Tenant(1)))
    }

    fn of_user(seed: u64, pool: ModelPool, account: Arc<UserAccount>) -> Self {
        let book = Book::new().expect("memory");
        let memory = remap(book.memory());
        let session = Some(SessionCore::new(pool.clone(), Arc::new(book), account));
        Self {
            pool,
            book: memory,
            session,
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            has_kills: true,
            kills: 0,
        }
    }

    fn below(&mut self, bound: u32) -> u32 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        u32::try_from(self.random >> 33).unwrap() % bound
    }

    /// Runs `work` in an agent. If the agent is killed meanwhile, starts the next one and returns
    /// `None`.
    fn with_agent<T>(&mut self, work: impl FnOnce(&mut SessionCore<ModelPool>) -> T) -> Option<T> {
        if self.has_kills && self.below(4) == 0 {
            KILL_POINTS_LEFT.set(1 + self.below(12));
        }
        let mut session = self.session.take().expect("an agent runs");
        let outcome = catch_unwind(AssertUnwindSafe(|| work(&mut session)));
        KILL_POINTS_LEFT.set(0);
        match outcome {
            Ok(done) => {
                self.session = Some(session);
                Some(done)
            }
            Err(cause) if cause.is::<AgentKilled>() => {
                drop(session);
                self.restart_agent();
                None
            }
            Err(cause) => resume_unwind(cause),
        }
    }

    /// Starts the next agent, which may be killed at once.
    fn restart_agent(&mut self) {
        self.kills += 1;
        loop {
            let book = Arc::new(Book::recover(remap(&self.book)).expect("a book"));
            // The leak scan frees extents that were allocated and not recorded.
            let recorded: Vec<Extent> = book.entries().map(|(_, entry)| entry.extent).collect();
            self.pool.0.borrow_mut().allocated.retain(|_, extent| recorded.contains(extent));
            if self.below(3) == 0 {
                KILL_POINTS_LEFT.set(1 + self.below(6));
            }
            let pool = self.pool.clone();
            let account = UserAccounts::default().of(Tenant(1));
            account.add_inherited(recorded.iter().map(|extent| extent.class.bytes()).sum());
            let outcome = catch_unwind(AssertUnwindSafe(|| SessionCore::new(pool, book, account)));
            KILL_POINTS_LEFT.set(0);
            match outcome {
                Ok(session) => return self.session = Some(session),
                Err(cause) if cause.is::<AgentKilled>() => {}
                Err(cause) => resume_unwind(cause),
            }
        }
    }

    /// Answers requests as the session's thread does. Returns the answers when all are concluded.
    fn ask(&mut self, requests: &[Option<RingRequest>]) -> Vec<RingAnswer> {
        let start = self.session.as_ref().expect("an agent runs").next_request();
        let mut answers: Vec<Option<RingAnswer>> = vec![None; requests.len()];
        let end = start + requests.len() as u64;
        loop {
            let next = self.session.as_ref().expect("an agent runs").next_request();
            if next == end {
                return answers.into_iter().map(|answer| answer.expect("the request is concluded")).collect();
            }
            let from = usize::try_from(next - start).unwrap();
            let slots = &mut answers[from..];
            self.with_agent(|session| {
                let mut some = Vec::new();
                session.answer(next, &requests[from..], &mut some);
                for (slot, answer) in slots.iter_mut().zip(&some) {
                    *slot = Some(*answer);
                }
                session.conclude(next + some.len() as u64);
            });
        }
    }

    fn check(&self) {
        let book = Book::recover(remap(&self.book)).expect("a book");
        let memory = self.pool.0.borrow();
        let recorded: BTreeMap<(NodeId, u64), Extent> =
            book.entries().map(|(_, entry)| ((entry.extent.node, entry.extent.addr), entry.extent)).collect();
        assert_eq!(recorded, memory.allocated, "the book has all allocated extents");
    }
}

/// Maps the same memory again.
fn remap(memory: &Memory) -> Memory {
    Memory::whole(memory.fd().try_clone_to_owned().expect("a descriptor")).expect("a mapping")
}

/// The expected state of the program's extents.
#[derive(Default)]
struct ProgramModel {
    /// Extents in use, and their contents.
    in_use: Vec<(ExtentName, u32)>,
    freed: Vec<ExtentName>,
}

/// Checks the answer to a request.
type Expectation = Box<dyn FnOnce(&RingAnswer, &ModelMemory, &mut ProgramModel)>;

/// Draws the request number `at` of a round, and returns the check of its answer.
fn draw_request(
    play: &mut SessionPlay,
    program: &mut ProgramModel,
    round: u32,
    at: u32,
) -> (Option<RingRequest>, Expectation) {
    let range = TransferRange { offset: 0, len: 4, data: at * 8 };
    let last = program.in_use.len().checked_sub(1);
    let index = last.map(|last| play.below(u32::try_from(last + 1).unwrap()) as usize);
    match (play.below(8), index) {
        (0..=1, Some(index)) => {
            let value = round * 100 + at;
            program.in_use[index].1 = value;
            play.pool.0.borrow_mut().data.insert(range.data, value);
            let request = RingRequest::Write(program.in_use[index].0, range);
            (Some(request), Box::new(|answer, _, _| assert_eq!(answer.status, RingStatus::Done)))
        }
        (2..=3, Some(index)) => {
            let (name, value) = program.in_use[index];
            let expected: Expectation = Box::new(move |answer, memory, _| {
                assert_eq!(answer.status, RingStatus::Done);
                assert_eq!(memory.data[&range.data], value, "a read returns the last write");
            });
            (Some(RingRequest::Read(name, range)), expected)
        }
        (4, Some(index)) => {
            let (name, _) = program.in_use.swap_remove(index);
            let expected: Expectation = Box::new(move |answer, _, program| {
                assert_eq!(answer.status, RingStatus::Done);
                program.freed.push(name);
            });
            (Some(RingRequest::Free(name)), expected)
        }
        (5, _) => {
            let name = program.freed.last().copied();
            let name = name.filter(|name| !program.in_use.iter().any(|(held, _)| held == name));
            (name.map(RingRequest::Free), expect_second_free(name))
        }
        _ => {
            let class = CLASS_MIN + u8::try_from(play.below(4)).unwrap();
            let count = if class == 9 { 1 + play.below(3) } else { 1 };
            let request =
                if count > 1 { RingRequest::AllocateStretch(count) } else { RingRequest::Allocate(class) };
            (Some(request), expect_allocation(class, count))
        }
    }
}

/// The answer to a second free of an extent; `None` is an invalid request.
fn expect_second_free(name: Option<ExtentName>) -> Expectation {
    let status = if name.is_some() { RingStatus::Refused } else { RingStatus::BadRequest };
    Box::new(move |answer, _, program| {
        // A request of this round may have allocated the extent again.
        let is_held = |name| program.in_use.iter().any(|(held, _)| *held == name);
        assert!(answer.status == status || name.is_some_and(|name| !is_held(name)));
        if answer.status == RingStatus::Done {
            program.in_use.retain(|(held, _)| Some(*held) != name);
        }
    })
}

/// The answer to the allocation of `count` neighbouring extents.
fn expect_allocation(class: u8, count: u32) -> Expectation {
    Box::new(move |answer, memory, program| {
        if answer.status != RingStatus::Done {
            assert!(matches!(answer.status, RingStatus::Full | RingStatus::Quota), "{answer:?}");
            return;
        }
        assert_eq!(answer.extent.class, class);
        for section in 0..count {
            let addr = answer.extent.addr + u64::from(section) * SizeClass::SECTION.bytes();
            let name = ExtentName { addr, ..answer.extent };
            assert!(!program.in_use.iter().any(|(held, _)| *held == name), "allocated twice");
            let value = memory.contents[&(NodeId(name.node), name.addr)];
            program.in_use.push((name, value));
        }
    })
}

/// Plays a schedule. Returns the number of agents that were killed.
fn play(seed: u64) -> u32 {
    let mut play = SessionPlay::new(seed);
    let mut program = ProgramModel::default();
    for round in 0..60 {
        let (mut requests, mut expectations) = (Vec::new(), Vec::new());
        for at in 0..1 + play.below(6) {
            let (request, expected) = draw_request(&mut play, &mut program, round, at);
            requests.push(request);
            expectations.push(expected);
            // An allocate or free ends the round, because later requests depend on its answer.
            if !matches!(request, Some(RingRequest::Read(..) | RingRequest::Write(..))) {
                break;
            }
        }
        let answers = play.ask(&requests);
        for (answer, expected) in answers.iter().zip(expectations) {
            expected(answer, &play.pool.0.borrow(), &mut program);
        }
        for _ in 0..play.below(4) {
            play.with_agent(SessionCore::maintain_stock);
        }
        if play.below(12) == 0 {
            play.with_agent(SessionCore::free_stock);
        }
        play.check();
    }
    let mut session = play.session.take().expect("an agent runs");
    assert!(session.close(), "all nodes are reachable");
    assert!(play.pool.0.borrow().allocated.is_empty(), "a closed session owns nothing");
    play.kills
}

#[test]
fn an_agent_may_be_killed_at_any_step() {
    let seeds = match std::env::var("AQUIFER_SEED") {
        Ok(seed) => {
            let seed = seed.parse().expect("AQUIFER_SEED is a number");
            seed..seed + 1
        }
        Err(_) => 0..2000,
    };
    let mut kills = 0;
    for seed in seeds {
        let outcome = catch_unwind(|| play(seed));
        kills += outcome.unwrap_or_else(|cause| {
            println!("AQUIFER_SEED={seed} replays this schedule");
            resume_unwind(cause)
        });
    }
    assert!(kills > 0, "no agent was killed");
}

#[test]
fn extents_of_a_node_that_was_lost_are_not_trusted() {
    let mut play = SessionPlay::new(1);
    let first = ask(&mut play, RingRequest::Allocate(0)).extent;
    let second = ask(&mut play, RingRequest::Allocate(0)).extent;
    assert_eq!(ask(&mut play, RingRequest::Free(second)).status, RingStatus::Done);
    let range = TransferRange { offset: 0, len: 4, data: 0 };
    assert_eq!(ask(&mut play, RingRequest::Read(first, range)).status, RingStatus::Done);
    play.pool.0.borrow_mut().lost.push(NodeId(first.node));
    ask(&mut play, RingRequest::Read(first, range));
    assert_eq!(play.pool.0.borrow().allocated.len(), 1, "the stock on the lost node is freed");
    assert_eq!(ask(&mut play, RingRequest::Read(first, range)).status, RingStatus::NodeGone);
    let third = ask(&mut play, RingRequest::Allocate(0)).extent;
    assert_eq!(
        ask(&mut play, RingRequest::Read(third, range)).status,
        RingStatus::Done,
        "a later extent is trusted"
    );
    assert_eq!(ask(&mut play, RingRequest::Free(first)).status, RingStatus::Done);
    assert!(play.pool.0.borrow().allocated.values().all(|extent| extent.addr == third.addr));
    assert_eq!(ask(&mut play, RingRequest::Read(third, range)).status, RingStatus::Done, "and still is");
}

#[test]
fn extents_of_an_unreachable_node_are_freed_when_it_is_reachable() {
    let mut play = SessionPlay::new(1);
    let first = ask(&mut play, RingRequest::Allocate(0)).extent;
    assert_eq!(ask(&mut play, RingRequest::Free(first)).status, RingStatus::Done);
    play.pool.0.borrow_mut().unreachable.push(NodeId(first.node));
    let session = play.session.as_mut().expect("an agent runs");
    session.free_stock();
    assert!(!session.close(), "a free is deferred");
    assert_eq!(play.pool.0.borrow().allocated.len(), 1);
    play.check();
    play.restart_agent();
    play.pool.0.borrow_mut().unreachable.clear();
    let session = play.session.as_mut().expect("an agent runs");
    assert!(session.maintain_stock(), "the next agent frees it");
    assert!(play.pool.0.borrow().allocated.is_empty());
    play.check();
}

#[test]
fn a_freed_extent_is_refused() {
    let mut play = SessionPlay::new(1);
    let first = ask(&mut play, RingRequest::Allocate(0)).extent;
    let range = TransferRange { offset: 0, len: 4, data: 0 };
    assert_eq!(ask(&mut play, RingRequest::Free(first)).status, RingStatus::Done);
    assert_eq!(ask(&mut play, RingRequest::Read(first, range)).status, RingStatus::Refused);
    assert_eq!(ask(&mut play, RingRequest::Free(first)).status, RingStatus::Refused);
    assert_eq!(ask(&mut play, RingRequest::Allocate(0)).extent, first);
    assert_eq!(ask(&mut play, RingRequest::Read(first, range)).status, RingStatus::Done);
}

#[test]
fn a_stretch_waits_while_nodes_clear_sections() {
    let mut play = SessionPlay::new(1);
    let whole_node = u32::try_from(NODE_BYTES / SizeClass::SECTION.bytes()).unwrap();
    // Others own all of the first node and a section of the second.
    for _ in 0..=whole_node {
        play.pool.0.borrow_mut().allocate(SizeClass::SECTION).expect("room");
    }
    assert_eq!(ask(&mut play, RingRequest::AllocateStretch(whole_node)).status, RingStatus::Full);
    assert_eq!(play.pool.0.borrow().now, Duration::ZERO, "no section is to be cleared");
    let mut waited_if_cleared_in = |seconds| {
        let before = play.pool.0.borrow().now;
        play.pool.0.borrow_mut().clearing_interval = Some(Duration::from_secs(seconds));
        assert_eq!(ask(&mut play, RingRequest::AllocateStretch(whole_node)).status, RingStatus::Full);
        (play.pool.0.borrow().now - before).as_secs()
    };
    assert_eq!(waited_if_cleared_in(3600), 3, "the nodes clear nothing");
    assert_eq!(waited_if_cleared_in(2), 10, "the nodes are slow");
}

#[test]
fn right_keys_of_others_do_not_use_up_tries() {
    let mut play = SessionPlay::new(1);
    play.has_kills = false;
    let theirs: Vec<Extent> = {
        let mut memory = play.pool.0.borrow_mut();
        (0..10).map(|_| memory.allocate(SizeClass::CHUNK).expect("room")).collect()
    };
    let read = |extent: &Extent, wrong: u32| {
        let name = ExtentName { node: extent.node.0, class: 0, key: extent.key.0 ^ wrong, addr: extent.addr };
        Some(RingRequest::Read(name, TransferRange { offset: 0, len: 4, data: 0 }))
    };
    let many: Vec<_> = (0..200).map(|number| read(&theirs[number % 10], 0)).collect();
    assert!(play.ask(&many).iter().all(|answer| answer.status == RingStatus::Done));
    let wrong: Vec<_> = (0..200).map(|number| read(&theirs[0], 1 << 20 | number)).collect();
    let answers = play.ask(&wrong);
    let (tried, not_tried) = answers.split_at(32);
    assert!(tried.iter().all(|answer| answer.status == RingStatus::Refused));
    assert!(not_tried.iter().all(|answer| answer.status == RingStatus::KeyNotTried));
    assert_eq!(play.pool.0.borrow().transfers, 200 + 32, "a bounded number of wrong keys is tried");
    assert!(
        play.ask(&many).iter().all(|answer| answer.status == RingStatus::KeyNotTried),
        "then right keys are not tried either"
    );
}

#[test]
fn wrong_keys_of_a_session_do_not_use_up_the_tries_of_another() {
    let account = UserAccounts::default().of(Tenant(1));
    let mut hostile = SessionPlay::of_user(1, ModelPool::default(), Arc::clone(&account));
    let mut play = SessionPlay::of_user(2, hostile.pool.clone(), account);
    (hostile.has_kills, play.has_kills) = (false, false);
    let theirs = hostile.pool.0.borrow_mut().allocate(SizeClass::CHUNK).expect("room");
    let read = |key: u32| {
        let name = ExtentName { node: theirs.node.0, class: 0, key, addr: theirs.addr };
        Some(RingRequest::Read(name, TransferRange { offset: 0, len: 4, data: 0 }))
    };
    let wrong: Vec<_> = (0..200).map(|number| read(theirs.key.0 ^ (1 << 20 | number))).collect();
    for _ in 0..20 {
        hostile.ask(&wrong);
    }
    assert_eq!(hostile.ask(&[read(theirs.key.0)])[0].status, RingStatus::KeyNotTried);
    assert_eq!(play.ask(&[read(theirs.key.0)])[0].status, RingStatus::Done);
}

/// Answers one request.
fn ask(play: &mut SessionPlay, request: RingRequest) -> RingAnswer {
    let mut answers = Vec::new();
    let session = play.session.as_mut().expect("an agent runs");
    let next = session.next_request();
    session.answer(next, &[Some(request)], &mut answers);
    session.conclude(next + 1);
    answers[0]
}
