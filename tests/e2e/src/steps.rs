//! Test of a limit in steps: the program grows, pauses until it is within its limit, and then works
//! while the test samples it.
//!
//! Resident memory is read from the kernel's counter. A walk through the pages, as for memory that
//! forks share, would count pages twice that move during the walk. How far a program exceeds its
//! limit while it grows depends on the machine; `aquifer bench faults` measures that.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};

use crate::cluster::Cluster;
use crate::run::mempool_share;
use crate::sampler::{Sampler, anonymous_bytes};
use crate::{eventually, processes};

const MIB: u64 = 1 << 20;
/// Bytes by which a run may exceed its limit, beside 10 %.
const SLACK_BYTES: u64 = 16 * MIB;
/// Steps of `checker steps`.
const STEPS: usize = 6;

/// Bytes of a pausing program that cannot be paged: stacks and data of libraries.
const UNPAGEABLE_BYTES: u64 = 4 * MIB;

/// Most memory that a run with this limit may have while it works, in bytes.
const fn allowed_bytes(limit: u64) -> u64 {
    limit + limit / 10 + SLACK_BYTES
}

/// Input and output of a `checker steps`.
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
        assert_eq!(line.trim_end(), what, "unexpected output; the program may have ended");
    }

    fn proceed(&mut self) {
        self.to.write_all(b"\n").expect("the program reads");
    }
}

/// Runs a `checker steps` and asserts that it stays within its limit, in bytes.
///
/// # Panics
/// If it exceeds its limit while it works, or fails.
pub fn assert_within_limit(cluster: &Cluster, command: &mut Command, limit: u64) {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it can be started");
    let (to, from) = (child.stdin.take().expect("it is a pipe"), child.stdout.take().expect("it is a pipe"));
    assert_all_within_limit(cluster, child.id(), &mut [Steps::new(to, from)], limit);
    let status = child.wait().expect("our own child can be waited for");
    assert!(status.success(), "the checker ended with {status}");
}

/// Asserts that the descendants of `pid`, which have one limit together, stay within it while their
/// checkers work. All checkers take a step at the same time.
///
/// # Panics
/// If they exceed it while they work.
pub fn assert_all_within_limit(cluster: &Cluster, pid: u32, checkers: &mut [Steps], limit: u64) {
    for step in 1..=STEPS {
        checkers.iter_mut().for_each(|checker| checker.expect("grown"));
        let mut mempool = mempool_share(cluster.agent_socket());
        eventually("the pausing program to be within its limit", || {
            let bytes = anonymous_bytes(&processes::descendants(pid), false) + mempool();
            (bytes <= limit + UNPAGEABLE_BYTES).then_some(())
        });
        let sampler = Sampler::start(pid, false, mempool);
        checkers.iter_mut().for_each(Steps::proceed);
        checkers.iter_mut().for_each(|checker| checker.expect("checked"));
        let peak = sampler.stop();
        assert!(
            peak.total_bytes <= allowed_bytes(limit),
            "step {step}: resident {} MiB, with the mempool {} MiB, of {} MiB",
            peak.anonymous_bytes / MIB,
            peak.total_bytes / MIB,
            allowed_bytes(limit) / MIB
        );
        assert!(peak.samples > 0, "step {step} was not sampled");
        checkers.iter_mut().for_each(Steps::proceed);
    }
}
