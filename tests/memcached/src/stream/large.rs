//! Requests with values around the sizes at which a server behaves differently: the read buffer,
//! the largest chunk, the largest item.

use crate::random::Random;
use crate::script::{Key, Request};

/// Sizes in bytes of memcached's read buffer, its largest chunk, and its largest item.
const EDGES: [usize; 3] = [16 << 10, 512 << 10, 1 << 20];
/// Greatest length in bytes of the headers of an item and its parts.
const HEADERS_MAX: usize = 400;
/// Greatest length of a value in bytes.
const LENGTH_MAX: usize = 3 << 20;

/// Generates a request that stores or reads a large value.
pub fn request(random: &mut Random, keys: &[Key]) -> Request {
    let key = &keys[random.below(3)].word;
    let key = if random.once_in(8) { &keys[keys.len() - 1].word } else { key };
    let key = key.as_slice();
    match random.below(10) {
        0..3 => {
            let commands: [&[u8]; 5] = [b"set ", b"add ", b"replace ", b"append ", b"prepend "];
            let command = if random.once_in(2) { commands[0] } else { *random.pick(&commands) };
            let flags: &[u8] = if random.once_in(2) { b" 0 0 " } else { b" 5 1000 " };
            let noreply: &[u8] = if random.once_in(5) { b" noreply" } else { b"" };
            let value = value(random);
            let length = value.len().to_string().into_bytes();
            let line = [command, key, flags, &length, noreply, b"\r\n"].concat();
            Request::literal([line, value, end(random)].concat())
        }
        3..6 => {
            let modes: [&[u8]; 8] = [b"", b"", b" MA", b" MP", b" ME", b" MR", b" q", b" F5 c k O7"];
            let mode = *random.pick(&modes);
            let value = value(random);
            let length = value.len().to_string().into_bytes();
            let line = [b"ms ", key, b" ", &length, mode, b"\r\n"].concat();
            Request::literal([line, value, end(random)].concat())
        }
        6 => Request::literal([b"get ", key, b" k0 k1 k2\r\n"].concat()),
        7 => Request::literal([b"mg ", key, b" v s f\r\n"].concat()),
        8 => Request::literal([b"mg ", key, b" v\r\nget ", key, b"\r\nmg ", key, b" s v q\r\n"].concat()),
        _ => Request::literal([b"delete ", key, b"\r\n"].concat()),
    }
}

fn value(random: &mut Random) -> Vec<u8> {
    let edge = *random.pick(&EDGES);
    let length = match random.below(8) {
        0 => edge + random.below(64) - 32,
        1 => EDGES[2] - random.below(HEADERS_MAX),
        2 => edge - random.below(HEADERS_MAX),
        3 => edge / 2 + random.below(HEADERS_MAX),
        4 => random.below(LENGTH_MAX),
        5 => random.below(20_000),
        6 => LENGTH_MAX,
        _ => random.below(600_000),
    };
    random.bytes(length)
}

/// Generates the end of a value, which is sometimes wrong.
fn end(random: &mut Random) -> Vec<u8> {
    if random.once_in(10) { b"\nX\r\n".to_vec() } else { b"\r\n".to_vec() }
}
