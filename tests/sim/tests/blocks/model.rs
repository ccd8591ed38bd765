//! A model of what the pages of a volume must hold.

use std::sync::Arc;

use aquifer_pager::PAGE_BYTES;

type Bytes = Arc<[u8; PAGE_BYTES]>;

/// One page.
#[derive(Clone, Debug)]
pub struct PageModel {
    /// The possible contents: one, unless a write has failed.
    candidates: Vec<Bytes>,
    /// The contents that the page had since the present read began.
    before: Vec<Bytes>,
    has_changed: bool,
    /// The page could not be read: it must stay unreadable until it is written.
    pub is_lost: bool,
}

impl PageModel {
    pub fn new() -> Self {
        Self {
            candidates: vec![Arc::new([0; PAGE_BYTES])],
            before: Vec::new(),
            has_changed: false,
            is_lost: false,
        }
    }

    /// Begins a read of the page.
    pub fn begin_read(&mut self) {
        self.before.clear();
        self.has_changed = false;
    }

    /// Records a write at offset `within`. If `is_sure`, the old contents are not possible any
    /// more.
    pub fn write(&mut self, within: usize, bytes: &[u8], is_sure: bool) {
        self.before.extend(self.candidates.iter().cloned());
        self.has_changed = true;
        let mut new: Vec<Bytes> = Vec::new();
        if bytes.len() == PAGE_BYTES {
            new.push(Arc::new(bytes.try_into().expect("a page")));
            self.is_lost &= !is_sure;
        } else {
            for old in &self.candidates {
                let mut page = **old;
                page[within..within + bytes.len()].copy_from_slice(bytes);
                new.push(Arc::new(page));
            }
        }
        if is_sure {
            self.candidates = new;
        } else {
            self.candidates.extend(new);
        }
    }

    /// Checks the bytes that a read found at offset `within`.
    pub fn found(&mut self, within: usize, bytes: &[u8]) -> Result<(), String> {
        let fits = |page: &Bytes| page[within..within + bytes.len()] == *bytes;
        if self.is_lost && !self.has_changed && self.candidates.len() == 1 {
            return Err("a lost page was served".into());
        }
        if self.before.iter().any(fits) && self.has_changed {
            return Ok(());
        }
        let number = self.candidates.iter().position(fits).ok_or("wrong bytes")?;
        if !self.has_changed && bytes.len() == PAGE_BYTES {
            self.candidates = vec![Arc::clone(&self.candidates[number])];
            self.is_lost = false;
        }
        Ok(())
    }

    /// Records that a write found the page unreadable. A read in progress may still find the old
    /// bytes.
    pub fn lost(&mut self) {
        self.before.extend(self.candidates.iter().cloned());
        self.has_changed = true;
        self.is_lost = true;
    }

    /// Records that a read failed at this page.
    pub fn not_found(&mut self) {
        self.is_lost |= !self.has_changed;
    }
}
