//! What a client has left at chunks that it gave back: the key that opens each from the next time on, bound already, and a record in the log that says that it is
//! this host's. Whoever takes it again as it was has nothing to write.
//!
//! Nobody else has changed either as long as the span's word is as this client remembers it: that is for its owner to see to.

use std::collections::{HashMap, VecDeque};

use aquifer_fabric::Key;

use crate::size::{SPAN_CHUNKS, SizeClass};

/// Most spans of which something is remembered: half a megabyte.
const SPANS_MAX: usize = 4096;
/// Most places of one size that are tried before others: what was left longest ago is found as anything else is.
const RECENT_MAX: usize = 4096;
/// Sizes of extents within a span.
const CLASSES: usize = SizeClass::SPAN.k() as usize;

/// Keys by chunk, none where nothing was left.
type Keys = [Key; SPAN_CHUNKS as usize];

#[derive(Clone, Default)]
pub(super) struct Left {
    spans: HashMap<u32, Box<Keys>>,
    /// For each size where something was left, the latest last; and perhaps where something has been taken since.
    recent: [VecDeque<u32>; CLASSES],
}

impl std::fmt::Debug for Left {
    /// Keys stay out of logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Left in {} spans", self.spans.len())
    }
}

impl Left {
    /// This is the next key of what begins with a chunk; its class is that of what was given back.
    pub fn leave(&mut self, chunk: u32, key: Key) {
        let span = chunk / SPAN_CHUNKS;
        if self.spans.len() >= SPANS_MAX && !self.spans.contains_key(&span) {
            // Rather begin anew than keep account of which is old.
            self.spans.clear();
        }
        if let Some(recent) = key.class().and_then(|class| self.recent.get_mut(usize::from(class))) {
            if recent.len() >= RECENT_MAX {
                recent.pop_front();
            }
            recent.push_back(chunk);
        }
        self.spans.entry(span).or_insert_with(|| Box::new([Key(0); SPAN_CHUNKS as usize]))[place(chunk)] =
            key;
    }

    /// The key that was left for an extent of this size.
    pub fn key(&self, chunk: u32, class: SizeClass) -> Option<Key> {
        let key = self.spans.get(&(chunk / SPAN_CHUNKS))?[place(chunk)];
        (key.class() == Some(class.k())).then_some(key)
    }

    /// Where an extent of this size was left last; no call tells of the same.
    pub fn take_recent(&mut self, class: SizeClass) -> Option<u32> {
        let recent = self.recent.get_mut(usize::from(class.k()))?;
        while let Some(chunk) = recent.pop_back() {
            let keys = self.spans.get(&(chunk / SPAN_CHUNKS));
            if keys.is_some_and(|keys| keys[place(chunk)].class() == Some(class.k())) {
                return Some(chunk);
            }
        }
        None
    }

    /// Something that begins with this chunk was taken.
    pub fn forget(&mut self, chunk: u32) {
        if let Some(keys) = self.spans.get_mut(&(chunk / SPAN_CHUNKS)) {
            keys[place(chunk)] = Key(0);
        }
    }

    /// Others may have changed what is in a span.
    pub fn forget_span(&mut self, span: u32) {
        self.spans.remove(&span);
    }

    pub fn forget_all(&mut self) {
        self.spans.clear();
        self.recent = Default::default();
    }
}

fn place(chunk: u32) -> usize {
    (chunk % SPAN_CHUNKS) as usize
}
