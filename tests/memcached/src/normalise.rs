//! Replaces the parts of replies that may differ between two servers: cas values, times, sizes, the
//! version.

use std::fmt::{self, Display, Formatter};

use crate::escape::escape;
use crate::reply::{Reply, split};

/// Least value of `t` for an item that expired in the past. memcached prints the negative number as
/// an unsigned one.
const PAST_TIME: i64 = 1 << 31;

/// A word of a reply.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Word {
    /// Bytes that must be equal.
    Text(Vec<u8>),
    /// A cas value: the n-th distinct one of this server in the script.
    Cas {
        /// The text before the number.
        name: &'static str,
        /// The index among the distinct values.
        index: usize,
    },
    /// A time that may differ by the duration of the script.
    Seconds {
        /// The text before the number.
        name: &'static str,
        /// The number.
        value: i64,
    },
    /// A number that may differ.
    AnyNumber {
        /// The text before the number.
        name: &'static str,
    },
    /// A version: three numbers.
    Version,
    /// The time of an item that has expired.
    PastTime,
}

impl Word {
    fn text(bytes: impl AsRef<[u8]>) -> Self {
        Self::Text(bytes.as_ref().to_vec())
    }

    /// Whether two servers may return these words at the same place of a reply.
    #[must_use]
    pub fn is_equivalent(&self, other: &Self, tolerance_s: i64) -> bool {
        match (self, other) {
            (Self::Seconds { name, value }, Self::Seconds { name: other_name, value: other_value }) => {
                name == other_name && (value - other_value).abs() <= tolerance_s
            }
            _ => self == other,
        }
    }
}

impl Display for Word {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(bytes) => write!(formatter, "{}", escape(bytes)),
            Self::Cas { name, index } => write!(formatter, "{name}<cas #{index}>"),
            Self::Seconds { name, value } => write!(formatter, "{name}<about {value} s>"),
            Self::AnyNumber { name } => write!(formatter, "{name}<any number>"),
            Self::Version => write!(formatter, "<any version>"),
            Self::PastTime => write!(formatter, "t<in the past>"),
        }
    }
}

/// A reply whose parts that may differ are replaced.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NormalReply {
    /// The words of the line.
    pub words: Vec<Word>,
    /// The data of a value.
    pub data: Option<Vec<u8>>,
    /// Whether the server has sent the reply to its end.
    pub is_complete: bool,
}

impl NormalReply {
    /// Whether two servers may return these replies to the same request.
    #[must_use]
    pub fn is_equivalent(&self, other: &Self, tolerance_s: i64) -> bool {
        self.data == other.data
            && self.is_complete == other.is_complete
            && self.words.len() == other.words.len()
            && self.words.iter().zip(&other.words).all(|(a, b)| a.is_equivalent(b, tolerance_s))
    }
}

impl Display for NormalReply {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        let words: Vec<String> = self.words.iter().map(ToString::to_string).collect();
        write!(formatter, "{}", words.join(" "))?;
        if let Some(data) = &self.data {
            write!(formatter, " | {}", escape(data))?;
        }
        if !self.is_complete { write!(formatter, " (incomplete)") } else { Ok(()) }
    }
}

/// Normalises the replies of one server in one script.
#[derive(Clone, Default, Debug)]
pub struct Normaliser {
    /// The distinct cas values so far, in the order of their first appearance.
    seen_cas: Vec<u64>,
    /// Whether any age is accepted, because items may be left from an earlier script.
    ignores_ages: bool,
}

impl Normaliser {
    /// A normaliser for a server. `has_old_items` says whether items may be left from an earlier
    /// script.
    #[must_use]
    pub fn new(has_old_items: bool) -> Self {
        Self { ignores_ages: has_old_items, ..Self::default() }
    }

    /// The distinct cas values so far, in the order of their first appearance.
    #[must_use]
    pub fn seen_cas(&self) -> &[u64] {
        &self.seen_cas
    }

    /// Normalises the answer of a server to a batch.
    pub fn normalise(&mut self, bytes: &[u8]) -> Vec<NormalReply> {
        split(bytes).iter().map(|reply| self.reply(reply)).collect()
    }

    fn reply(&mut self, reply: &Reply<'_>) -> NormalReply {
        let words: Vec<&[u8]> = reply.line.split(|byte| *byte == b' ').collect();
        let words = match words.as_slice() {
            [b"VALUE", start @ .., cas] if start.len() == 3 => {
                let start = [b"VALUE"].into_iter().map(Word::text).chain(start.iter().map(Word::text));
                let cas = self.cas("", cas);
                start.chain([cas]).collect()
            }
            [b"ME", key, fields @ ..] => {
                let start = [Word::text(b"ME"), Word::text(key)];
                start.into_iter().chain(fields.iter().map(|field| self.debug_field(field))).collect()
            }
            [b"VERSION", version] if is_version(version) => vec![Word::text(b"VERSION"), Word::Version],
            [status @ (b"HD" | b"VA" | b"EN" | b"NF" | b"NS" | b"EX"), flags @ ..] => {
                let flags = flags.iter().map(|flag| self.meta_flag(flag));
                [Word::text(status)].into_iter().chain(flags).collect()
            }
            _ => vec![Word::text(reply.line)],
        };
        NormalReply { words, data: reply.data.map(<[u8]>::to_vec), is_complete: reply.is_complete }
    }

    /// Normalises a cas value. 0 is kept: a server without cas values returns it.
    fn cas(&mut self, name: &'static str, digits: &[u8]) -> Word {
        let value: u64 = match number(digits) {
            Some(value) if value != 0 => value,
            _ => return Word::Text([name.as_bytes(), digits].concat()),
        };
        let index = self.seen_cas.iter().position(|seen| *seen == value).unwrap_or_else(|| {
            self.seen_cas.push(value);
            self.seen_cas.len() - 1
        });
        Word::Cas { name, index }
    }

    fn meta_flag(&mut self, flag: &[u8]) -> Word {
        match flag {
            [b'c', digits @ ..] => self.cas("c", digits),
            [b't', digits @ ..] => match number(digits) {
                Some(-1) => Word::text(flag),
                Some(value) if value >= PAST_TIME => Word::PastTime,
                _ => seconds("t", digits),
            },
            [b'l', digits @ ..] => self.age("l", digits),
            _ => Word::text(flag),
        }
    }

    fn age(&self, name: &'static str, digits: &[u8]) -> Word {
        match seconds(name, digits) {
            Word::Seconds { name, .. } if self.ignores_ages => Word::AnyNumber { name },
            word => word,
        }
    }

    fn debug_field(&mut self, field: &[u8]) -> Word {
        let Some(at) = field.iter().position(|byte| *byte == b'=') else { return Word::text(field) };
        let (name, value) = field.split_at(at + 1);
        match name {
            b"exp=" if value != b"-1" => seconds("exp=", value),
            b"la=" => self.age("la=", value),
            b"cas=" => self.cas("cas=", value),
            b"cls=" if number::<u64>(value).is_some() => Word::AnyNumber { name: "cls=" },
            b"size=" if number::<u64>(value).is_some() => Word::AnyNumber { name: "size=" },
            _ => Word::text(field),
        }
    }
}

fn seconds(name: &'static str, digits: &[u8]) -> Word {
    match number(digits) {
        Some(value) => Word::Seconds { name, value },
        None => Word::Text([name.as_bytes(), digits].concat()),
    }
}

fn number<T: std::str::FromStr>(digits: &[u8]) -> Option<T> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}

fn is_version(word: &[u8]) -> bool {
    let parts: Vec<&[u8]> = word.split(|byte| *byte == b'.').collect();
    let is_number = |part: &&[u8]| part.first().is_some_and(u8::is_ascii_digit);
    parts.len() == 3 && parts.iter().all(is_number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn normal(bytes: &[&[u8]]) -> Vec<Vec<NormalReply>> {
        let mut normaliser = Normaliser::default();
        bytes.iter().map(|bytes| normaliser.normalise(bytes)).collect()
    }

    fn are_equivalent(a: &[&[u8]], b: &[&[u8]]) -> bool {
        let (a, b) = (normal(a).concat(), normal(b).concat());
        a.len() == b.len() && a.iter().zip(&b).all(|(a, b)| a.is_equivalent(b, 2))
    }

    #[test]
    fn cas_values_are_compared_by_their_pattern() {
        let first: [&[u8]; 2] = [b"VALUE k 0 1 7\r\na\r\nEND\r\n", b"HD c9 kk\r\nHD c7\r\n"];
        assert!(are_equivalent(&first, &[b"VALUE k 0 1 12\r\na\r\nEND\r\n", b"HD c3 kk\r\nHD c12\r\n"]));
        assert!(!are_equivalent(&first, &[b"VALUE k 0 1 12\r\na\r\nEND\r\n", b"HD c3 kk\r\nHD c3\r\n"]));
        assert!(!are_equivalent(&[b"HD c0\r\n"], &[b"HD c5\r\n"]));
    }

    #[test]
    fn times_may_differ_within_the_tolerance() {
        assert!(are_equivalent(&[b"HD t1000 l0\r\n"], &[b"HD t998 l1\r\n"]));
        assert!(!are_equivalent(&[b"HD t1000\r\n"], &[b"HD t900\r\n"]));
        assert!(!are_equivalent(&[b"HD t-1\r\n"], &[b"HD t0\r\n"]));
        assert!(are_equivalent(&[b"HD t4294967234\r\n"], &[b"HD t4294960000\r\n"]));
        let debug: &[u8] = b"ME k exp=-1000 la=3 cas=5 fetch=no cls=1 size=66\r\n";
        assert!(are_equivalent(&[debug], &[b"ME k exp=-999 la=3 cas=1 fetch=no cls=7 size=1\r\n"]));
        assert!(!are_equivalent(&[debug], &[b"ME k exp=-999 la=3 cas=1 fetch=yes cls=7 size=1\r\n"]));
        assert!(!are_equivalent(&[debug], &[b"ME k exp=1000 la=3 cas=1 fetch=no cls=7 size=1\r\n"]));
    }

    #[test]
    fn a_version_has_three_numbers() {
        assert!(are_equivalent(&[b"VERSION 1.6.18\r\n"], &[b"VERSION 0.1.0\r\n"]));
        assert!(!are_equivalent(&[b"VERSION 1.6.18\r\n"], &[b"VERSION one\r\n"]));
    }

    #[test]
    fn all_other_bytes_must_be_equal() {
        assert!(!are_equivalent(&[b"9 \r\n"], &[b"9\r\n"]));
        assert!(!are_equivalent(&[b"HD Oc5\r\n"], &[b"HD Oc6\r\n"]));
        assert!(!are_equivalent(&[b"VA 1\r\na\r\n"], &[b"VA 1\r\nb\r\n"]));
        assert!(!are_equivalent(&[b"VA 1\r\na\r\n"], &[b"VA 1\r\na"]));
    }
}
