//! The binary protocol.

use std::fmt::Display;
use std::sync::atomic::Ordering;

use super::elsewhere::{Entry, Scatter};
use super::{Context, Flushed, PROTOCOL_VERSION, Replies, Session, Step};
use crate::operations::{Counted, Deleted, Deletion, Delta, NewValue, StoreMode, Stored};
use crate::protocol::binary::{HEADER_BYTES, RequestHeader, Status, opcode, reply_header};
use crate::store::Refusal;
use crate::store::item::{Item, KEY_MAX};
use crate::store::partition::Cas;

/// The expiry by which a client requests that a missing counter is not created.
const NEVER_CREATE: u32 = u32::MAX;

/// A request whose body was received.
struct Request<'p> {
    header: RequestHeader,
    /// The command; for a quiet one its variant with a reply.
    opcode: u8,
    is_quiet: bool,
    extras: &'p [u8],
    key: &'p [u8],
    value: &'p [u8],
}

/// The result of a command.
enum Outcome {
    Done,
    Refused(Refusal),
    /// Other servers must execute these parts of the command.
    Scatter(Vec<Entry>),
    /// The connection is closed after the reply.
    Close,
}

impl Session {
    /// Executes the first request in `input`.
    pub(super) fn binary<'p>(
        &mut self,
        input: &'p [u8],
        context: &Context<'p>,
        out: &mut Replies<'p>,
    ) -> Step {
        let Some(bytes) = input.first_chunk::<HEADER_BYTES>() else {
            return Step::Incomplete(HEADER_BYTES);
        };
        let Some(header) = RequestHeader::read(bytes) else { return Step::Close };
        let (plain, is_quiet) = without_quiet(header.opcode);
        if header.key_len + header.extras_len > header.body_len {
            push_error(&header, Status::UnknownCommand, out);
            return Step::Close;
        }
        match refused(&header, plain) {
            None => {}
            Some(Status::UnknownCommand) => {
                push_error(&header, Status::UnknownCommand, out);
                self.skip_bytes = header.body_len;
                return Step::Used(HEADER_BYTES);
            }
            Some(status) => {
                push_error(&header, status, out);
                return Step::Close;
            }
        }
        let value_len = header.body_len - header.key_len - header.extras_len;
        let end = HEADER_BYTES + header.body_len;
        let is_stored = matches!(plain, opcode::SET..=opcode::REPLACE | opcode::APPEND | opcode::PREPEND);
        if is_stored && !context.access.fits(header.key_len, 0, value_len) {
            return self.refuse_large_binary(&header, plain, input, context, out);
        }
        let Some(body) = input.get(HEADER_BYTES..end) else { return Step::Incomplete(end) };
        let (extras, rest) = body.split_at(header.extras_len);
        let (key, value) = rest.split_at(header.key_len);
        let request = Request { header, opcode: plain, is_quiet, extras, key, value };
        match request.run(context, out) {
            Outcome::Done => Step::Used(end),
            Outcome::Refused(Refusal::Again(until)) => Step::Again(until),
            Outcome::Refused(Refusal::Elsewhere(partition)) => Step::Elsewhere { partition, len: end },
            Outcome::Scatter(entries) => {
                let mut reply = Replies::new(Vec::new());
                request.succeed(0, b"", &mut reply);
                self.scatter = Some(Box::new(Scatter::then(entries, reply.into_buffer(), end, 0)));
                Step::Scatter
            }
            Outcome::Refused(Refusal::Full) => {
                context.access.counters.store_no_memory.add(1);
                push_error(&header, Status::NoMemory, out);
                Step::Used(end)
            }
            Outcome::Close => Step::Close,
        }
    }

    /// Refuses and skips a value that is too large. Deletes the item of the key if the command is
    /// `SET`.
    fn refuse_large_binary<'p>(
        &mut self,
        header: &RequestHeader,
        plain: u8,
        input: &'p [u8],
        context: &Context<'p>,
        out: &mut Replies<'p>,
    ) -> Step {
        let key_end = HEADER_BYTES + header.extras_len + header.key_len;
        let Some(key) = input.get(HEADER_BYTES + header.extras_len..key_end) else {
            return Step::Incomplete(key_end);
        };
        context.access.counters.store_too_large.add(1);
        let mut reply = Replies::new(Vec::new());
        push_error(header, Status::TooLarge, &mut reply);
        let (reply, skip_bytes) = (reply.into_buffer(), HEADER_BYTES + header.body_len - key_end);
        let step = self.refuse_large(
            context.access.key(key),
            plain == opcode::SET,
            &reply,
            skip_bytes,
            context,
            out,
        );
        self.scatter.iter_mut().for_each(|scatter| scatter.add_used(key_end));
        if step == Step::Scatter { step } else { Step::Used(key_end) }
    }
}

/// The variant with a reply of a command, and whether the command is quiet.
pub(super) fn without_quiet(code: u8) -> (u8, bool) {
    use opcode::*;
    match code {
        SET_QUIET..=DECREMENT_QUIET => (code - SET_QUIET + SET, true),
        QUIT_QUIET => (QUIT, true),
        FLUSH_QUIET => (FLUSH, true),
        APPEND_QUIET => (APPEND, true),
        PREPEND_QUIET => (PREPEND, true),
        GET_QUIET => (GET, true),
        GET_KEY_QUIET => (GET_KEY, true),
        GET_TOUCH_QUIET => (GET_TOUCH, true),
        GET_KEY_TOUCH_QUIET => (GET_KEY_TOUCH, true),
        other => (other, false),
    }
}

/// The status with which a request is refused because of its lengths or command.
pub(super) fn refused(header: &RequestHeader, plain: u8) -> Option<Status> {
    use opcode::*;
    let RequestHeader { key_len, extras_len, body_len, .. } = *header;
    let has_key = (1..=KEY_MAX).contains(&key_len);
    let ends_with_key = body_len == key_len + extras_len;
    let is_valid = match plain {
        GET | GET_KEY | DELETE => extras_len == 0 && has_key && ends_with_key,
        TOUCH | GET_TOUCH | GET_KEY_TOUCH => extras_len == 4 && has_key,
        SET | ADD | REPLACE => extras_len == 8 && has_key,
        APPEND | PREPEND => extras_len == 0 && has_key,
        INCREMENT | DECREMENT => extras_len == 20 && has_key && ends_with_key,
        QUIT | NOOP | VERSION => body_len == 0,
        FLUSH => key_len == 0 && body_len == extras_len && matches!(extras_len, 0 | 4),
        STATS => extras_len == 0 && key_len <= KEY_MAX && ends_with_key,
        VERBOSITY => extras_len == 4 && key_len == 0 && body_len == 4,
        _ => return Some(Status::UnknownCommand),
    };
    if is_valid { None } else { Some(Status::Invalid) }
}

impl<'p> Request<'p> {
    fn run(&self, context: &Context<'p>, out: &mut Replies<'p>) -> Outcome {
        use opcode::*;
        match self.opcode {
            GET | GET_KEY => match context.access.get(context.access.key(self.key)) {
                Err(refusal) => return Outcome::Refused(refusal),
                Ok(item) => self.push_item(item, false, out),
            },
            TOUCH | GET_TOUCH | GET_KEY_TOUCH => {
                let expires_s = context.access.expires_s(self.number(0).cast_signed());
                match context.access.touch(context.access.key(self.key), expires_s) {
                    Err(refusal) => return Outcome::Refused(refusal),
                    Ok(item) => self.push_item(item, self.opcode == TOUCH, out),
                }
            }
            SET..=REPLACE | APPEND | PREPEND => return self.store(context, out),
            DELETE => return self.delete(context, out),
            INCREMENT | DECREMENT => return self.count(context, out),
            QUIT => {
                self.succeed(0, b"", out);
                return Outcome::Close;
            }
            FLUSH => return self.flush(context, out),
            VERSION => self.succeed(0, PROTOCOL_VERSION.as_bytes(), out),
            STATS => self.stats(context, out),
            VERBOSITY => {
                context.service.verbosity.store(self.number(0).min(2), Ordering::Relaxed);
                self.succeed(0, b"", out);
            }
            _ => self.succeed(0, b"", out),
        }
        Outcome::Done
    }

    /// The 32-bit number at an offset in the extras.
    fn number(&self, at: usize) -> u32 {
        let bytes = self.extras.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
        u32::from_be_bytes(bytes.expect("the length was checked"))
    }

    fn long_number(&self, at: usize) -> u64 {
        u64::from(self.number(at)) << 32 | u64::from(self.number(at + 4))
    }

    fn succeed(&self, cas: u64, value: &[u8], out: &mut Replies<'p>) {
        if !self.is_quiet {
            out.push(&reply_header(&self.header, Status::Success, cas, 0, 0, value.len()));
            out.push(value);
        }
    }

    fn fail(&self, status: Status, out: &mut Replies<'p>) {
        push_error(&self.header, status, out);
    }

    fn push_item(&self, item: Option<Item<'p>>, without_value: bool, out: &mut Replies<'p>) {
        let has_key = matches!(self.opcode, opcode::GET_KEY | opcode::GET_KEY_TOUCH);
        let key: &[u8] = if has_key { self.key } else { b"" };
        let Some(item) = item else {
            if !self.is_quiet {
                push_missing(&self.header, key, out);
            }
            return;
        };
        let value: &'p [u8] = if without_value { b"" } else { item.value };
        let body_len = 4 + key.len() + value.len();
        out.push(&reply_header(&self.header, Status::Success, item.header.cas, 4, key.len(), body_len));
        out.push(&item.header.client_flags.to_be_bytes());
        out.push(key);
        out.push_value(value);
    }

    fn store(&self, context: &Context<'p>, out: &mut Replies<'p>) -> Outcome {
        let mode = match self.opcode {
            opcode::SET | opcode::ADD | opcode::REPLACE if self.header.cas != 0 => StoreMode::Cas,
            opcode::SET => StoreMode::Set,
            opcode::ADD => StoreMode::Add,
            opcode::REPLACE => StoreMode::Replace,
            opcode::APPEND => StoreMode::Append,
            _ => StoreMode::Prepend,
        };
        let (client_flags, exptime) =
            if self.extras.len() == 8 { (self.number(0), self.number(4)) } else { (0, 0) };
        let new = NewValue {
            client_flags,
            expires_s: context.access.expires_s(exptime.cast_signed()),
            cas: self.header.cas,
            new_cas: Cas::Next,
            has_binary_key: false,
            invalidates: false,
            vivify_expires_s: None,
            value: self.value,
        };
        match context.access.store(mode, context.access.key(self.key), &new) {
            Err(refusal) => return Outcome::Refused(refusal),
            Ok(Stored::Stored { cas, .. }) => self.succeed(cas, b"", out),
            Ok(Stored::Exists) => self.fail(Status::Exists, out),
            Ok(Stored::NotFound) => self.fail(Status::NotFound, out),
            Ok(Stored::NotStored) => {
                let status = match mode {
                    StoreMode::Add => Status::Exists,
                    StoreMode::Replace => Status::NotFound,
                    _ => Status::NotStored,
                };
                self.fail(status, out);
            }
        }
        Outcome::Done
    }

    fn delete(&self, context: &Context<'p>, out: &mut Replies<'p>) -> Outcome {
        let cas = if self.header.cas == 0 { None } else { Some(self.header.cas) };
        match context.access.delete(context.access.key(self.key), &Deletion { cas, ..Deletion::default() }) {
            Err(refusal) => return Outcome::Refused(refusal),
            Ok(Deleted::Deleted) => self.succeed(0, b"", out),
            Ok(Deleted::NotFound) => self.fail(Status::NotFound, out),
            Ok(Deleted::Exists) => self.fail(Status::Exists, out),
        }
        Outcome::Done
    }

    fn count(&self, context: &Context<'p>, out: &mut Replies<'p>) -> Outcome {
        let exptime = self.number(16);
        let initial = (exptime != NEVER_CREATE)
            .then(|| (self.long_number(8), context.access.expires_s(exptime.cast_signed())));
        let how = Delta {
            is_increment: self.opcode == opcode::INCREMENT,
            delta: self.long_number(0),
            cas: self.header.cas,
            new_cas: Cas::Next,
            expires_s: None,
            initial,
            has_binary_key: false,
        };
        match context.access.count(context.access.key(self.key), &how) {
            Err(refusal) => return Outcome::Refused(refusal),
            Ok(Counted::Value { number, cas, .. }) => self.succeed(cas, &number.to_be_bytes(), out),
            Ok(Counted::NotNumeric) => self.fail(Status::NotNumeric, out),
            Ok(Counted::NotFound) => self.fail(Status::NotFound, out),
            Ok(Counted::Exists) => self.fail(Status::Exists, out),
        }
        Outcome::Done
    }

    fn flush(&self, context: &Context<'p>, out: &mut Replies<'p>) -> Outcome {
        let exptime = if self.extras.is_empty() { 0 } else { self.number(0) };
        match context.flush_all(exptime.cast_signed()) {
            Flushed::Done => self.succeed(0, b"", out),
            Flushed::Refused => self.fail(Status::Unauthenticated, out),
            Flushed::Elsewhere(entries) => return Outcome::Scatter(entries),
        }
        Outcome::Done
    }

    fn stats(&self, context: &Context<'p>, out: &mut Replies<'p>) {
        let subcommand = self.key.split(|byte| *byte == b' ').next().unwrap_or_default();
        let mut add = |name: &str, value: &dyn Display| {
            let value = value.to_string();
            let body_len = name.len() + value.len();
            out.push(&reply_header(&self.header, Status::Success, 0, 0, name.len(), body_len));
            out.push(name.as_bytes());
            out.push(value.as_bytes());
        };
        if context.report(subcommand, &mut add) {
            out.push(&reply_header(&self.header, Status::Success, 0, 0, 0, 0));
        } else if subcommand == b"reset" {
            context.service.report.reset();
            out.push(&reply_header(&self.header, Status::Success, 0, 0, 0, 0));
        } else {
            self.fail(Status::NotFound, out);
        }
    }
}

/// Replies that an item is missing, with the key if the command returns it.
pub(super) fn push_missing<'p>(header: &RequestHeader, key: &'p [u8], out: &mut Replies<'p>) {
    if key.is_empty() {
        return push_error(header, Status::NotFound, out);
    }
    out.push(&reply_header(header, Status::NotFound, 0, 0, key.len(), key.len()));
    out.push(key);
}

fn push_error(header: &RequestHeader, status: Status, out: &mut Replies<'_>) {
    let text = status.text();
    out.push(&reply_header(header, status, 0, 0, 0, text.len()));
    out.push(text);
}
