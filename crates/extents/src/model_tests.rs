//! Sessions over a pool that is modelled, whose agent is killed at any step and followed by another: seeded schedules, everything checked.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use aquifer_fabric::{Key, Memory, Tenant};
use aquifer_ipc::ring::{ExtentAnswer, ExtentName, ExtentRequest, ExtentStatus, TransferRange};
use aquifer_pool::{Extent, NodeId, SizeClass, Stretch};

use crate::account::Accounts;
use crate::book::{Book, State};
use crate::session::{Move, Pool, Session};

/// The end of an agent.
struct Killed;

thread_local! {
    /// Steps until the agent is killed; 0: it is not.
    static STEPS_LEFT: Cell<u32> = const { Cell::new(0) };
}

/// A place where an agent may be killed.
pub(crate) fn may_die() {
    let left = STEPS_LEFT.get();
    if left > 0 {
        STEPS_LEFT.set(left - 1);
        if left == 1 {
            resume_unwind(Box::new(Killed));
        }
    }
}

const NODES: u16 = 2;
const NODE_BYTES: u64 = 8 << 20;
const QUOTA_BYTES: u64 = 12 << 20;
/// The sizes that programs ask for: from this one on.
const CLASS_MIN: u8 = 6;

/// What outlives agents: the nodes' memory, and the ring's data.
#[derive(Debug, Default)]
struct World {
    taken: BTreeMap<(NodeId, u64), Extent>,
    contents: HashMap<(NodeId, u64), u32>,
    data: HashMap<u32, u32>,
    next_key: u32,
    gone: Vec<NodeId>,
    /// Nodes that cannot be reached.
    away: Vec<NodeId>,
    /// READs and WRITEs that reached a node.
    tried: u32,
}

impl World {
    fn is_free(&self, node: NodeId, addr: u64, bytes: u64) -> bool {
        let overlaps = |extent: &Extent| {
            extent.node == node && extent.addr < addr + bytes && addr < extent.addr + extent.class.bytes()
        };
        !self.taken.values().any(overlaps)
    }

    fn allocate(&mut self, class: SizeClass) -> Option<Extent> {
        self.allocate_row(class, 1)
    }

    /// So many side by side, under one key.
    fn allocate_row(&mut self, class: SizeClass, count: u32) -> Option<Extent> {
        let bytes = class.bytes() * u64::from(count);
        for node in (0..NODES).map(NodeId) {
            for addr in (0..NODE_BYTES).step_by(usize::try_from(class.bytes()).unwrap()) {
                if addr + bytes <= NODE_BYTES && self.is_free(node, addr, bytes) {
                    self.next_key += 1;
                    let first = Extent { node, addr, class, key: Key(self.next_key) };
                    for addr in (addr..addr + bytes).step_by(usize::try_from(class.bytes()).unwrap()) {
                        self.taken.insert((node, addr), Extent { addr, ..first });
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
struct ModelPool(Rc<RefCell<World>>);

impl ModelPool {
    fn give_one_back(&self, extent: &Extent) -> bool {
        may_die();
        if self.0.borrow().away.contains(&extent.node) {
            return false;
        }
        let struck = self.0.borrow_mut().taken.remove(&(extent.node, extent.addr));
        assert_eq!(struck, Some(*extent), "what is given back is what was taken");
        may_die();
        true
    }
}

impl Pool for ModelPool {
    fn under_way(&self) -> Option<aquifer_pool::OperationGuard> {
        None
    }

    fn allocate(&mut self, class: SizeClass) -> Result<Extent, ExtentStatus> {
        may_die();
        let extent = self.0.borrow_mut().allocate(class).ok_or(ExtentStatus::Full)?;
        may_die();
        Ok(extent)
    }

    fn allocate_many(&mut self, class: SizeClass, count: u32) -> Result<Vec<Extent>, ExtentStatus> {
        let first = self.allocate(class)?;
        let rest = (1..count).map_while(|_| self.allocate(class).ok());
        Ok(std::iter::once(first).chain(rest).collect())
    }

    fn allocate_stretch(&mut self, sections: u32) -> Result<Stretch, ExtentStatus> {
        may_die();
        let first =
            self.0.borrow_mut().allocate_row(SizeClass::SECTION, sections).ok_or(ExtentStatus::Full)?;
        may_die();
        Ok(Stretch { first, sections })
    }

    fn sections_to_clear(&self, _sections: u32) -> Option<u32> {
        None
    }

    fn last_record(&self, extent: Extent) -> u32 {
        extent.key.0
    }

    fn give_back(&mut self, extents: &[Extent]) -> Vec<bool> {
        extents.iter().map(|extent| self.give_one_back(extent)).collect()
    }

    fn give_back_begun(&mut self, extent: Extent, record: u32) -> bool {
        may_die();
        let place = (extent.node, extent.addr);
        if self.0.borrow().away.contains(&extent.node) {
            return false;
        }
        if self.0.borrow().taken.get(&place).is_some_and(|extent| extent.key.0 == record) {
            self.give_one_back(&extent);
        }
        true
    }

    fn reaches(&self, node: NodeId) -> bool {
        !self.0.borrow().away.contains(&node)
    }

    fn transfer(&mut self, moves: &[Move]) -> Vec<ExtentStatus> {
        let mut outcomes = Vec::new();
        for each in moves {
            may_die();
            let mut world = self.0.borrow_mut();
            world.tried += 1;
            let place = (each.extent.node, each.extent.addr);
            let is_right = world.taken.get(&place) == Some(&each.extent);
            if is_right && each.is_write {
                let value = world.data[&each.piece.data];
                world.contents.insert(place, value);
            } else if is_right {
                let value = world.contents[&place];
                world.data.insert(each.piece.data, value);
            }
            outcomes.push(if is_right { ExtentStatus::Done } else { ExtentStatus::Refused });
        }
        outcomes
    }

    fn take_gone(&mut self) -> Vec<NodeId> {
        std::mem::take(&mut self.0.borrow_mut().gone)
    }

    fn quota_bytes(&self) -> u64 {
        QUOTA_BYTES
    }
}

/// An agent after the other, as a session's program sees them.
struct Play {
    pool: ModelPool,
    book: Memory,
    session: Option<Session<ModelPool>>,
    random: u64,
    /// Agents are killed.
    is_deadly: bool,
    kills: u32,
}

impl Play {
    fn new(seed: u64) -> Self {
        let pool = ModelPool::default();
        let book = Book::new().expect("memory");
        let memory = again(book.memory());
        let session = Some(Session::new(pool.clone(), Arc::new(book), Accounts::default().of(Tenant(1))));
        Self {
            pool,
            book: memory,
            session,
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            is_deadly: true,
            kills: 0,
        }
    }

    fn below(&mut self, bound: u32) -> u32 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        u32::try_from(self.random >> 33).unwrap() % bound
    }

    /// Work for an agent; if it is killed over it, the next one is there afterwards.
    fn with_agent<T>(&mut self, work: impl FnOnce(&mut Session<ModelPool>) -> T) -> Option<T> {
        if self.is_deadly && self.below(4) == 0 {
            STEPS_LEFT.set(1 + self.below(12));
        }
        let mut session = self.session.take().expect("an agent is there");
        let outcome = catch_unwind(AssertUnwindSafe(|| work(&mut session)));
        STEPS_LEFT.set(0);
        match outcome {
            Ok(done) => {
                self.session = Some(session);
                Some(done)
            }
            Err(cause) if cause.is::<Killed>() => {
                drop(session);
                self.follow();
                None
            }
            Err(cause) => resume_unwind(cause),
        }
    }

    /// Another agent comes, and may be killed as it does.
    fn follow(&mut self) {
        self.kills += 1;
        loop {
            let book = Arc::new(Book::recover(again(&self.book)).expect("a book"));
            // What was taken and not noted goes back.
            let noted: Vec<Extent> = book.entries().map(|(_, entry)| entry.extent).collect();
            self.pool.0.borrow_mut().taken.retain(|_, extent| noted.contains(extent));
            if self.below(3) == 0 {
                STEPS_LEFT.set(1 + self.below(6));
            }
            let pool = self.pool.clone();
            let account = Accounts::default().of(Tenant(1));
            account.charge(noted.iter().map(|extent| extent.class.bytes()).sum());
            let outcome = catch_unwind(AssertUnwindSafe(|| Session::new(pool, book, account)));
            STEPS_LEFT.set(0);
            match outcome {
                Ok(session) => return self.session = Some(session),
                Err(cause) if cause.is::<Killed>() => {}
                Err(cause) => resume_unwind(cause),
            }
        }
    }

    /// As the session's thread does; the answers, once each is concluded.
    fn ask(&mut self, requests: &[Option<ExtentRequest>]) -> Vec<ExtentAnswer> {
        let start = self.session.as_ref().expect("an agent").next_request();
        let mut answers: Vec<Option<ExtentAnswer>> = vec![None; requests.len()];
        let end = start + requests.len() as u64;
        loop {
            let next = self.session.as_ref().expect("an agent").next_request();
            if next == end {
                return answers.into_iter().map(|answer| answer.expect("it is concluded")).collect();
            }
            let from = usize::try_from(next - start).unwrap();
            let slots = &mut answers[from..];
            self.with_agent(|session| {
                let mut some = Vec::new();
                session.answer(next, &requests[from..], &mut some, Duration::ZERO);
                for (slot, answer) in slots.iter_mut().zip(&some) {
                    *slot = Some(*answer);
                }
                session.conclude(next + some.len() as u64);
            });
        }
    }

    fn check(&self) {
        let book = Book::recover(again(&self.book)).expect("a book");
        let world = self.pool.0.borrow();
        let noted: BTreeMap<(NodeId, u64), Extent> =
            book.entries().map(|(_, entry)| ((entry.extent.node, entry.extent.addr), entry.extent)).collect();
        assert_eq!(noted, world.taken, "what is written down is what was taken");
    }
}

fn again(memory: &Memory) -> Memory {
    Memory::whole(memory.fd().try_clone_to_owned().expect("a descriptor")).expect("a mapping")
}

/// What the program knows of its extents.
#[derive(Default)]
struct Shadow {
    held: Vec<(ExtentName, u32)>,
    given_back: Vec<ExtentName>,
}

/// What must come of a request.
type Expectation = Box<dyn FnOnce(&ExtentAnswer, &World, &mut Shadow)>;

fn play(seed: u64) -> u32 {
    let mut play = Play::new(seed);
    let mut shadow = Shadow::default();
    for round in 0..60 {
        let mut requests = Vec::new();
        let mut expected: Vec<Expectation> = Vec::new();
        for at in 0..1 + play.below(6) {
            let piece = TransferRange { offset: 0, len: 4, data: at * 8 };
            let index = shadow
                .held
                .len()
                .checked_sub(1)
                .map(|last| play.below(u32::try_from(last + 1).unwrap()) as usize);
            match (play.below(8), index) {
                (0..=1, Some(index)) => {
                    let value = round * 100 + at;
                    shadow.held[index].1 = value;
                    play.pool.0.borrow_mut().data.insert(piece.data, value);
                    requests.push(Some(ExtentRequest::Write(shadow.held[index].0, piece)));
                    expected.push(Box::new(|answer, _, _| assert_eq!(answer.status, ExtentStatus::Done)));
                }
                (2..=3, Some(index)) => {
                    let (name, value) = shadow.held[index];
                    requests.push(Some(ExtentRequest::Read(name, piece)));
                    expected.push(Box::new(move |answer, world, _| {
                        assert_eq!(answer.status, ExtentStatus::Done);
                        assert_eq!(world.data[&piece.data], value, "what is read was written last");
                    }));
                }
                (4, Some(index)) => {
                    let (name, _) = shadow.held.swap_remove(index);
                    requests.push(Some(ExtentRequest::Free(name)));
                    expected.push(Box::new(move |answer, _, shadow| {
                        assert_eq!(answer.status, ExtentStatus::Done);
                        shadow.given_back.push(name);
                    }));
                }
                (5, _) => {
                    let name = shadow.given_back.last().copied();
                    let name = name.filter(|name| !shadow.held.iter().any(|(held, _)| held == name));
                    requests.push(name.map(ExtentRequest::Free));
                    let status =
                        if name.is_some() { ExtentStatus::Refused } else { ExtentStatus::BadRequest };
                    // It may have been given again meanwhile, by a request of this round.
                    expected.push(Box::new(move |answer, _, shadow| {
                        let is_held = |name| shadow.held.iter().any(|(held, _)| *held == name);
                        assert!(answer.status == status || name.is_some_and(|name| !is_held(name)));
                        if answer.status == ExtentStatus::Done {
                            shadow.held.retain(|(held, _)| Some(*held) != name);
                        }
                    }));
                }
                _ => {
                    let class = CLASS_MIN + u8::try_from(play.below(4)).unwrap();
                    let count = if class == 9 { 1 + play.below(3) } else { 1 };
                    let is_many = count > 1;
                    requests.push(Some(if is_many {
                        ExtentRequest::AllocateStretch(count)
                    } else {
                        ExtentRequest::Allocate(class)
                    }));
                    expected.push(Box::new(move |answer, world, shadow| match answer.status {
                        ExtentStatus::Done => {
                            assert_eq!(answer.extent.class, class);
                            for section in 0..count {
                                let addr =
                                    answer.extent.addr + u64::from(section) * SizeClass::SECTION.bytes();
                                let name = ExtentName { addr, ..answer.extent };
                                assert!(!shadow.held.iter().any(|(held, _)| *held == name), "given twice");
                                let value = world.contents[&(NodeId(name.node), name.addr)];
                                shadow.held.push((name, value));
                            }
                        }
                        status => {
                            assert!(matches!(status, ExtentStatus::Full | ExtentStatus::Quota), "{status:?}")
                        }
                    }));
                }
            }
            // What the requests of a round depend on must not change in it.
            if !matches!(requests.last(), Some(Some(ExtentRequest::Read(..) | ExtentRequest::Write(..)))) {
                break;
            }
        }
        let answers = play.ask(&requests);
        for (answer, expected) in answers.iter().zip(expected) {
            expected(answer, &play.pool.0.borrow(), &mut shadow);
        }
        for _ in 0..play.below(4) {
            play.with_agent(Session::tend_stock);
        }
        if play.below(12) == 0 {
            play.with_agent(Session::drop_stock);
        }
        play.check();
    }
    let mut session = play.session.take().expect("an agent");
    assert!(session.close(), "all nodes can be reached");
    assert!(play.pool.0.borrow().taken.is_empty(), "a session that is over has nothing");
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
            println!("AQUIFER_SEED={seed} plays this again");
            resume_unwind(cause)
        });
    }
    assert!(kills > 0, "no agent was killed");
}

#[test]
fn what_was_on_a_node_that_was_gone_is_not_trusted_again() {
    let mut play = Play::new(1);
    let first = ask(&mut play, ExtentRequest::Allocate(0)).extent;
    let second = ask(&mut play, ExtentRequest::Allocate(0)).extent;
    assert_eq!(ask(&mut play, ExtentRequest::Free(second)).status, ExtentStatus::Done);
    let piece = TransferRange { offset: 0, len: 4, data: 0 };
    assert_eq!(ask(&mut play, ExtentRequest::Read(first, piece)).status, ExtentStatus::Done);
    play.pool.0.borrow_mut().gone.push(NodeId(first.node));
    ask(&mut play, ExtentRequest::Read(first, piece));
    assert_eq!(play.pool.0.borrow().taken.len(), 1, "what was in stock is not given to anybody again");
    assert_eq!(ask(&mut play, ExtentRequest::Read(first, piece)).status, ExtentStatus::NodeGone);
    let third = ask(&mut play, ExtentRequest::Allocate(0)).extent;
    assert_eq!(
        ask(&mut play, ExtentRequest::Read(third, piece)).status,
        ExtentStatus::Done,
        "what was taken later is"
    );
    assert_eq!(ask(&mut play, ExtentRequest::Free(first)).status, ExtentStatus::Done);
    assert!(play.pool.0.borrow().taken.values().all(|extent| extent.addr == third.addr));
    assert_eq!(ask(&mut play, ExtentRequest::Read(third, piece)).status, ExtentStatus::Done, "and stays so");
}

#[test]
fn what_is_on_a_node_that_cannot_be_reached_is_given_back_when_it_can() {
    let mut play = Play::new(1);
    let first = ask(&mut play, ExtentRequest::Allocate(0)).extent;
    assert_eq!(ask(&mut play, ExtentRequest::Free(first)).status, ExtentStatus::Done);
    play.pool.0.borrow_mut().away.push(NodeId(first.node));
    let session = play.session.as_mut().expect("an agent");
    session.drop_stock();
    assert!(!session.close(), "it is owed");
    assert_eq!(play.pool.0.borrow().taken.len(), 1);
    play.check();
    play.follow();
    play.pool.0.borrow_mut().away.clear();
    let session = play.session.as_mut().expect("an agent");
    assert!(session.tend_stock(), "another agent gives it back");
    assert!(play.pool.0.borrow().taken.is_empty());
    play.check();
}

#[test]
fn what_was_given_back_is_closed_to_the_program() {
    let mut play = Play::new(1);
    let first = ask(&mut play, ExtentRequest::Allocate(0)).extent;
    let piece = TransferRange { offset: 0, len: 4, data: 0 };
    assert_eq!(ask(&mut play, ExtentRequest::Free(first)).status, ExtentStatus::Done);
    assert_eq!(ask(&mut play, ExtentRequest::Read(first, piece)).status, ExtentStatus::Refused);
    assert_eq!(ask(&mut play, ExtentRequest::Free(first)).status, ExtentStatus::Refused);
    assert_eq!(ask(&mut play, ExtentRequest::Allocate(0)).extent, first);
    assert_eq!(ask(&mut play, ExtentRequest::Read(first, piece)).status, ExtentStatus::Done);
}

#[test]
fn right_keys_of_others_are_not_counted_as_guesses() {
    let mut play = Play::new(1);
    play.is_deadly = false;
    let theirs: Vec<Extent> = {
        let mut world = play.pool.0.borrow_mut();
        (0..10).map(|_| world.allocate(SizeClass::CHUNK).expect("room")).collect()
    };
    let read = |extent: &Extent, wrong: u32| {
        let name = ExtentName { node: extent.node.0, class: 0, key: extent.key.0 ^ wrong, addr: extent.addr };
        Some(ExtentRequest::Read(name, TransferRange { offset: 0, len: 4, data: 0 }))
    };
    let many: Vec<_> = (0..200).map(|number| read(&theirs[number % 10], 0)).collect();
    assert!(play.ask(&many).iter().all(|answer| answer.status == ExtentStatus::Done));
    let wrong: Vec<_> = (0..200).map(|number| read(&theirs[0], 1 << 20 | number)).collect();
    assert!(play.ask(&wrong).iter().all(|answer| answer.status == ExtentStatus::Refused));
    assert_eq!(play.pool.0.borrow().tried, 200 + 32, "only so many wrong ones are tried");
    assert!(play.ask(&many).iter().all(|answer| answer.status == ExtentStatus::Refused), "nor others then");
}

/// Ask for one thing.
fn ask(play: &mut Play, request: ExtentRequest) -> ExtentAnswer {
    let mut answers = Vec::new();
    let session = play.session.as_mut().expect("an agent");
    let next = session.next_request();
    session.answer(next, &[Some(request)], &mut answers, Duration::ZERO);
    session.conclude(next + 1);
    answers[0]
}

#[test]
fn a_book_with_damaged_entries_is_gone_on_with() {
    let book = Book::new().expect("memory");
    let extent = Extent { node: NodeId(1), addr: 8192, class: SizeClass::CHUNK, key: Key(7) };
    book.add(0, &extent, State::Given, 3);
    book.add(2, &extent, State::Stocked, 4);
    let memory = again(book.memory());
    memory.atomic_u64(64 + 16).store(77, std::sync::atomic::Ordering::Relaxed);
    let entries: Vec<_> = Book::recover(memory).expect("a book").entries().collect();
    assert_eq!(entries.len(), 1);
    assert!(Book::recover(Memory::create("none", 4096).expect("memory")).is_err());
}
