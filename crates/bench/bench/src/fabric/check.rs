//! The end of a check that tests, measures and reports.

use std::fmt::Write;
use std::hash::{BuildHasher, RandomState};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use aquifer::Outcome;
use aquifer::say::say;
use aquifer::settings::Network;
use aquifer_bench::BenchError;
use aquifer_bench::support::spread::short;
use aquifer_fabric::{
    Completion, Endpoint, EndpointError, Host, Identity, Limits, RemoteAddr, Tenant, Verb, Work, WorkError,
    tcp,
};
use aquifer_fabric_verbs::{RemapMethod, VerbsEndpoint, devices};

use super::CheckEnd;
use super::info::describe;
use super::messages::{MESSAGE_BYTES, Moved, Opened, Request};
use crate::bench::fabric::link::Link;

/// Duration of one measurement, which ends earlier after `OPERATIONS_MAX` operations.
const MEASURE_TIME: Duration = Duration::from_millis(500);
const OPERATIONS_MAX: usize = 20_000;
/// Operations in flight when bandwidth is measured.
const DEPTH: usize = 32;
/// Longest time to wait for an answer message.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Number of times that memory is remapped.
const REMAPS: usize = 9;
const PAGE_BYTES: u64 = 4096;
/// Offset in the lent memory at which the check writes, away from the window.
const SCRATCH: usize = 1 << 20;
const PATTERN_BYTES: u32 = 64 << 10;
/// Greatest host number; see [`Host`].
const HOST_MAX: u16 = 4094;

/// The report, and the number of failed tests.
#[derive(Debug, Default)]
struct Findings {
    text: String,
    failures: usize,
}

impl Findings {
    fn line(&mut self, what: &str, value: &str) {
        // Writing to a String does not fail.
        let _ = writeln!(self.text, "  {what:<44} {value}");
    }

    /// Reports a test.
    fn test(&mut self, what: &str, has_passed: bool, otherwise: &str) {
        self.line(what, if has_passed { "yes" } else { otherwise });
        self.failures += usize::from(!has_passed);
    }
}

/// Runs the check and prints its report; the exit code is 1 if a test failed.
///
/// # Errors
/// If the other end cannot be reached, or an operation fails.
pub fn check(end: &CheckEnd) -> Outcome {
    let identity = identity();
    let mut link = Link::new(connect(end, identity)?, 4096)?;
    let mut findings =
        Findings { text: format!("{} over {}\n", end.address, end.network.name()), failures: 0 };
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
        remap(&mut findings, end, identity)?;
    }
    if findings.failures > 0 {
        let _ = writeln!(findings.text, "failed tests: {}", findings.failures);
    }
    say!("{}", findings.text);
    Ok(if findings.failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A random host number, so that concurrent checks get their own answers, with the time as epoch: a
/// target refuses smaller epochs than the greatest that it has seen.
fn identity() -> Identity {
    let host = RandomState::new().hash_one(0) % u64::from(HOST_MAX) + 1;
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let epoch = u64::try_from(since.as_millis()).unwrap_or(1);
    Identity { host: Host(u16::try_from(host).expect("at most 4094")), epoch, tenant: Tenant(0) }
}

/// Connects an endpoint that sends all operations, so that the target's device has to refuse
/// invalid ones.
fn connect(end: &CheckEnd, identity: Identity) -> Result<Box<dyn Endpoint>, EndpointError> {
    match end.network {
        Network::Tcp => tcp::connect(end.address, &end.key, identity, tcp::ConnectOptions::default()),
        Network::Verbs => {
            let mut endpoint = VerbsEndpoint::connect(end.address, &end.key, identity)?;
            endpoint.skip_local_checks();
            Ok(Box::new(endpoint))
        }
    }
}

fn limits(findings: &mut Findings, limits: &Limits) {
    findings.text += "limits\n";
    findings.line("operations in flight", &limits.queue_depth.to_string());
    findings.line("bytes of one READ or WRITE", &limits.transfer_bytes_max.to_string());
    findings.line("queued messages", &limits.receive_depth.to_string());
}

fn latencies(findings: &mut Findings, link: &mut Link) -> Result<(), BenchError> {
    findings.text += "latency of one operation at a time in µs: median and 99th percentile\n";
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
    while times_us.is_empty() || times_us.len() < OPERATIONS_MAX && started.elapsed() < MEASURE_TIME {
        let start = Instant::now();
        once()?;
        times_us.push(start.elapsed().as_secs_f64() * 1e6);
    }
    times_us.sort_by(f64::total_cmp);
    let at = |part: usize| short(times_us[(times_us.len() - 1) * part / 100]);
    Ok(format!("{:>8} {:>8}", at(50), at(99)))
}

fn bandwidths(findings: &mut Findings, link: &mut Link) -> Result<(), BenchError> {
    let _ = writeln!(findings.text, "throughput with {DEPTH} operations in flight");
    for (name, is_read, bytes) in [
        ("READs of 4 KiB", true, 4096),
        ("READs of 16 KiB", true, 16 << 10),
        ("WRITEs of 4 KiB", false, 4096),
        ("WRITEs of 16 KiB", false, 16 << 10),
    ] {
        let batch: Vec<Work> = (0..DEPTH).map(|at| nth(link, is_read, bytes, at)).collect();
        let started = Instant::now();
        let mut batches = 0_u32;
        while batches == 0 || started.elapsed() < MEASURE_TIME {
            link.all(&batch)?;
            batches += 1;
        }
        let operations = f64::from(batches) * f64::from(u32::try_from(DEPTH).unwrap_or(u32::MAX));
        let per_second = operations / started.elapsed().as_secs_f64();
        let mib = per_second * f64::from(bytes) / f64::from(1 << 20);
        findings.line(name, &format!("{:>8} MiB/s {:>8} operations/s", short(mib), short(per_second)));
    }
    Ok(())
}

fn nth(link: &Link, is_read: bool, bytes: u32, at: usize) -> Work {
    let local = link.slice(at as u64 * u64::from(bytes), bytes);
    let remote = link.remote(SCRATCH + at * bytes as usize);
    let verb = if is_read { Verb::Read { local, remote } } else { Verb::Write { local, remote } };
    Work { id: at as u64, verb, signalled: true }
}

/// Tests that a READ posted after a WRITE returns the written bytes, and that atomics work.
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
    findings.test("a READ returns the written bytes", found == pattern, "NO: other bytes");
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
    findings.test("atomics return and change the right values", is_sound, "NO");
    Ok(())
}

fn windows(findings: &mut Findings, link: &mut Link, network: Network) -> Result<(), BenchError> {
    let refused = Err(WorkError::RemoteAccess);
    let Opened { key, addr, len } = ask(link, Request::Open)?;
    if key.0 == 0 {
        findings.test("a window can be bound", false, "NO: the other end has no free window");
        return Ok(());
    }
    let local = link.slice(0, 64);
    let at = |addr| RemoteAddr { addr, key };
    let read = |addr| Verb::Read { local, remote: at(addr) };
    let inside = one(link, read(addr))?.is_ok() && one(link, read(addr + len - 64))?.is_ok();
    findings.test("a window opens its range", inside, "NO");
    let rights = one(link, Verb::Write { local, remote: at(addr) })? == refused;
    findings.test("a window enforces its rights", rights, "NO: read-only memory was written");
    let mut bounds = true;
    for beyond in [addr + len, addr - 64, addr + len - 32] {
        bounds &= one(link, read(beyond))? == refused;
    }
    let otherwise = match network {
        Network::Verbs => {
            "NO: it opens its whole region (a known defect of Soft-RoCE; other devices must not do that)"
        }
        Network::Tcp => "NO",
    };
    findings.test("a window enforces its bounds", bounds, otherwise);
    ask(link, Request::Close(key))?;
    let closed = one(link, read(addr))? == refused;
    findings.test("a closed window opens nothing", closed, "NO");
    Ok(())
}

/// Tests that remapped memory has its new pages at once, under the same addresses and key.
///
/// Uses an ordinary endpoint: on a device without on-demand paging the target closes its windows
/// meanwhile, and the endpoint requests them again.
fn remap(findings: &mut Findings, end: &CheckEnd, identity: Identity) -> Result<(), BenchError> {
    // The greater epoch fences the first endpoint, which is not used any more.
    let later = Identity { epoch: identity.epoch + 1, ..identity };
    let endpoint = VerbsEndpoint::connect(end.address, &end.key, later)
        .map_err(|error| BenchError::Fabric { reason: error.to_string() })?;
    let mut link = Link::new(Box::new(endpoint), 4096)?;
    let mut is_right = true;
    let mut how = None;
    let mut times_us = Vec::with_capacity(REMAPS);
    for _ in 0..REMAPS {
        let start = Instant::now();
        let moved = Moved::parse(&exchange(&mut link, Request::Move)?);
        let Some(moved) = moved.filter(|moved| moved.key.0 != 0) else {
            findings.test("memory can be remapped", false, "NO: see the output of the other end");
            return Ok(());
        };
        link.local().write(0, &[0; 64]);
        let remote = RemoteAddr { addr: moved.addr + PAGE_BYTES, key: moved.key };
        let local = link.slice(0, 64);
        is_right &= one(&mut link, Verb::Read { local, remote })? == Ok(64);
        times_us.push(start.elapsed().as_secs_f64() * 1e6);
        let mut found = [0; 64];
        link.local().read(0, &mut found);
        is_right &= found == [moved.byte; 64];
        how = RemapMethod::ALL.get(usize::from(moved.how)).copied();
    }
    findings.test("remapped memory has its new pages at once", is_right, "NO: other bytes");
    times_us.sort_by(f64::total_cmp);
    let how = how.map_or_else(|| "an unknown method".into(), |how| how.to_string());
    findings.line("remapped by", &how);
    findings.line("request, remapping and READ, µs (median)", &short(times_us[REMAPS / 2]));
    Ok(())
}

/// Posts one operation and returns its outcome.
fn one(link: &mut Link, verb: Verb) -> Result<Result<u64, WorkError>, BenchError> {
    let done: &[Completion] = link.outcomes(&[Work { id: 0, verb, signalled: true }])?;
    let outcome = done[0].outcome;
    if let Err(WorkError::PeerGone) = outcome {
        return Err(BenchError::Fabric { reason: "connection to the other host lost".into() });
    }
    Ok(outcome)
}

/// Sends a request and parses the answer.
fn ask(link: &mut Link, request: Request) -> Result<Opened, BenchError> {
    Opened::parse(&exchange(link, request)?)
        .ok_or_else(|| BenchError::Fabric { reason: "invalid answer of the other end".into() })
}

fn exchange(link: &mut Link, request: Request) -> Result<Vec<u8>, BenchError> {
    let failed = |reason: &str| BenchError::Fabric { reason: reason.into() };
    link.local().write(0, &request.bytes());
    let local = link.slice(0, u32::try_from(MESSAGE_BYTES).expect("a few bytes"));
    link.all(&[Work { id: 0, verb: Verb::Send { local }, signalled: true }])?;
    let mut answer = Vec::new();
    let asked = Instant::now();
    while !link.receive(&mut answer) {
        if link.is_broken() || asked.elapsed() > ANSWER_TIMEOUT {
            return Err(failed(
                "the other end does not answer: does `aquifer fabric check --listen` run there?",
            ));
        }
        std::hint::spin_loop();
    }
    Ok(answer)
}
