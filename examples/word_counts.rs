//! Two processes count the words of a text in partitions, and share the work out between them.
//!
//! Usage: `word_counts NAME PEER FILE [PARTITIONS]`, once for each of two names, on one host or on
//! two. A cluster must run (`aquifer up`). The process whose name comes first makes the partitions,
//! and prints the counts in the end.
//!
//! A partition is a segment: how far the text is read, and a map of the words that belong to it. A
//! process that has nothing to do hands a finished partition to the other one, which gives it one
//! of its own, with all its counts, in the middle of the work.

use std::collections::HashMap;
use std::error::Error;
use std::time::{Duration, Instant};

use aquifer_client::segments::{Process, Pulling};
use aquifer_containers::{Map, Owned, Text, TransferFailure, migratable};

/// The number of the first partition's segment.
const FIRST: u64 = 100;
const SEGMENT_BYTES: u64 = 16 << 20;
/// Lines that a process reads at once for one partition.
const LINES_AT_ONCE: usize = 200;
/// How long to wait for the other process.
const PATIENCE: Duration = Duration::from_secs(30);

migratable! {
    /// The words of one partition.
    #[derive(Debug)]
    pub struct Partition: 1 {
        /// The number of the partition.
        number: u64,
        /// Lines of the text that are counted.
        lines: u64,
        /// Whether all processes are to end.
        is_over: bool,
        /// How often it was handed over.
        moves: u64,
        counts: Map<Text, u64>,
    }
}

type Partitions<'p> = Vec<Owned<'p, Partition>>;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut next = || arguments.next().ok_or("usage: word_counts NAME PEER FILE [PARTITIONS]");
    let (name, peer, file) = (next()?, next()?, next()?);
    let partitions: u64 = arguments.next().map_or(Ok(8), |text| text.parse())?;
    let text = std::fs::read_to_string(file)?;
    let lines: Vec<&str> = text.lines().collect();

    let process = Process::open(&name)?;
    let is_first = name < peer;
    let (mut work, mut finished) = (Partitions::new(), Partitions::new());
    if is_first {
        for number in 0..partitions {
            work.push(Owned::create(&process, FIRST + number, SEGMENT_BYTES, |allocator| {
                let counts = Map::new(allocator)?;
                Ok(Partition { number, lines: 0, is_over: false, moves: 0, counts })
            })?);
        }
    }
    let mut has_asked = false;
    loop {
        // Without work it can only wait.
        let patience = if work.is_empty() { PATIENCE } else { Duration::ZERO };
        match Owned::<Partition>::receive(&process, Pulling::Ahead, patience)? {
            Some(partition) if partition.is_over => return free(partition),
            Some(partition) if partition.lines < lines.len() as u64 => {
                has_asked = false;
                work.push(partition);
            }
            Some(partition) => {
                finished.push(partition);
                // The other process has nothing to do.
                if work.len() > 1 {
                    give(work.swap_remove(0), &peer)?;
                }
            }
            None if work.is_empty() => return Err("nothing was handed over".into()),
            None => {}
        }
        for partition in &mut work {
            count(partition, &lines, partitions)?;
        }
        let (done, left) = work.into_iter().partition(|partition| partition.lines >= lines.len() as u64);
        (work, finished) = (left, [finished, done].into_iter().flatten().collect());
        if is_first && finished.len() as u64 == partitions {
            return report(finished, &text, &peer);
        }
        if !is_first && work.is_empty() {
            // Finished ones are a sign that there is nothing to do.
            for partition in finished.drain(..) {
                give(partition, &peer)?;
            }
        } else if work.len() as u64 == partitions {
            // The first time: half of them are for the other process.
            for partition in work.drain(..work.len() / 2) {
                give(partition, &peer)?;
            }
        } else if is_first && work.is_empty() && !has_asked {
            has_asked = true;
            if let Some(partition) = finished.pop() {
                give(partition, &peer)?;
            }
        }
    }
}

/// Counts the words of some lines that belong to a partition.
fn count(
    partition: &mut Owned<'_, Partition>,
    lines: &[&str],
    partitions: u64,
) -> Result<(), Box<dyn Error>> {
    let first = usize::try_from(partition.lines)?;
    let end = lines.len().min(first + LINES_AT_ONCE);
    let allocator = partition.allocator();
    for word in lines[first..end].iter().flat_map(|line| line.split_whitespace()) {
        if partition_of(word, partitions) != partition.number {
            continue;
        }
        match partition.counts.get_mut(word) {
            Some(count) => *count += 1,
            None => drop(partition.counts.insert(Text::new(allocator, word)?, 1)?),
        }
    }
    partition.lines = end as u64;
    Ok(())
}

/// FNV-1a.
fn partition_of(word: &str, partitions: u64) -> u64 {
    let hash = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    word.bytes().fold(0xcbf2_9ce4_8422_2325, hash) % partitions
}

/// Waits until the other process is open, and hands a partition over.
fn give(mut partition: Owned<'_, Partition>, peer: &str) -> Result<(), Box<dyn Error>> {
    partition.moves += 1;
    let end = Instant::now() + PATIENCE;
    loop {
        let failure = match partition.connect(peer) {
            // SAFETY: nothing was moved out of the partition.
            Ok(()) => match unsafe { partition.transfer() } {
                Ok(()) => return Ok(()),
                Err(failure) => failure,
            },
            Err(error) => TransferFailure { owned: Some(partition), error },
        };
        // An agent may have ended. If it is not known whether the partition has arrived, either
        // process receives it later.
        let Some(kept) = failure.owned else { return Ok(()) };
        if Instant::now() > end {
            return Err(failure.error.into());
        }
        partition = kept;
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Compares the counts with those of the whole text, and lets the other process end.
fn report(mut partitions: Partitions<'_>, text: &str, peer: &str) -> Result<(), Box<dyn Error>> {
    let mut expected: HashMap<&str, u64> = HashMap::new();
    text.split_whitespace().for_each(|word| *expected.entry(word).or_default() += 1);
    let (mut words, mut moves) = (0, 0);
    for partition in &partitions {
        moves += partition.moves;
        for (word, count) in partition.counts.iter() {
            if expected.get(&**word) != Some(count) {
                return Err(format!("«{word}» was counted {count} times").into());
            }
            words += 1;
        }
    }
    if words != expected.len() {
        return Err(format!("{words} words instead of {}", expected.len()).into());
    }
    println!("{words} different words in {} partitions, {moves} hand-overs", partitions.len());
    let mut last = partitions.pop().ok_or("there are no partitions")?;
    last.is_over = true;
    give(last, peer)?;
    partitions.into_iter().try_for_each(free)
}

fn free(partition: Owned<'_, Partition>) -> Result<(), Box<dyn Error>> {
    // SAFETY: nothing was moved out of the partition.
    Ok(unsafe { partition.deallocate() }?)
}
