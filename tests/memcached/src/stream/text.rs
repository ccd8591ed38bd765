//! Requests of the text protocol.

use crate::random::Random;
use crate::script::{Cas, Key, Request};
use crate::stream::meta::WRONG_BASE64;
use crate::stream::words::{
    TEXT, appended_value, delta, edge_number, flags, key_word, length_word, lifetime, line, line_end,
    no_number, numeric_value, refused_length, value, wrong_cas,
};

/// Longest line of keys in bytes, except of `get` and `gets`, whose lines memcached always accepts.
const KEYS_BYTES_MAX: usize = 1400;

/// Whether `mn` precedes commands that change a number in place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Barrier {
    /// No `mn`: no unwritten reply refers to an item when they are executed.
    None,
    /// `mn` precedes them, because meta commands may precede them.
    BeforeChanges,
}

/// Generates a request of one text command.
pub fn request(random: &mut Random, keys: &[Key], barrier: Barrier) -> Request {
    match random.below(100) {
        0..26 => storage(random, keys),
        26..32 => refused_storage(random, keys),
        32..37 => bad_chunk(random, keys),
        37..55 => get(random, keys),
        55..62 => get_and_touch(random, keys),
        62..70 => delete(random, keys),
        70..82 => arithmetic(random, keys, barrier),
        82..84 => great_numbers(random),
        84..90 => touch(random, keys),
        90..93 => flush_all(random, keys),
        93..96 => other(random, keys),
        _ => Request::literal(junk(random)),
    }
}

/// Generates a `gets`, and a `cas` of the same key with the returned value.
pub fn fetch_and_store(random: &mut Random, keys: &[Key]) -> Vec<Request> {
    let plain: Vec<&Key> = keys.iter().filter(|key| !key.is_base64).collect();
    let word = random.pick(&plain).word.clone();
    let command: &[u8] = if random.once_in(4) { b"gats 0" } else { b"gets" };
    let fetch = Request::literal(line(random, &[command.to_vec(), word.clone()]));
    let value = value(random);
    let mut store = Request::default();
    store.push([b"cas ", word.as_slice(), b" 3 0 ", value.len().to_string().as_bytes(), b" "].concat());
    store.push_cas(random_cas(random));
    store.push(if random.once_in(8) { &b" noreply"[..] } else { b"" });
    store.push([b"\r\n", value.as_slice(), b"\r\n"].concat());
    vec![fetch, store]
}

/// Picks a cas value: mostly the latest, sometimes an older one, or one that was not issued.
pub fn random_cas(random: &mut Random) -> Cas {
    match random.below(8) {
        0 => Cas::Greatest,
        1 => Cas::Recent(random.below(8)),
        _ => Cas::Recent(0),
    }
}

/// Appends `noreply` sometimes, mostly in its legal place and form.
fn push_noreply(random: &mut Random, words: &mut Vec<Vec<u8>>) {
    match random.below(14) {
        0 | 1 => words.push(b"noreply".to_vec()),
        2 if random.once_in(2) => {
            let wrong: [&[u8]; 6] =
                [b"NOREPLY", b"noreplyx", b"norepl", b"noreply\t", b"noreply noreply", b"0"];
            words.push(random.pick(&wrong).to_vec());
        }
        3 if random.once_in(4) => {
            // The place of the key is left out: a lifetime would become a length.
            let places = [0, 2, 3, 4, 5, 6];
            let at = (*random.pick(&places)).min(words.len());
            words.insert(at, b"noreply".to_vec());
        }
        _ => {}
    }
}

/// Generates a storage command with data of the announced length.
fn storage(random: &mut Random, keys: &[Key]) -> Request {
    let commands = ["set", "set", "set", "add", "replace", "append", "prepend", "cas"];
    let command = *random.pick(&commands);
    let value = match command {
        "append" | "prepend" => appended_value(random),
        _ if random.once_in(3) => numeric_value(random),
        _ => value(random),
    };
    let mut words = vec![command.as_bytes().to_vec(), key_word(random, keys), flags(random)];
    words.push(lifetime(random));
    words.push(length_word(random, value.len()));
    if command == "cas" {
        words.push(wrong_cas(random));
    }
    push_noreply(random, &mut words);
    let line = line(random, &words);
    // If the line is refused, the data are parsed as commands.
    Request::literal([&line, value.as_slice(), b"\r\n"].concat())
}

/// Generates a storage command that is refused: its data are parsed as commands.
fn refused_storage(random: &mut Random, keys: &[Key]) -> Request {
    let commands = ["set", "add", "replace", "append", "prepend", "cas"];
    let mut words: Vec<Vec<u8>> = vec![random.pick(&commands).as_bytes().to_vec(), key_word(random, keys)];
    words.extend([flags(random), lifetime(random), b"2".to_vec()]);
    match random.below(5) {
        0 => words[2] = no_number(random),
        1 => words[3] = no_number(random),
        2 => words[4] = refused_length(random),
        3 => {
            words.truncate(random.between(1, 4));
        }
        _ => words.extend((0..random.between(2, 30)).map(|_| b"7".to_vec())),
    }
    if random.once_in(3) {
        words.push(b"noreply".to_vec());
    }
    let data: &[u8] = if random.once_in(4) { b"version\r\n" } else { b"ab\r\n" };
    Request::literal([&line(random, &words), data].concat())
}

/// Generates a storage command whose data are longer or shorter than announced, or end wrongly.
/// After the request the server awaits a command.
fn bad_chunk(random: &mut Random, keys: &[Key]) -> Request {
    let commands = ["set", "add", "replace", "append", "prepend"];
    let length = random.below(40);
    let value = random.text(length, TEXT);
    let mut words: Vec<Vec<u8>> = vec![random.pick(&commands).as_bytes().to_vec(), key_word(random, keys)];
    words.extend([b"0".to_vec(), b"0".to_vec(), length.to_string().into_bytes()]);
    push_noreply(random, &mut words);
    let mut bytes = line(random, &words);
    bytes.extend_from_slice(&value);
    let ends: [&[u8]; 8] = [
        b"x\r\n",
        b"xyz\r\n",
        b"\nX\r\n",
        b"\n\r\n",
        b"\r\r\n",
        b"\r\r\r\n",
        b"\n\n\r\n",
        b"longer than announced\n",
    ];
    bytes.extend_from_slice(random.pick::<&[u8]>(&ends));
    Request::literal(bytes)
}

fn get(random: &mut Random, keys: &[Key]) -> Request {
    let commands: [&[u8]; 5] = [b"get", b"get", b"gets", b"gets", b"bget"];
    let command = *random.pick(&commands);
    let counts = [1, 1, 1, 1, 2, 3, 5, 22, 23, 24, 25, 46, 47, 100, 1000];
    let count = *random.pick(&counts);
    let is_limited = command == b"bget";
    keys_line(random, keys, vec![command.to_vec()], count, is_limited)
}

fn get_and_touch(random: &mut Random, keys: &[Key]) -> Request {
    let command: &[u8] = if random.once_in(2) { b"gat" } else { b"gats" };
    let counts = [0, 1, 1, 1, 2, 20, 21, 22, 23, 24, 50];
    let count = *random.pick(&counts);
    let words = vec![command.to_vec(), lifetime(random)];
    keys_line(random, keys, words, count, true)
}

/// Appends keys to a command that fetches them. With a key that is too long the command drops
/// earlier replies, so `mn` precedes it.
fn keys_line(
    random: &mut Random,
    keys: &[Key],
    mut words: Vec<Vec<u8>>,
    count: usize,
    is_limited: bool,
) -> Request {
    let mut length = 0;
    let mut has_long_key = false;
    for _ in 0..count {
        let word = if count > 30 && !random.once_in(10) {
            format!("missing{}", random.below(1000)).into_bytes()
        } else {
            key_word(random, keys)
        };
        length += word.len() + 4;
        if is_limited && length > KEYS_BYTES_MAX {
            break;
        }
        has_long_key |= word.len() > 250;
        words.push(word);
    }
    if random.once_in(20) {
        words.push(b"noreply".to_vec());
    }
    let barrier: &[u8] = if has_long_key { b"mn\r\n" } else { b"" };
    Request::literal([barrier, &line(random, &words)].concat())
}

fn delete(random: &mut Random, keys: &[Key]) -> Request {
    let mut words = vec![b"delete".to_vec(), key_word(random, keys)];
    if random.once_in(5) {
        words.push(if random.once_in(2) { b"0".to_vec() } else { edge_number(random) });
    }
    push_noreply(random, &mut words);
    if random.once_in(20) {
        words.remove(random.below(words.len()));
    }
    Request::literal(line(random, &words))
}

fn arithmetic(random: &mut Random, keys: &[Key], barrier: Barrier) -> Request {
    let command: &[u8] = if random.once_in(2) { b"incr" } else { b"decr" };
    let key =
        if random.once_in(2) { format!("n{}", random.below(2)).into_bytes() } else { key_word(random, keys) };
    let delta = match random.below(4) {
        0 => delta(random),
        1 => random.below(1 << 40).to_string().into_bytes(),
        _ => random.below(200).to_string().into_bytes(),
    };
    let mut words = vec![command.to_vec(), key, delta];
    push_noreply(random, &mut words);
    if random.once_in(30) {
        words.remove(random.below(words.len()));
    }
    let before: &[u8] = if barrier == Barrier::BeforeChanges { b"mn\r\n" } else { b"" };
    Request::literal([before, &line(random, &words)].concat())
}

/// Generates an `incr` or `decr` of a new item by any number. The result may be too great for
/// another change.
fn great_numbers(random: &mut Random) -> Request {
    let command = if random.once_in(2) { "incr" } else { "decr" };
    let value = (random.number() >> random.between(1, 63)).to_string();
    let delta = if random.once_in(3) {
        String::from_utf8(edge_number(random)).expect("numbers are text")
    } else {
        (random.number() >> random.below(64)).to_string()
    };
    let length = value.len();
    Request::literal(format!(
        "set great 3 0 {length}\r\n{value}\r\n{command} great {delta}\r\nget great\r\ndelete great\r\n"
    ))
}

fn touch(random: &mut Random, keys: &[Key]) -> Request {
    let mut words = vec![b"touch".to_vec(), key_word(random, keys), lifetime(random)];
    push_noreply(random, &mut words);
    if random.once_in(20) {
        words.remove(random.below(words.len()));
    }
    Request::literal(line(random, &words))
}

fn flush_all(random: &mut Random, keys: &[Key]) -> Request {
    let times =
        ["", "", "0", "-1", "x", "1000", "2592001", "1000000000", "2100000000", "2147483648", "0 0", "0 x"];
    let time = *random.pick(&times);
    let mut words: Vec<Vec<u8>> = vec![b"flush_all".to_vec()];
    words.extend(time.split_terminator(' ').map(|word| word.as_bytes().to_vec()));
    push_noreply(random, &mut words);
    let plain = keys.iter().filter(|key| !key.is_base64).map(|key| key.word.clone());
    let get: Vec<Vec<u8>> = [b"get".to_vec()].into_iter().chain(plain).collect();
    let mut bytes = line(random, &get);
    if keys.iter().any(|key| key.is_base64) {
        let wrong = WRONG_BASE64.iter().map(|word| Key::base64(*word));
        let others =
            keys.iter().filter(|key| key.is_base64).cloned().chain(keys.iter().map(Key::with_other_encoding));
        bytes.extend(others.chain(wrong).flat_map(|key| key.meta_line("mg", "")));
    }
    bytes.extend(line(random, &words));
    Request::literal(bytes)
}

fn other(random: &mut Random, keys: &[Key]) -> Request {
    let lines = [
        "version",
        "version x",
        "verbosity 0",
        "verbosity",
        "verbosity x",
        "verbosity 1 noreply",
        "verbosity 0 1 2",
        "verbosity noreply",
        "version noreply",
        "stats reset",
        "stats nothing",
        "stats detail",
        "shutdown",
        "quit",
        "quit x",
    ];
    let closes = random.once_in(8);
    if closes {
        // Without `mn` the replies before the line would be dropped.
        let lines: [&[u8]; 3] = [b"GET / HTTP/1.1", b"x HTTP/1.0", b"HTTP/"];
        return Request::literal([b"mn\r\n", *random.pick(&lines), b"\r\n"].concat());
    }
    let word = random.pick(&lines).as_bytes().to_vec();
    let mut words = vec![word];
    if random.once_in(10) {
        words.push(key_word(random, keys));
    }
    Request::literal(line(random, &words))
}

/// Generates a line that is no command.
pub fn junk(random: &mut Random) -> Vec<u8> {
    let mut bytes: Vec<u8> = match random.below(8) {
        0 => Vec::new(),
        1 => vec![b' '; random.between(1, 1000)],
        2 => vec![b'\t'; random.between(1, 3)],
        3 => vec![0; random.between(1, 3)],
        4 => [b"get k0\0k1".to_vec(), random.text(3, TEXT)].concat(),
        5 => {
            let length = random.between(1, 60);
            let bytes = random.bytes(length);
            // Neither the first byte of the binary protocol nor a line end.
            bytes.into_iter().map(|byte| byte & 0x7f).filter(|byte| *byte != b'\n').collect()
        }
        6 => {
            let commands: [&[u8]; 12] = [
                b"GET k0",
                b"Set k0 0 0 1",
                b"gett k0",
                b"getss k0",
                b"se",
                b"s",
                b"m",
                b"mx k0",
                b"incrx k0 1",
                b"delet k0",
                b"get\tk0",
                b"\rget k0",
            ];
            random.pick(&commands).to_vec()
        }
        _ => {
            let length = random.between(1, 12);
            random.text(length, TEXT)
        }
    };
    bytes.extend_from_slice(line_end(random));
    bytes
}
