//! Hand-overs by the size of the segment.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::{float, show_bytes};
use aquifer_bench::support::interrupt;
use aquifer_bench::support::report::{Column, Row, Table, Target};
use aquifer_bench::support::spread::Spread;
use aquifer_client::segments::{Process, Pulling, Segment};
use serde::{Deserialize, Serialize};

use super::hosts::Hosts;
use super::player::{self, PEER_TIMEOUT, Play, now_ns, segment_error};

const SIZES: [u64; 4] = [1 << 20, 64 << 20, 1 << 30, 4 << 30];
const SEGMENT: u64 = 50;
/// Turns of a segment. A segment can move at most eight times before its pages are pulled, and they
/// are never pulled here.
const TURNS_AT_ONCE: u64 = 3;
/// Turns that are not measured.
const WARM_UP: usize = 5;
const COLUMNS: [&str; 6] =
    ["transfer p50 µs", "transfer p99 µs", "write p50 µs", "write p99 µs", "connect µs", "floor µs"];

/// Times that a process has measured, in ns.
#[derive(Default, Serialize, Deserialize)]
pub struct Times {
    transfer: Vec<u64>,
    write: Vec<u64>,
    connect: Vec<u64>,
}

/// Measures segments of all sizes.
pub fn table(hosts: &Hosts, is_quick: bool) -> Result<(Table, Vec<Target>), BenchError> {
    let turns = if is_quick { 60 } else { 400 };
    let mut rows = Vec::new();
    let (mut medians, mut slowest) = (Vec::new(), 0.0_f64);
    for bytes in SIZES {
        interrupt::check()?;
        let floor = floor_us(bytes)?;
        let play = |is_first| Play::Transfers { is_first, bytes, turns };
        let (first, second): (Times, Times) = player::run(hosts.agents(), [play(true), play(false)])?;
        let join = |of: fn(&Times) -> &Vec<u64>| -> Vec<f64> {
            let all = of(&first).iter().skip(WARM_UP).chain(of(&second).iter().skip(WARM_UP));
            let mut all: Vec<f64> = all.map(|ns| float(*ns) / 1e3).collect();
            all.sort_by(f64::total_cmp);
            all
        };
        let (transfer, write) = (join(|times| &times.transfer), join(|times| &times.write));
        let connect = join(|times| &times.connect);
        let figures = [
            percentile(&transfer, 50),
            percentile(&transfer, 99),
            percentile(&write, 50),
            percentile(&write, 99),
            percentile(&connect, 50),
            floor,
        ];
        medians.push((figures[0], floor));
        slowest = slowest.max(figures[1]);
        let figures = COLUMNS.into_iter().zip(figures.map(Spread::one)).collect();
        rows.push(Row { name: show_bytes(bytes), figures });
    }
    let table = Table {
        title: "hand-overs between two agents over TCP, by the size of the segment".into(),
        columns: COLUMNS.map(Column::middle).to_vec(),
        pictured: None,
        ratio: None,
        rows,
    };
    let least = medians.iter().map(|(p50, _)| *p50).fold(f64::INFINITY, f64::min);
    let greatest = medians.iter().map(|(p50, _)| *p50).fold(0.0, f64::max);
    let of_floor = medians.iter().map(|(p50, floor)| p50 / floor).fold(0.0, f64::max);
    let target = |name: &str, value: f64, bound: f64| Target {
        name: name.into(),
        value: Spread::one(value),
        bound,
        at_most: true,
    };
    let targets = vec![
        target("hand-over p50 ÷ floor, worst size", of_floor, 1.5),
        target("hand-over p50, slowest ÷ fastest size", greatest / least, 1.5),
        target("hand-over p99 in µs, worst size", slowest, 1000.0),
    ];
    Ok((table, targets))
}

fn percentile(sorted: &[f64], percent: usize) -> f64 {
    sorted
        .get((sorted.len() * percent / 100).min(sorted.len().saturating_sub(1)))
        .copied()
        .unwrap_or(f64::NAN)
}

/// Hands a segment back and forth. Its first word has the time of the hand-over.
pub fn play(
    process: &Process,
    peer: &str,
    is_first: bool,
    bytes: u64,
    turns: u32,
) -> Result<Times, BenchError> {
    let mut times = Times::default();
    for round in 0..u64::from(turns) / TURNS_AT_ONCE {
        let mut segment = match is_first {
            true => process.allocate(SEGMENT + round, bytes).map_err(segment_error)?,
            false => receive(process, &mut times)?,
        };
        for turn in 1..=TURNS_AT_ONCE {
            transfer_segment(segment, peer, &mut times)?;
            if !is_first && turn == TURNS_AT_ONCE {
                break;
            }
            segment = receive(process, &mut times)?;
            if is_first && turn == TURNS_AT_ONCE {
                segment.deallocate().map_err(segment_error)?;
                break;
            }
        }
    }
    Ok(times)
}

fn transfer_segment(segment: Segment<'_>, peer: &str, times: &mut Times) -> Result<(), BenchError> {
    let began = Instant::now();
    while let Err(error) = segment.connect(peer) {
        if began.elapsed() > PEER_TIMEOUT {
            return Err(segment_error(error));
        }
        // The other process may not have started yet.
        std::thread::sleep(Duration::from_millis(5));
    }
    times.connect.push(u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX));
    segment.words()[0].store(now_ns(), Relaxed);
    segment.transfer().map_err(|failure| segment_error(failure.error))
}

fn receive<'p>(process: &'p Process, times: &mut Times) -> Result<Segment<'p>, BenchError> {
    let received = process.receive(Pulling::OnTouch, PEER_TIMEOUT).map_err(segment_error)?;
    let segment = received.ok_or_else(|| segment_error("nothing was handed over"))?;
    let arrived = now_ns();
    let began = segment.words()[0].load(Relaxed);
    segment.words()[1].store(arrived, Relaxed);
    times.write.push(now_ns() - began);
    times.transfer.push(arrived - began);
    Ok(segment)
}

/// Lower bound of a hand-over in µs: the move of a mapping, a message from the program to its
/// agent, one to the other program, and one between the agents.
fn floor_us(bytes: u64) -> Result<f64, BenchError> {
    let system = |error: std::io::Error| segment_error(error);
    let (near, far) = UnixStream::pair().map_err(system)?;
    let local = half_round_trip_us(near, far)?;
    let listener = TcpListener::bind("127.0.0.1:0").map_err(system)?;
    let near = TcpStream::connect(listener.local_addr().map_err(system)?).map_err(system)?;
    let (far, _) = listener.accept().map_err(system)?;
    near.set_nodelay(true).map_err(system)?;
    far.set_nodelay(true).map_err(system)?;
    let network = half_round_trip_us(near, far)?;
    Ok(2.0 * local + network + move_us(bytes)?)
}

fn half_round_trip_us<S: Read + Write + Send>(mut near: S, mut far: S) -> Result<f64, BenchError> {
    const TRIPS: usize = 500;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut byte = [0];
            while far.read_exact(&mut byte).is_ok() && far.write_all(&byte).is_ok() {}
        });
        let mut times = Vec::new();
        for _ in 0..TRIPS {
            let began = Instant::now();
            let mut byte = [1];
            near.write_all(&byte).and_then(|()| near.read_exact(&mut byte)).map_err(segment_error)?;
            times.push(began.elapsed().as_secs_f64() * 1e6 / 2.0);
        }
        drop(near);
        times.sort_by(f64::total_cmp);
        Ok(percentile(&times, 50))
    })
}

/// Time to move a mapping of this length, in µs.
fn move_us(bytes: u64) -> Result<f64, BenchError> {
    super::pages::move_us(usize::try_from(bytes).map_err(segment_error)?).map_err(segment_error)
}
