//! Judging a limit in steps: the program grows, stands still until it is within its limit, and then
//! works under judgement.
//!
//! Resident memory is read from the kernel's counter. A walk through the pages, as for what forks
//! share, counts twice what moves while it is on its way. How far a program that grows freely may
//! be over its limit for a moment depends on the machine; `aquifer bench faults` measures that.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};

use crate::cluster::Cluster;
use crate::run::mempool_share;
use crate::sampler::{Sampler, anonymous_bytes};
use crate::{eventually, processes};

const MIB: u64 = 1 << 20;
/// The promise: the limit, 10 % and 16 MiB.
const SLACK_BYTES: u64 = 16 * MIB;
/// Steps of `checker steps`.
const STEPS: usize = 6;

/// What of a program that stands still cannot be paged: stacks, libraries' data.
const REST_BYTES: u64 = 4 * MIB;

/// What a run with this limit may have while it works, in bytes.
const fn most_bytes(limit: u64) -> u64 {
    limit + limit / 10 + SLACK_BYTES
}

/// The two ends of a `checker steps`.
#[allow(missing_debug_implementations, reason = "streams have none")]
pub struct Steps {
    to: Box<dyn Write>,
    from: Box<dyn BufRead>,
}

impl Steps {
    /// A checker that reads lines from `to` and writes lines to `from`.
    #[must_use]
    pub fn new(to: impl Write + 'static, from: impl Read + 'static) -> Self {
        Self { to: Box::new(to), from: Box::new(BufReader::new(from)) }
    }

    fn expect(&mut self, what: &str) {
        let mut line = String::new();
        self.from.read_line(&mut line).expect("the program's output can be read");
        assert_eq!(line.trim_end(), what, "the program has ended, or is another");
    }

    fn go_on(&mut self) {
        self.to.write_all(b"\n").expect("the program reads");
    }
}

/// Run a command that is one `checker steps`, and judge it by its limit in bytes.
///
/// # Panics
/// If it exceeds its limit while it works, or fails.
pub fn judge(cluster: &Cluster, command: &mut Command, limit: u64) {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it can be started");
    let (to, from) = (child.stdin.take().expect("it was asked for"), child.stdout.take().expect("the same"));
    judge_all(cluster, child.id(), &mut [Steps::new(to, from)], limit);
    let status = child.wait().expect("our own child can be waited for");
    assert!(status.success(), "the checker ended with {status}");
}

/// Judge the descendants of `pid`, which have one limit together, while their checkers work, which
/// take each step at once.
///
/// # Panics
/// If they exceed it while they work.
pub fn judge_all(cluster: &Cluster, pid: u32, checkers: &mut [Steps], limit: u64) {
    for step in 1..=STEPS {
        checkers.iter_mut().for_each(|checker| checker.expect("grown"));
        let mut mempool = mempool_share(cluster.agent_socket());
        eventually("the program to be within its limit while it stands still", || {
            let bytes = anonymous_bytes(&processes::descendants(pid), false) + mempool();
            (bytes <= limit + REST_BYTES).then_some(())
        });
        let sampler = Sampler::start(pid, false, mempool);
        checkers.iter_mut().for_each(Steps::go_on);
        checkers.iter_mut().for_each(|checker| checker.expect("checked"));
        let peak = sampler.stop();
        assert!(
            peak.total_bytes <= most_bytes(limit),
            "step {step}: resident {} MiB, with the mempool {} MiB, of {} MiB",
            peak.anonymous_bytes / MIB,
            peak.total_bytes / MIB,
            most_bytes(limit) / MIB
        );
        assert!(peak.samples > 0, "step {step} was not sampled");
        checkers.iter_mut().for_each(Steps::go_on);
    }
}
