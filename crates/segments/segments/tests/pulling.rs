//! Random orders of touches, READs and hand-overs. A READ has several steps, so pages could be
//! torn, outdated or lost. Each touch compares the page with the value that was written last.

use std::collections::HashMap;

use aquifer_mutation::Mutations;
use aquifer_ownership::Life;
use aquifer_segments::mutation::Mutation;
use aquifer_segments::pulling::{Lineage, Link, Puller, ReadEnd, ReadMode, ReadOrder, Step};

const HOSTS: usize = 3;
const PAGES: u32 = 3;
const STEPS: usize = 120;

/// The mutations of this crate.
const MUTATIONS: [Mutation; 4] =
    [Mutation::ReadTwice, Mutation::ReadOntoOlder, Mutation::AcceptBusy, Mutation::TrustCopy];

/// The two halves of a page, which a READ copies one after the other.
type Page = [u64; 2];

/// A READ in flight.
#[derive(Clone, Copy, Debug)]
struct Read {
    by: usize,
    generation: u64,
    order: ReadOrder,
    /// Number of steps that the READ has made.
    stage: usize,
    was_present: bool,
}

struct World {
    random: u64,
    memory: Vec<Vec<Page>>,
    /// The pages that are present in each copy.
    present: HashMap<Link, Vec<bool>>,
    /// The pullers of all generations, by generation.
    pullers: HashMap<u64, Puller>,
    reads: Vec<Read>,
    owner: Link,
    lineage: Lineage,
    truth: Vec<u64>,
    touches: u64,
    moves: u64,
    /// A page that a puller has reported lost, although no host has died.
    lost: Option<u32>,
}

const fn life(host: usize) -> Life {
    Life { host: [0, 1, 2][host], epoch: 1 }
}

impl World {
    fn new(seed: u64) -> Self {
        let owner = Link { at: life(0), generation: 0 };
        let mut memory = vec![vec![[0; 2]; PAGES as usize]; HOSTS];
        let truth: Vec<u64> = (1..=u64::from(PAGES)).collect();
        for (page, value) in memory[0].iter_mut().zip(&truth) {
            *page = [*value; 2];
        }
        Self {
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            memory,
            present: HashMap::from([(owner, vec![true; PAGES as usize])]),
            pullers: HashMap::new(),
            reads: Vec::new(),
            owner,
            lineage: Lineage::whole(owner),
            truth,
            touches: 0,
            moves: 0,
            lost: None,
        }
    }

    fn below(&mut self, bound: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        usize::try_from(self.random >> 33).unwrap() % bound
    }

    fn host(&self) -> usize {
        usize::from(self.owner.at.host)
    }

    /// Performs one random step. Fails if a page is lost or has wrong bytes.
    fn step(&mut self) -> Result<(), String> {
        match self.below(10) {
            0..3 => self.touch()?,
            3 => {
                let puller = self.pullers.get_mut(&self.owner.generation);
                let step = puller.and_then(Puller::ahead);
                self.perform(self.owner, step);
            }
            4 => self.transfer(),
            _ if !self.reads.is_empty() => {
                let at = self.below(self.reads.len());
                self.advance(at);
            }
            _ => {}
        }
        self.lost.map_or(Ok(()), |page| Err(format!("page {page} is lost")))
    }

    /// Touches a page: the program reads or writes it if it is present, and otherwise waits for it.
    fn touch(&mut self) -> Result<(), String> {
        let page = u32::try_from(self.below(PAGES as usize)).unwrap();
        let (at, host) = (page as usize, self.host());
        if !self.present[&self.owner][at] {
            let step = self.pullers.get_mut(&self.owner.generation).unwrap().demand(page);
            self.perform(self.owner, step);
            return Ok(());
        }
        self.touches += 1;
        let (found, wanted) = (self.memory[host][at], self.truth[at]);
        if found != [wanted; 2] {
            return Err(format!("page {page} at host {host} is {found:?} instead of {wanted}"));
        }
        if self.below(2) == 0 {
            self.truth[at] += 100;
            self.memory[host][at] = [self.truth[at]; 2];
        }
        Ok(())
    }

    fn transfer(&mut self) {
        let to = (self.host() + 1 + self.below(HOSTS - 1)) % HOSTS;
        let is_busy = self.reads.iter().any(|read| read.by == to);
        if is_busy && !Mutation::AcceptBusy.is_active() {
            return;
        }
        let owner = Link { at: life(to), generation: self.owner.generation + 1 };
        // If all pages are present at the owner, the lineage is its copy alone.
        let is_whole = self.present[&self.owner].iter().all(|is_present| *is_present);
        let lineage = if is_whole { Lineage::whole(self.owner) } else { self.lineage.clone() };
        let Some(lineage) = lineage.handed_to(owner) else { return };
        if let Some(puller) = self.pullers.get_mut(&self.owner.generation) {
            puller.finish();
        }
        self.moves += 1;
        (self.owner, self.lineage) = (owner, lineage.clone());
        self.present.insert(owner, vec![false; PAGES as usize]);
        self.pullers.insert(owner.generation, Puller::new(owner.at, PAGES, lineage));
    }

    fn perform(&mut self, puller: Link, step: Option<Step>) {
        match step {
            Some(Step::Read(order)) => {
                let (by, generation) = (usize::from(puller.at.host), puller.generation);
                self.reads.push(Read { by, generation, order, stage: 0, was_present: false });
            }
            Some(Step::Complete { page, .. }) => {
                self.present.get_mut(&puller).unwrap()[page as usize] = true;
            }
            Some(Step::Lost { page, .. }) => self.lost = Some(page),
            None => {}
        }
    }

    /// Performs the next step of a READ.
    fn advance(&mut self, at: usize) {
        let Read { by, order: ReadOrder { page, from, mode, .. }, stage, .. } = self.reads[at];
        let is_present = self.present[&from][page as usize] || Mutation::TrustCopy.is_active();
        let source = self.memory[usize::from(from.at.host)][page as usize];
        match (mode, stage) {
            (ReadMode::Presence | ReadMode::Own, _) => return self.end(at, is_present),
            (ReadMode::Page, 0) => self.reads[at].was_present = is_present,
            (ReadMode::Page, 1 | 2) => self.memory[by][page as usize][stage - 1] = source[stage - 1],
            (ReadMode::Page, _) => {
                let is_found = is_present && self.reads[at].was_present;
                return self.end(at, is_found);
            }
        }
        self.reads[at].stage += 1;
    }

    fn end(&mut self, at: usize, is_found: bool) {
        let Read { by, generation, order, .. } = self.reads.remove(at);
        let end = if is_found { ReadEnd::Found } else { ReadEnd::NotThere };
        let step = self.pullers.get_mut(&generation).unwrap().read_ended(order.page, end);
        self.perform(Link { at: life(by), generation }, step);
    }
}

/// Plays a schedule. Returns the numbers of touches and hand-overs, or the fault.
fn run(seed: u64) -> Result<(u64, u64), String> {
    let mut world = World::new(seed);
    (0..STEPS).try_for_each(|_| world.step())?;
    // All pages can be pulled at the end.
    while let Some(page) = (0..PAGES).find(|page| !world.present[&world.owner][*page as usize]) {
        let step = world.pullers.get_mut(&world.owner.generation).unwrap().demand(page);
        world.perform(world.owner, step);
        while !world.reads.is_empty() {
            world.advance(0);
        }
        if let Some(page) = world.lost {
            return Err(format!("page {page} is lost"));
        }
    }
    for (page, value) in world.memory[world.host()].iter().zip(&world.truth) {
        if *page != [*value; 2] {
            return Err(format!("at the end a page is {page:?} instead of {value}"));
        }
    }
    Ok((world.touches, world.moves))
}

#[test]
fn each_touch_reads_the_value_that_was_written_last() {
    let (mut touches, mut moves) = (0, 0);
    for seed in 0..20_000 {
        match run(seed) {
            Ok((touched, moved)) => (touches, moves) = (touches + touched, moves + moved),
            Err(fault) => panic!("seed {seed}: {fault}"),
        }
    }
    println!("{touches} touches, {moves} hand-overs");
    assert!(touches > 100_000 && moves > 50_000);
}

#[test]
fn each_mutation_is_detected() {
    for mutation in MUTATIONS {
        let seed = mutation.while_active(|| (0..2000).find(|seed| run(*seed).is_err()));
        println!("{mutation:?}: seed {seed:?}");
        assert!(seed.is_some(), "{mutation:?} is not detected");
    }
}
