//! What a client has left where it gave something back: the key that opens it from the next time on, bound already, and a record in the log that says that it is
//! this host's. Whoever takes it again as it was has nothing to write.
//!
//! Nobody else has changed either as long as the word is as this client remembers it, that of the span or, for whole spans, of the section: that is for the owner of
//! this to see to.

use std::collections::{HashMap, VecDeque};

use aquifer_fabric::Key;

use crate::size::{SPAN_CHUNKS, SizeClass};

/// Most spans of which something is remembered, at 136 bytes each.
const SPANS_MAX: usize = 4096;
/// Most places of one size that are tried before others: what was left longest ago is found as anything else is.
const RECENT_MAX: usize = 4096;

/// Keys of what begins in a span, none where nothing was left: by chunk, of a group of spans, of the section.
type Keys = [Key; SECTION + 1];
const GROUP: usize = SPAN_CHUNKS as usize;
const SECTION: usize = GROUP + 1;

#[derive(Clone, Default)]
pub(super) struct Left {
    spans: HashMap<u32, Box<Keys>>,
    /// For each size where something was left, the latest last; and perhaps where something has been taken since.
    recent: [VecDeque<u32>; SizeClass::COUNT as usize],
}

impl std::fmt::Debug for Left {
    /// Keys stay out of logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Left in {} spans", self.spans.len())
    }
}

impl Left {
    /// This is the next key of what begins with a chunk, and has this size.
    pub fn leave(&mut self, chunk: u32, class: SizeClass, key: Key) {
        self.plant(chunk, class, key);
        let recent = &mut self.recent[usize::from(class.k())];
        if recent.len() >= RECENT_MAX {
            recent.pop_front();
        }
        recent.push_back(chunk);
    }

    /// The same where nothing was before: it is not looked for before anything else.
    pub fn plant(&mut self, chunk: u32, class: SizeClass, key: Key) {
        let span = chunk / SPAN_CHUNKS;
        if self.spans.len() >= SPANS_MAX && !self.spans.contains_key(&span) {
            // Rather begin anew than keep account of which is old.
            self.spans.clear();
        }
        self.spans.entry(span).or_insert_with(|| Box::new([Key(0); SECTION + 1]))[place(chunk, class)] = key;
    }

    /// The key that was left for an extent of this size.
    pub fn key(&self, chunk: u32, class: SizeClass) -> Option<Key> {
        let key = self.spans.get(&(chunk / SPAN_CHUNKS))?[place(chunk, class)];
        (key.class() == Some(class.k())).then_some(key)
    }

    /// Where an extent of this size was left last, of those that are there yet.
    pub fn last(&mut self, class: SizeClass) -> Option<u32> {
        loop {
            let chunk = *self.recent[usize::from(class.k())].back()?;
            if self.key(chunk, class).is_some() {
                return Some(chunk);
            }
            self.recent[usize::from(class.k())].pop_back();
        }
    }

    /// The same; no call tells of it again.
    pub fn take_recent(&mut self, class: SizeClass) -> Option<u32> {
        let last = self.last(class);
        self.recent[usize::from(class.k())].pop_back();
        last
    }

    /// Something of this size that begins with this chunk was taken.
    pub fn forget(&mut self, chunk: u32, class: SizeClass) {
        if let Some(keys) = self.spans.get_mut(&(chunk / SPAN_CHUNKS)) {
            keys[place(chunk, class)] = Key(0);
        }
    }

    /// The span's own entries were written: no whole spans that begin there are as they were left.
    pub fn forget_whole(&mut self, span: u32) {
        if let Some(keys) = self.spans.get_mut(&span) {
            keys[GROUP..].fill(Key(0));
        }
    }

    /// Others may have changed what is in a span.
    pub fn forget_span(&mut self, span: u32) {
        self.spans.remove(&span);
    }

    pub fn forget_all(&mut self) {
        *self = Self::default();
    }
}

/// Each has its own entry for the key.
const fn place(chunk: u32, class: SizeClass) -> usize {
    if class.is_within_span() {
        (chunk % SPAN_CHUNKS) as usize
    } else if class.k() < SizeClass::SECTION.k() {
        GROUP
    } else {
        SECTION
    }
}
