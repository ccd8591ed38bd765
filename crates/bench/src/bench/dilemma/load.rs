//! The load: half reads and half writes of whole pages with a Zipf distribution. In between, pages
//! are freed and written again, so that the number of used pages falls and rises.

use std::time::Instant;

use aquifer_block::{BlockError, BlockVolume, VolumeReader};
use aquifer_pager::PAGE_BYTES;

use super::store::Store;
use crate::bench::BenchError;
use crate::bench::apps::random::{Access, Draw, Random};
use crate::bench::support::bytes::float;

/// Operations between two frees or new pages.
const CHANGE_EVERY: usize = 16;
/// Operations of a thread between two samples of the allocated memory.
const LOOK_EVERY: u64 = 256;

/// Size of the load.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Number of pages.
    pub keys: usize,
    /// Least number of used pages, in thousandths.
    pub least_permille: usize,
    /// Number of times that the used pages fall and rise.
    pub waves: usize,
    /// Threads, each with its own pages.
    pub threads: usize,
}

/// Results of a load.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoadResult {
    /// Reads, writes and frees per second, of all threads together.
    pub ops_per_s: f64,
    /// Mean of the memory allocated on nodes, in MiB.
    pub held_mib: f64,
    /// Peak of the memory allocated on nodes, in MiB.
    pub peak_mib: f64,
    /// Mean of the used pages, in MiB.
    pub live_mib: f64,
    /// Pages that were moved out of sparse slabs.
    pub moved: f64,
}

/// Runs a load.
///
/// # Errors
/// If the volume fails, or a page differs from what was written.
pub fn play(store: &Store, plan: Plan) -> Result<LoadResult, BenchError> {
    let keys = plan.keys / plan.threads;
    let mut clients = Vec::new();
    for thread in 0..plan.threads {
        clients.push(Client::new(store, thread * keys, keys, plan)?);
    }
    on_threads(&mut clients, Client::fill)?;
    store.volume().flush().map_err(|error| wrong(&error))?;
    let start = Instant::now();
    on_threads(&mut clients, Client::play)?;
    let seconds = start.elapsed().as_secs_f64();
    let done: u64 = clients.iter().map(|client| client.done).sum();
    let looks: u64 = clients.iter().map(|client| client.looks).sum::<u64>().max(1);
    let mean = |of: fn(&Client<'_>) -> u64| mib(clients.iter().map(of).sum::<u64>() / looks);
    Ok(LoadResult {
        ops_per_s: float(done) / seconds,
        held_mib: mean(|client| client.held_bytes),
        peak_mib: mib(clients.iter().map(|client| client.peak_bytes).max().unwrap_or(0)),
        live_mib: mean(|client| client.live_bytes) * float(plan.threads as u64),
        moved: float(store.volume().stats().repacked_pages),
    })
}

fn on_threads<'a>(
    clients: &mut [Client<'a>],
    what: fn(&mut Client<'a>) -> Result<(), BenchError>,
) -> Result<(), BenchError> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = clients.iter_mut().map(|client| scope.spawn(move || what(client))).collect();
        let mut outcomes = threads.into_iter().map(|thread| thread.join());
        outcomes.try_for_each(|outcome| outcome.unwrap_or_else(|_| Err(wrong(&"a client has panicked"))))
    })
}

/// A thread of the load, and its pages.
struct Client<'a> {
    volume: &'a BlockVolume,
    reader: VolumeReader,
    plan: Plan,
    first: usize,
    /// Version of each page; 0 if it is free.
    versions: Vec<u32>,
    /// All pages, used ones first, and the index of each page in this order.
    order: Vec<usize>,
    places: Vec<usize>,
    live: usize,
    draw: Draw,
    random: Random,
    page: Vec<u8>,
    done: u64,
    looks: u64,
    held_bytes: u64,
    peak_bytes: u64,
    live_bytes: u64,
}

impl<'a> Client<'a> {
    fn new(store: &'a Store, first: usize, keys: usize, plan: Plan) -> Result<Self, BenchError> {
        Ok(Self {
            volume: store.volume(),
            reader: store.reader()?,
            plan,
            first,
            versions: vec![0; keys],
            order: (0..keys).collect(),
            places: (0..keys).collect(),
            live: 0,
            draw: Draw::new(Access::Zipf, keys),
            random: Random(first as u64 + 3),
            page: vec![0; PAGE_BYTES],
            done: 0,
            looks: 0,
            held_bytes: 0,
            peak_bytes: 0,
            live_bytes: 0,
        })
    }

    /// Writes all pages.
    fn fill(&mut self) -> Result<(), BenchError> {
        (0..self.order.len()).try_for_each(|key| self.write(key))
    }

    fn play(&mut self) -> Result<(), BenchError> {
        let least = self.order.len() * self.plan.least_permille / 1000;
        for _ in 0..self.plan.waves {
            while self.live > least {
                self.operate()?;
                if self.draw.once_in(CHANGE_EVERY) {
                    let key = self.order[self.random.below(self.live)];
                    self.free(key)?;
                }
            }
            while self.live < self.order.len() {
                self.operate()?;
                if self.draw.once_in(CHANGE_EVERY) {
                    let dead = self.order.len() - self.live;
                    let key = self.order[self.live + self.random.below(dead)];
                    self.write(key)?;
                }
            }
        }
        Ok(())
    }

    /// Reads or writes a used page.
    fn operate(&mut self) -> Result<(), BenchError> {
        let key = std::iter::repeat_with(|| self.draw.key()).find(|key| self.versions[*key] != 0);
        let Some(key) = key else { return Ok(()) };
        if self.draw.once_in(2) { self.read(key) } else { self.write(key) }
    }

    fn offset(&self, key: usize) -> u64 {
        ((self.first + key) * PAGE_BYTES) as u64
    }

    fn write(&mut self, key: usize) -> Result<(), BenchError> {
        if self.versions[key] == 0 {
            self.swap(key, self.live);
            self.live += 1;
        }
        self.versions[key] += 1;
        stamp(&mut self.page, self.first + key, self.versions[key]);
        let offset = self.offset(key);
        self.volume.write(&mut self.reader, offset, &self.page).map_err(|error| wrong(&error))?;
        self.count();
        Ok(())
    }

    fn read(&mut self, key: usize) -> Result<(), BenchError> {
        let offset = self.offset(key);
        let outcome = self.volume.read(&mut self.reader, offset, &mut self.page);
        let read = outcome.map_err(|error: BlockError| wrong(&error))?;
        if read != PAGE_BYTES || !is_stamped(&self.page, self.first + key, self.versions[key]) {
            return Err(wrong(&format!("page {} is not what was written", self.first + key)));
        }
        self.count();
        Ok(())
    }

    fn free(&mut self, key: usize) -> Result<(), BenchError> {
        self.versions[key] = 0;
        self.live -= 1;
        self.swap(key, self.live);
        let offset = self.offset(key);
        self.volume.discard(&mut self.reader, offset, PAGE_BYTES as u64).map_err(|error| wrong(&error))?;
        self.count();
        Ok(())
    }

    fn swap(&mut self, key: usize, place: usize) {
        let (other, old) = (self.order[place], self.places[key]);
        self.order.swap(old, place);
        self.places[key] = place;
        self.places[other] = old;
    }

    fn count(&mut self) {
        self.done += 1;
        if self.done.is_multiple_of(LOOK_EVERY) {
            let held_bytes = self.volume.remote_bytes();
            self.looks += 1;
            self.held_bytes += held_bytes;
            self.peak_bytes = self.peak_bytes.max(held_bytes);
            self.live_bytes += (self.live * PAGE_BYTES) as u64;
        }
    }
}

/// Fills a page with words that identify the page and its version.
fn stamp(page: &mut [u8], key: usize, version: u32) {
    let word = (key as u64) << 32 | u64::from(version);
    page.chunks_exact_mut(8).for_each(|bytes| bytes.copy_from_slice(&word.to_le_bytes()));
}

fn is_stamped(page: &[u8], key: usize, version: u32) -> bool {
    let word = (key as u64) << 32 | u64::from(version);
    page.chunks_exact(8).all(|bytes| bytes == word.to_le_bytes())
}

fn mib(bytes: u64) -> f64 {
    float(bytes) / float(1 << 20)
}

fn wrong(what: &dyn std::fmt::Display) -> BenchError {
    BenchError::Wrong { program: "the volume".into(), way: "bench dilemma".into(), what: what.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_of_another_version_or_key_or_torn_is_not_taken_for_this_one() {
        let mut page = vec![0; PAGE_BYTES];
        stamp(&mut page, 5, 9);
        assert!(is_stamped(&page, 5, 9) && !is_stamped(&page, 5, 8) && !is_stamped(&page, 4, 9));
        page[4000] ^= 1;
        assert!(!is_stamped(&page, 5, 9));
    }
}
