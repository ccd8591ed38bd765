//! Runs a script on two servers, and shrinks it to a difference.

use std::fmt::{self, Display, Formatter};
use std::time::{Duration, Instant};

use crate::connection::{Answer, Connection};
use crate::escape::escape;
use crate::normalise::{NormalReply, Normaliser};
use crate::script::{Batch, Cuts, Key, Script};
use crate::server::Server;
use crate::stream::meta::WRONG_BASE64;
use crate::stream::words::ODD_KEYS;

/// Seconds by which times may differ, in addition to the duration of the script. The clock of
/// memcached is late on a busy machine.
const TOLERANCE_S: u64 = 5;
/// Time limit for shrinking a script.
const SHRINK_TIME: Duration = Duration::from_secs(60);

/// Two servers whose replies must be equal.
#[derive(Clone, Copy, Debug)]
pub struct Pair<'a> {
    /// The server whose replies are correct.
    pub reference: &'a Server,
    /// The server under test.
    pub candidate: &'a Server,
}

/// The answer of a server to a batch.
#[derive(Clone, Debug)]
struct BatchResult {
    answer: Answer,
    replies: Vec<NormalReply>,
}

/// The answers of a server to a script.
#[derive(Debug)]
struct Run {
    results: Vec<BatchResult>,
    elapsed: Duration,
}

/// The first difference between two servers.
#[derive(Clone, Debug)]
pub struct Difference {
    /// The number of the batch.
    pub batch: usize,
    /// The number of the reply in the batch.
    pub reply: usize,
    description: String,
}

impl Display for Difference {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        write!(formatter, "batch {}, reply {}:\n{}", self.batch, self.reply, self.description)
    }
}

/// Deletes all items, and resets the settings that a script may have changed.
fn prepare(server: &Server, script: &Script) {
    let mut reset = b"verbosity 0\r\n".to_vec();
    if server.has_cas() {
        // Without cas values, the command also deletes items that are stored in the same second.
        reset.extend_from_slice(b"flush_all\r\n");
    }
    // A delayed flush would make memcached return flushed items again that it has not freed yet. A
    // script may also name keys that only an earlier script had.
    let odd = ODD_KEYS.iter().chain(&WRONG_BASE64).map(|word| Key::plain(*word));
    let keys = script.keys.iter().cloned().chain(odd);
    let both = keys.flat_map(|key| [key.with_other_encoding(), key]);
    reset.extend(both.flat_map(|key| key.meta_line("md", "q")));
    server.connect().request(reset);
}

fn run(server: &Server, script: &Script) -> Run {
    let started = Instant::now();
    prepare(server, script);
    let mut normaliser = Normaliser::new(!server.has_cas());
    let mut connections: Vec<Option<Connection>> = Vec::new();
    let mut results = Vec::new();
    for batch in &script.batches {
        if connections.len() <= batch.connection {
            connections.resize_with(batch.connection + 1, || None);
        }
        let place = &mut connections[batch.connection];
        let requests = batch.requests.iter();
        let bytes: Vec<u8> = requests.flat_map(|request| request.bytes(normaliser.seen_cas())).collect();
        let connection = place.get_or_insert_with(|| server.connect());
        let answer = connection.exchange(&batch.cuts.split(&bytes), batch.end);
        if answer.is_closed {
            *place = None;
        }
        let is_last = answer.is_stalled || (answer.is_closed && !server.is_alive());
        results.push(BatchResult { replies: normaliser.normalise(&answer.bytes), answer });
        if is_last {
            break;
        }
    }
    Run { results, elapsed: started.elapsed() }
}

/// Finds the first difference between two servers in a script.
///
/// # Panics
/// If the reference stalls or ends: then the script is wrong.
#[must_use]
pub fn find_difference(pair: Pair<'_>, script: &Script) -> Option<Difference> {
    match compare_runs(pair, script) {
        Ok(difference) => difference,
        Err(ReferenceFailed { batch, answer }) => {
            let mut until_there = script.clone();
            until_there.batches.truncate(batch + 1);
            let what = if pair.reference.is_alive() { "stalled" } else { "ended" };
            panic!("the reference {what} after {} in the last of\n{until_there}", escape(&answer.bytes));
        }
    }
}

/// The error that the reference stalled or ended during a batch.
#[derive(Debug)]
struct ReferenceFailed {
    batch: usize,
    answer: Answer,
}

fn compare_runs(pair: Pair<'_>, script: &Script) -> Result<Option<Difference>, ReferenceFailed> {
    let expected = run(pair.reference, script);
    if let Some(last) = expected.results.last()
        && (last.answer.is_stalled || !pair.reference.is_alive())
    {
        return Err(ReferenceFailed { batch: expected.results.len() - 1, answer: last.answer.clone() });
    }
    let actual = run(pair.candidate, script);
    let tolerance_s = TOLERANCE_S + expected.elapsed.as_secs() + actual.elapsed.as_secs();
    let tolerance_s = i64::try_from(tolerance_s).expect("a test is short");
    let mut pairs = expected.results.iter().zip(&actual.results).enumerate();
    let difference = pairs.find_map(|(batch, (expected, actual))| {
        compare_batch(expected, actual, tolerance_s).map(|(reply, description)| Difference {
            batch,
            reply,
            description,
        })
    });
    let ended = || Difference {
        batch: actual.results.len().saturating_sub(1),
        reply: 0,
        description: "the server has ended".to_owned(),
    };
    Ok(difference.or_else(|| (!pair.candidate.is_alive()).then(ended)))
}

fn compare_batch(expected: &BatchResult, actual: &BatchResult, tolerance_s: i64) -> Option<(usize, String)> {
    let are_equal = |at: &usize| {
        let (expected, actual) = (expected.replies.get(*at), actual.replies.get(*at));
        expected.zip(actual).is_some_and(|(expected, actual)| expected.is_equivalent(actual, tolerance_s))
    };
    let replies = expected.replies.len().max(actual.replies.len());
    let equal = (0..replies).take_while(are_equal).count();
    let ending = |result: &BatchResult| match result.answer {
        Answer { is_stalled: true, .. } => "<no reply to the end of the batch>",
        Answer { is_closed: true, .. } => "<connection closed>",
        Answer { .. } => "<connection open>",
    };
    if equal == replies && ending(expected) == ending(actual) {
        return None;
    }
    let show = |result: &BatchResult| match result.replies.get(equal) {
        Some(reply) => reply.to_string(),
        None => ending(result).to_owned(),
    };
    let description = format!(
        "  expected: {}\n  actual:   {}\n  all expected bytes: {}\n  all actual bytes:   {}",
        show(expected),
        show(actual),
        escape(&expected.answer.bytes),
        escape(&actual.answer.bytes),
    );
    Some((equal, description))
}

/// Removes batches, requests, cuts and connections that are not needed for a difference.
#[must_use]
pub fn shrink(pair: Pair<'_>, script: Script, difference: Difference) -> (Script, Difference) {
    let started = Instant::now();
    let mut shrinker = Shrinker { pair, script, difference, started };
    // A step may make another step possible.
    while !shrinker.is_out_of_time() {
        let before = shrinker.script.clone();
        shrinker.remove_batches();
        shrinker.remove_requests();
        shrinker.simplify_batches();
        if shrinker.script == before {
            break;
        }
    }
    (shrinker.script, shrinker.difference)
}

struct Shrinker<'a> {
    pair: Pair<'a>,
    script: Script,
    difference: Difference,
    started: Instant,
}

impl Shrinker<'_> {
    fn is_out_of_time(&self) -> bool {
        // A server that has ended is not restarted.
        self.started.elapsed() > SHRINK_TIME
            || !self.pair.candidate.is_alive()
            || !self.pair.reference.is_alive()
    }

    /// Keeps a smaller script if it also has a difference.
    fn try_script(&mut self, smaller: Script) -> bool {
        if self.is_out_of_time() {
            return false;
        }
        let Ok(Some(difference)) = compare_runs(self.pair, &smaller) else { return false };
        self.difference = difference;
        self.script = smaller;
        true
    }

    fn remove_batches(&mut self) {
        let mut smaller = self.script.clone();
        smaller.batches.truncate(self.difference.batch + 1);
        if smaller != self.script {
            self.try_script(smaller);
        }
        let mut length = self.script.batches.len().div_ceil(2);
        while length > 0 {
            let mut start = 0;
            while start < self.script.batches.len() {
                let end = (start + length).min(self.script.batches.len());
                let mut smaller = self.script.clone();
                smaller.batches.drain(start..end);
                if !self.try_script(smaller) {
                    start = end;
                }
            }
            length /= 2;
        }
    }

    fn remove_requests(&mut self) {
        for batch in (0..self.script.batches.len()).rev() {
            let mut length = self.script.batches[batch].requests.len() / 2;
            while length > 0 {
                let mut start = 0;
                while start < self.script.batches[batch].requests.len() {
                    let end = (start + length).min(self.script.batches[batch].requests.len());
                    let mut smaller = self.script.clone();
                    smaller.batches[batch].requests.drain(start..end);
                    if !self.try_script(smaller) {
                        start = end;
                    }
                }
                length /= 2;
            }
        }
    }

    fn simplify_batches(&mut self) {
        for at in 0..self.script.batches.len() {
            let simplifications: [fn(&mut Batch); 2] =
                [|batch| batch.cuts = Cuts::None, |batch| batch.connection = 0];
            for simplify in simplifications {
                let mut smaller = self.script.clone();
                smaller.batches.get_mut(at).into_iter().for_each(simplify);
                if smaller != self.script {
                    self.try_script(smaller);
                }
            }
        }
    }
}

/// Asserts that the replies of two servers to a script are equal. The message has the shrunk
/// script.
///
/// # Panics
/// If the replies differ.
#[track_caller]
pub fn assert_equal(pair: Pair<'_>, name: &str, script: Script) {
    let Some(difference) = find_difference(pair, &script) else { return };
    let requests = script.requests();
    let (script, shrunk) = shrink(pair, script, difference.clone());
    panic!(
        "{name}: different replies\nfirst difference: {difference}\n\nafter shrinking {requests} requests to \
         {}:\n{script}{shrunk}",
        script.requests(),
    );
}
