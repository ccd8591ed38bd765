//! The meta commands.

use super::text::{TOO_LARGE, refused, value_len, value_of};
use super::{Context, Replies, Session, Step};
use crate::operations::{Access, Counted, Deleted, Deletion, Delta, NewValue, StoreMode, Stored, unchanged};
use crate::protocol::base64;
use crate::protocol::meta::{self, META_WORDS_MAX, MetaFlags, flags_of};
use crate::protocol::words::{self, Words};
use crate::store::item::{Item, KEY_MAX, States};
use crate::store::partition::{Absent, Cas, Change, Put};
use crate::store::presence::Presence;
use crate::store::{Key, Refusal, Until};

const BAD_FORMAT: &str = "CLIENT_ERROR bad command line format";
const OPAQUE_TOO_LONG: &str = "CLIENT_ERROR opaque token too long";

impl Session {
    /// Executes the meta command with this second character.
    pub(super) fn meta<'p>(
        &mut self,
        command: u8,
        text: &[u8],
        input: &'p [u8],
        after: usize,
        context: &Context<'p>,
        out: &mut Replies<'p>,
    ) -> Step {
        let words = words::split(text);
        if command == b'n' {
            out.push_line("MN");
            return Step::Used(0);
        }
        if words.len() < 2 {
            if command == b'e' {
                out.push_line(BAD_FORMAT);
                return Step::Used(0);
            }
            return Session::error(out);
        }
        let is_key_too_long = words[1].len() > KEY_MAX;
        if is_key_too_long || command == b's' && words.len() == 2 {
            out.push_line(BAD_FORMAT);
            return Step::Used(0);
        }
        if words.len() > META_WORDS_MAX && command != b'e' {
            let are = if command == b'g' { "are " } else { "" };
            out.push_line(&format!("CLIENT_ERROR options flags {are}too long"));
            return Step::Used(0);
        }
        match command {
            b'g' => get(&words, context, out),
            b's' => self.set(&words, input, after, context, out),
            b'd' => delete(&words, context, out),
            b'a' => arithmetic(&words, context, out),
            _ => debug(&words, context, out),
        }
    }

    fn set<'p>(
        &mut self,
        words: &Words<'_>,
        input: &'p [u8],
        after: usize,
        context: &Context<'p>,
        out: &mut Replies<'p>,
    ) -> Step {
        let Some(len) = value_len(words[2]) else {
            out.push_line(BAD_FORMAT);
            return Step::Used(0);
        };
        let flags = flags_of(words, 3);
        let mut refuse = |session: &mut Self, error: &str| {
            out.push_line(error);
            session.skip_bytes = len + 2;
            Step::Used(0)
        };
        let parsed = match meta::parse(words[1], flags) {
            Ok(parsed) => parsed,
            Err(error) => return refuse(self, error),
        };
        let mode = match parsed.mode {
            None | Some(b'S' | b's') => StoreMode::Set,
            Some(b'E' | b'e') => StoreMode::Add,
            Some(b'A' | b'a') => StoreMode::Append,
            Some(b'P' | b'p') => StoreMode::Prepend,
            Some(b'R' | b'r') => StoreMode::Replace,
            Some(_) => return refuse(self, "CLIENT_ERROR invalid mode for ms M token"),
        };
        if parsed.opaque_is_too_long {
            return refuse(self, OPAQUE_TOO_LONG);
        }
        let compares = parsed.cas.is_some() && matches!(mode, StoreMode::Set | StoreMode::Replace);
        let mode = if compares { StoreMode::Cas } else { mode };
        let key = key_of(&context.access, words[1], &parsed);
        if !context.access.fits(key.bytes.len(), parsed.client_flags, len) {
            context.access.counters.store_too_large.add(1);
            return self.refuse_large(key, true, TOO_LARGE, len + 2, context, out);
        }
        let Some(block) = input.get(after..after + len + 2) else {
            return Step::Incomplete(after + len + 2);
        };
        let Some(value) = value_of(block) else {
            out.push_line("CLIENT_ERROR bad data chunk");
            return Step::Used(len + 2);
        };
        let new = NewValue {
            client_flags: parsed.client_flags,
            expires_s: parsed.exptime.map_or(0, |exptime| context.access.expires_s(exptime)),
            cas: parsed.cas.unwrap_or(0),
            new_cas: new_cas(&parsed),
            has_binary_key: parsed.binary_key.is_some(),
            invalidates: parsed.invalidates,
            vivify_expires_s: parsed.vivify_exptime.map(|exptime| context.access.expires_s(exptime)),
            value,
        };
        let stored = match context.access.store(mode, key, &new) {
            Ok(stored) => stored,
            Err(refusal) => return refused(refusal, context, out, false, len + 2),
        };
        let (code, cas, stored_len) = match stored {
            Stored::Stored { .. } if parsed.is_quiet => return Step::Used(len + 2),
            Stored::Stored { cas, value_len } => ("HD", cas, Some(value_len)),
            Stored::NotStored => ("NS", 0, None),
            Stored::Exists => ("EX", 0, None),
            Stored::NotFound => ("NF", 0, None),
        };
        out.push(code.as_bytes());
        for flag in flags {
            match flag[0] {
                b'O' => push_word(flag, out),
                b'k' => push_key(key.bytes, parsed.binary_key.is_some(), out),
                b'c' => push_flag_number(b'c', cas, out),
                b's' => {
                    if let Some(len) = stored_len {
                        push_flag_number(b's', len as u64, out);
                    }
                }
                _ => {}
            }
        }
        out.push(b"\r\n");
        Step::Used(len + 2)
    }
}

/// The action of `mg` on an item.
#[derive(Clone, Copy)]
struct Fetch<'p> {
    /// The item as it was found, or as it is created.
    item: Item<'p>,
    is_new: bool,
    /// Whether the client is asked to replace the item.
    is_won: bool,
    /// The change of the item, if there is one.
    put: Option<Put<'p>>,
}

fn get<'p>(words: &Words<'_>, context: &Context<'p>, out: &mut Replies<'p>) -> Step {
    let flags = flags_of(words, 2);
    let parsed = match meta::parse(words[1], flags) {
        Ok(parsed) => parsed,
        Err(text) => return error(text, out),
    };
    let access = &context.access;
    let key = key_of(&context.access, words[1], &parsed);
    let partition = access.store.partition_number(key.hash);
    if access.presence(partition) != Presence::Here {
        return refused(Refusal::Elsewhere(partition), context, out, false, 0);
    }
    access.count_request(key);
    access.counters.cmd_meta.add(1);
    if parsed.opaque_is_too_long {
        return refuse_opaque(words, &parsed, flags, context, out);
    }
    let look_up = access.store.look_up(access.pin, key, access.now_s, !parsed.is_uncounted);
    match look_up {
        Err(Absent::Fetching) => return Step::Again(Until::Fetched),
        Err(Absent::Elsewhere(partition)) => {
            return refused(Refusal::Elsewhere(partition), context, out, false, 0);
        }
        _ => {}
    }
    let found = look_up.ok();
    let mut fetch = plan(found.as_ref(), &parsed, flags, context);
    if fetch.is_some_and(|fetch| fetch.put.is_some()) {
        // The item must be changed: plan again, with the partition's lock held.
        let stored = access.store.update(access.pin, key, access.now_s, |item| {
            let mut item = item.copied();
            if let (Some(item), Some(found)) = (&mut item, &found)
                && item.header.cas == found.header.cas
            {
                // The read above must not show in the reply to this command.
                item.is_fetched = found.is_fetched;
            }
            fetch = plan(item.as_ref(), &parsed, flags, context);
            fetch.and_then(|fetch| fetch.put).map_or(Change::Keep, Change::Put)
        });
        match (stored, &mut fetch) {
            (Err(refusal), _) => return refused(refusal, context, out, false, 0),
            (Ok(cas), Some(fetch)) if fetch.put.is_some() => fetch.item.header.cas = cas,
            _ => {}
        }
    }
    if parsed.exptime.is_some() {
        access.counters.cmd_touch.add(1);
        let counters = access.counters;
        if fetch.is_some() { &counters.touch_hits } else { &counters.touch_misses }.add(1);
    } else {
        access.count_get(&fetch.map_or(look_up, |fetch| Ok(fetch.item)));
    }
    match fetch {
        Some(fetch) => push_fetched(&fetch, key, &parsed, flags, context, out),
        None => push_missing(words[1], &parsed, flags, out),
    }
    Step::Used(0)
}

/// Replies that the item of `mg` is missing. `word` is the key as the request has it.
pub(super) fn push_missing(word: &[u8], parsed: &MetaFlags, flags: &[&[u8]], out: &mut Replies<'_>) {
    if !parsed.is_quiet {
        out.push(b"EN");
        let key = parsed.binary_key.as_deref().unwrap_or(word);
        push_opaque_and_key(flags, key, parsed.binary_key.is_some(), out);
        out.push(b"\r\n");
    }
}

/// Refuses an opaque token that is too long. The flags before it take effect nevertheless.
fn refuse_opaque<'p>(
    words: &Words<'_>,
    parsed: &MetaFlags,
    flags: &[&[u8]],
    context: &Context<'p>,
    out: &mut Replies<'p>,
) -> Step {
    let before = flags.iter().position(|flag| flag[0] == b'O').map_or(flags, |at| &flags[..at]);
    let access = &context.access;
    let is_counted_later = flags.iter().any(|flag| b"NTRlhu".contains(&flag[0]));
    if !is_counted_later {
        let _read = access.store.look_up(access.pin, key_of(access, words[1], parsed), access.now_s, true);
    }
    let updated = access.store.update(access.pin, key_of(access, words[1], parsed), access.now_s, |item| {
        let item = match item {
            Some(item) => *item,
            None if parsed.vivify_exptime.is_none() => return Change::Keep,
            None => Item::default(),
        };
        let is_new = item.key.is_empty();
        let expires_s = last_expiry(item.header.expires_s, is_new, parsed, before, context);
        if is_new {
            let states = binary_key_state(parsed);
            return Change::Put(Put { expires_s, states, cas: new_cas(parsed), ..unchanged(&item) });
        }
        if expires_s == item.header.expires_s {
            return Change::Keep;
        }
        Change::Put(Put { expires_s, ..unchanged(&item) })
    });
    match updated {
        Ok(_) => error(OPAQUE_TOO_LONG, out),
        Err(refusal) => refused(refusal, context, out, false, 0),
    }
}

/// Plans the action of `mg` on an item, or on a missing key.
///
/// Flags take effect in their order: `R` compares with the expiry that a `T` before it has set.
fn plan<'p>(
    item: Option<&Item<'p>>,
    parsed: &MetaFlags,
    flags: &[&[u8]],
    context: &Context<'p>,
) -> Option<Fetch<'p>> {
    let access = &context.access;
    let Some(item) = item else {
        parsed.vivify_exptime?;
        let mut item = Item::default();
        item.header.states = binary_key_state(parsed);
        let put = Put {
            is_fetched: !parsed.is_uncounted,
            expires_s: last_expiry(0, true, parsed, flags, context),
            states: item.header.states.with(States::TOKEN_SENT),
            cas: new_cas(parsed),
            ..unchanged(&item)
        };
        return Some(Fetch { item, is_new: true, is_won: true, put: Some(put) });
    };
    let header = &item.header;
    let is_sent = header.states.has(States::TOKEN_SENT);
    let expires_s = last_expiry(header.expires_s, false, parsed, flags, context);
    let is_early = parsed.recache_exptime.is_some_and(|exptime| {
        let before = flags.iter().position(|flag| flag[0] == b'R').unwrap_or(0);
        let expires_s = last_expiry(header.expires_s, false, parsed, &flags[..before], context);
        expires_s != 0 && expires_s < access.expires_s(exptime)
    });
    let is_won = !is_sent && (is_early || header.states.has(States::STALE));
    let changes = is_won || parsed.exptime.is_some();
    let put = changes.then(|| {
        let mut put = Put { expires_s, ..unchanged(item) };
        if is_won {
            put.states = put.states.with(States::TOKEN_SENT);
        }
        if !parsed.is_uncounted {
            put.is_fetched = true;
        }
        put.cas = parsed.new_cas.map_or(put.cas, Cas::Exactly);
        put
    });
    Some(Fetch { item: *item, is_new: false, is_won, put })
}

/// The expiry second of an item after these flags.
fn last_expiry(
    mut expires_s: u32,
    is_new: bool,
    parsed: &MetaFlags,
    flags: &[&[u8]],
    context: &Context<'_>,
) -> u32 {
    for flag in flags {
        match flag[0] {
            b'T' => expires_s = parsed.exptime.map_or(0, |exptime| context.access.expires_s(exptime)),
            b'N' if is_new => {
                expires_s = parsed.vivify_exptime.map_or(0, |exptime| context.access.expires_s(exptime));
            }
            _ => {}
        }
    }
    expires_s
}

fn binary_key_state(parsed: &MetaFlags) -> States {
    if parsed.binary_key.is_some() { States::BINARY_KEY } else { States::NONE }
}

/// Writes the reply of `mg` for an item.
fn push_fetched<'p>(
    fetch: &Fetch<'p>,
    key: Key<'_>,
    parsed: &MetaFlags,
    flags: &[&[u8]],
    context: &Context<'p>,
    out: &mut Replies<'p>,
) {
    let Item { header, value, .. } = fetch.item;
    // A client that already has the value gets only the flags.
    let returns_value = parsed.returns_value && parsed.cas != Some(header.cas);
    if returns_value {
        out.push(b"VA ");
        out.push_number(value.len());
    } else {
        out.push(b"HD");
    }
    let mut expires_s = header.expires_s;
    for flag in flags {
        match flag[0] {
            b'T' | b'N' => expires_s = last_expiry(expires_s, fetch.is_new, parsed, &[flag], context),
            b's' => push_flag_number(b's', value.len() as u64, out),
            b't' => push_time_left(expires_s, context, out),
            b'c' => push_flag_number(b'c', header.cas, out),
            b'f' => push_flag_number(b'f', u64::from(header.client_flags), out),
            b'l' => {
                let age_s = context.access.age_s(key, &fetch.item);
                push_flag_number(b'l', u64::from(age_s), out);
            }
            b'h' => push_flag_number(b'h', u64::from(fetch.item.is_fetched), out),
            b'O' => push_word(flag, out),
            b'k' => push_key(key.bytes, header.states.has(States::BINARY_KEY), out),
            _ => {}
        }
    }
    if !fetch.is_new && header.states.has(States::TOKEN_SENT) {
        out.push(b" Z");
    }
    if header.states.has(States::STALE) {
        out.push(b" X");
    }
    if fetch.is_won {
        out.push(b" W");
    }
    out.push(b"\r\n");
    if returns_value {
        out.push_value(value);
        out.push(b"\r\n");
    }
}

fn delete(words: &Words<'_>, context: &Context<'_>, out: &mut Replies<'_>) -> Step {
    let flags = flags_of(words, 2);
    let Ok(parsed) = meta::parse(words[1], flags) else {
        return error("CLIENT_ERROR invalid or duplicate flag", out);
    };
    if parsed.opaque_is_too_long {
        return error(OPAQUE_TOO_LONG, out);
    }
    context.access.counters.cmd_meta.add(1);
    let key = key_of(&context.access, words[1], &parsed);
    let how = Deletion {
        cas: parsed.cas,
        invalidates: parsed.invalidates,
        removes_value: parsed.removes_value,
        expires_s: parsed.exptime.map(|exptime| context.access.expires_s(exptime)),
        new_cas: parsed.new_cas,
    };
    let code = match context.access.delete(key, &how) {
        Err(refusal) => return refused(refusal, context, out, false, 0),
        Ok(Deleted::Deleted) if parsed.is_quiet => return Step::Used(0),
        Ok(Deleted::Deleted) => "HD",
        Ok(Deleted::NotFound) => "NF",
        Ok(Deleted::Exists) => "EX",
    };
    out.push(code.as_bytes());
    push_opaque_and_key(flags, key.bytes, parsed.binary_key.is_some(), out);
    out.push(b"\r\n");
    Step::Used(0)
}

fn arithmetic(words: &Words<'_>, context: &Context<'_>, out: &mut Replies<'_>) -> Step {
    let flags = flags_of(words, 2);
    let Ok(parsed) = meta::parse(words[1], flags) else {
        return error("CLIENT_ERROR invalid or duplicate flag", out);
    };
    let is_increment = match parsed.mode {
        None | Some(b'I' | b'i' | b'+') => true,
        Some(b'D' | b'd' | b'-') => false,
        Some(_) => return error("CLIENT_ERROR invalid mode for ma M token", out),
    };
    let access = &context.access;
    access.counters.cmd_meta.add(1);
    let key = key_of(&context.access, words[1], &parsed);
    // Flags after an opaque token that is too long have no effect.
    let long = flags.iter().position(|flag| flag[0] == b'O' && parsed.opaque_is_too_long);
    let effective = long.map_or(flags, |at| &flags[..at]);
    let touches = effective.iter().any(|flag| flag[0] == b'T');
    let expires_s = parsed.exptime.filter(|_| touches).map(|exptime| access.expires_s(exptime));
    let how = Delta {
        is_increment,
        delta: parsed.delta.unwrap_or(1),
        cas: parsed.cas.unwrap_or(0),
        new_cas: new_cas(&parsed),
        expires_s,
        initial: parsed
            .vivify_exptime
            .map(|_| (parsed.initial, last_expiry(0, true, &parsed, effective, context))),
        has_binary_key: parsed.binary_key.is_some(),
    };
    let counted = match access.count(key, &how) {
        Err(refusal) => return refused(refusal, context, out, false, 0),
        Ok(Counted::NotNumeric) => {
            return error("CLIENT_ERROR cannot increment or decrement non-numeric value", out);
        }
        Ok(_) if parsed.opaque_is_too_long => return error(OPAQUE_TOO_LONG, out),
        Ok(counted) => counted,
    };
    let (number, cas, is_new, mut expires_s) = match counted {
        Counted::Value { is_new: false, .. } if parsed.is_quiet => return Step::Used(0),
        Counted::Value { number, cas, is_new, expired_s } => (number, cas, is_new, expired_s),
        Counted::NotFound | Counted::Exists | Counted::NotNumeric => {
            out.push(if counted == Counted::Exists { b"EX" } else { b"NF" });
            push_opaque_and_key(flags, key.bytes, parsed.binary_key.is_some(), out);
            out.push(b"\r\n");
            return Step::Used(0);
        }
    };
    let mut buffer = itoa::Buffer::new();
    let digits = buffer.format(number).as_bytes();
    if parsed.returns_value {
        out.push(b"VA ");
        out.push_number(digits.len());
    } else {
        out.push(b"HD");
    }
    for flag in flags {
        match flag[0] {
            b'T' | b'N' => expires_s = last_expiry(expires_s, is_new, &parsed, &[flag], context),
            b't' => push_time_left(expires_s, context, out),
            b'c' => push_flag_number(b'c', cas, out),
            b'O' => push_word(flag, out),
            b'k' => push_key(key.bytes, parsed.binary_key.is_some(), out),
            _ => {}
        }
    }
    out.push(b"\r\n");
    if parsed.returns_value {
        out.push(digits);
        out.push(b"\r\n");
    }
    Step::Used(0)
}

/// Executes `me`, which shows the fields of an item.
fn debug(words: &Words<'_>, context: &Context<'_>, out: &mut Replies<'_>) -> Step {
    let mut decoded = None;
    if words.get(2).is_some_and(|word| *word == b"b") {
        decoded = base64::decode(words[1]);
        if decoded.is_none() {
            return error(BAD_FORMAT, out);
        }
    }
    let access = &context.access;
    access.counters.cmd_meta.add(1);
    let key = context.access.key(decoded.as_deref().unwrap_or(words[1]));
    let item = match access.store.look_up(access.pin, key, access.now_s, false) {
        Ok(item) => item,
        Err(Absent::Elsewhere(partition)) => {
            return refused(Refusal::Elsewhere(partition), context, out, false, 0);
        }
        Err(Absent::Fetching) => return Step::Again(Until::Fetched),
        Err(_) => {
            out.push_line("EN");
            return Step::Used(0);
        }
    };
    out.push(b"ME ");
    if item.header.states.has(States::BINARY_KEY) {
        base64::encode_to(item.key, out.buffer());
    } else {
        out.push(item.key);
    }
    let expired_for_s = match item.header.expires_s {
        0 => -1,
        expires_s => i64::from(access.now_s) - i64::from(expires_s),
    };
    out.push_line(&format!(
        " exp={expired_for_s} la={} cas={} fetch={} cls=1 size={}",
        access.age_s(key, &item),
        item.header.cas,
        if item.is_fetched { "yes" } else { "no" },
        access.item_size(item.key.len(), item.header.client_flags, item.value.len()),
    ));
    Step::Used(0)
}

fn error(text: &str, out: &mut Replies<'_>) -> Step {
    out.push_line(text);
    Step::Used(0)
}

fn key_of<'k>(access: &Access<'_>, word: &'k [u8], parsed: &'k MetaFlags) -> Key<'k> {
    access.key(parsed.binary_key.as_deref().unwrap_or(word))
}

fn new_cas(parsed: &MetaFlags) -> Cas {
    parsed.new_cas.map_or(Cas::Next, Cas::Exactly)
}

fn push_opaque_and_key(flags: &[&[u8]], key: &[u8], is_binary: bool, out: &mut Replies<'_>) {
    for flag in flags {
        match flag[0] {
            b'O' => push_word(flag, out),
            b'k' => push_key(key, is_binary, out),
            _ => {}
        }
    }
}

fn push_word(word: &[u8], out: &mut Replies<'_>) {
    out.push(b" ");
    out.push(word);
}

fn push_key(key: &[u8], is_binary: bool, out: &mut Replies<'_>) {
    out.push(b" k");
    if is_binary {
        base64::encode_to(key, out.buffer());
        out.push(b" b");
    } else {
        out.push(key);
    }
}

fn push_flag_number(name: u8, number: u64, out: &mut Replies<'_>) {
    out.push(&[b' ', name]);
    out.push_number(number);
}

fn push_time_left(expires_s: u32, context: &Context<'_>, out: &mut Replies<'_>) {
    if expires_s == 0 {
        out.push(b" t-1");
    } else {
        push_flag_number(b't', u64::from(expires_s.wrapping_sub(context.access.now_s)), out);
    }
}
