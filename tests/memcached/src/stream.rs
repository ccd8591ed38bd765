//! Generates scripts from seeds.
//!
//! memcached itself does not always give the same replies to the same bytes. The generators avoid
//! these cases:
//!
//! - Over 2 KiB without a newline close the connection, unless they begin with `get ` or `gets `.
//!   Whether the server receives over 2 KiB before the newline depends on its reads. All other
//!   lines are shorter.
//! - Some errors drop the replies that are not yet written: a `get` with a key that is too long,
//!   and a line of HTTP. Such requests follow `mn`, which writes all replies.
//! - `incr`, `decr` and `ma` pad a number in place only while no unwritten reply refers to the
//!   item. After meta commands they also follow `mn`.
//! - `incr`, `decr` and `ma` reject a number of at least 2^63 if there is a `-` in the memory
//!   behind it, and search for a number behind a value of white space. Scripts have no such values.
//! - If the writing side is closed within a value, replies that are not yet written are dropped.
//!   Batches that may end within a value are completed by empty lines.
//! - A delayed `flush_all` makes memcached return items again that were flushed and not yet freed.
//!   The command follows a `get` of all keys, which frees the items.
//! - `ma` loses a new lifetime if the number becomes longer. With a lifetime, it only decrements.
//! - An item with a key in base64 is returned with the plain key once memcached has replaced the
//!   item to append to it or to change its number, and if a get has created it. No such request has
//!   the flag `b`.
//! - Items with a short lifetime could expire between two commands. Lifetimes are 0, negative, or
//!   at least 1000 s. Thresholds of recaching are far from all lifetimes.
//! - Servers may order the cas values of different keys differently. The effect of `ms` with `I`
//!   depends on whether a value is lower than the item's: a lower value is always of the same item.
//! - Flags that later versions of memcached define are not sent: `aquifer cache` may define them.
//! - 0x80 as the first byte of a connection would select the binary protocol.

pub mod large;
pub mod malformed;
pub mod meta;
pub mod text;
pub mod words;

use std::ops::Range;

use crate::connection::End;
use crate::random::Random;
use crate::script::{Batch, Cuts, Key, Request, Script};

/// Environment variable with the seeds that replace those of the tests: a number, or `FIRST..END`.
const SEEDS_VARIABLE: &str = "AQUIFER_CACHE_SEEDS";

/// The seeds of the environment variable, or else those of the test.
///
/// # Panics
/// If the variable is neither a number nor a range.
#[must_use]
pub fn chosen_seeds(own: Range<u64>) -> Range<u64> {
    let Ok(given) = std::env::var(SEEDS_VARIABLE) else { return own };
    let number = |text: &str| text.parse::<u64>().expect("AQUIFER_CACHE_SEEDS is FIRST or FIRST..END");
    match given.split_once("..") {
        Some((first, end)) => number(first)..number(end),
        None => number(&given)..number(&given) + 1,
    }
}

/// A kind of scripts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stream {
    /// Commands of the text protocol.
    Text,
    /// Meta commands.
    Meta,
    /// Text and meta commands on the same keys.
    Mixed,
    /// Commands with damaged bytes.
    Malformed,
    /// Values from 16 KiB to 3 MiB.
    Large,
}

/// Number of connections of a script.
const CONNECTIONS: usize = 3;
/// The connection on which the final state is read.
const LAST_CONNECTION: usize = CONNECTIONS;
/// Greatest length in bytes of a batch that may be sent byte by byte.
const SINGLE_BYTES_MAX: usize = 200;

impl Stream {
    /// Generates the script of a seed.
    #[must_use]
    pub fn script(self, seed: u64) -> Script {
        // The streams use different numbers for the same seed.
        let stream = match self {
            Self::Text => 1,
            Self::Meta => 2,
            Self::Mixed => 3,
            Self::Malformed => 4,
            Self::Large => 5,
        };
        let mut random = Random::new(seed.wrapping_mul(8).wrapping_add(stream));
        let keys = words::keys(&mut random, self);
        let batches = match self {
            Self::Malformed => random.between(4, 16),
            Self::Large => random.between(5, 12),
            _ => random.between(10, 40),
        };
        let mut script = Script { batches: Vec::new(), keys };
        for _ in 0..batches {
            self.push_batches(&mut random, &mut script);
        }
        script.batches.push(final_state(&script.keys));
        script
    }

    fn push_batches(self, random: &mut Random, script: &mut Script) {
        let keys = &script.keys;
        if matches!(self, Self::Text | Self::Meta | Self::Mixed) && random.once_in(5) {
            let requests = match self {
                Self::Text => text::fetch_and_store(random, keys),
                Self::Meta => meta::fetch_and_store(random, keys),
                _ if random.once_in(2) => text::fetch_and_store(random, keys),
                _ => meta::fetch_and_store(random, keys),
            };
            script.batches.extend(requests.into_iter().map(|request| batch(random, vec![request])));
            return;
        }
        let requests = match self {
            Self::Large => 1,
            // Either one command at a time is sent, or several are pipelined.
            _ if random.once_in(3) => 1,
            _ => random.between(2, 12),
        };
        let requests: Vec<Request> = (0..requests).map(|_| self.request(random, keys)).collect();
        let mut batch = batch(random, requests);
        if self == Self::Malformed {
            batch.end = End::FilledSentinel;
            malformed::damage(random, &mut batch);
        }
        script.batches.push(batch);
    }

    fn request(self, random: &mut Random, keys: &[Key]) -> Request {
        match self {
            Self::Text => text::request(random, keys, text::Barrier::None),
            Self::Meta => meta::request(random, keys),
            Self::Mixed if random.once_in(2) => text::request(random, keys, text::Barrier::BeforeChanges),
            Self::Mixed => meta::request(random, keys),
            Self::Malformed => malformed::request(random, keys),
            Self::Large => large::request(random, keys),
        }
    }
}

fn batch(random: &mut Random, requests: Vec<Request>) -> Batch {
    let length: usize = requests.iter().map(|request| request.bytes(&[]).len()).sum();
    let cuts = match random.below(6) {
        0 | 1 => Cuts::Random(random.number()),
        2 if length <= SINGLE_BYTES_MAX => Cuts::EachByte,
        _ => Cuts::None,
    };
    let connection = if random.once_in(2) { 0 } else { random.below(CONNECTIONS) };
    let end = if random.once_in(12) { End::HalfClose } else { End::Sentinel };
    Batch { connection, requests, cuts, end }
}

/// A batch that reads all keys on a new connection.
fn final_state(keys: &[Key]) -> Batch {
    let requests = keys.iter().map(|key| Request::literal(key.meta_line("mg", "k s f t c v"))).collect();
    Batch { connection: LAST_CONNECTION, requests, cuts: Cuts::None, end: End::Sentinel }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Length from which memcached closes the connection of an incomplete line, in bytes.
    const LINE_BYTES_MAX: usize = 2048;

    #[test]
    fn a_seed_determines_the_script() {
        for stream in [Stream::Text, Stream::Meta, Stream::Mixed, Stream::Malformed, Stream::Large] {
            assert_eq!(stream.script(7), stream.script(7));
            assert_ne!(stream.script(7), stream.script(8));
        }
    }

    #[test]
    fn only_lines_of_get_are_long() {
        for seed in 0..200 {
            for stream in [Stream::Text, Stream::Meta, Stream::Mixed, Stream::Malformed] {
                for batch in stream.script(seed).batches {
                    let bytes: Vec<u8> =
                        batch.requests.iter().flat_map(|request| request.bytes(&[])).collect();
                    assert_ne!(bytes.first(), Some(&0x80));
                    let is_short = |line: &[u8]| line.len() < LINE_BYTES_MAX;
                    let is_get = |line: &[u8]| line.trim_ascii_start().starts_with(b"get");
                    let mut lines = bytes.split(|byte| *byte == b'\n');
                    assert!(lines.all(|line| is_short(line) || is_get(line)), "{stream:?} {seed}");
                }
            }
        }
    }
}
