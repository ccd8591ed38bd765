//! What is really so, beside what the words say: who may do what is judged by this.

use crate::recovery_model::memory::{CHUNKS, Group, HOSTS, Host, SPANS};

/// A span's life.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Life {
    Empty,
    /// Its section says that it is open; its first chunk is not yet taken.
    Opening(Host),
    Open,
    /// Its last chunk was given back; its section does not know.
    Closing(Host),
    Whole(Host),
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Truth {
    pub lives: [Life; SPANS],
    pub owners: [[Option<Host>; CHUNKS]; SPANS],
    pub dead: [bool; HOSTS],
    /// The first thing that must not be.
    pub broken: Option<&'static str>,
}

impl Truth {
    pub const NEW: Self = Self {
        lives: [Life::Empty; SPANS],
        owners: [[None; CHUNKS]; SPANS],
        dead: [false; HOSTS],
        broken: None,
    };

    fn demand(&mut self, holds: bool, otherwise: &'static str) {
        if !holds {
            self.broken.get_or_insert(otherwise);
        }
    }

    /// Whether `host` may end what `of` has begun.
    fn may_act_for(&self, host: Host, of: Host) -> bool {
        host == of || self.dead[usize::from(of)]
    }

    pub fn open(&mut self, span: usize, host: Host) {
        self.demand(self.lives[span] == Life::Empty, "a span is opened that is not empty");
        self.lives[span] = Life::Opening(host);
    }

    pub fn take(&mut self, span: usize, chunk: u8, host: Host) {
        let is_ours = matches!(self.lives[span], Life::Opening(of) | Life::Closing(of) if of == host);
        self.demand(is_ours || self.lives[span] == Life::Open, "a chunk is taken of a span that is not open");
        let owner = &mut self.owners[span][usize::from(chunk)];
        let before = owner.replace(host);
        self.demand(before.is_none(), "a chunk has two owners");
        self.lives[span] = Life::Open;
    }

    pub fn give(&mut self, span: usize, chunk: u8, host: Host) {
        let owner = self.owners[span][usize::from(chunk)].take();
        let may = owner.is_some_and(|of| self.may_act_for(host, of));
        self.demand(may, "a chunk is given back that is another's");
        if self.owners[span].iter().all(Option::is_none) {
            self.lives[span] = Life::Closing(host);
        }
    }

    pub fn sign(&mut self, span: usize, host: Host) {
        let may = matches!(self.lives[span], Life::Closing(of) if self.may_act_for(host, of));
        self.demand(may, "a span is to be closed that is another's");
        self.lives[span] = Life::Closing(host);
    }

    pub fn close(&mut self, span: usize, host: Host) {
        let may = match self.lives[span] {
            Life::Closing(of) => self.may_act_for(host, of),
            Life::Opening(of) => of != host && self.may_act_for(host, of),
            _ => false,
        };
        self.demand(may, "a span is closed that others use");
        self.lives[span] = Life::Empty;
    }

    pub fn take_whole(&mut self, group: Group, host: Host) {
        for span in group.spans() {
            self.demand(self.lives[span] == Life::Empty, "a span is taken whole that is not empty");
            self.lives[span] = Life::Whole(host);
        }
    }

    pub fn give_whole(&mut self, group: Group, host: Host) {
        for span in group.spans() {
            let may = matches!(self.lives[span], Life::Whole(of) if self.may_act_for(host, of));
            self.demand(may, "a span is given back whole that is another's");
            self.lives[span] = Life::Empty;
        }
    }

    /// Whether anything of that host's is left.
    pub fn has_traces_of(&self, host: Host) -> bool {
        let lives = self.lives.iter().any(
            |life| matches!(life, Life::Opening(of) | Life::Closing(of) | Life::Whole(of) if *of == host),
        );
        lives || self.owners.iter().flatten().any(|owner| *owner == Some(host))
    }
}
