//! The classic text commands.

use std::sync::atomic::Ordering;

use super::elsewhere::{Entry, Scatter, Task};
use super::get::GetKind;
use super::{Context, Flushed, Mutation, Replies, Session, Step};
use crate::operations::{Counted, Deleted, Deletion, Delta, NewValue, StoreMode, Stored};
use crate::protocol::number;
use crate::protocol::words::{self, Words};
use crate::store::item::KEY_MAX;
use crate::store::partition::Cas;
use crate::store::{Key, Refusal};

pub(super) const TOO_LARGE: &[u8] = b"SERVER_ERROR object too large for cache\r\n";
const BAD_FORMAT: &str = "CLIENT_ERROR bad command line format";
/// Greatest length of a value that a command can announce.
const VALUE_LEN_MAX: i32 = i32::MAX - 2;
const VERBOSITY_MAX: u32 = 2;
const MEMORY_MIN_MIB: u32 = 8;
const MEMORY_MAX_MIB: u32 = 1_000_000_000;

/// The version of memcached whose replies this server has; clients may check it.
pub const PROTOCOL_VERSION: &str = "1.6.18";

impl Session {
    /// Executes the request whose line ends at `newline`; a value may follow.
    #[inline]
    pub(super) fn line<'p>(
        &mut self,
        input: &'p [u8],
        newline: usize,
        context: &Context<'p>,
        out: &mut Replies<'p>,
    ) -> Step {
        let end = if newline > 1 && input[newline - 1] == b'\r' { newline - 1 } else { newline };
        let text = words::text_of(&input[..end]);
        let after = newline + 1;
        let command = words::next(text, 0).filter(|(command, _)| command.len() > 1);
        let Some((command, at)) = command else {
            out.push(b"ERROR\r\n");
            return Step::Used(after);
        };
        let step = match command {
            b"get" | b"bget" => self.get(text, at, GET, context, out),
            b"gets" => self.get(text, at, GETS, context, out),
            b"gat" => self.get(text, at, GAT, context, out),
            b"gats" => self.get(text, at, GATS, context, out),
            b"set" => self.storage(StoreMode::Set, text, input, after, context, out),
            b"add" => self.storage(StoreMode::Add, text, input, after, context, out),
            b"replace" => self.storage(StoreMode::Replace, text, input, after, context, out),
            b"append" => self.storage(StoreMode::Append, text, input, after, context, out),
            b"prepend" => self.storage(StoreMode::Prepend, text, input, after, context, out),
            b"cas" => self.storage(StoreMode::Cas, text, input, after, context, out),
            b"mg" | b"ms" | b"md" | b"ma" | b"mn" | b"me" => {
                self.meta(command[1], text, input, after, context, out)
            }
            _ => self.other(command, &words::split(text), context, out),
        };
        match step {
            Step::Used(value) => Step::Used(after + value),
            Step::Elsewhere { partition, len } => Step::Elsewhere { partition, len: after + len },
            Step::Scatter => {
                self.scatter.iter_mut().for_each(|scatter| scatter.add_used(after));
                Step::Scatter
            }
            other => other,
        }
    }

    pub(super) fn error(out: &mut Replies<'_>) -> Step {
        out.push(b"ERROR\r\n");
        Step::Used(0)
    }

    fn other<'p>(
        &mut self,
        command: &[u8],
        words: &Words<'_>,
        context: &Context<'p>,
        out: &mut Replies<'p>,
    ) -> Step {
        // The last word may be an argument, too; only `delete` checks the number of words.
        let noreply =
            words.last().is_some_and(|word| *word == b"noreply") && (command != b"delete" || words.len() > 2);
        let mark = out.mark();
        let step = match command {
            b"delete" => delete(words, context, out),
            b"incr" => arithmetic(true, words, context, out),
            b"decr" => arithmetic(false, words, context, out),
            b"touch" => touch(words, context, out),
            b"flush_all" => self.flush_all(words, noreply, context, out),
            b"verbosity" => verbosity(words, context, out),
            b"version" => {
                out.push_line(&format!("VERSION {PROTOCOL_VERSION}"));
                return Step::Used(0);
            }
            b"quit" => return Step::Close,
            b"stats" => return self.stats(words, context, out),
            b"lru_crawler" => return self.crawler(words, context, out),
            b"refresh_certs" => match context.service.report.refresh_certificates() {
                Ok(()) => {
                    out.push_line("OK");
                    Some(Step::Used(0))
                }
                Err(error) => {
                    out.push_line(&format!("SERVER_ERROR {}", error.replace(['\r', '\n'], " ")));
                    Some(Step::Used(0))
                }
            },
            b"cache_memlimit" => memory_limit(words, context, out),
            b"shutdown" => return shutdown(words, context, out),
            _ if words.last().is_some_and(|word| word.starts_with(b"HTTP/")) => return Step::Close,
            _ => None,
        };
        match step {
            Some(step) => {
                if noreply {
                    out.truncate(mark);
                }
                step
            }
            None => Session::error(out),
        }
    }

    fn storage<'p>(
        &mut self,
        mode: StoreMode,
        text: &[u8],
        input: &'p [u8],
        after: usize,
        context: &Context<'p>,
        out: &mut Replies<'p>,
    ) -> Step {
        let words = words::split(text);
        let has_cas = usize::from(mode == StoreMode::Cas);
        if words.len() != 5 + has_cas && words.len() != 6 + has_cas {
            return Session::error(out);
        }
        let noreply = words[words.len() - 1] == b"noreply";
        let reply = |out: &mut Replies<'p>, text: &str| {
            if !noreply {
                out.push_line(text);
            }
        };
        let Some((client_flags, exptime, len, cas)) = storage_numbers(&words, mode == StoreMode::Cas) else {
            reply(out, BAD_FORMAT);
            return Step::Used(0);
        };
        let key = context.access.key(words[1]);
        if !context.access.fits(key.bytes.len(), client_flags, len) {
            context.access.counters.store_too_large.add(1);
            let text = if noreply { &b""[..] } else { TOO_LARGE };
            return self.refuse_large(key, mode == StoreMode::Set, text, len + 2, context, out);
        }
        let Some(block) = input.get(after..after + len + 2) else {
            return Step::Incomplete(after + len + 2);
        };
        let Some(value) = value_of(block) else {
            reply(out, "CLIENT_ERROR bad data chunk");
            return Step::Used(len + 2);
        };
        let new = NewValue {
            client_flags,
            expires_s: context.access.expires_s(exptime),
            cas,
            new_cas: Cas::Next,
            has_binary_key: false,
            invalidates: false,
            vivify_expires_s: None,
            value,
        };
        match context.access.store(mode, key, &new) {
            Err(refusal) => return refused(refusal, context, out, noreply, len + 2),
            Ok(Stored::Stored { .. }) => reply(out, "STORED"),
            Ok(Stored::NotStored) => reply(out, "NOT_STORED"),
            Ok(Stored::Exists) => reply(out, "EXISTS"),
            Ok(Stored::NotFound) => reply(out, "NOT_FOUND"),
        }
        Step::Used(len + 2)
    }
}

impl Session {
    /// Refuses and skips a value that is too large. If `deletes`, deletes the item of the key.
    pub(super) fn refuse_large(
        &mut self,
        key: Key<'_>,
        deletes: bool,
        reply: &[u8],
        skip_bytes: usize,
        context: &Context<'_>,
        out: &mut Replies<'_>,
    ) -> Step {
        let mark = out.mark();
        out.push(reply);
        if deletes && let Err(Refusal::Elsewhere(partition)) = context.access.delete_outdated(key) {
            out.truncate(mark);
            let entry = Entry::new(partition, Task::Delete(key.bytes));
            let scatter = Scatter::then(vec![entry], reply.to_vec(), 0, skip_bytes);
            self.scatter = Some(Box::new(scatter));
            return Step::Scatter;
        }
        self.skip_bytes = skip_bytes;
        Step::Used(0)
    }

    fn flush_all(
        &mut self,
        words: &Words<'_>,
        noreply: bool,
        context: &Context<'_>,
        out: &mut Replies<'_>,
    ) -> Option<Step> {
        if !(1..=3).contains(&words.len()) {
            return None;
        }
        let mut exptime = 0;
        if words.len() != 1 + usize::from(noreply) {
            match number::int32(words[1]) {
                Some(given) => exptime = given,
                None => {
                    out.push_line("CLIENT_ERROR invalid exptime argument");
                    return Some(Step::Used(0));
                }
            }
        }
        match context.flush_all(exptime) {
            Flushed::Refused => out.push_line("CLIENT_ERROR flush_all not allowed"),
            Flushed::Done => out.push_line("OK"),
            Flushed::Elsewhere(entries) => {
                let reply = if noreply { Vec::new() } else { b"OK\r\n".to_vec() };
                self.scatter = Some(Box::new(Scatter::then(entries, reply, 0, 0)));
                return Some(Step::Scatter);
            }
        }
        Some(Step::Used(0))
    }
}

/// The value in a block that ends with `\r\n`; `None` if it ends otherwise.
pub(super) fn value_of(block: &[u8]) -> Option<&[u8]> {
    let (value, end) = block.split_at(block.len() - 2);
    (end == b"\r\n" || Mutation::AcceptAnyEnd.is_active()).then_some(value)
}

/// The step for a refused command: it is retried, forwarded, or fails for lack of memory.
pub(super) fn refused(
    refusal: Refusal,
    context: &Context<'_>,
    out: &mut Replies<'_>,
    noreply: bool,
    used: usize,
) -> Step {
    match refusal {
        Refusal::Again(until) => return Step::Again(until),
        Refusal::Elsewhere(partition) => return Step::Elsewhere { partition, len: used },
        Refusal::Full => {}
    }
    context.access.counters.store_no_memory.add(1);
    if !noreply {
        out.push_line("SERVER_ERROR out of memory storing object");
    }
    Step::Used(used)
}

const GET: GetKind = GetKind { returns_cas: false, touches: false };
const GETS: GetKind = GetKind { returns_cas: true, touches: false };
const GAT: GetKind = GetKind { returns_cas: false, touches: true };
const GATS: GetKind = GetKind { returns_cas: true, touches: true };

/// Flags, expiry, length and cas number of a storage command whose key is not too long.
fn storage_numbers(words: &Words<'_>, has_cas: bool) -> Option<(u32, i32, usize, u64)> {
    if words[1].len() > KEY_MAX {
        return None;
    }
    let client_flags = number::uint32(words[2])?;
    let exptime = number::int32(words[3])?;
    let len = value_len(words[4])?;
    let cas = if has_cas { number::uint64(words[5])? } else { 0 };
    Some((client_flags, exptime, len, cas))
}

/// The length of a value.
pub(super) fn value_len(word: &[u8]) -> Option<usize> {
    number::int32(word).filter(|len| *len <= VALUE_LEN_MAX).and_then(|len| usize::try_from(len).ok())
}

fn delete(words: &Words<'_>, context: &Context<'_>, out: &mut Replies<'_>) -> Option<Step> {
    if !(2..=4).contains(&words.len()) {
        return None;
    }
    let is_noreply = |at: usize| words.get(at).is_some_and(|word| *word == b"noreply");
    let is_zero = words.get(2).is_some_and(|word| *word == b"0");
    let is_valid = match words.len() {
        2 => true,
        3 => is_zero || is_noreply(2),
        _ => is_zero && is_noreply(3),
    };
    if !is_valid {
        out.push_line("CLIENT_ERROR bad command line format.  Usage: delete <key> [noreply]");
        return Some(Step::Used(0));
    }
    if words[1].len() > KEY_MAX {
        out.push_line(BAD_FORMAT);
        return Some(Step::Used(0));
    }
    match context.access.delete(context.access.key(words[1]), &Deletion::default()) {
        Err(refusal) => return Some(refused(refusal, context, out, false, 0)),
        Ok(Deleted::Deleted) => out.push_line("DELETED"),
        Ok(Deleted::NotFound | Deleted::Exists) => out.push_line("NOT_FOUND"),
    }
    Some(Step::Used(0))
}

fn arithmetic(
    is_increment: bool,
    words: &Words<'_>,
    context: &Context<'_>,
    out: &mut Replies<'_>,
) -> Option<Step> {
    if !(3..=4).contains(&words.len()) {
        return None;
    }
    if words[1].len() > KEY_MAX {
        out.push_line(BAD_FORMAT);
        return Some(Step::Used(0));
    }
    let Some(delta) = number::uint64(words[2]) else {
        out.push_line("CLIENT_ERROR invalid numeric delta argument");
        return Some(Step::Used(0));
    };
    let how = Delta {
        is_increment,
        delta,
        cas: 0,
        new_cas: Cas::Next,
        expires_s: None,
        initial: None,
        has_binary_key: false,
    };
    match context.access.count(context.access.key(words[1]), &how) {
        Err(refusal) => return Some(refused(refusal, context, out, false, 0)),
        Ok(Counted::Value { number, .. }) => {
            out.push_number(number);
            out.push(b"\r\n");
        }
        Ok(Counted::NotNumeric) => {
            out.push_line("CLIENT_ERROR cannot increment or decrement non-numeric value");
        }
        Ok(Counted::NotFound | Counted::Exists) => out.push_line("NOT_FOUND"),
    }
    Some(Step::Used(0))
}

fn touch(words: &Words<'_>, context: &Context<'_>, out: &mut Replies<'_>) -> Option<Step> {
    if !(3..=4).contains(&words.len()) {
        return None;
    }
    if words[1].len() > KEY_MAX {
        out.push_line(BAD_FORMAT);
    } else if let Some(exptime) = number::int32(words[2]) {
        match context.access.touch(context.access.key(words[1]), context.access.expires_s(exptime)) {
            Err(refusal) => return Some(refused(refusal, context, out, false, 0)),
            Ok(Some(_)) => out.push_line("TOUCHED"),
            Ok(None) => out.push_line("NOT_FOUND"),
        }
    } else {
        out.push_line("CLIENT_ERROR invalid exptime argument");
    }
    Some(Step::Used(0))
}

fn verbosity(words: &Words<'_>, context: &Context<'_>, out: &mut Replies<'_>) -> Option<Step> {
    if !(2..=3).contains(&words.len()) {
        return None;
    }
    match number::uint32(words[1]) {
        Some(level) => {
            context.service.verbosity.store(level.min(VERBOSITY_MAX), Ordering::Relaxed);
            out.push_line("OK");
        }
        None => out.push_line(BAD_FORMAT),
    }
    Some(Step::Used(0))
}

fn memory_limit(words: &Words<'_>, context: &Context<'_>, out: &mut Replies<'_>) -> Option<Step> {
    if !(2..=3).contains(&words.len()) {
        return None;
    }
    let mebibytes = number::uint32(words[1])?;
    out.push_line(if mebibytes < MEMORY_MIN_MIB {
        "MEMLIMIT_TOO_SMALL cannot set maxbytes to less than 8m"
    } else if mebibytes > MEMORY_MAX_MIB {
        "MEMLIMIT_ADJUST_FAILED input value is megabytes not bytes"
    } else if context.access.store.set_limit(u64::from(mebibytes) << 20) {
        "OK"
    } else {
        "MEMLIMIT_ADJUST_FAILED out of bounds or unable to adjust"
    });
    Some(Step::Used(0))
}

fn shutdown(words: &Words<'_>, context: &Context<'_>, out: &mut Replies<'_>) -> Step {
    if !context.service.shutdown_is_enabled {
        out.push_line("ERROR: shutdown not enabled");
        return Step::Used(0);
    }
    let is_graceful = words.len() == 2 && words[1] == b"graceful";
    if words.len() != 1 && !is_graceful {
        out.push_line("CLIENT_ERROR invalid shutdown mode");
        return Step::Used(0);
    }
    context.service.report.shut_down(is_graceful);
    Step::Close
}
