//! The end of a check that tries everything, measures, and reports.

use std::fmt::Write;
use std::hash::{BuildHasher, RandomState};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use aquifer_fabric::{
    Completion, Endpoint, EndpointError, Host, Identity, Limits, RemoteAddr, Tenant, Verb, Work, WorkError,
    tcp,
};
use aquifer_fabric_verbs::{RemapMethod, VerbsEndpoint, devices};

use super::CheckEnd;
use super::info::describe;
use super::talk::{MESSAGE_BYTES, Moved, Opened, Request};
use crate::bench::BenchError;
use crate::bench::fabric::link::Link;
use crate::bench::support::spread::short;
use aquifer::Outcome;
use aquifer::say::say;
use aquifer::settings::Network;

/// One measurement takes so long, or so many operations.
const PATIENCE: Duration = Duration::from_millis(500);
const OPERATIONS_MAX: usize = 20_000;
/// Operations under way at once, for bandwidth.
const DEPTH: usize = 32;
/// An answer in words may take so long.
const ANSWER_PATIENCE: Duration = Duration::from_secs(10);
/// Memory is remapped so many times.
const REMAPS: usize = 9;
const PAGE_BYTES: u64 = 4096;
/// Where the lent memory is written, away from its window.
const SCRATCH: usize = 1 << 20;
const PATTERN_BYTES: u32 = 64 << 10;
/// See [`Host`].
const HOST_MAX: u16 = 4094;

/// What was found.
#[derive(Debug, Default)]
struct Findings {
    text: String,
    faults: usize,
}

impl Findings {
    fn line(&mut self, what: &str, value: &str) {
        // Writing to a String does not fail.
        let _ = writeln!(self.text, "  {what:<44} {value}");
    }

    /// A property that must hold.
    fn holds(&mut self, what: &str, holds: bool, otherwise: &str) {
        self.line(what, if holds { "yes" } else { otherwise });
        self.faults += usize::from(!holds);
    }
}

/// Check the way to another host; 1 if something is not as it must be.
pub fn check(end: &CheckEnd) -> Outcome {
    let who = who();
    let mut link = Link::new(connect(end, who)?, 4096)?;
    let mut findings = Findings { text: format!("{} over {}\n", end.address, end.network.name()), faults: 0 };
    if end.network == Network::Verbs
        && let Ok(found) = devices()
    {
        found.iter().for_each(|caps| findings.text += &format!("this machine's {}", describe(caps)));
    }
    limits(&mut findings, &link.limits());
    latencies(&mut findings, &mut link)?;
    bandwidths(&mut findings, &mut link)?;
    bytes_arrive(&mut findings, &mut link)?;
    windows(&mut findings, &mut link, end.network)?;
    if end.network == Network::Verbs {
        remap(&mut findings, end, who)?;
    }
    if findings.faults > 0 {
        let _ = writeln!(findings.text, "Found wanting: {}", findings.faults);
    }
    say!("{}", findings.text);
    Ok(if findings.faults == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Of several who check at once each hears its own answers. An epoch shuts out those before it for
/// as long as the other end lives, so each check has a later one.
fn who() -> Identity {
    let host = RandomState::new().hash_one(0) % u64::from(HOST_MAX) + 1;
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let epoch = u64::try_from(since.as_millis()).unwrap_or(1);
    Identity { host: Host(u16::try_from(host).expect("at most 4094")), epoch, tenant: Tenant(0) }
}

/// An endpoint that is not honest, where it is the device that must notice.
fn connect(end: &CheckEnd, who: Identity) -> Result<Box<dyn Endpoint>, EndpointError> {
    match end.network {
        Network::Tcp => tcp::connect(end.address, &end.key, who, tcp::ConnectOptions::default()),
        Network::Verbs => {
            let mut endpoint = VerbsEndpoint::connect(end.address, &end.key, who)?;
            endpoint.skip_local_checks();
            Ok(Box::new(endpoint))
        }
    }
}

fn limits(findings: &mut Findings, limits: &Limits) {
    findings.text += "granted\n";
    findings.line("operations under way", &limits.queue_depth.to_string());
    findings.line("bytes of one READ or WRITE", &limits.transfer_bytes_max.to_string());
    findings.line("messages that may wait", &limits.receive_depth.to_string());
}

fn latencies(findings: &mut Findings, link: &mut Link) -> Result<(), BenchError> {
    findings.text += "latency of one at a time, µs: the median, and what 99 of 100 keep within\n";
    let remote = link.remote(SCRATCH);
    let (word, page) = (link.slice(0, 8), link.slice(0, 4096));
    for (name, verb) in [
        ("READ of 8 bytes", Verb::Read { local: word, remote }),
        ("READ of 4 KiB", Verb::Read { local: page, remote }),
        ("WRITE of 8 bytes", Verb::Write { local: word, remote }),
        ("WRITE of 4 KiB", Verb::Write { local: page, remote }),
        ("compare-and-swap", Verb::CompareSwap { remote, expected: 0, desired: 1 }),
        ("fetch-and-add", Verb::FetchAdd { remote, add: 1 }),
    ] {
        let times = timed(|| link.all(&[Work { id: 0, verb, signalled: true }]).map(drop))?;
        findings.line(name, &times);
    }
    let times = timed(|| ask(link, Request::Echo).map(drop))?;
    findings.line("message and answer", &times);
    Ok(())
}

fn timed(mut once: impl FnMut() -> Result<(), BenchError>) -> Result<String, BenchError> {
    let mut times_us = Vec::with_capacity(OPERATIONS_MAX);
    let started = Instant::now();
    while times_us.is_empty() || times_us.len() < OPERATIONS_MAX && started.elapsed() < PATIENCE {
        let start = Instant::now();
        once()?;
        times_us.push(start.elapsed().as_secs_f64() * 1e6);
    }
    times_us.sort_by(f64::total_cmp);
    let at = |part: usize| short(times_us[(times_us.len() - 1) * part / 100]);
    Ok(format!("{:>8} {:>8}", at(50), at(99)))
}

fn bandwidths(findings: &mut Findings, link: &mut Link) -> Result<(), BenchError> {
    let _ = writeln!(findings.text, "throughput with {DEPTH} under way");
    for (name, is_read, bytes) in [
        ("READs of 4 KiB", true, 4096),
        ("READs of 16 KiB", true, 16 << 10),
        ("WRITEs of 4 KiB", false, 4096),
        ("WRITEs of 16 KiB", false, 16 << 10),
    ] {
        let batch: Vec<Work> = (0..DEPTH).map(|at| nth(link, is_read, bytes, at)).collect();
        let started = Instant::now();
        let mut batches = 0_u32;
        while batches == 0 || started.elapsed() < PATIENCE {
            link.all(&batch)?;
            batches += 1;
        }
        let operations = f64::from(batches) * f64::from(u32::try_from(DEPTH).unwrap_or(u32::MAX));
        let per_second = operations / started.elapsed().as_secs_f64();
        let mib = per_second * f64::from(bytes) / f64::from(1 << 20);
        findings.line(name, &format!("{:>8} MiB/s {:>8} a second", short(mib), short(per_second)));
    }
    Ok(())
}

fn nth(link: &Link, is_read: bool, bytes: u32, at: usize) -> Work {
    let local = link.slice(at as u64 * u64::from(bytes), bytes);
    let remote = link.remote(SCRATCH + at * bytes as usize);
    let verb = if is_read { Verb::Read { local, remote } } else { Verb::Write { local, remote } };
    Work { id: at as u64, verb, signalled: true }
}

/// What is written is read, by a READ that was posted behind the WRITE.
fn bytes_arrive(findings: &mut Findings, link: &mut Link) -> Result<(), BenchError> {
    findings.text += "correctness\n";
    let len = PATTERN_BYTES as usize;
    let pattern: Vec<u8> = (0..len).map(|at| (at * 7 + at / 256).to_le_bytes()[0]).collect();
    link.local().write(0, &pattern);
    link.local().write(len, &vec![0; len]);
    let remote = link.remote(SCRATCH);
    let there = Verb::Write { local: link.slice(0, PATTERN_BYTES), remote };
    let back = Verb::Read { local: link.slice(u64::from(PATTERN_BYTES), PATTERN_BYTES), remote };
    link.all(&[there, back].map(|verb| Work { id: 0, verb, signalled: true }))?;
    let mut found = vec![0; len];
    link.local().read(len, &mut found);
    findings.holds("what is written is read", found == pattern, "NO: other bytes came back");
    let word = link.remote(SCRATCH + 8);
    let add = Work { id: 0, verb: Verb::FetchAdd { remote: word, add: 5 }, signalled: true };
    let before = link.all(&[add])?;
    let swap = |expected, desired| Work {
        id: 0,
        verb: Verb::CompareSwap { remote: word, expected, desired },
        signalled: true,
    };
    let is_sound = link.all(&[swap(before, 1)])? == before.wrapping_add(5)
        && link.all(&[swap(before.wrapping_add(5), 1)])? == before.wrapping_add(5)
        && link.all(&[add])? == 1;
    findings.holds("atomics find and change what they should", is_sound, "NO");
    Ok(())
}

fn windows(findings: &mut Findings, link: &mut Link, network: Network) -> Result<(), BenchError> {
    let refused = Err(WorkError::RemoteAccess);
    let Opened { key, addr, len } = ask(link, Request::Open)?;
    if key.0 == 0 {
        findings.holds("a window can be bound", false, "NO: the other end has none left");
        return Ok(());
    }
    let local = link.slice(0, 64);
    let at = |addr| RemoteAddr { addr, key };
    let read = |addr| Verb::Read { local, remote: at(addr) };
    let inside = one(link, read(addr))?.is_ok() && one(link, read(addr + len - 64))?.is_ok();
    findings.holds("a window opens its range", inside, "NO");
    let rights = one(link, Verb::Write { local, remote: at(addr) })? == refused;
    findings.holds("a window is held to its rights", rights, "NO: what may only be read was written");
    let mut bounds = true;
    for beyond in [addr + len, addr - 64, addr + len - 32] {
        bounds &= one(link, read(beyond))? == refused;
    }
    let otherwise = match network {
        Network::Verbs => "NO: its whole region is open (Soft-RoCE is known for this; no real device may)",
        Network::Tcp => "NO",
    };
    findings.holds("a window is held to its bounds", bounds, otherwise);
    ask(link, Request::Close(key))?;
    let closed = one(link, read(addr))? == refused;
    findings.holds("a window that was closed opens nothing", closed, "NO");
    Ok(())
}

/// Other pages lie under the same addresses and key, and are found there at once. By an honest
/// endpoint: where the device does not notice by itself, its windows are closed meanwhile, and it
/// asks for the key again.
fn remap(findings: &mut Findings, end: &CheckEnd, who: Identity) -> Result<(), BenchError> {
    // The later epoch shuts out the endpoint of before, which has done its work.
    let later = Identity { epoch: who.epoch + 1, ..who };
    let endpoint = VerbsEndpoint::connect(end.address, &end.key, later)
        .map_err(|error| BenchError::Fabric { reason: error.to_string() })?;
    let mut link = Link::new(Box::new(endpoint), 4096)?;
    let mut is_sound = true;
    let mut how = None;
    let mut times_us = Vec::with_capacity(REMAPS);
    for _ in 0..REMAPS {
        let start = Instant::now();
        let moved = Moved::parse(&say_and_hear(&mut link, Request::Move)?);
        let Some(moved) = moved.filter(|moved| moved.key.0 != 0) else {
            findings.holds("memory can be remapped", false, "NO: the other end says why");
            return Ok(());
        };
        link.local().write(0, &[0; 64]);
        let remote = RemoteAddr { addr: moved.addr + PAGE_BYTES, key: moved.key };
        let local = link.slice(0, 64);
        is_sound &= one(&mut link, Verb::Read { local, remote })? == Ok(64);
        times_us.push(start.elapsed().as_secs_f64() * 1e6);
        let mut found = [0; 64];
        link.local().read(0, &mut found);
        is_sound &= found == [moved.byte; 64];
        how = RemapMethod::ALL.get(usize::from(moved.how)).copied();
    }
    findings.holds("remapped memory is found at once", is_sound, "NO: other bytes came back");
    times_us.sort_by(f64::total_cmp);
    let how = how.map_or_else(|| "in a way that is not known here".into(), |how| how.to_string());
    findings.line("it is remapped by", &how);
    findings.line("asked for, done, and read, µs (median)", &short(times_us[REMAPS / 2]));
    Ok(())
}

/// The outcome of one operation, whatever it is.
fn one(link: &mut Link, verb: Verb) -> Result<Result<u64, WorkError>, BenchError> {
    let done: &[Completion] = link.outcomes(&[Work { id: 0, verb, signalled: true }])?;
    let outcome = done[0].outcome;
    if let Err(WorkError::PeerGone) = outcome {
        return Err(BenchError::Fabric { reason: "the other host is gone".into() });
    }
    Ok(outcome)
}

/// Ask the other end for a window, and hear its answer.
fn ask(link: &mut Link, request: Request) -> Result<Opened, BenchError> {
    Opened::parse(&say_and_hear(link, request)?)
        .ok_or_else(|| BenchError::Fabric { reason: "the other end answers what is not of a check".into() })
}

fn say_and_hear(link: &mut Link, request: Request) -> Result<Vec<u8>, BenchError> {
    let failed = |reason: &str| BenchError::Fabric { reason: reason.into() };
    link.local().write(0, &request.bytes());
    let local = link.slice(0, u32::try_from(MESSAGE_BYTES).expect("a few bytes"));
    link.all(&[Work { id: 0, verb: Verb::Send { local }, signalled: true }])?;
    let mut answer = Vec::new();
    let asked = Instant::now();
    while !link.receive(&mut answer) {
        if link.is_broken() || asked.elapsed() > ANSWER_PATIENCE {
            return Err(failed(
                "the other end does not answer: does `aquifer fabric check --listen` run there?",
            ));
        }
        std::hint::spin_loop();
    }
    Ok(answer)
}
