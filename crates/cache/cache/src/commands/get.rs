//! The commands `get`, `gets`, `gat` and `gats`.

use super::elsewhere::{Entry, Scatter};
use super::text::refused;
use super::{Context, REPLIES_MAX, Replies, Session, Step};
use crate::protocol::{number, words};
use crate::store::item::{Item, KEY_MAX};
use crate::store::{Refusal, Until};

/// The variant of the command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GetKind {
    /// Whether replies have the cas number.
    pub returns_cas: bool,
    /// Whether the first word is the new expiry of the items.
    pub touches: bool,
}

impl Session {
    /// Executes a command of the family. `text` is its line, and `at` the offset of its arguments.
    ///
    /// If the replies must be sent first, the session notes the offset at which the command
    /// continues.
    pub(super) fn get<'p>(
        &mut self,
        text: &[u8],
        mut at: usize,
        kind: GetKind,
        context: &Context<'p>,
        out: &mut Replies<'p>,
    ) -> Step {
        let mut expires_s = 0;
        if kind.touches {
            let Some((word, end)) = words::next(text, at) else { return Session::error(out) };
            let Some(exptime) = number::int32(word) else {
                out.push_line("CLIENT_ERROR invalid exptime argument");
                return Step::Used(0);
            };
            expires_s = context.access.expires_s(exptime);
            at = end;
        } else if words::next(text, at).is_none() {
            return Session::error(out);
        }
        let first = at;
        if self.get_offset != 0 {
            at = self.get_offset;
        } else if has_long_word(text, at) {
            return self.refuse_get(text, at, kind, expires_s, context, out);
        }
        while let Some((word, end)) = words::next(text, at) {
            if out.len() >= REPLIES_MAX {
                self.get_offset = at;
                return Step::Again(Until::NextTurn);
            }
            let key = context.access.key(word);
            let found =
                if kind.touches { context.access.touch(key, expires_s) } else { context.access.get(key) };
            match found {
                Ok(Some(item)) => push_item(&item, kind.returns_cas, out),
                Ok(None) => {}
                Err(Refusal::Elsewhere(_)) if at != first || words::next(text, end).is_some() => {
                    let command = &text[..first];
                    return self.scatter_get(text, words::trim(command), at, context);
                }
                Err(refusal) => {
                    let is_retried = matches!(refusal, Refusal::Again(_));
                    self.get_offset = if is_retried { at } else { 0 };
                    return refused(refusal, context, out, false, 0);
                }
            }
            at = end;
        }
        self.get_offset = 0;
        out.push(b"END\r\n");
        Step::Used(0)
    }

    /// Refuses a command with a key that is too long. The keys before it count as read.
    fn refuse_get<'p>(
        &mut self,
        text: &[u8],
        first: usize,
        kind: GetKind,
        expires_s: u32,
        context: &Context<'p>,
        out: &mut Replies<'p>,
    ) -> Step {
        let (mut at, mut entries) = (first, Vec::new());
        while let Some((word, end)) = words::next(text, at)
            && word.len() <= KEY_MAX
        {
            let key = context.access.key(word);
            let read =
                if kind.touches { context.access.touch(key, expires_s) } else { context.access.get(key) };
            if let Err(refusal) = read {
                let Refusal::Elsewhere(partition) = refusal else {
                    return refused(refusal, context, out, false, 0);
                };
                entries.push(Entry::get(partition, words::trim(&text[..first]), word));
            }
            at = end;
        }
        const BAD_FORMAT: &[u8] = b"CLIENT_ERROR bad command line format\r\n";
        if entries.is_empty() {
            out.push(BAD_FORMAT);
            return Step::Used(0);
        }
        self.scatter = Some(Box::new(Scatter::then(entries, BAD_FORMAT.to_vec(), 0, 0)));
        Step::Scatter
    }
}

fn has_long_word(text: &[u8], mut at: usize) -> bool {
    if text.len() - at <= KEY_MAX {
        return false;
    }
    while let Some((word, end)) = words::next(text, at) {
        if word.len() > KEY_MAX {
            return true;
        }
        at = end;
    }
    false
}

#[inline]
fn push_item<'p>(item: &Item<'p>, returns_cas: bool, out: &mut Replies<'p>) {
    out.push(b"VALUE ");
    out.push(item.key);
    out.push(b" ");
    out.push_number(item.header.client_flags);
    out.push(b" ");
    out.push_number(item.value.len());
    if returns_cas {
        out.push(b" ");
        out.push_number(item.header.cas);
    }
    out.push(b"\r\n");
    out.push_value(item.value);
    out.push(b"\r\n");
}
