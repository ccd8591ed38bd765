//! Recognition of requests that can be forwarded together with the request before them.
//!
//! Only simple requests for one key are recognised. Any other request waits until those before it
//! are answered, and is then parsed by its session.

use super::Protocol;
use super::binary::{refused, without_quiet};
use crate::protocol::binary::{HEADER_BYTES, RequestHeader, opcode};
use crate::protocol::meta::META_WORDS_MAX;
use crate::protocol::{number, words};
use crate::store::item::KEY_MAX;

/// A complete request for one key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Peeked<'a> {
    /// Bytes of the request.
    pub len: usize,
    /// The key.
    pub key: &'a [u8],
}

/// The request at the start of the input, if it is a simple one with a value of at most `value_max`
/// bytes.
#[must_use]
pub fn peek(protocol: Protocol, input: &[u8], value_max: usize) -> Option<Peeked<'_>> {
    match protocol {
        Protocol::Text => peek_text(input, value_max),
        Protocol::Binary => peek_binary(input, value_max),
    }
}

fn peek_text(input: &[u8], value_max: usize) -> Option<Peeked<'_>> {
    let newline = memchr::memchr(b'\n', input)?;
    let line = input[..newline].strip_suffix(b"\r").unwrap_or(&input[..newline]);
    let words = words::split(line);
    if words.len() < 2 || words.len() >= words::WORDS_MAX || line.contains(&0) {
        return None;
    }
    // The word that is the key, and the one that is the length of a value.
    let (key, value) = match words[0] {
        b"get" | b"gets" if words.len() == 2 => (1, None),
        b"gat" | b"gats" if words.len() == 3 => (2, None),
        b"delete" | b"incr" | b"decr" | b"touch" | b"mg" | b"md" | b"ma" => (1, None),
        b"set" | b"add" | b"replace" | b"append" | b"prepend" if (5..=6).contains(&words.len()) => {
            (1, Some(4))
        }
        b"cas" if (6..=7).contains(&words.len()) => (1, Some(4)),
        b"ms" => (1, Some(2)),
        _ => return None,
    };
    let is_meta = words[0].len() == 2 && words[0][0] == b'm';
    let flags = if value.is_some() { 3 } else { 2 };
    let has_binary_key = is_meta && words.iter().skip(flags).any(|flag| flag[0] == b'b');
    if words[key].len() > KEY_MAX || has_binary_key || is_meta && words.len() > META_WORDS_MAX {
        return None;
    }
    if value == Some(4) && !has_numbers(&words) {
        return None;
    }
    let mut len = newline + 1;
    if let Some(value) = value {
        let value_len = number::uint32(words.get(value)?)? as usize;
        if value_len > value_max {
            return None;
        }
        len += value_len + 2;
    }
    (input.len() >= len).then(|| Peeked { len, key: words[key] })
}

/// Whether flags, expiry and cas number of a storage command are numbers. Otherwise the command
/// ends with its line, and its value is parsed as other commands.
fn has_numbers(words: &words::Words<'_>) -> bool {
    let has_cas = words[0] != b"cas" || number::uint64(words[5]).is_some();
    number::uint32(words[2]).is_some() && number::int32(words[3]).is_some() && has_cas
}

fn peek_binary(input: &[u8], value_max: usize) -> Option<Peeked<'_>> {
    let header = RequestHeader::read(input.first_chunk::<HEADER_BYTES>()?)?;
    let (plain, _) = without_quiet(header.opcode);
    let is_single = plain <= opcode::DECREMENT
        || matches!(plain, opcode::GET_KEY | opcode::APPEND | opcode::PREPEND | opcode::TOUCH)
        || matches!(plain, opcode::GET_TOUCH | opcode::GET_KEY_TOUCH);
    if !is_single || refused(&header, plain).is_some() {
        return None;
    }
    let start = HEADER_BYTES + header.extras_len;
    if header.body_len.checked_sub(header.key_len + header.extras_len)? > value_max {
        return None;
    }
    let len = HEADER_BYTES + header.body_len;
    let key = input.get(..len)?.get(start..start + header.key_len)?;
    Some(Peeked { len, key })
}

/// Whether a request can be executed twice, because it only reads.
#[must_use]
pub fn is_repeatable(protocol: Protocol, request: &[u8]) -> bool {
    match protocol {
        Protocol::Text => request.starts_with(b"get ") || request.starts_with(b"gets "),
        Protocol::Binary => matches!(
            request.get(1),
            Some(&(opcode::GET | opcode::GET_QUIET | opcode::GET_KEY | opcode::GET_KEY_QUIET))
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(input: &str) -> Option<usize> {
        peek(Protocol::Text, input.as_bytes(), 100).map(|peeked| {
            assert_eq!(peeked.key, b"key", "{input}");
            peeked.len
        })
    }

    #[test]
    fn simple_requests_are_recognised() {
        for request in [
            "get key\r\n",
            "gets  key\n",
            "gat 5 key\r\n",
            "delete key 0\r\n",
            "incr key 1 noreply\r\n",
            "touch key 0\r\n",
            "mg key v O1\r\n",
            "ms key 3 T0\r\nabc\r\n",
            "set key 0 0 3\r\nabc\r\n",
            "cas key 0 0 3 7 noreply\r\nabc\r\n",
        ] {
            assert_eq!(text(request), Some(request.len()), "{request}");
            assert_eq!(text(&request[..request.len() - 1]), None, "{request}");
        }
        for request in [
            "get key key2\r\n",
            "gat key\r\n",
            "mg a2V5 b\r\n",
            "set key 0 0 101\r\n",
            "set key 0 0 -1\r\n",
            "add key noreply 0 2\r\nab\r\n",
            "add key 0 x 2\r\nab\r\n",
            "cas key 0 0 2 -\r\nab\r\n",
            "set key 0 0\r\n",
            "mn\r\n",
            "version\r\n",
            "\r\n",
            "get key\0\r\n",
            "me key\r\n",
        ] {
            assert_eq!(text(request), None, "{request}");
        }
    }

    #[test]
    fn binary_requests_are_recognised() {
        let mut request = vec![0x80, 1, 0, 3, 8, 0, 0, 0, 0, 0, 0, 13];
        request.extend([0; 12 + 8]);
        request.extend(b"keyab");
        let peeked = peek(Protocol::Binary, &request, 2).unwrap();
        assert_eq!((peeked.len, peeked.key), (request.len(), &b"key"[..]));
        assert_eq!(peek(Protocol::Binary, &request, 1), None);
        assert_eq!(peek(Protocol::Binary, &request[..request.len() - 1], 2), None);
        for other in [opcode::STATS, opcode::INCREMENT, opcode::GET_QUIET, opcode::QUIT, 0x7f] {
            request[1] = other;
            assert_eq!(peek(Protocol::Binary, &request, 2), None, "{other:#x}");
        }
    }
}
