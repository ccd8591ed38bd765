//! Keys in base64, as the meta commands have them (RFC 4648, section 4).
//!
//! Encoding is done by the crate `base64`. Decoding is as lenient as memcached: bytes outside the
//! alphabet are skipped, padding may be anywhere in a group of four, and groups after the first
//! with padding are ignored.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use smallvec::SmallVec;

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
/// The value of a byte outside the alphabet.
const OUTSIDE: u8 = 0xFF;

/// The value of each byte; padding has 0.
static VALUES: [u8; 256] = {
    let mut values = [OUTSIDE; 256];
    let mut at = 0;
    while at < ALPHABET.len() {
        #[expect(clippy::cast_possible_truncation, reason = "below 64")]
        let value = at as u8;
        values[ALPHABET[at] as usize] = value;
        at += 1;
    }
    values[b'=' as usize] = 0;
    values
};

/// A decoded key.
pub type DecodedKey = SmallVec<[u8; 256]>;

/// Decodes a key. `None` if it is not valid or empty.
#[must_use]
pub fn decode(encoded: &[u8]) -> Option<DecodedKey> {
    let is_inside = |byte: &&u8| VALUES[usize::from(**byte)] != OUTSIDE;
    let count = encoded.iter().filter(is_inside).count();
    if count == 0 || !count.is_multiple_of(4) {
        return None;
    }
    let mut key = DecodedKey::new();
    let mut group = SmallVec::<[u8; 4]>::new();
    for byte in encoded.iter().filter(is_inside) {
        group.push(*byte);
        let [a, b, c, d] = group[..] else { continue };
        group.clear();
        let [va, vb, vc, vd] = [a, b, c, d].map(|byte| VALUES[usize::from(byte)]);
        key.extend([va << 2 | vb >> 4, vb << 4 | vc >> 2, vc << 6 | vd]);
        match [a, b, c, d].iter().filter(|byte| **byte == b'=').count() {
            0 => {}
            padding @ (1 | 2) => {
                key.truncate(key.len() - padding);
                break;
            }
            _ => return None,
        }
    }
    Some(key)
}

/// Appends a key in base64.
pub fn encode_to(key: &[u8], out: &mut Vec<u8>) {
    let start = out.len();
    let len = base64::encoded_len(key.len(), true).expect("a short key");
    out.resize(start + len, 0);
    STANDARD.encode_slice(key, &mut out[start..]).expect("the length was computed");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn again(encoded: &str) -> Option<String> {
        decode(encoded.as_bytes()).map(|key| {
            let mut out = Vec::new();
            encode_to(&key, &mut out);
            String::from_utf8(out).unwrap()
        })
    }

    #[test]
    fn decoding_is_as_lenient_as_memcached() {
        for (encoded, expected) in [
            ("Zm9vIA==", Some("Zm9vIA==")),
            ("Zm9v!IA==", Some("Zm9vIA==")),
            ("Zg==Zg==", Some("Zg==")),
            ("Zh==", Some("Zg==")),
            ("Z=9v", Some("ZA8=")),
            ("Zm=vZm9v", Some("ZmA=")),
            ("Zm9", None),
            ("Zm9vZ===", None),
            ("====", None),
            ("!!!!", None),
            ("", None),
        ] {
            assert_eq!(again(encoded).as_deref(), expected, "{encoded}");
        }
    }
}
