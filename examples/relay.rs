//! Two processes hand a ring of nodes to each other; the pointers in it stay valid.
//!
//! Usage: `relay NAME PEER TURNS [MIB]`, once for each of two names, on one host or on two. The
//! process whose name comes first creates the ring. A cluster must run (`aquifer up`).

use std::error::Error;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use aquifer_client::segments::{Process, Pulling, Segment, TransferFailure};

/// Number of the segment.
const RING: u64 = 7;
/// Words of a node: the address of the next one, and the number of visits.
const NODE_WORDS: usize = 2;
/// Distance in nodes between neighbours in the ring, so that a walk touches many pages.
const STRIDE: usize = 7919;
/// Number of nodes that each turn visits, beginning with the first.
const VISITS: usize = 1000;
/// Time for which a process waits for the other one.
const PEER_TIMEOUT: Duration = Duration::from_secs(30);

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut next = || arguments.next().ok_or("usage: relay NAME PEER TURNS [MIB]");
    let (name, peer, turns) = (next()?, next()?, next()?.parse::<u64>()?);
    let mib: u64 = arguments.next().map_or(Ok(8), |text| text.parse())?;

    let process = Process::open(&name)?;
    let mut turn = 0;
    let mut segment = if name < peer {
        let segment = process.allocate(RING, mib << 20)?;
        build(&segment);
        segment
    } else {
        turn += 1;
        receive(&process)?
    };
    loop {
        visit(&segment, turn)?;
        if turn + 1 >= turns {
            break;
        }
        transfer(segment, &peer)?;
        turn += 2;
        if turn >= turns {
            return Ok(());
        }
        segment = receive(&process)?;
    }
    let began = Instant::now();
    segment.close()?;
    let all = segment.words().iter().skip(1).step_by(NODE_WORDS);
    let visits: u64 = all.map(|count| count.load(Relaxed)).sum();
    if visits != turns * VISITS as u64 {
        return Err(format!("{visits} visits instead of {}", turns * VISITS as u64).into());
    }
    println!("{turns} turns, {visits} visits; the rest was pulled in {:?}", began.elapsed());
    segment.deallocate()?;
    Ok(())
}

/// Links all nodes to a ring by their addresses.
fn build(segment: &Segment<'_>) {
    let nodes = segment.words().len() / NODE_WORDS;
    for node in 0..nodes {
        let next = segment.address() + (node + STRIDE) % nodes * NODE_WORDS * 8;
        segment.words()[node * NODE_WORDS].store(next as u64, Relaxed);
    }
}

/// Follows the pointers and counts each visit. Each visited node was also visited in all turns
/// before.
fn visit(segment: &Segment<'_>, turn: u64) -> Result<(), Box<dyn Error>> {
    let mut node = segment.address();
    for _ in 0..VISITS {
        let at = (node - segment.address()) / 8;
        let [next, visits]: &[AtomicU64; NODE_WORDS] = segment.words()[at..at + NODE_WORDS].try_into()?;
        let before = visits.fetch_add(1, Relaxed);
        if before != turn {
            return Err(format!("node {node:#x} was visited {before} times, not {turn}").into());
        }
        node = usize::try_from(next.load(Relaxed))?;
    }
    Ok(())
}

/// Hands the segment over. Retries if the peer is not open yet, or an agent is restarted.
fn transfer(mut segment: Segment<'_>, peer: &str) -> Result<(), Box<dyn Error>> {
    let end = Instant::now() + PEER_TIMEOUT;
    loop {
        let failure = match segment.connect(peer) {
            Err(error) => TransferFailure { segment: Some(segment), error },
            Ok(()) => match segment.transfer() {
                Ok(()) => return Ok(()),
                Err(failure) => failure,
            },
        };
        match failure.segment {
            Some(kept) if Instant::now() < end => segment = kept,
            _ => return Err(failure.error.into()),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn receive(process: &Process) -> Result<Segment<'_>, Box<dyn Error>> {
    process
        .receive(Pulling::Ahead, PEER_TIMEOUT)?
        .ok_or_else(|| "the other process has handed no segment over".into())
}
