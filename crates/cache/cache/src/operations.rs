//! memcached's operations on items, for all protocols.

use crate::clock::Clock;
use crate::counters::Counters;
use crate::protocol::number;
use crate::store::epochs::Pin;
use crate::store::item::{Item, KEY_MAX, States};
use crate::store::partition::{Absent, Cas, Change, Put};
use crate::store::presence::Presence;
use crate::store::{Key, Refusal, ShortValue, Store, Until};

/// Bytes of memcached's item other than key, flags and value. They count for the limit `-I`.
const ITEM_OVERHEAD: usize = 51;
const CAS_BYTES: usize = 8;
const CLIENT_FLAGS_BYTES: usize = 4;

/// A thread's access to the items during a turn of its loop.
#[derive(Clone, Copy, Debug)]
pub struct Access<'p> {
    /// The items.
    pub store: &'p Store,
    /// The pin that keeps items valid during the turn.
    pub pin: &'p Pin<'p>,
    /// The clock of the server.
    pub clock: &'p Clock,
    /// The second of this turn.
    pub now_s: u32,
    /// The thread's counters.
    pub counters: &'p Counters,
    /// Largest item, in bytes as memcached counts them.
    pub item_size_max: usize,
}

impl<'p> Access<'p> {
    /// A key with its hash.
    #[inline]
    #[must_use]
    pub fn key<'a>(&self, bytes: &'a [u8]) -> Key<'a> {
        self.store.key(bytes)
    }

    /// Whether the thread may serve partitions of this server.
    #[must_use]
    pub fn may_serve(&self) -> bool {
        self.pin.serves_until_us() != 0
    }

    /// The presence of a partition for this turn. Partitions of a server that may serve nothing are
    /// treated as if they were about to leave.
    #[must_use]
    pub fn presence(&self, partition: usize) -> Presence {
        match self.store.partitions()[partition].presence() {
            Presence::Here if !self.may_serve() => Presence::Leaving,
            presence => presence,
        }
    }
}

/// The condition of a storage command, and how the value is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StoreMode {
    /// Stores in any case.
    Set,
    /// Stores if the item is missing.
    Add,
    /// Stores if the item exists.
    Replace,
    /// Stores if the item exists and has the cas number.
    Cas,
    /// Adds to the end of the value.
    Append,
    /// Adds to the start of the value.
    Prepend,
}

/// A value to store, with its fields.
#[derive(Clone, Copy, Debug)]
pub struct NewValue<'p> {
    /// The client's flags.
    pub client_flags: u32,
    /// The second in which the item expires, or 0.
    pub expires_s: u32,
    /// The cas number that the item must have, or 0.
    pub cas: u64,
    /// The cas number that the stored item gets.
    pub new_cas: Cas,
    /// Whether the key is binary.
    pub has_binary_key: bool,
    /// Whether a command with a lower cas number than the item's stores its value, marked stale.
    pub invalidates: bool,
    /// The expiry of an item that `append` or `prepend` creates, if they do.
    pub vivify_expires_s: Option<u32>,
    /// The value.
    pub value: &'p [u8],
}

/// The result of a storage command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stored {
    /// The item was stored.
    Stored {
        /// The cas number of the item.
        cas: u64,
        /// The length of the stored value.
        value_len: usize,
    },
    /// The condition of the command was not met.
    NotStored,
    /// The item has another cas number.
    Exists,
    /// The item is missing.
    NotFound,
}

/// The result of a deletion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Deleted {
    /// The item was deleted, or invalidated.
    Deleted,
    /// The item is missing.
    NotFound,
    /// The item has another cas number.
    Exists,
}

/// A change of a counter.
#[derive(Clone, Copy, Debug)]
pub struct Delta {
    /// Whether the number is added; otherwise it is subtracted.
    pub is_increment: bool,
    /// The number.
    pub delta: u64,
    /// The cas number that the item must have, or 0.
    pub cas: u64,
    /// The cas number that the item gets.
    pub new_cas: Cas,
    /// The new second in which the item expires, if it changes.
    pub expires_s: Option<u32>,
    /// The value and expiry of a missing counter, if it is created.
    pub initial: Option<(u64, u32)>,
    /// Whether the key is binary.
    pub has_binary_key: bool,
}

/// The result of a change of a counter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Counted {
    /// The counter has this value now.
    Value {
        /// The value.
        number: u64,
        /// The item's cas number.
        cas: u64,
        /// The second in which the item expired before the change; 0 if none, or if it was created.
        expired_s: u32,
        /// Whether the counter was created.
        is_new: bool,
    },
    /// The value is not a number.
    NotNumeric,
    /// The item is missing.
    NotFound,
    /// The item has another cas number.
    Exists,
}

/// The options of a deletion.
#[derive(Clone, Copy, Debug, Default)]
pub struct Deletion {
    /// The cas number that the item must have.
    pub cas: Option<u64>,
    /// Keeps the item, and marks it stale.
    pub invalidates: bool,
    /// Keeps the item without its value.
    pub removes_value: bool,
    /// The new second in which a kept item expires, if it changes.
    pub expires_s: Option<u32>,
    /// The cas number of a kept item.
    pub new_cas: Option<u64>,
}

impl<'p> Access<'p> {
    /// Seconds since an item was stored.
    #[must_use]
    pub fn age_s(&self, key: Key<'_>, item: &Item<'p>) -> u32 {
        item.place
            .map_or(0, |place| self.now_s.saturating_sub(self.store.stored_s(self.pin, key.hash, place)))
    }

    /// Whether an item is within the size limit.
    #[inline]
    #[must_use]
    pub fn fits(&self, key_len: usize, client_flags: u32, value_len: usize) -> bool {
        self.item_size(key_len, client_flags, value_len) <= self.item_size_max
    }

    /// The longest value that is within the size limit with any key and flags.
    #[must_use]
    pub fn value_max(&self) -> usize {
        self.item_size_max.saturating_sub(self.item_size(KEY_MAX, 1, 0))
    }

    /// The size of an item as memcached counts it.
    #[inline]
    #[must_use]
    pub fn item_size(&self, key_len: usize, client_flags: u32, value_len: usize) -> usize {
        let cas = if self.store.has_cas() { CAS_BYTES } else { 0 };
        let flags = if client_flags == 0 { 0 } else { CLIENT_FLAGS_BYTES };
        ITEM_OVERHEAD + cas + flags + key_len + value_len
    }

    /// The second in which an item expires.
    #[inline]
    #[must_use]
    pub fn expires_s(&self, exptime: i32) -> u32 {
        self.clock.expires_s(exptime, self.now_s)
    }

    /// Reads an item, and counts the read.
    ///
    /// # Errors
    /// If the partition is not on this server, or if the item is being fetched from the pool.
    #[inline]
    pub fn get(&self, key: Key<'_>) -> Result<Option<Item<'p>>, Refusal> {
        let found = self.store.look_up(self.pin, key, self.now_s, true);
        match found {
            Err(Absent::Elsewhere(partition)) => return Err(Refusal::Elsewhere(partition)),
            Err(Absent::Fetching) => return Err(Refusal::Again(Until::Fetched)),
            _ => {}
        }
        self.count_request(key);
        self.count_get(&found);
        Ok(found.ok())
    }

    /// Counts a request for the load of its partition.
    #[inline]
    pub fn count_request(&self, key: Key<'_>) {
        self.counters.count_request(self.store.partition_number(key.hash));
    }

    /// Counts a read.
    #[inline]
    pub fn count_get(&self, found: &Result<Item<'p>, Absent>) {
        let Err(absent) = found else { return self.counters.get_hits.add(1) };
        self.counters.get_misses.add(1);
        match absent {
            Absent::Missing | Absent::Elsewhere(_) | Absent::Fetching => {}
            Absent::Expired => self.counters.get_expired.add(1),
            Absent::Flushed => self.counters.get_flushed.add(1),
        }
    }

    /// Sets the second in which an item expires; returns the item as it was before.
    ///
    /// # Errors
    /// A [`Refusal`].
    pub fn touch(&self, key: Key<'_>, expires_s: u32) -> Result<Option<Item<'p>>, Refusal> {
        let mut touched = None;
        self.store.update(self.pin, key, self.now_s, |item| {
            touched = item.copied();
            item.map_or(Change::Keep, |item| {
                Change::Put(Put { expires_s, is_fetched: true, ..unchanged(item) })
            })
        })?;
        self.count_request(key);
        self.counters.cmd_touch.add(1);
        let counter = if touched.is_some() { &self.counters.touch_hits } else { &self.counters.touch_misses };
        counter.add(1);
        Ok(touched)
    }

    /// Stores a value.
    ///
    /// # Errors
    /// A [`Refusal`].
    pub fn store(&self, mode: StoreMode, key: Key<'_>, new: &NewValue<'p>) -> Result<Stored, Refusal> {
        let mut outcome = Stored::NotStored;
        let replaces = mode == StoreMode::Set;
        let cas = self.store.update_or_replace(self.pin, key, self.now_s, replaces, |item| {
            let (decided, change) = match item {
                Some(item) => self.store_over(mode, item, new),
                None => store_first(mode, new),
            };
            outcome = decided;
            change
        })?;
        if let Stored::Stored { cas: stored, .. } = &mut outcome {
            *stored = cas;
            self.counters.total_items.add(1);
        }
        self.count_request(key);
        self.counters.cmd_set.add(1);
        if mode == StoreMode::Cas {
            let counter = match outcome {
                Stored::Stored { .. } => &self.counters.cas_hits,
                Stored::Exists => &self.counters.cas_badval,
                _ => &self.counters.cas_misses,
            };
            counter.add(1);
        }
        Ok(outcome)
    }

    fn store_over(&self, mode: StoreMode, item: &Item<'p>, new: &NewValue<'p>) -> (Stored, Change<'p>) {
        // Without cas numbers the command's number is ignored.
        let cas = if self.store.has_cas() { new.cas } else { 0 };
        let matches = cas == item.header.cas;
        match mode {
            StoreMode::Add => (Stored::NotStored, Change::Keep),
            StoreMode::Cas if cas != 0 && matches => put(put_of(new)),
            StoreMode::Cas if new.invalidates && cas != 0 && cas < item.header.cas => {
                let sent = item.header.states.has(States::TOKEN_SENT);
                let stale = States::STALE.with(if sent { States::TOKEN_SENT } else { States::NONE });
                let mut stored = put_of(new);
                stored.states = stored.states.with(stale);
                stored.expires_s = item.header.expires_s;
                put(stored)
            }
            StoreMode::Cas => (Stored::Exists, Change::Keep),
            StoreMode::Set | StoreMode::Replace => put(put_of(new)),
            StoreMode::Append | StoreMode::Prepend => {
                let value_len = item.value.len() + new.value.len();
                if cas != 0 && !matches {
                    (Stored::Exists, Change::Keep)
                } else if !self.fits(item.key.len(), item.header.client_flags, value_len) {
                    (Stored::NotStored, Change::Keep)
                } else {
                    let append = mode == StoreMode::Append;
                    let value = if append { [item.value, new.value] } else { [new.value, item.value] };
                    let states = if item.header.states.has(States::BINARY_KEY) {
                        States::BINARY_KEY
                    } else {
                        States::NONE
                    };
                    put(Put { states, cas: new.new_cas, is_fetched: false, value, ..unchanged(item) })
                }
            }
        }
    }

    /// Deletes an item.
    ///
    /// # Errors
    /// A [`Refusal`].
    pub fn delete(&self, key: Key<'_>, how: &Deletion) -> Result<Deleted, Refusal> {
        let mut outcome = Deleted::NotFound;
        self.store.update(self.pin, key, self.now_s, |item| {
            let Some(item) = item else { return Change::Keep };
            if how.cas.is_some_and(|cas| cas != item.header.cas) {
                outcome = Deleted::Exists;
                return Change::Keep;
            }
            outcome = Deleted::Deleted;
            if !how.invalidates && !how.removes_value {
                return Change::Remove;
            }
            let mut kept = unchanged(item);
            kept.cas = how.new_cas.map_or(Cas::Next, Cas::Exactly);
            if how.removes_value {
                kept.value = [b"", b""];
                kept.client_flags = 0;
            }
            if how.invalidates {
                kept.states = kept.states.with(States::STALE).without(States::TOKEN_SENT);
                kept.expires_s = how.expires_s.unwrap_or(kept.expires_s);
            }
            Change::Put(kept)
        })?;
        self.count_request(key);
        match outcome {
            Deleted::Deleted if how.invalidates => {}
            Deleted::Deleted => self.counters.delete_hits.add(1),
            _ => self.counters.delete_misses.add(1),
        }
        Ok(outcome)
    }

    /// Changes a counter.
    ///
    /// # Errors
    /// A [`Refusal`].
    pub fn count(&self, key: Key<'_>, how: &Delta) -> Result<Counted, Refusal> {
        let mut outcome = Counted::NotFound;
        let cas = self.store.update_short(self.pin, key, self.now_s, |item, digits| {
            let (decided, change) = match item {
                Some(item) => count_item(item, how, digits),
                None => count_new(how, digits),
            };
            outcome = decided;
            change
        })?;
        if let Counted::Value { cas: stored, .. } = &mut outcome {
            *stored = cas;
        }
        self.count_request(key);
        let (hits, misses) = if how.is_increment {
            (&self.counters.incr_hits, &self.counters.incr_misses)
        } else {
            (&self.counters.decr_hits, &self.counters.decr_misses)
        };
        match outcome {
            Counted::Value { is_new: false, .. } => hits.add(1),
            Counted::NotFound => misses.add(1),
            _ => {}
        }
        Ok(outcome)
    }

    /// Deletes an item whose replacement is too large, so that clients do not read the old value.
    ///
    /// # Errors
    /// If the partition is not on this server, or if the update must be retried.
    pub fn delete_outdated(&self, key: Key<'_>) -> Result<(), Refusal> {
        self.store.update_or_replace(self.pin, key, self.now_s, true, |_| Change::Remove).map(drop)
    }
}

/// A put that stores an item unchanged. Callers override the fields that change.
#[must_use]
pub fn unchanged<'p>(item: &Item<'p>) -> Put<'p> {
    Put {
        client_flags: item.header.client_flags,
        expires_s: item.header.expires_s,
        states: item.header.states,
        cas: Cas::Exactly(item.header.cas),
        is_fetched: item.is_fetched,
        value: [item.value, b""],
    }
}

fn put_of<'p>(new: &NewValue<'p>) -> Put<'p> {
    Put {
        client_flags: new.client_flags,
        expires_s: new.expires_s,
        states: if new.has_binary_key { States::BINARY_KEY } else { States::NONE },
        cas: new.new_cas,
        is_fetched: false,
        value: [new.value, b""],
    }
}

fn put(put: Put<'_>) -> (Stored, Change<'_>) {
    let value_len = put.value[0].len() + put.value[1].len();
    (Stored::Stored { cas: 0, value_len }, Change::Put(put))
}

fn store_first<'p>(mode: StoreMode, new: &NewValue<'p>) -> (Stored, Change<'p>) {
    match mode {
        StoreMode::Set | StoreMode::Add => put(put_of(new)),
        StoreMode::Cas => (Stored::NotFound, Change::Keep),
        StoreMode::Append | StoreMode::Prepend if new.vivify_expires_s.is_some() => {
            put(Put { expires_s: new.vivify_expires_s.unwrap_or(0), ..put_of(new) })
        }
        StoreMode::Replace | StoreMode::Append | StoreMode::Prepend => (Stored::NotStored, Change::Keep),
    }
}

fn count_item<'d>(item: &Item<'d>, how: &Delta, digits: &'d mut ShortValue) -> (Counted, Change<'d>) {
    if item.value.is_empty() || item.value.len() > crate::store::slot::RUN_BYTES {
        return (Counted::NotNumeric, Change::Keep);
    }
    if how.cas != 0 && how.cas != item.header.cas {
        return (Counted::Exists, Change::Keep);
    }
    let Some(number) = number::uint64(item.value) else { return (Counted::NotNumeric, Change::Keep) };
    let number =
        if how.is_increment { number.wrapping_add(how.delta) } else { number.saturating_sub(how.delta) };
    let expired_s = item.header.expires_s;
    let outcome = Counted::Value { number, cas: 0, expired_s, is_new: false };
    let len = write_digits(number, digits);
    // The text of a number that becomes shorter is padded to its length, as in memcached.
    let padding = item.value.len().saturating_sub(len).min(SPACES.len());
    let mut put = Put {
        cas: how.new_cas,
        expires_s: how.expires_s.unwrap_or(expired_s),
        value: [&digits[..len], &SPACES[..padding]],
        ..unchanged(item)
    };
    if len > item.value.len() {
        // In memcached a number that becomes longer is a new item.
        put.states = put.states.without(States::STALE.with(States::TOKEN_SENT));
        put.is_fetched = false;
    }
    (outcome, Change::Put(put))
}

fn count_new<'d>(how: &Delta, digits: &'d mut ShortValue) -> (Counted, Change<'d>) {
    let Some((number, expires_s)) = how.initial else { return (Counted::NotFound, Change::Keep) };
    let len = write_digits(number, digits);
    let put = Put {
        client_flags: 0,
        expires_s,
        states: if how.has_binary_key { States::BINARY_KEY } else { States::NONE },
        cas: how.new_cas,
        is_fetched: false,
        value: [&digits[..len], b""],
    };
    (Counted::Value { number, cas: 0, expired_s: 0, is_new: true }, Change::Put(put))
}

/// Padding for a counter with many leading zeros or trailing spaces, as long as a run of the log.
static SPACES: [u8; crate::store::slot::RUN_BYTES] = [b' '; crate::store::slot::RUN_BYTES];

fn write_digits(number: u64, digits: &mut ShortValue) -> usize {
    let mut buffer = itoa::Buffer::new();
    let text = buffer.format(number).as_bytes();
    digits[..text.len()].copy_from_slice(text);
    text.len()
}
