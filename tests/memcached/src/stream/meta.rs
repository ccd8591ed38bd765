//! Requests of the meta protocol.

use crate::random::Random;
use crate::script::{Cas, Key, Request};
use crate::stream::text::random_cas;
use crate::stream::words::{
    TEXT, appended_value, base64, delta, flags, join, length_word, lifetime, line, line_end, no_number,
    numeric_value, refused_length, value, wrong_cas,
};

/// Number of flags from which a line may have too many words: its data are then parsed as commands.
const FLAGS_SAFE: usize = 12;
/// Thresholds of recaching, far from all lifetimes.
const THRESHOLDS: [&str; 8] = ["0", "30", "3000", "200000", "-1", "2100000000", "", "x"];

/// Words with the flag `b` that are not a valid key in base64.
pub const WRONG_BASE64: [&[u8]; 12] = [
    b"***",
    b"Zm9",
    b"Zg=",
    b"====",
    b"Z===",
    b"Zm9v\xff",
    b"Zh==",
    b"Zm9=",
    b"Zg==Zg==",
    b"=Zg=",
    b"Zm9v=",
    b"A",
];

/// A flag of a meta command.
enum Flag {
    Literal(Vec<u8>),
    /// The flag `C` with a cas value that the server returned.
    Cas(Cas),
}

impl Flag {
    fn name(&self) -> u8 {
        match self {
            Self::Literal(literal) => literal[0],
            Self::Cas(_) => b'C',
        }
    }

    fn is_named(&self, name: u8) -> bool {
        self.name() == name
    }
}

/// Generates a request of one meta command.
pub fn request(random: &mut Random, keys: &[Key]) -> Request {
    match random.below(100) {
        0..34 => get(random, keys),
        34..62 => set(random, keys),
        62..68 => refused_set(random, keys),
        68..80 => simple(random, keys, "md", b""),
        80..93 => simple(random, keys, "ma", b"mn\r\n"),
        93..96 => debug(random, keys),
        96..98 => Request::literal(&b"mn\r\n"[..]),
        _ => broken(random, keys),
    }
}

/// Generates a command that returns a cas value, and a command that is conditional on it.
pub fn fetch_and_store(random: &mut Random, keys: &[Key]) -> Vec<Request> {
    let key = random.pick(keys);
    if random.once_in(4) {
        return invalidation(random, key);
    }
    let base64: &[u8] = if key.is_base64 { b" b" } else { b"" };
    let fetch = if random.once_in(4) {
        Request::literal([b"ms ", key.word.as_slice(), b" 2", base64, b" c\r\nab\r\n"].concat())
    } else {
        Request::literal(key.meta_line("mg", "c v t"))
    };
    let mut store = Request::default();
    // Commands that change a part of an item lose the encoding of the key.
    let kind = if key.is_base64 { random.below(2) * 2 } else { random.below(4) };
    match kind {
        0 => {
            store.push([b"md ", key.word.as_slice(), base64, b" C"].concat());
            store.push_cas(random_cas(random));
            let flags = ["", " I", " I T1000", " q", " k O7", " I T-1"];
            store.push(random.pick(&flags));
            store.push("\r\n");
        }
        1 => {
            store.push([b"mn\r\nma ", key.word.as_slice(), base64, b" v c C"].concat());
            store.push_cas(random_cas(random));
            let flags = ["", " MD", " N0 J5", " q", " k O7", " MD T5000 t"];
            store.push(random.pick(&flags));
            store.push("\r\n");
        }
        _ => {
            let value = value(random);
            let length = value.len().to_string();
            store.push([b"ms ", key.word.as_slice(), b" ", length.as_bytes(), base64, b" c C"].concat());
            store.push_cas(random_cas(random));
            let flags = ["", "", " ME", " MR", " q", " k O7 T5000", " MA", " MP"];
            let usable = if key.is_base64 { flags.len() - 2 } else { flags.len() };
            store.push(random.pick(&flags[..usable]));
            store.push([b"\r\n", value.as_slice(), b"\r\n"].concat());
        }
    }
    vec![fetch, store]
}

/// Generates two requests that store a value, and one with `I` and a cas value: the current one of
/// the item, an older one, or one that was not issued.
fn invalidation(random: &mut Random, key: &Key) -> Vec<Request> {
    let base64: &[u8] = if key.is_base64 { b" b" } else { b"" };
    let start = [b"ms ", key.word.as_slice(), b" 2", base64].concat();
    let stored = Request::literal([start.as_slice(), b" c\r\nab\r\n"].concat());
    let mut last = Request::literal([start.as_slice(), b" c I C"].concat());
    last.push_cas(*random.pick(&[Cas::Recent(0), Cas::Recent(1), Cas::Recent(1), Cas::Greatest]));
    let flags = ["", "", " T1000 F5", " ME", " MR", " q", " k O7"];
    last.push(random.pick(&flags));
    last.push("\r\ncd\r\n");
    let state = Request::literal(key.meta_line("mg", "c v t"));
    vec![stored.clone(), stored, last, state]
}

/// Generates a key, with the flag `b` if the key needs it; sometimes a wrong key or flag.
fn key_and_flag(random: &mut Random, keys: &[Key]) -> (Vec<u8>, Option<&'static [u8]>) {
    if random.once_in(40) {
        return (random.pick(&WRONG_BASE64).to_vec(), Some(b"b"));
    }
    if random.once_in(40) {
        let lengths = [251, 252, 300, 1000];
        let length = *random.pick(&lengths);
        return (random.text(length, TEXT), None);
    }
    if random.once_in(60) {
        // In base64, a binary key may be too long although the decoded one is not.
        let lengths = [187, 188, 250, 251];
        let length = *random.pick(&lengths);
        return (base64(&random.bytes(length)), Some(b"b"));
    }
    let limit = if random.once_in(2) { keys.len() } else { keys.len().min(5) };
    let key = &keys[random.below(limit)];
    let is_base64 = key.is_base64 ^ random.once_in(30);
    (key.word.clone(), is_base64.then_some(b"b"))
}

/// Generates flags in random order, with `b` if the key needs it.
fn flags_of(random: &mut Random, command: &str, base64: Option<&'static [u8]>) -> Vec<Flag> {
    let mut count = random.below(7);
    if random.once_in(15) {
        count = random.between(8, 19);
    }
    let mut seen = vec![b'b'];
    let mut all = Vec::new();
    while all.len() < count {
        let candidate = flag(random, command);
        if is_of_later_versions(command, &candidate) || (base64.is_some() && loses_base64(&candidate)) {
            continue;
        }
        let name = candidate.name();
        // Without this check, most lines with many flags would have a duplicate.
        let is_repeatable = random.once_in(60);
        if seen.contains(&name) && !is_repeatable {
            if seen.len() > 18 {
                break;
            }
            continue;
        }
        seen.push(name);
        all.push(candidate);
    }
    let is_invalidation = all.iter().any(|flag| flag.is_named(b'I'));
    // Servers may order the cas values of different items differently.
    for flag in all.iter_mut().filter(|flag| is_invalidation && flag.is_named(b'C')) {
        *flag = Flag::Cas(Cas::Greatest);
    }
    if let Some(base64) = base64 {
        all.insert(random.below(all.len() + 1), Flag::Literal(base64.to_vec()));
    }
    all
}

/// Whether memcached may create an item without the mark that its key is in base64.
fn loses_base64(flag: &Flag) -> bool {
    matches!(flag, Flag::Literal(literal) if literal[0] == b'N' || literal == b"MA" || literal == b"MP")
}

/// Whether a version after 1.6.18 defines the flag, so that a server may define it. Later versions
/// also define modes in lower case.
fn is_of_later_versions(command: &str, flag: &Flag) -> bool {
    matches!((command, flag.name()), (_, b'E' | b'x' | b'i') | ("mg", b'C') | ("ms", b'N' | b's'))
}

/// Generates a flag with its argument.
fn flag(random: &mut Random, command: &str) -> Flag {
    let plain = b"kstcfhlvuq";
    let with = |name: u8, argument: Vec<u8>| Flag::Literal([vec![name], argument].concat());
    match random.below(40) {
        0..18 => {
            let name = *random.pick(plain);
            // memcached ignores the argument.
            let argument = if random.once_in(30) { b"x7".to_vec() } else { Vec::new() };
            with(name, argument)
        }
        18 | 19 => {
            let lengths = [0, 1, 5, 30, 31, 32, 40];
            let length = *random.pick(&lengths);
            with(b'O', random.text(length, TEXT))
        }
        20..23 => with(b'T', lifetime_or_nothing(random)),
        23..25 => with(b'N', lifetime_or_nothing(random)),
        25 | 26 => with(b'R', random.pick(&THRESHOLDS).as_bytes().to_vec()),
        27 => with(b'F', flags(random)),
        28 | 29 => match random.below(3) {
            0 => with(b'C', wrong_cas(random)),
            _ => Flag::Cas(random_cas(random)),
        },
        30 | 31 => {
            let modes: &[&str] = match command {
                "ms" => &["E", "A", "P", "R", "S", "E", "A", "P", "R", "S", "X", "I", "", "SS"],
                "ma" => &["I", "+", "D", "-", "I", "+", "D", "-", "E", "", "DD"],
                _ => &["E", "I", "X", "", "II"],
            };
            with(b'M', random.pick(modes).as_bytes().to_vec())
        }
        32 | 33 => with(b'D', number_or_nothing(random)),
        34 => with(b'J', number_or_nothing(random)),
        35 | 36 => with(b'I', Vec::new()),
        37 => {
            let name = *random.pick(b"PL");
            with(name, random.text(3, TEXT))
        }
        38 if random.once_in(4) => {
            let unknown: [&[u8]; 8] = [b"z", b"a", b"Z", b"\x7f", b"\xff", b"1", b"noreply", b"\x01"];
            Flag::Literal(random.pick(&unknown).to_vec())
        }
        _ => with(b'v', Vec::new()),
    }
}

fn lifetime_or_nothing(random: &mut Random) -> Vec<u8> {
    if random.once_in(25) { Vec::new() } else { lifetime(random) }
}

fn number_or_nothing(random: &mut Random) -> Vec<u8> {
    match random.below(6) {
        0 => delta(random),
        1 if random.once_in(3) => Vec::new(),
        1 => random.below(1 << 40).to_string().into_bytes(),
        _ => random.below(200).to_string().into_bytes(),
    }
}

/// Generates a line of words and flags.
fn meta_line(random: &mut Random, words: &[Vec<u8>], flags: Vec<Flag>) -> Request {
    let mut request = Request::literal(join(random, words));
    for flag in flags {
        request.push(" ");
        match flag {
            Flag::Literal(literal) => request.push(literal),
            Flag::Cas(cas) => {
                request.push("C");
                request.push_cas(cas);
            }
        }
    }
    request.push(line_end(random));
    request
}

fn get(random: &mut Random, keys: &[Key]) -> Request {
    let (key, base64) = key_and_flag(random, keys);
    let flags = flags_of(random, "mg", base64);
    meta_line(random, &[b"mg".to_vec(), key], flags)
}

fn simple(random: &mut Random, keys: &[Key], command: &str, before: &[u8]) -> Request {
    let (mut key, mut base64) = key_and_flag(random, keys);
    if command == "ma" && (base64.is_some() || random.once_in(2)) {
        key = format!("n{}", random.below(2)).into_bytes();
        base64 = None;
    }
    let mut flags = flags_of(random, command, base64);
    if command == "ma" && flags.iter().any(|flag| flag.is_named(b'T')) {
        // The number must not become longer.
        flags.retain(|flag| !flag.is_named(b'M'));
        flags.push(Flag::Literal(b"MD".to_vec()));
    }
    let mut request = Request::literal(before);
    request.pieces.extend(meta_line(random, &[command.as_bytes().to_vec(), key], flags).pieces);
    request
}

fn set(random: &mut Random, keys: &[Key]) -> Request {
    let (key, base64) = key_and_flag(random, keys);
    let flags = flags_of(random, "ms", base64);
    let is_risky = flags.len() >= FLAGS_SAFE || key.len() > 250;
    let is_appended = |flag: &Flag| matches!(flag, Flag::Literal(name) if name == b"MA" || name == b"MP");
    let value = match random.below(3) {
        _ if is_risky => b"ab".to_vec(),
        _ if flags.iter().any(is_appended) => appended_value(random),
        0 => numeric_value(random),
        _ => value(random),
    };
    let words = [b"ms".to_vec(), key, length_word(random, value.len())];
    let mut request = meta_line(random, &words, flags);
    request.push(value);
    let ends: [&[u8]; 4] = [b"x\r\n", b"\nX\r\n", b"\n\r\n", b"\r\r\r\n"];
    request.push(if random.once_in(20) { random.pick::<&[u8]>(&ends) } else { &b"\r\n"[..] });
    request
}

/// Generates an `ms` that is refused: its data are parsed as commands.
fn refused_set(random: &mut Random, keys: &[Key]) -> Request {
    let (key, base64) = key_and_flag(random, keys);
    let flags = flags_of(random, "ms", base64);
    let length = match random.below(3) {
        0 => no_number(random),
        1 => b"S2".to_vec(),
        _ => refused_length(random),
    };
    let mut request = meta_line(random, &[b"ms".to_vec(), key, length], flags);
    request.push(if random.once_in(4) { "mn\r\n" } else { "ab\r\n" });
    request
}

fn debug(random: &mut Random, keys: &[Key]) -> Request {
    let (key, base64) = key_and_flag(random, keys);
    let mut words = vec![b"me".to_vec(), key];
    words.extend(base64.map(<[u8]>::to_vec));
    if random.once_in(8) {
        words.push(b"k".to_vec());
    }
    Request::literal(line(random, &words))
}

/// Generates a meta command without a key, or one that does not exist.
fn broken(random: &mut Random, keys: &[Key]) -> Request {
    let commands = ["mg", "ms", "md", "ma", "me", "mx", "mgg", "m", "MG", "mq"];
    let mut words = vec![random.pick(&commands).as_bytes().to_vec()];
    if words[0] != b"ms" && words[0] != b"ma" && random.once_in(2) {
        words.push(random.pick(keys).word.clone());
    }
    Request::literal(line(random, &words))
}
