//! Words of commands: keys, numbers, lifetimes, values.

use crate::random::Random;
use crate::script::Key;
use crate::stream::{Stream, malformed};

/// Longest part of a value without a newline, in bytes, because a server may parse it as a line.
const RUN_MAX: usize = 1500;

/// Characters of ordinary text.
pub const TEXT: &[u8] = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_.:-";

/// Words that no command accepts as a number: numbers of more than 64 bits, and other text.
pub const NO_NUMBERS: [&str; 14] = [
    "x",
    "1x",
    "0x1",
    "1.5",
    "1e3",
    "-",
    "+",
    "--1",
    "1-",
    "noreply",
    "\t",
    "18446744073709551616",
    "36893488147419103232",
    "999999999999999999999999",
];

/// Numbers around the limits of integers, and in unusual forms.
const EDGE_NUMBERS: [&str; 34] = [
    "0",
    "1",
    "2",
    "9",
    "10",
    "99",
    "-0",
    "+1",
    "01",
    "0000000000000000000000000000001",
    "1\t",
    "1\tx",
    "\t1",
    "-1",
    "-2",
    "2147483647",
    "2147483648",
    "2147483649",
    "4294967295",
    "4294967296",
    "4294967297",
    "9223372036854775806",
    "9223372036854775807",
    "9223372036854775808",
    "9223372036854775809",
    "18446744073709551614",
    "18446744073709551615",
    "-2147483648",
    "-2147483649",
    "-4294967295",
    "-4294967296",
    "-9223372036854775807",
    "-9223372036854775808",
    "-9223372036854775809",
];

/// Lifetimes with which an item never expires, has expired, or expires much later.
const LIFETIMES: [&str; 16] = [
    "0",
    "0",
    "0",
    "-1",
    "-2147483648",
    "1000",
    "5000",
    "100000",
    "2592000",
    "2592001",
    "1000000000",
    "2100000000",
    "2147483647",
    "2147483648",
    "4294968296",
    "+5000",
];

/// Picks a word that no command accepts as a number.
pub fn no_number(random: &mut Random) -> Vec<u8> {
    random.pick(&NO_NUMBERS).as_bytes().to_vec()
}

/// Picks a number around the limits of integers, or a word that is no number.
pub fn edge_number(random: &mut Random) -> Vec<u8> {
    if random.once_in(4) { no_number(random) } else { random.pick(&EDGE_NUMBERS).as_bytes().to_vec() }
}

/// Picks a number far below 2^63 for `incr` and `decr`, or a word that is no number.
pub fn delta(random: &mut Random) -> Vec<u8> {
    loop {
        let edge = edge_number(random);
        // A negative number wraps: -9223372036854775809 is parsed as 2^63 - 1. The exception below
        // is refused by the servers.
        let is_great = edge.trim_ascii_start().len() > 12 && !edge.starts_with(b"0");
        let is_refused = NO_NUMBERS.iter().any(|refused| refused.as_bytes() == edge);
        if is_refused || !is_great || edge == b"-9223372036854775808" {
            return edge;
        }
    }
}

/// Picks a cas value that no server has issued, or a word that is no number.
pub fn wrong_cas(random: &mut Random) -> Vec<u8> {
    loop {
        let edge = edge_number(random);
        let digits = edge.trim_ascii();
        let value = std::str::from_utf8(digits).ok().and_then(|digits| digits.parse::<u64>().ok());
        let is_small = value.is_some_and(|value| (1..1 << 31).contains(&value)) || edge.starts_with(b"1\t");
        if !is_small {
            return edge;
        }
    }
}

/// Picks a lifetime.
pub fn lifetime(random: &mut Random) -> Vec<u8> {
    match random.below(12) {
        0..6 => b"0".to_vec(),
        6 => no_number(random),
        _ => random.pick(&LIFETIMES).as_bytes().to_vec(),
    }
}

/// Picks the client flags of an item.
pub fn flags(random: &mut Random) -> Vec<u8> {
    match random.below(8) {
        0..4 => b"0".to_vec(),
        4 => edge_number(random),
        _ => random.below(1 << 16).to_string().into_bytes(),
    }
}

/// Keys with unusual bytes, or that could be another part of a command.
pub const ODD_KEYS: [&[u8]; 8] =
    [b"\x01\x02\xff\x80", "ключ".as_bytes(), b"tab\tkey", b"cr\rkey", b"noreply", b"0", b"-1", b"prefix:1"];

/// Generates the keys of a script.
pub fn keys(random: &mut Random, stream: Stream) -> Vec<Key> {
    let mut keys: Vec<Key> = (0..4).map(|number| Key::plain(format!("k{number}"))).collect();
    if stream == Stream::Malformed {
        keys.push(Key::plain("a"));
        keys.push(Key::plain(random.text(60, malformed::TEXT)));
        return keys;
    }
    keys.extend(["n0", "n1", "a"].map(Key::plain));
    keys.push(Key::plain(random.text(250, TEXT)));
    if stream == Stream::Large {
        return keys;
    }
    keys.push(Key::plain(random.text(249, TEXT)));
    keys.extend((0..3).map(|_| Key::plain(*random.pick(&ODD_KEYS))));
    if matches!(stream, Stream::Meta | Stream::Mixed) {
        let lengths = [1, 2, 3, random.between(4, 20), 180, 186];
        let length = *random.pick(&lengths);
        let binary = random.bytes(length);
        keys.push(Key::base64(base64(&binary)));
        keys.push(Key::base64(base64(b"a b\r\nc\0")));
    }
    keys
}

/// Picks a key of the script, or sometimes a word that is too long for a key.
pub fn key_word(random: &mut Random, keys: &[Key]) -> Vec<u8> {
    if random.once_in(40) {
        let lengths = [251, 252, 300, 1000];
        let length = *random.pick(&lengths);
        return random.text(length, TEXT);
    }
    // The first keys are used most often.
    let plain = keys.iter().filter(|key| !key.is_base64).count();
    let limit = if random.once_in(3) { plain } else { plain.min(6) };
    keys[random.below(limit)].word.clone()
}

/// Generates a value that is short or has newlines, so that a server that parses it as commands
/// finds lines.
pub fn value(random: &mut Random) -> Vec<u8> {
    let value = any_value(random);
    if is_blank(&value) { b"blank".to_vec() } else { value }
}

/// Whether a value is white space, behind which memcached searches for a number.
fn is_blank(value: &[u8]) -> bool {
    !value.is_empty() && value.trim_ascii().is_empty()
}

fn any_value(random: &mut Random) -> Vec<u8> {
    let special: [&[u8]; 12] = [
        b"",
        b"\r\n",
        b"\n",
        b"\r",
        b"END\r\n",
        b"VALUE k0 0 1\r\na\r\nEND\r\n",
        b"EN\r\n",
        b"MN\r\n",
        b"HD c5\r\n",
        b"\0\0\0",
        b"STORED\r\n",
        b"ERROR\r\n",
    ];
    match random.below(10) {
        0..3 => numeric_value(random),
        3 => random.pick(&special).to_vec(),
        4 => {
            let length = random.below(64);
            random.bytes(length)
        }
        5 => {
            let length = random.below(RUN_MAX);
            random.text(length, TEXT)
        }
        6 if random.once_in(4) => {
            let mut value = Vec::new();
            for _ in 0..random.between(2, 20) {
                let length = random.below(1000);
                value.extend(random.text(length, TEXT));
                value.extend_from_slice(b"\r\n");
            }
            value
        }
        _ => {
            let length = random.below(20);
            random.text(length, TEXT)
        }
    }
}

/// Generates a value far below 2^63 that `incr` may accept.
pub fn numeric_value(random: &mut Random) -> Vec<u8> {
    match random.below(8) {
        0 => {
            let number = delta(random);
            if is_blank(&number) { b"0".to_vec() } else { number }
        }
        1 => [random.below(1000).to_string().into_bytes(), b"   ".to_vec()].concat(),
        2 => [b" 0".to_vec(), random.below(1000).to_string().into_bytes()].concat(),
        3 => random.below(1 << 40).to_string().into_bytes(),
        _ => random.below(10_000).to_string().into_bytes(),
    }
}

/// Generates a value that does not extend a number when it is appended to one: the number could
/// become too great.
pub fn appended_value(random: &mut Random) -> Vec<u8> {
    [b"x".to_vec(), value(random), b"x".to_vec()].concat()
}

/// Formats the length of a value in one of the forms that the servers accept.
pub fn length_word(random: &mut Random, length: usize) -> Vec<u8> {
    match random.below(30) {
        0 => format!("+{length}").into_bytes(),
        1 => format!("000{length}").into_bytes(),
        2 => format!("{length}\t").into_bytes(),
        3 => (length + (1 << 32)).to_string().into_bytes(),
        _ => length.to_string().into_bytes(),
    }
}

/// Picks a length that the servers refuse before they read data.
pub fn refused_length(random: &mut Random) -> Vec<u8> {
    let refused = ["-1", "-2147483648", "2147483646", "2147483647", "2147483648", "4294967295"];
    if random.once_in(2) { no_number(random) } else { random.pick(&refused).as_bytes().to_vec() }
}

/// Joins words with spaces, mostly with one, and with none before the first.
pub fn join(random: &mut Random, words: &[Vec<u8>]) -> Vec<u8> {
    let mut line = Vec::new();
    if random.once_in(30) {
        line.resize(random.between(1, 90), b' ');
    }
    for (number, word) in words.iter().enumerate() {
        if number > 0 {
            let spaces = if random.once_in(30) { random.between(2, 4) } else { 1 };
            line.resize(line.len() + spaces, b' ');
        }
        line.extend_from_slice(word);
    }
    line
}

/// Joins words, and ends the line.
pub fn line(random: &mut Random, words: &[Vec<u8>]) -> Vec<u8> {
    let mut line = join(random, words);
    line.extend_from_slice(line_end(random));
    line
}

/// Picks a line end: mostly `\r\n`, rarely `\n` alone or with a space before it.
pub fn line_end(random: &mut Random) -> &'static [u8] {
    match random.below(40) {
        0..3 => b"\n",
        3 => b" \r\n",
        _ => b"\r\n",
    }
}

/// Encodes bytes in base64, with padding.
#[must_use]
pub fn base64(bytes: &[u8]) -> Vec<u8> {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut encoded = Vec::new();
    for group in bytes.chunks(3) {
        let bits =
            group.iter().fold(0, |bits, byte| (bits << 8) | usize::from(*byte)) << (8 * (3 - group.len()));
        let digits = [18, 12, 6, 0].map(|shift| DIGITS[(bits >> shift) & 63]);
        encoded.extend_from_slice(&digits[..=group.len()]);
        encoded.resize(encoded.len() + 3 - group.len(), b'=');
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::base64;

    #[test]
    fn base64_pads_the_last_group() {
        let pairs: [(&[u8], &[u8]); 5] = [
            (b"", b""),
            (b"f", b"Zg=="),
            (b"fo", b"Zm8="),
            (b"foo", b"Zm9v"),
            (b"\xff\xfe\xfd!", b"//79IQ=="),
        ];
        for (plain, encoded) in pairs {
            assert_eq!(base64(plain), encoded);
        }
    }
}
