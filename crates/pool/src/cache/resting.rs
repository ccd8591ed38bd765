//! Spans that a client has closed, of which it has told nobody yet: it alone may open them again, as long as their words are as remembered (docs/decisions/0017).

/// Most that rest on a node, all together as large as a section.
const SPANS_MAX: usize = 16;

#[derive(Clone, Default, Debug)]
pub(super) struct Resting {
    /// Those that rest longest come first.
    spans: Vec<u32>,
}

impl Resting {
    pub fn has_room(&self) -> bool {
        self.spans.len() < SPANS_MAX
    }

    pub fn add(&mut self, span: u32) {
        debug_assert!(self.has_room() && !self.contains(span));
        self.spans.push(span);
    }

    pub fn contains(&self, span: u32) -> bool {
        self.spans.contains(&span)
    }

    /// Somebody has opened it again, or its section was told, or another may be about to.
    pub fn remove(&mut self, span: u32) {
        self.spans.retain(|resting| *resting != span);
    }

    pub fn clear(&mut self) {
        self.spans.clear();
    }

    pub fn spans(&self) -> &[u32] {
        &self.spans
    }
}
