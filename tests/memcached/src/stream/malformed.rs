//! Requests with damaged bytes.
//!
//! A damaged byte may turn a command into another one. So values and keys are short, there are no
//! numbers that a command could change in place, and neither `flush_all` nor lifetimes. All numbers
//! are small, even if damage splits or joins them: the server must not wait for a long value.

use crate::random::Random;
use crate::script::{Batch, Key, Piece, Request};

/// Characters of keys and values. The flags and modes of later versions are left out, because
/// damage can turn characters into words.
pub const TEXT: &[u8] = b"abdfghjklmopqrtuvwyzABDFGHIJKLOPQRTUVWXYZ_.:-";
/// Greatest length of a line in bytes; a longer one is cut.
const RUN_MAX: usize = 1400;
/// Most damages to one batch.
const DAMAGE_MAX: usize = 3;
const LIFETIMES: [&str; 3] = ["0", "0", EXPIRED];
/// A lifetime that has expired, and whose damaged forms are not short lifetimes.
const EXPIRED: &str = "-2000000000";
/// Most digits of any other number.
const DIGITS_MAX: usize = 3;
/// A cas value that no item of a short test has. Each partition counts its own values from 1, and
/// the partition of a key depends on the secret of the server.
const CAS_OF_NO_ITEM: &str = "999";
/// Greatest length of a value in bytes: words that damage has joined are not too long for a key.
const VALUE_BYTES_MAX: usize = 60;

/// Generates a request, which is damaged later.
pub fn request(random: &mut Random, keys: &[Key]) -> Request {
    let key = String::from_utf8(random.pick(keys).word.clone()).expect("these keys are text");
    let length = random.below(VALUE_BYTES_MAX);
    let value = String::from_utf8(random.text(length, TEXT)).expect("the bytes are text");
    let lifetime = *random.pick(&LIFETIMES);
    let noreply = if random.once_in(6) { " noreply" } else { "" };
    let quiet = if random.once_in(6) { " q" } else { "" };
    let text = match random.below(12) {
        0..3 => {
            let command = *random.pick(&["set", "add", "replace", "append", "prepend"]);
            format!("{command} {key} 0 {lifetime} {length}{noreply}\r\n{value}\r\n")
        }
        3 => format!("cas {key} 0 {lifetime} {length} {CAS_OF_NO_ITEM}{noreply}\r\n{value}\r\n"),
        4..6 => format!("ms {key} {length} T{lifetime} k Oa c{quiet}\r\n{value}\r\n"),
        6 => format!("ms {key} {length} F5 k{quiet}\r\n{value}\r\n"),
        7 => format!("gets {key} k0 k1\r\n"),
        8 => format!("mg {key} v k t f O{quiet}\r\n"),
        9 => format!("delete {key}{noreply}\r\n"),
        10 => format!("md {key} k{quiet}\r\n"),
        _ => format!("touch {key} {lifetime}{noreply}\r\nmn\r\n"),
    };
    Request::literal(text)
}

/// Damages some bytes of a batch.
pub fn damage(random: &mut Random, batch: &mut Batch) {
    for _ in 0..random.between(1, DAMAGE_MAX) {
        let at = random.below(batch.requests.len());
        if let Some(Piece::Bytes(bytes)) = batch.requests[at].pieces.first_mut() {
            let mut damaged = bytes.clone();
            damage_bytes(random, &mut damaged);
            if !has_long_number(&damaged) {
                *bytes = damaged;
            }
        }
    }
    let mut run = 0;
    for request in &mut batch.requests {
        for piece in &mut request.pieces {
            let Piece::Bytes(bytes) = piece else { continue };
            for byte in bytes {
                run = if *byte == b'\n' { 0 } else { run + 1 };
                if run == RUN_MAX {
                    *byte = b'\n';
                    run = 0;
                }
            }
        }
    }
}

/// Whether there is a number that could be a great length.
fn has_long_number(bytes: &[u8]) -> bool {
    let words = bytes.split(|byte| !byte.is_ascii_digit() && *byte != b'-');
    words.into_iter().any(|word| word.len() > DIGITS_MAX && word != EXPIRED.as_bytes())
}

fn damage_bytes(random: &mut Random, bytes: &mut Vec<u8>) {
    if bytes.is_empty() {
        return;
    }
    let at = random.below(bytes.len());
    let special = *random.pick(b"\r\n \t\0-+:\x7f\xff");
    match random.below(8) {
        0 => {
            bytes.remove(at);
        }
        1 => bytes.insert(at, special),
        2 => bytes[at] = special,
        3 => bytes.truncate(at),
        4 => {
            let other = random.below(bytes.len());
            if !bytes[at].is_ascii_digit() && !bytes[other].is_ascii_digit() {
                bytes.swap(at, other);
            }
        }
        5 => {
            let end = (at + random.between(1, 8)).min(bytes.len());
            bytes.drain(at..end);
        }
        // Line ends lose their first byte.
        6 => bytes.retain(|byte| *byte != b'\r'),
        _ => {
            if let Some(found) = bytes.iter().position(|byte| *byte == b'\n') {
                bytes.remove(found);
            }
        }
    }
}
