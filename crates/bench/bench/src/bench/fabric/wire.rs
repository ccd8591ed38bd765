//! READs of pages over TCP, compared with the same bytes over a plain socket: one READ at a time
//! with a blocking round trip, and many at once with a pipelined echo. One serving process has both
//! servers.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::float;
use aquifer_bench::support::report::{Row, Target};
use aquifer_bench::support::spread::Spread;
use aquifer_bench::support::{interrupt, procs};
use aquifer_fabric::ClusterKey;
use aquifer_fabric::tcp::wire::{ANSWER_BYTES, REQUEST_BYTES};
use aquifer_fabric::tcp::{self, ConnectOptions};
use aquifer_fabric::{Host, Identity, Tenant, Verb, Work};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::link::Link;
use super::measure::Volume;
use super::server::REGION_BYTES;

/// Cluster key of the bench's two processes; it need not be secret.
pub const KEY: ClusterKey = ClusterKey([11; 32]);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
const PAGE_BYTES: u32 = 4096;
const ANSWER: usize = ANSWER_BYTES + PAGE_BYTES as usize;
/// READs in a measurement of the lower bound.
const READS: usize = 2000;
/// Distance between two such READs: an odd number of pages, so that all pages are read in turn.
const FAR_BYTES: usize = 4096 * 0x9E37;
/// Operations in flight.
pub const DEPTH: usize = 32;

/// Starts a server that answers each request with an answer of fixed length.
///
/// # Errors
/// If it cannot listen.
pub fn serve_echo() -> std::io::Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    tcp::avoid_pacing(&listener);
    let address = listener.local_addr()?;
    std::thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            std::thread::spawn(move || echo(stream));
        }
    });
    Ok(address)
}

fn echo(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let answers = vec![7; ANSWER * DEPTH];
    let mut buffer = [0; REQUEST_BYTES * DEPTH];
    let mut filled = 0;
    loop {
        match stream.read(&mut buffer[filled..])? {
            0 => return Ok(()),
            bytes => filled += bytes,
        }
        let whole = filled / REQUEST_BYTES;
        stream.write_all(&answers[..whole * ANSWER])?;
        buffer.copy_within(whole * REQUEST_BYTES..filled, 0);
        filled -= whole * REQUEST_BYTES;
    }
}

/// A connection that reads pages with `depth` operations in flight, and its measurements.
struct PageReader {
    name: &'static str,
    depth: usize,
    end: End,
    us: Vec<f64>,
    server_cpu_us: Vec<f64>,
}

enum End {
    Plain(TcpStream, Vec<u8>),
    Verbs(Box<Link>),
}

impl PageReader {
    fn new(name: &'static str, depth: usize, end: End) -> Self {
        Self { name, depth, end, us: Vec::new(), server_cpu_us: Vec::new() }
    }

    /// Reads pages; returns the time of each in µs.
    fn measure(&mut self, operations: usize) -> Result<f64, BenchError> {
        let failed = |error: std::io::Error| BenchError::Fabric { reason: error.to_string() };
        let rounds = operations.div_ceil(self.depth);
        let mut at = 0;
        let start = Instant::now();
        for _ in 0..rounds {
            match &mut self.end {
                End::Plain(stream, buffer) => {
                    stream
                        .write_all(&[1; REQUEST_BYTES * DEPTH][..REQUEST_BYTES * self.depth])
                        .map_err(failed)?;
                    stream.read_exact(&mut buffer[..ANSWER * self.depth]).map_err(failed)?;
                }
                End::Verbs(link) => {
                    let read = |slot: usize, link: &Link, at: &mut usize| {
                        *at = (*at + PAGE_BYTES as usize) % (PAGE_BYTES as usize * DEPTH);
                        let local = link.slice(slot as u64 * u64::from(PAGE_BYTES), PAGE_BYTES);
                        let verb = Verb::Read { local, remote: link.remote(*at) };
                        Work { id: slot as u64, verb, signalled: true }
                    };
                    let batch: Vec<Work> = (0..self.depth).map(|slot| read(slot, link, &mut at)).collect();
                    link.all(&batch)?;
                }
            }
        }
        Ok(start.elapsed().as_secs_f64() * 1e6 / float((rounds * self.depth) as u64))
    }
}

/// Processors of both ends. A wake-up across processors takes longer than all other steps, so the
/// placement is fixed.
#[derive(Clone, Copy)]
struct Placement {
    name: &'static str,
    initiator: usize,
    target: usize,
}

const PLACEMENTS: [Placement; 2] = [
    Placement { name: "one processor", initiator: 0, target: 0 },
    Placement { name: "two processors", initiator: 0, target: 1 },
];

impl Placement {
    /// Pins this thread and the serving process; returns false if a processor does not exist.
    fn apply(self, server: u32) -> bool {
        let only = |core: usize| {
            let mut set = CpuSet::new();
            set.set(core);
            set
        };
        let tasks = std::fs::read_dir(format!("/proc/{server}/task")).into_iter().flatten().flatten();
        let threads = tasks.filter_map(|task| Pid::from_raw(task.file_name().to_str()?.parse().ok()?));
        for thread in threads {
            // Fails if the thread has ended.
            let _ = sched_setaffinity(Some(thread), &only(self.target));
        }
        let process = i32::try_from(server).ok().and_then(Pid::from_raw);
        sched_setaffinity(process, &only(self.target)).is_ok()
            && sched_setaffinity(None, &only(self.initiator)).is_ok()
    }
}

/// Results over TCP.
pub struct Wire {
    /// Rows of the table.
    pub rows: Vec<Row>,
    /// Targets.
    pub targets: Vec<Target>,
}

/// Measures all page readers in each round.
///
/// # Errors
/// If a connection fails, or a signal asks to stop.
pub fn measure(
    server: u32,
    verbs: SocketAddr,
    plain: SocketAddr,
    volume: Volume,
) -> Result<Wire, BenchError> {
    let mut wire = Wire { rows: Vec::new(), targets: Vec::new() };
    let before = sched_getaffinity(None).ok();
    for placement in PLACEMENTS {
        if placement.apply(server) {
            let readers = measure_at(placement, server, verbs, plain, volume)?;
            wire.targets.extend(targets(placement, &readers));
            wire.rows.extend(readers.iter().map(|reader| row(placement, reader, &readers)));
        }
    }
    if let Some(before) = before {
        // A failure to undo the placement is ignored: nothing more is timed.
        let _ = sched_setaffinity(None, &before);
    }
    Ok(wire)
}

fn measure_at(
    placement: Placement,
    server: u32,
    verbs: SocketAddr,
    plain: SocketAddr,
    volume: Volume,
) -> Result<Vec<PageReader>, BenchError> {
    let mut readers = Vec::new();
    for (depth, name) in [(1, "plain blocking round trip"), (DEPTH, "plain echo, 32 at once")] {
        readers.push(PageReader::new(name, depth, connect_plain(plain)?));
    }
    for (depth, encrypt, name) in [
        (1, false, "READ 4 KiB"),
        (DEPTH, false, "READ 4 KiB, 32 at once"),
        (1, true, "READ 4 KiB, encrypted"),
        (DEPTH, true, "READ 4 KiB, 32 at once, encrypted"),
    ] {
        readers.push(PageReader::new(name, depth, End::Verbs(Box::new(connect_verbs(verbs, encrypt)?))));
    }
    // Connections have started further threads, which must be pinned, too.
    placement.apply(server);
    // The first round maps pages and opens windows, and is not counted.
    for round in 0..=volume.rounds {
        for reader in &mut readers {
            interrupt::check()?;
            let operations = volume.operations / if reader.depth == 1 { 20 } else { 5 };
            let before_us = procs::cpu_us(server);
            let us = reader.measure(operations)?;
            if round > 0 {
                reader.us.push(us);
                reader
                    .server_cpu_us
                    .push(float(procs::cpu_us(server) - before_us) / float(operations as u64));
            }
        }
    }
    Ok(readers)
}

fn connect_plain(address: SocketAddr) -> Result<End, BenchError> {
    let failed = |error: std::io::Error| BenchError::Fabric { reason: error.to_string() };
    let stream = tcp::connect_unpaced(address, ANSWER_TIMEOUT).map_err(failed)?;
    stream.set_nodelay(true).map_err(failed)?;
    Ok(End::Plain(stream, vec![0; ANSWER * DEPTH]))
}

fn connect_verbs(address: SocketAddr, encrypt: bool) -> Result<Link, BenchError> {
    let who = Identity { host: Host(1), epoch: 1, tenant: Tenant(0) };
    let options = ConnectOptions { encrypt, ..ConnectOptions::default() };
    let endpoint = tcp::connect(address, &KEY, who, options)
        .map_err(|error| BenchError::Fabric { reason: error.to_string() })?;
    Link::new(endpoint, 4096)
}

/// Median latency in µs of cold READs of a page, one at a time, with the best placement of the two
/// ends.
///
/// # Errors
/// If a connection fails, or a signal asks to stop.
pub fn read_p50_us(server: u32, verbs: SocketAddr) -> Result<f64, BenchError> {
    let before = sched_getaffinity(None).ok();
    let mut best_us = f64::INFINITY;
    for placement in PLACEMENTS {
        if placement.apply(server) {
            let link = connect_verbs(verbs, false);
            placement.apply(server);
            let p50_us = link.and_then(|mut link| p50_us(&mut link));
            if let Some(before) = &before {
                // The placement must not affect later measurements.
                let _ = sched_setaffinity(None, before);
            }
            best_us = best_us.min(p50_us?);
        }
    }
    Ok(best_us)
}

fn p50_us(link: &mut Link) -> Result<f64, BenchError> {
    let mut times_us = Vec::with_capacity(READS);
    let mut at = 0;
    for operation in 0..2 * READS {
        interrupt::check()?;
        at = (at + FAR_BYTES) % REGION_BYTES;
        let verb = Verb::Read { local: link.slice(0, PAGE_BYTES), remote: link.remote(at) };
        let start = Instant::now();
        link.all(&[Work { id: 0, verb, signalled: true }])?;
        // The first half opens windows and wakes processors, and is not counted.
        if operation >= READS {
            times_us.push(start.elapsed().as_secs_f64() * 1e6);
        }
    }
    times_us.sort_by(f64::total_cmp);
    Ok(times_us[READS / 2])
}

/// The plain reader with the same number of operations in flight.
fn peer<'a>(reader: &PageReader, readers: &'a [PageReader]) -> &'a PageReader {
    let is_peer = |other: &&PageReader| other.depth == reader.depth && matches!(other.end, End::Plain(..));
    readers.iter().find(is_peer).expect("there is a plain reader for each depth")
}

fn row(placement: Placement, reader: &PageReader, readers: &[PageReader]) -> Row {
    let per_s: Vec<f64> = reader.us.iter().map(|us| 1e3 / us).collect();
    let figures = [
        ("µs", Spread::of(&reader.us)),
        ("1000/s", Spread::of(&per_s)),
        ("÷ plain", Spread::of_ratios(&reader.us, &peer(reader, readers).us)),
        ("CPU µs there", Spread::of(&reader.server_cpu_us)),
    ];
    let figures: BTreeMap<_, _> =
        figures.into_iter().filter_map(|(name, spread)| Some((name, spread?))).collect();
    Row { name: format!("{}, {}", reader.name, placement.name), figures }
}

fn targets(placement: Placement, readers: &[PageReader]) -> Vec<Target> {
    let mut targets = Vec::new();
    for reader in
        readers.iter().filter(|reader| reader.name.starts_with("READ") && !reader.name.contains("encrypted"))
    {
        let plain = peer(reader, readers);
        if reader.depth == 1
            && let Some(value) = Spread::of_ratios(&reader.us, &plain.us)
        {
            let name = format!("tcp READ 4 KiB ÷ plain blocking round trip, {}", placement.name);
            targets.push(Target { name, value, bound: 1.2, at_most: true });
        }
        if reader.depth > 1
            && let Some(value) = Spread::of_ratios(&plain.us, &reader.us)
        {
            let name =
                format!("tcp READs per second, 32 at once ÷ plain pipelined echo's, {}", placement.name);
            targets.push(Target { name, value, bound: 0.8, at_most: false });
        }
    }
    targets
}
