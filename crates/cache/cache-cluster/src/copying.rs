//! Copies a partition to another server: first in rounds while it is written, and then, when it is
//! paused, the remaining bytes.
//!
//! The written bytes of a run of the log do not change until the run is opened again, which changes
//! its serial number. So each round copies only the bytes that were appended since the round
//! before. The index is copied when the partition is paused.

use std::collections::BTreeMap;

use aquifer_cache::store::index::{BUCKET_BYTES, IndexState};
use aquifer_cache::store::layout::{Layout, RUN_ENTRY_BYTES};
use aquifer_cache::store::memory::PAGE_BYTES;
use aquifer_cache::store::partition::{Departure, Partition};
use aquifer_cache::store::runs::RunState;
use aquifer_cache::store::slot::RUN_BYTES;

aquifer_mutation::mutations! {
    /// Steps of copying that the test breaks, to show that it notices.
    pub enum Mutation {
        /// Copied bytes of a run still count after the run was opened again.
        IgnoreSerial,
        /// Entries of runs after the last one in use are not cleared.
        KeepEntries,
        /// Bytes that were written since the last round are not copied.
        SkipRest,
        /// The index is copied without its overflow buckets.
        SkipOverflow,
    }
}

/// Largest number of bytes that one READ copies.
pub const PIECE_BYTES: usize = 256 << 10;

/// A range of the source's memory, and where it is copied to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Offset in the source's memory.
    pub from: u64,
    /// Offset in the memory of this server's partition.
    pub to: u64,
    /// Length, at most [`PIECE_BYTES`].
    pub len: u32,
}

/// Why a partition cannot be copied.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CopyError {
    /// A READ of the source's memory failed.
    #[error("cannot read the memory of the partition's source")]
    Lost,
    /// The partition does not fit into the memory or layout of this server.
    #[error("the partition does not fit into the memory of this server")]
    NoRoom,
    /// The source's table of runs is inconsistent.
    #[error("the source's table of runs is inconsistent")]
    Damaged,
}

/// Access to the memory of the source.
pub trait Source {
    /// Copies pieces to the memory of this server's partition, in order.
    ///
    /// # Errors
    /// If a READ fails.
    fn read(&mut self, pieces: &[Piece]) -> Result<(), CopyError>;
}

/// A partition that is being copied.
#[derive(Debug)]
pub struct Copy<'a> {
    partition: &'a Partition,
    from: Layout,
    /// Copied bytes of each run that has an entry.
    copied: BTreeMap<u32, Copied>,
    /// Bytes at the start of each 64 KiB of the log that were ever copied to.
    touched: BTreeMap<u32, usize>,
    /// The end of the runs whose entries were copied.
    table_end: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Copied {
    serial: u32,
    bytes: usize,
}

impl<'a> Copy<'a> {
    /// A copy to `partition` that has not begun. `from` is the layout of the source's memory.
    #[must_use]
    pub fn new(partition: &'a Partition, from: Layout) -> Self {
        Self { partition, from, copied: BTreeMap::new(), touched: BTreeMap::new(), table_end: 1 }
    }

    /// Bytes of memory that the copy uses so far, without the index.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.touched.values().map(|touched| touched.next_multiple_of(PAGE_BYTES) as u64).sum()
    }

    /// Copies the bytes that were written since the last round to runs before `runs_end`. `reserve`
    /// is called with the bytes of memory that the copy will use, and returns whether they are
    /// available. Returns the number of copied bytes.
    ///
    /// # Errors
    /// [`CopyError::Lost`] if a READ fails, [`CopyError::NoRoom`] if the partition does not fit.
    pub fn round(
        &mut self,
        runs_end: u32,
        source: &mut dyn Source,
        reserve: &mut dyn FnMut(u64) -> bool,
    ) -> Result<u64, CopyError> {
        if runs_end as usize > self.partition.layout().runs || runs_end as usize > self.from.runs {
            return Err(CopyError::NoRoom);
        }
        self.copy_table(runs_end, source)?;
        let pieces = self.plan(runs_end);
        if !reserve(self.bytes()) {
            return Err(CopyError::NoRoom);
        }
        source.read(&pieces)?;
        Ok(pieces.iter().map(|piece| u64::from(piece.len)).sum())
    }

    /// Copies the remaining bytes and the index of a paused partition, and frees memory that was
    /// copied to and is not needed any more.
    ///
    /// # Errors
    /// Errors of [`Self::round`].
    pub fn finish(
        &mut self,
        departure: &Departure,
        source: &mut dyn Source,
        reserve: &mut dyn FnMut(u64) -> bool,
    ) -> Result<(), CopyError> {
        if !self.partition.layout().fits(departure.runs_end, departure.index)
            || !self.from.fits(departure.runs_end, departure.index)
        {
            return Err(CopyError::NoRoom);
        }
        let before = self.table_end;
        if Mutation::SkipRest.is_active() {
            self.copy_table(departure.runs_end, source)?;
        } else {
            self.round(departure.runs_end, source, reserve)?;
        }
        source.read(&self.index_pieces(departure.index))?;
        let after =
            if Mutation::KeepEntries.is_active() { before..before } else { departure.runs_end..before };
        for run in after {
            self.partition.clear_run_entry(run);
        }
        self.discard_unneeded(departure.runs_end);
        Ok(())
    }

    fn copy_table(&mut self, runs_end: u32, source: &mut dyn Source) -> Result<(), CopyError> {
        let bytes = (runs_end as usize - 1) * RUN_ENTRY_BYTES;
        let mut pieces = Vec::new();
        push_pieces(&mut pieces, self.from.run_entry(1), self.partition.layout().run_entry(1), bytes);
        source.read(&pieces)?;
        self.table_end = self.table_end.max(runs_end);
        Ok(())
    }

    /// Plans the copy of the bytes that the copied table of runs has and this copy does not.
    fn plan(&mut self, runs_end: u32) -> Vec<Piece> {
        let mut pieces = Vec::new();
        for (run, serial, fill) in runs_with_bytes(self.partition, runs_end) {
            let copied = self.copied.entry(run).or_default();
            if copied.serial != serial && !(Mutation::IgnoreSerial.is_active() && copied.serial != 0) {
                *copied = Copied { serial, bytes: 0 };
            }
            if fill > copied.bytes {
                let (from, to) = (self.from.run(run), self.partition.layout().run(run));
                push_pieces(&mut pieces, from + copied.bytes, to + copied.bytes, fill - copied.bytes);
                copied.bytes = fill;
                for (part, bytes) in parts_of(run, fill) {
                    let touched = self.touched.entry(part).or_default();
                    *touched = bytes.max(*touched);
                }
            }
        }
        pieces
    }

    fn index_pieces(&self, index: IndexState) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let skips_overflow = Mutation::SkipOverflow.is_active();
        let counts = [index.buckets, if skips_overflow { 0 } else { index.overflow_buckets }];
        let places = self.from.index_starts().into_iter().zip(self.partition.layout().index_starts());
        for ((from, to), count) in places.zip(counts) {
            let bytes = usize::try_from(count).expect("64 bits") * BUCKET_BYTES;
            push_pieces(&mut pieces, from, to, bytes);
        }
        pieces
    }

    /// Frees memory that was copied to and that no run uses any more.
    fn discard_unneeded(&mut self, runs_end: u32) {
        let layout = *self.partition.layout();
        let runs = runs_with_bytes(self.partition, runs_end);
        let needed: BTreeMap<u32, usize> = runs.flat_map(|(run, _, fill)| parts_of(run, fill)).collect();
        for (part, touched) in &self.touched {
            let needed = needed.get(part).copied().unwrap_or(0).next_multiple_of(PAGE_BYTES);
            let touched = touched.next_multiple_of(PAGE_BYTES);
            if touched > needed {
                self.partition.discard(layout.run(*part) + needed, touched - needed);
            }
        }
    }
}

/// Lists the runs whose bytes are in the memory of a partition, by its table: number, serial number
/// and bytes of each.
fn runs_with_bytes(partition: &Partition, runs_end: u32) -> impl Iterator<Item = (u32, u32, usize)> {
    let mut next = 1;
    std::iter::from_fn(move || {
        while next < runs_end {
            let run = next;
            let entry = partition.run_entry(run);
            let runs = entry.runs().max(1);
            let (serial, fill) = entry.serial_and_fill();
            let is_free = entry.state() == RunState::Free;
            if is_free || runs > runs_end - run || fill > runs as usize * RUN_BYTES {
                // Free, or inconsistent because the entry was changed during the READ: the next
                // round reads it again.
                next = run + 1;
                continue;
            }
            next = run + runs;
            // Runs in the pool are not copied.
            if !entry.state().is_away() {
                return Some((run, serial, fill));
            }
        }
        None
    })
}

/// Lists each 64 KiB of a run that has `fill` bytes, with the bytes in it.
fn parts_of(run: u32, fill: usize) -> impl Iterator<Item = (u32, usize)> {
    let count = u32::try_from(fill.div_ceil(RUN_BYTES)).expect("runs have 32 bits");
    (0..count).map(move |part| (run + part, (fill - part as usize * RUN_BYTES).min(RUN_BYTES)))
}

fn push_pieces(pieces: &mut Vec<Piece>, from: usize, to: usize, bytes: usize) {
    let mut at = 0;
    while at < bytes {
        let len = (bytes - at).min(PIECE_BYTES);
        let len_u32 = u32::try_from(len).expect("pieces are short");
        pieces.push(Piece { from: (from + at) as u64, to: (to + at) as u64, len: len_u32 });
        at += len;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use aquifer_cache::store::hash::{HashSecret, KeyHasher};
    use aquifer_cache::store::item::States;
    use aquifer_cache::store::partition::{Cas, Change, Put};
    use aquifer_cache::store::presence::{Place, Presence};
    use aquifer_cache::store::{Store, StoreOptions};
    use aquifer_mutation::Mutations;

    /// Reads the memory of a partition of the same process.
    pub struct Local {
        from: aquifer_fabric::Memory,
        to: aquifer_fabric::Memory,
    }

    impl Local {
        pub fn new(from: &Partition, to: &Partition) -> Self {
            let map = |partition: &Partition| {
                let fd = partition.descriptor().unwrap();
                aquifer_fabric::Memory::from_fd(fd, partition.layout().bytes()).unwrap()
            };
            Self { from: map(from), to: map(to) }
        }
    }

    impl Source for Local {
        fn read(&mut self, pieces: &[Piece]) -> Result<(), CopyError> {
            for piece in pieces {
                let mut bytes = vec![0; piece.len as usize];
                self.from.read(usize::try_from(piece.from).unwrap(), &mut bytes);
                self.to.write(usize::try_from(piece.to).unwrap(), &bytes);
            }
            Ok(())
        }
    }

    fn store(limit: u64) -> Store {
        let options = StoreOptions {
            limit,
            partitions: 2,
            threads: 3,
            has_cas: true,
            evicts: true,
            pool: 0,
            hasher: KeyHasher::new(HashSecret([1, 2])),
        };
        Store::new(&options).unwrap()
    }

    fn put(store: &Store, thread: usize, key: &str, value: &str, now_s: u32, expires_s: u32) -> bool {
        let pin = store.pin(thread);
        let put = Put {
            client_flags: 7,
            expires_s,
            states: States::NONE,
            cas: Cas::Next,
            is_fetched: false,
            value: [value.as_bytes(), b""],
        };
        store.update(&pin, store.key(key.as_bytes()), now_s, |_| Change::Put(put)).is_ok()
    }

    fn value(store: &Store, key: &str, now_s: u32) -> Option<(String, u64, u32)> {
        let pin = store.pin(2);
        let item = store.look_up(&pin, store.key(key.as_bytes()), now_s, false).ok()?;
        let text = String::from_utf8(item.value.to_vec()).unwrap();
        Some((text, item.header.cas, item.header.expires_s))
    }

    fn key_in(partition: usize, store: &Store, number: usize) -> Option<String> {
        let key = format!("key{number}");
        (store.partition_number(store.hash(key.as_bytes())) == partition).then_some(key)
    }

    #[test]
    fn a_partition_is_copied_while_it_is_written() {
        let (from, to) = (store(64 << 20), store(32 << 20));
        to.begin_absent();
        let written = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            let writers: Vec<_> = (0..2)
                .map(|thread| {
                    let (from, written) = (&from, &written);
                    scope.spawn(move || {
                        let mut last = BTreeMap::new();
                        for count in 0.. {
                            let number = count * 7919 % 5000 * 2 + thread;
                            let Some(key) = key_in(1, from, number) else { continue };
                            // Some items are longer than a run, and are replaced by short ones.
                            let len = if count % 97 == 0 { 150_000 } else { count % 300 };
                            let value = format!("{number}-{count}-{}", "x".repeat(len));
                            if !put(from, thread, &key, &value, 100, 0) {
                                assert_eq!(from.partitions()[1].presence(), Presence::Leaving);
                                return last;
                            }
                            last.insert(key, value);
                            written.fetch_add(1, Ordering::Relaxed);
                        }
                        last
                    })
                })
                .collect();
            let (source, target) = (&from.partitions()[1], &to.partitions()[1]);
            let mut local = Local::new(source, target);
            let mut copy = Copy::new(target, *source.layout());
            let mut reservation = to.reservation();
            let mut rounds = 0;
            while rounds < 20 || written.load(Ordering::Relaxed) < 50_000 {
                rounds += 1;
                let runs_end = source.runs_end();
                copy.round(runs_end, &mut local, &mut |bytes| reservation.resize(bytes, 5)).unwrap();
            }
            let departure = from.leave(1, 100);
            let last: Vec<BTreeMap<String, String>> =
                writers.into_iter().map(|writer| writer.join().unwrap()).collect();
            copy.finish(&departure, &mut local, &mut |bytes| reservation.resize(bytes, 5)).unwrap();
            to.arrive(1, &departure, 5).unwrap();
            drop(reservation);
            to.stay(1);
            from.forget(1, Presence::Elsewhere(Place { server: 1, generation: 2 })).unwrap();
            let mut items = 0;
            for (key, expected) in last.iter().flatten() {
                assert_eq!(value(&to, key, 5).unwrap().0, *expected);
                items += 1;
            }
            assert!(items > 1000, "{items}");
            assert_eq!(to.content().items, items);
            assert_eq!(from.content().items, 0);
            // The budget agrees with the allocated memory.
            let pages = allocated(&to.partitions()[1]);
            assert!(to.budget().used().abs_diff(pages) <= 64 * PAGE_BYTES as u64, "{pages}");
        });
    }

    /// Copies a partition between random writes; returns an error if the copy is wrong.
    fn copy_between_writes(seed: u64) -> Result<(), String> {
        let (from, to) = (store(3 << 20), store(8 << 20));
        to.begin_absent();
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = |below: usize| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            usize::try_from(random % below as u64).unwrap()
        };
        let keys: Vec<String> = (0..3000).filter_map(|number| key_in(1, &from, number)).collect();
        let (source, target) = (&from.partitions()[1], &to.partitions()[1]);
        let (mut local, mut copy) = (Local::new(source, target), Copy::new(target, *source.layout()));
        for count in 0..8000 {
            // Some items are longer than a run, and are replaced by short ones.
            let len = if next(200) == 0 { 100_000 } else { next(2000) };
            let (number, now_s) = (next(keys.len()), 10 + count / 100);
            put(&from, 0, &keys[number], &format!("{count}:{}", "x".repeat(len)), now_s, 0);
            if next(400) == 0 {
                copy.round(source.runs_end(), &mut local, &mut |_| true)
                    .map_err(|error| error.to_string())?;
            }
        }
        let now_s = 100;
        if seed % 2 == 1 {
            // Most runs at the end are free when the partition is paused.
            for key in &keys[1..] {
                let pin = from.pin(0);
                from.update(&pin, from.key(key.as_bytes()), now_s, |_| Change::Remove).unwrap();
            }
            from.collect_retired();
        }
        let expected: Vec<_> = keys.iter().map(|key| value(&from, key, now_s)).collect();
        let departure = from.leave(1, now_s);
        copy.finish(&departure, &mut local, &mut |_| true).map_err(|error| error.to_string())?;
        to.arrive(1, &departure, now_s).map_err(|_| "damaged".to_owned())?;
        to.stay(1);
        for (key, expected) in keys.iter().zip(expected) {
            if value(&to, key, now_s) != expected {
                return Err(format!("{key} differs"));
            }
        }
        if to.content().items != departure.items {
            return Err(format!("{} items", departure.items));
        }
        // All runs are usable, also those that the source had once used.
        for count in 0..4000 {
            put(&to, 0, &keys[count % keys.len()], &format!("{count}:{}", "y".repeat(next(6000))), now_s, 0);
            let (used, pages) = (to.budget().used(), allocated(target));
            if used.abs_diff(pages) > 64 * PAGE_BYTES as u64 {
                return Err(format!("{pages} bytes of memory, and {used} of the budget"));
            }
        }
        Ok(())
    }

    #[test]
    fn copies_between_writes_are_equal() {
        for seed in 0..12 {
            copy_between_writes(seed).unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
        }
    }

    #[test]
    fn mutations_are_noticed() {
        for mutation in Mutation::ALL {
            let is_wrong = |seed| {
                let copied = || mutation.while_active(|| copy_between_writes(seed));
                std::panic::catch_unwind(copied).map_or(true, |copied| copied.is_err())
            };
            assert!((0..12).any(is_wrong), "{mutation:?}");
        }
    }

    fn allocated(partition: &Partition) -> u64 {
        let fd = partition.descriptor().unwrap();
        rustix::fs::fstat(&fd).unwrap().st_blocks.cast_unsigned() * 512
    }

    #[test]
    fn times_and_cas_numbers_survive() {
        let (from, to) = (store(8 << 20), store(8 << 20));
        to.begin_absent();
        let keys: Vec<String> = (0..100).filter_map(|number| key_in(0, &from, number)).collect();
        for key in &keys {
            assert!(put(&from, 0, key, key, 1000, 1050));
        }
        let before: Vec<_> = keys.iter().map(|key| value(&from, key, 1000).unwrap()).collect();
        from.flush_at(0, 1040);
        let departure = from.leave(0, 1010);
        let (source, target) = (&from.partitions()[0], &to.partitions()[0]);
        let mut copy = Copy::new(target, *source.layout());
        copy.finish(&departure, &mut Local::new(source, target), &mut |_| true).unwrap();
        // The clock of the other server shows another time.
        to.arrive(0, &departure, 20).unwrap();
        to.stay(0);
        for (key, (text, cas, _)) in keys.iter().zip(&before) {
            assert_eq!(value(&to, key, 20), Some((text.clone(), *cas, 60)));
            assert_eq!(value(&to, key, 59), Some((text.clone(), *cas, 60)));
            assert_eq!(value(&to, key, 60), None);
        }
        assert!(put(&to, 0, &keys[0], "new", 20, 0));
        let (_, cas, _) = value(&to, &keys[0], 20).unwrap();
        assert!(before.iter().all(|(_, other, _)| cas > *other));
        to.flush_due(49);
        assert!(value(&to, &keys[1], 49).is_some());
        to.flush_due(50);
        assert!(value(&to, &keys[1], 50).is_none());
    }

    #[test]
    fn a_source_serves_again_if_the_target_has_no_room() {
        let (from, to) = (store(64 << 20), store(1 << 20));
        to.begin_absent();
        let keys: Vec<String> = (0..40_000).filter_map(|number| key_in(0, &from, number)).collect();
        for key in &keys {
            assert!(put(&from, 0, key, &"x".repeat(200), 10, 0));
        }
        let (source, target) = (&from.partitions()[0], &to.partitions()[0]);
        let mut copy = Copy::new(target, *source.layout());
        let mut reservation = to.reservation();
        let end = source.runs_end();
        let mut local = Local::new(source, target);
        let copied = copy.round(end, &mut local, &mut |bytes| reservation.resize(bytes, 10));
        assert_eq!(copied, Err(CopyError::NoRoom));
        drop(reservation);
        to.forget(0, Presence::Unknown).unwrap();
        assert_eq!(to.budget().used(), 0);
        let departure = from.leave(0, 10);
        assert_eq!(departure.items, keys.len() as u64);
        assert!(!put(&from, 0, &keys[0], "y", 10, 0));
        from.stay(0);
        assert!(put(&from, 0, &keys[0], "y", 10, 0));
        assert_eq!(value(&from, &keys[0], 10).unwrap().0, "y");
    }
}
