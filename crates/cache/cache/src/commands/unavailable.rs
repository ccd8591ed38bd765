//! Replies to requests while no server may answer for their partition.

use super::binary::{push_missing, without_quiet};
use super::{Protocol, Replies, meta};
use crate::protocol::binary::{HEADER_BYTES, RequestHeader, Status, opcode, reply_header};
use crate::protocol::meta::{flags_of, parse};
use crate::protocol::words;

/// A reply to a request that was not served.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum UnavailableReply {
    /// The reply that a read finds no item.
    Miss(Vec<u8>),
    /// The reply that another request has failed.
    Error(Vec<u8>),
}

impl UnavailableReply {
    /// The reply to a complete request for one key. An error reply has this text.
    #[must_use]
    pub fn to(protocol: Protocol, request: &[u8], text: &str) -> Self {
        let miss = match protocol {
            Protocol::Text => text_miss(line_of(request)),
            Protocol::Binary => binary_miss(request),
        };
        miss.map_or_else(|| Self::Error(error_reply(protocol, request, text)), Self::Miss)
    }
}

/// An error reply to a request, in its protocol.
#[must_use]
pub fn error_reply(protocol: Protocol, request: &[u8], text: &str) -> Vec<u8> {
    if protocol == Protocol::Text {
        let is_quiet = line_of(request).ends_with(b" noreply");
        return if is_quiet { Vec::new() } else { format!("SERVER_ERROR {text}\r\n").into_bytes() };
    }
    let header = request.first_chunk::<HEADER_BYTES>().and_then(RequestHeader::read);
    header.map_or(Vec::new(), |header| {
        let head = reply_header(&header, Status::TemporaryFailure, 0, 0, 0, text.len());
        [&head[..], text.as_bytes()].concat()
    })
}

fn line_of(request: &[u8]) -> &[u8] {
    let line = memchr::memchr(b'\n', request).map_or(request, |end| &request[..end]);
    line.strip_suffix(b"\r").unwrap_or(line)
}

fn text_miss(line: &[u8]) -> Option<Vec<u8>> {
    let words = words::split(words::text_of(line));
    match *words.first()? {
        b"get" | b"bget" | b"gets" | b"gat" | b"gats" => Some(b"END\r\n".to_vec()),
        b"mg" => {
            let (key, flags) = (words.get(1)?, flags_of(&words, 2));
            let mut out = Replies::new(Vec::new());
            meta::push_missing(key, &parse(key, flags).ok()?, flags, &mut out);
            Some(out.into_buffer())
        }
        _ => None,
    }
}

fn binary_miss(request: &[u8]) -> Option<Vec<u8>> {
    let header = RequestHeader::read(request.first_chunk::<HEADER_BYTES>()?)?;
    let (plain, is_quiet) = without_quiet(header.opcode);
    let key_at = HEADER_BYTES + header.extras_len;
    let key = match plain {
        opcode::GET | opcode::GET_TOUCH => b"",
        opcode::GET_KEY | opcode::GET_KEY_TOUCH => request.get(key_at..key_at + header.key_len)?,
        _ => return None,
    };
    let mut out = Replies::new(Vec::new());
    if !is_quiet {
        push_missing(&header, key, &mut out);
    }
    Some(out.into_buffer())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn miss(reply: &str) -> UnavailableReply {
        UnavailableReply::Miss(reply.into())
    }

    #[test]
    fn text_reads_miss_and_changes_fail() {
        for (request, expected) in [
            ("get key\r\n", miss("END\r\n")),
            ("gets key\n", miss("END\r\n")),
            ("gat 5 key\r\n", miss("END\r\n")),
            ("mg key v\r\n", miss("EN\r\n")),
            ("mg key v q k\r\n", miss("")),
            ("mg a2V5 b v k t O12\r\n", miss("EN ka2V5 b O12\r\n")),
            ("set key 0 0 1\r\nx\r\n", UnavailableReply::Error(b"SERVER_ERROR why\r\n".into())),
            ("set key 0 0 1 noreply\r\nx\r\n", UnavailableReply::Error(Vec::new())),
            ("ms key 1 q\r\nx\r\n", UnavailableReply::Error(b"SERVER_ERROR why\r\n".into())),
            ("md key q\r\n", UnavailableReply::Error(b"SERVER_ERROR why\r\n".into())),
            ("touch key 0\r\n", UnavailableReply::Error(b"SERVER_ERROR why\r\n".into())),
        ] {
            let reply = UnavailableReply::to(Protocol::Text, request.as_bytes(), "why");
            assert_eq!(reply, expected, "{request}");
        }
    }

    #[test]
    fn binary_reads_miss_and_changes_fail() {
        use opcode::*;
        let reply = |code: u8, extras: u8| {
            let mut request = vec![0x80, code, 0, 3, extras, 0, 0, 0, 0, 0, 0, 3 + extras, 1, 2, 3, 4];
            request.extend(vec![0; 8 + usize::from(extras)]);
            request.extend(b"key");
            UnavailableReply::to(Protocol::Binary, &request, "why")
        };
        let end = |reply: UnavailableReply, status: u8, body: &str| {
            let (UnavailableReply::Miss(bytes) | UnavailableReply::Error(bytes)) = reply;
            assert_eq!((bytes[7], &bytes[12..16]), (status, &[1, 2, 3, 4][..]));
            assert_eq!(&bytes[HEADER_BYTES..], body.as_bytes());
        };
        end(reply(GET, 0), 1, "Not found");
        end(reply(GET_KEY, 0), 1, "key");
        end(reply(GET_KEY_TOUCH, 4), 1, "key");
        for quiet in [GET_QUIET, GET_KEY_QUIET] {
            assert_eq!(reply(quiet, 0), miss(""));
        }
        for (change, extras) in [(SET, 8), (SET_QUIET, 8), (DELETE, 0), (TOUCH, 4)] {
            let reply = reply(change, extras);
            assert!(matches!(reply, UnavailableReply::Error(_)));
            end(reply, 0x86, "why");
        }
    }
}
