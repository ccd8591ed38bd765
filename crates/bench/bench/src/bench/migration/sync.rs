//! The cost of a sync to a memory node, compared with writing and syncing a file.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::float;
use aquifer_bench::support::random::Random;
use aquifer_bench::support::report::{Column, Row, Table};
use aquifer_bench::support::spread::Spread;
use aquifer_bench::support::{folder, interrupt};
use aquifer_client::segments::{Process, Segment};

use super::hosts::SyncHost;
use super::player::segment_error;

const MIB: u64 = 1 << 20;
const PAGE_WORDS: usize = 512;
const ROUNDS: usize = 5;
const COLUMNS: [&str; 3] = ["sync ms", "written MiB", "file and fdatasync ms"];

/// The pages that are changed before a sync.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Changed {
    All,
    Pages(usize),
}

/// Measures syncs of a segment after changes of several sizes, and the time to read it back.
pub fn table(is_quick: bool) -> Result<Table, BenchError> {
    let bytes = if is_quick { 64 * MIB } else { 256 * MIB };
    let host = SyncHost::start(5 * bytes)?;
    let process = Process::open_at(&host.agent(), "bench").map_err(segment_error)?;
    let segment = process.allocate(1, bytes).map_err(segment_error)?;
    let folder = folder::create("aquifer-bench-sync-")?;
    let path = folder.path().join("segment");
    let file = File::create(&path).map_err(BenchError::io("create", &path))?;
    let mut measured = Measured { segment, file, path: &path, random: Random::new(5), stamp: 0 };
    let mut rows = Vec::new();
    for (name, changed, rounds) in [
        ("first", Changed::All, 1),
        ("nothing", Changed::Pages(0), ROUNDS),
        ("1 page", Changed::Pages(1), ROUNDS),
        ("1000 pages", Changed::Pages(1000), ROUNDS),
        ("all pages", Changed::All, ROUNDS),
    ] {
        interrupt::check()?;
        rows.push(measured.row(name, changed, rounds)?);
    }
    rows.push(measured.revert()?);
    let Measured { segment, .. } = measured;
    segment.deallocate().map_err(segment_error)?;
    Ok(Table {
        title: format!("syncs of a segment of {} MiB to one memory node, by what has changed", bytes / MIB),
        columns: COLUMNS.map(Column::middle).to_vec(),
        pictured: None,
        ratio: None,
        rows,
    })
}

struct Measured<'a> {
    segment: Segment<'a>,
    file: File,
    path: &'a Path,
    random: Random,
    stamp: u64,
}

impl Measured<'_> {
    fn row(&mut self, name: &str, changed: Changed, rounds: usize) -> Result<Row, BenchError> {
        let (mut syncs, mut files, mut written) = (Vec::new(), Vec::new(), 0);
        for _ in 0..rounds {
            let pages = self.change(changed);
            let began = Instant::now();
            written = self.segment.sync(1).map_err(segment_error)?.written_bytes;
            syncs.push(began.elapsed().as_secs_f64() * 1e3);
            // The file is written from memory, so the copy is not timed.
            let pieces = self.pieces(&pages);
            let began = Instant::now();
            self.write_file(&pieces).map_err(BenchError::io("write", self.path))?;
            files.push(began.elapsed().as_secs_f64() * 1e3);
        }
        let written = Spread::one(float(written) / float(MIB));
        Ok(row(name, [Spread::of(&syncs), Some(written), Spread::of(&files)]))
    }

    /// Measures the time to read all pages back, and to read the file.
    fn revert(&mut self) -> Result<Row, BenchError> {
        let (mut reverts, mut files) = (Vec::new(), Vec::new());
        let mut content = vec![0; self.segment.bytes()];
        for _ in 0..ROUNDS {
            let began = Instant::now();
            self.segment.revert().map_err(segment_error)?;
            reverts.push(began.elapsed().as_secs_f64() * 1e3);
            let began = Instant::now();
            let file = File::open(self.path).map_err(BenchError::io("open", self.path))?;
            file.read_exact_at(&mut content, 0).map_err(BenchError::io("read", self.path))?;
            files.push(began.elapsed().as_secs_f64() * 1e3);
        }
        Ok(row("revert", [Spread::of(&reverts), None, Spread::of(&files)]))
    }

    /// Changes all words of some pages. Returns the numbers of the pages.
    fn change(&mut self, changed: Changed) -> Vec<usize> {
        let all = self.segment.words().len() / PAGE_WORDS;
        let pages: Vec<usize> = match changed {
            Changed::All => (0..all).collect(),
            Changed::Pages(count) => {
                let mut random = || usize::try_from(self.random.word_below(all as u64)).unwrap_or(0);
                (0..count).map(|_| random()).collect()
            }
        };
        self.stamp += 1;
        for page in &pages {
            let words = &self.segment.words()[page * PAGE_WORDS..][..PAGE_WORDS];
            words.iter().enumerate().for_each(|(at, word)| word.store(self.stamp << 32 | at as u64, Relaxed));
        }
        pages
    }

    /// The bytes of pages with their offsets in the file: one piece, if they are all pages.
    fn pieces(&self, pages: &[usize]) -> Vec<(u64, Vec<u8>)> {
        let words = self.segment.words();
        let bytes_of = |words: &[AtomicU64]| -> Vec<u8> {
            words.iter().flat_map(|word| word.load(Relaxed).to_ne_bytes()).collect()
        };
        if pages.len() * PAGE_WORDS == words.len() {
            return vec![(0, bytes_of(words))];
        }
        let piece = |page: &usize| {
            let first = page * PAGE_WORDS;
            (first as u64 * 8, bytes_of(&words[first..][..PAGE_WORDS]))
        };
        pages.iter().map(piece).collect()
    }

    fn write_file(&self, pieces: &[(u64, Vec<u8>)]) -> std::io::Result<()> {
        pieces.iter().try_for_each(|(offset, bytes)| self.file.write_all_at(bytes, *offset))?;
        self.file.sync_data()
    }
}

fn row(name: &str, figures: [Option<Spread>; 3]) -> Row {
    let figures = COLUMNS.into_iter().zip(figures).filter_map(|(name, figure)| Some((name, figure?)));
    Row { name: name.into(), figures: figures.collect() }
}
