//! A client of an array with an entry for each 4 KiB, which says who has it: a state machine, for
//! the model and for real memory alike.

use aquifer_pool::SizeClass;
use aquifer_pool::size::SECTION_CHUNKS;

/// Entries that one READ brings, at least.
const READ: u32 = 64;
/// Most entries of one READ.
pub const READ_MAX: u32 = SECTION_CHUNKS;

/// What is done to entries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Touch {
    /// A WRITE: nobody has it.
    Clear {
        /// Which.
        entry: u32,
    },
    /// A READ of neighbours, at most [`READ_MAX`].
    Read {
        /// The first.
        first: u32,
        /// How many.
        count: u32,
    },
    /// A CAS from nobody to this host.
    Take {
        /// Which.
        entry: u32,
        /// Who wants it.
        host: u16,
    },
}

/// A run of entries that a client has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Held {
    /// Of which node.
    pub node: usize,
    /// The first.
    pub first: u32,
    /// How much.
    pub class: SizeClass,
}

/// One operation at a time: what is wanted is in [`ArrayClient::touches`], until
/// [`ArrayClient::hear`] says that it is over.
#[derive(Debug)]
pub struct ArrayClient {
    host: u16,
    /// What it knows of each node's entries.
    views: Vec<Vec<u16>>,
    cursor: u32,
    /// What it is at.
    now: Option<Held>,
    touches: Vec<Touch>,
    /// Entries of a try that was lost, which go back with the next.
    got: Vec<u32>,
    /// What others had has been forgotten once for this operation.
    has_forgotten: bool,
}

impl ArrayClient {
    /// A client that remembers `nodes` nodes of so many sections as empty.
    pub fn new(host: u16, sections: u32, nodes: usize, seed: u64) -> Self {
        let entries = sections * SECTION_CHUNKS;
        let mixed = (seed ^ u64::from(host)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        // Each begins somewhere else.
        let cursor = u32::try_from(mixed % u64::from(entries)).unwrap_or(0);
        let views = vec![vec![0; entries as usize]; nodes];
        Self { host, views, cursor, now: None, touches: Vec::new(), got: Vec::new(), has_forgotten: false }
    }

    /// What is to be done, by one doorbell.
    pub fn touches(&self) -> &[Touch] {
        &self.touches
    }

    /// Begin to take; false if there is nothing as far as this client knows.
    pub fn take(&mut self, node: usize, class: SizeClass) -> bool {
        self.has_forgotten = false;
        let first = self.find(node, class);
        self.touches.clear();
        self.now = first.map(|first| Held { node, first, class });
        self.attempt();
        first.is_some()
    }

    /// Begin to give back.
    pub fn give(&mut self, held: Held) {
        self.touches.clear();
        self.now = None;
        for entry in held.first..held.first + held.class.chunks() {
            self.touches.push(Touch::Clear { entry });
            self.views[held.node][entry as usize] = 0;
        }
    }

    /// What came of it: the entries that were read and those that the CASes found, in order. What
    /// was taken, if that is over; nothing is, if something was given back.
    ///
    /// # Errors
    /// If the array is full.
    pub fn hear(&mut self, heard: &[u16]) -> Result<Heard, String> {
        let Some(Held { node, first, class }) = self.now else { return Ok(Heard::Given) };
        let mut heard = heard.iter().copied();
        let mut has_lost = false;
        let view = &mut self.views[node];
        self.got.clear();
        for touch in &self.touches {
            match *touch {
                Touch::Clear { .. } => {}
                Touch::Read { first, count } => {
                    let near = &mut view[first as usize..][..count as usize];
                    near.iter_mut().zip(&mut heard).for_each(|(owner, found)| *owner = found);
                }
                Touch::Take { entry, host } => {
                    let found = heard.next().unwrap_or(0);
                    has_lost |= found != 0;
                    view[entry as usize] = if found == 0 { host } else { found };
                    if found == 0 {
                        self.got.push(entry);
                    }
                }
            }
        }
        if !has_lost {
            return Ok(Heard::Taken(Held { node, first, class }));
        }
        let next = self.find(node, class).ok_or("the array is full")?;
        self.try_again(node, next, class);
        Ok(Heard::Lost)
    }

    /// What was got goes back, what is there is read, and others are tried.
    fn try_again(&mut self, node: usize, first: u32, class: SizeClass) {
        self.touches.clear();
        for entry in self.got.drain(..) {
            self.touches.push(Touch::Clear { entry });
            self.views[node][entry as usize] = 0;
        }
        let entries = u32::try_from(self.views[node].len()).unwrap_or(u32::MAX);
        let count = READ.max(class.chunks()).min(entries - first);
        self.touches.push(Touch::Read { first, count });
        self.now = Some(Held { node, first, class });
        self.attempt();
    }

    fn attempt(&mut self) {
        let Some(Held { first, class, .. }) = self.now else { return };
        let host = self.host;
        self.touches.extend((first..first + class.chunks()).map(|entry| Touch::Take { entry, host }));
    }

    /// The next run of entries that is free as far as this client knows. If there is none, others
    /// may have given something back: what they had is forgotten, once for each operation.
    fn find(&mut self, node: usize, class: SizeClass) -> Option<u32> {
        let found = self.find_known(node, class);
        if found.is_some() || std::mem::replace(&mut self.has_forgotten, true) {
            return found;
        }
        let host = self.host;
        self.views[node].iter_mut().filter(|owner| **owner != host).for_each(|owner| *owner = 0);
        self.find_known(node, class)
    }

    fn find_known(&mut self, node: usize, class: SizeClass) -> Option<u32> {
        let view = &self.views[node];
        let step = class.chunks();
        let runs = u32::try_from(view.len()).unwrap_or(u32::MAX) / step;
        let from = self.cursor / step;
        let is_free = |run: &u32| {
            let first = (run * step) as usize;
            view[first..first + step as usize].iter().all(|owner| *owner == 0)
        };
        let run = (from..runs).chain(0..from.min(runs)).find(is_free)?;
        self.cursor = run * step;
        Some(run * step)
    }
}

/// How far an operation is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Heard {
    /// Somebody else was faster: there is more to be done.
    Lost,
    /// It is over.
    Taken(Held),
    /// It is over.
    Given,
}

#[cfg(test)]
mod tests {
    use super::super::ways::Way;
    use super::super::words::NodeWords;
    use super::*;

    fn run(client: &mut ArrayClient, words: &mut NodeWords) -> Result<Option<Held>, String> {
        let mut heard = Vec::new();
        loop {
            words.touch(client.touches(), &mut heard);
            match client.hear(&heard)? {
                Heard::Lost => {}
                Heard::Taken(held) => return Ok(Some(held)),
                Heard::Given => return Ok(None),
            }
        }
    }

    #[test]
    fn two_that_begin_at_one_place_never_have_the_same() {
        let mut words = NodeWords::new(Way::Array, 1);
        let mut clients = [1, 2].map(|host| ArrayClient::new(host, 1, 1, 0));
        clients.iter_mut().for_each(|client| client.cursor = 0);
        let mut owners = [0; SECTION_CHUNKS as usize];
        let class = SizeClass::new(2).unwrap();
        let mut held = Vec::new();
        for turn in 0..SECTION_CHUNKS / class.chunks() {
            let number = (turn % 2) as usize;
            assert!(clients[number].take(0, class));
            let got = run(&mut clients[number], &mut words).unwrap().unwrap();
            for entry in got.first..got.first + 4 {
                assert_eq!(std::mem::replace(&mut owners[entry as usize], number + 1), 0);
            }
            held.push((number, got));
        }
        let full =
            if clients[0].take(0, class) { run(&mut clients[0], &mut words) } else { Err(String::new()) };
        assert!(full.is_err(), "nothing is left");
        for (number, held) in held {
            clients[number].give(held);
            assert_eq!(run(&mut clients[number], &mut words), Ok(None));
        }
        assert!((0..2).all(|_| clients[0].take(0, class) && run(&mut clients[0], &mut words).is_ok()));
    }

    #[test]
    fn what_others_have_given_back_is_found_again() {
        let mut words = NodeWords::new(Way::Array, 1);
        let mut clients = [1, 2].map(|host| ArrayClient::new(host, 1, 1, 0));
        // The other has everything; who wants something learns that.
        assert!(clients[1].take(0, SizeClass::SECTION));
        let all = run(&mut clients[1], &mut words).unwrap().unwrap();
        assert!(clients[0].take(0, SizeClass::SPAN));
        assert!(run(&mut clients[0], &mut words).is_err(), "all is the other's");
        clients[1].give(all);
        run(&mut clients[1], &mut words).unwrap();
        assert!(clients[0].take(0, SizeClass::SPAN), "it does not go by what it has seen for ever");
        assert!(run(&mut clients[0], &mut words).unwrap().is_some());
    }
}
