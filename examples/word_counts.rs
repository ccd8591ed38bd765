//! Two processes count the words of a text in partitions, and balance the work between them.
//!
//! Usage: `word_counts NAME PEER FILE [PARTITIONS]`, once for each of two names, on one host or on
//! two. A cluster must run (`aquifer up`). The process whose name comes first creates the
//! partitions, and prints the result at the end.
//!
//! A partition is a segment: the number of counted lines, and a map of the words that belong to the
//! partition. An idle process hands a finished partition over to the other one. The other process
//! replies with an unfinished partition, with all its counts.

use std::collections::HashMap;
use std::error::Error;
use std::time::{Duration, Instant};

use aquifer_client::segments::{Process, Pulling};
use aquifer_containers::{Map, Owned, Text, TransferFailure, migratable};

/// The number of the first partition's segment.
const FIRST: u64 = 100;
const SEGMENT_BYTES: u64 = 16 << 20;
/// Number of lines that a process counts in one step of a partition.
const LINES_PER_STEP: usize = 200;
/// Time for which a process waits for the other one.
const PEER_TIMEOUT: Duration = Duration::from_secs(30);

migratable! {
    /// The words of one partition.
    #[derive(Debug)]
    pub struct Partition: 1 {
        /// The number of the partition.
        number: u64,
        /// Number of lines of the text that are counted.
        lines: u64,
        /// Whether the process that receives the partition must end.
        is_over: bool,
        /// Number of hand-overs of the partition.
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
        // A process without work waits for a partition.
        let timeout = if work.is_empty() { PEER_TIMEOUT } else { Duration::ZERO };
        match Owned::<Partition>::receive(&process, Pulling::Ahead, timeout)? {
            Some(partition) if partition.is_over => return free(partition),
            Some(partition) if partition.lines < lines.len() as u64 => {
                has_asked = false;
                work.push(partition);
            }
            Some(partition) => {
                finished.push(partition);
                // A finished partition means that the other process is idle.
                if work.len() > 1 {
                    transfer(work.swap_remove(0), &peer)?;
                }
            }
            None if work.is_empty() => return Err("the other process has handed no partition over".into()),
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
            // The finished partitions show the other process that this one is idle.
            for partition in finished.drain(..) {
                transfer(partition, &peer)?;
            }
        } else if work.len() as u64 == partitions {
            // At the start, half of the partitions are for the other process.
            for partition in work.drain(..work.len() / 2) {
                transfer(partition, &peer)?;
            }
        } else if is_first && work.is_empty() && !has_asked {
            has_asked = true;
            if let Some(partition) = finished.pop() {
                transfer(partition, &peer)?;
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
    let end = lines.len().min(first + LINES_PER_STEP);
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

/// Returns the partition of a word, by its FNV-1a hash.
fn partition_of(word: &str, partitions: u64) -> u64 {
    let hash = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    word.bytes().fold(0xcbf2_9ce4_8422_2325, hash) % partitions
}

/// Waits until the other process is open, and hands a partition over.
fn transfer(mut partition: Owned<'_, Partition>, peer: &str) -> Result<(), Box<dyn Error>> {
    partition.moves += 1;
    let end = Instant::now() + PEER_TIMEOUT;
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

/// Compares the counts with those of the whole text, prints the result, and ends the other process.
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
    transfer(last, peer)?;
    partitions.into_iter().try_for_each(free)
}

fn free(partition: Owned<'_, Partition>) -> Result<(), Box<dyn Error>> {
    // SAFETY: nothing was moved out of the partition.
    Ok(unsafe { partition.deallocate() }?)
}
