//! Replies of memcached's text protocol.

/// Longest line of a reply.
const LINE_BYTES_MAX: usize = 512;
/// Longest value.
const VALUE_BYTES_MAX: usize = 1 << 20;
const LINE_END: &[u8] = b"\r\n";

/// A reply to a request for one key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reply<'a> {
    /// A set succeeded.
    Stored,
    /// A get found no item.
    Missing,
    /// A get found an item.
    Value { key: &'a [u8], value: &'a [u8] },
    /// The server cannot store the item, for example for lack of memory.
    Refused,
}

/// Parses the first reply in `bytes`. Returns it with its length in bytes, or `None` if it is not
/// complete.
///
/// # Errors
/// A message with the first line, if that is not the start of a known reply.
pub fn parse(bytes: &[u8]) -> Result<Option<(Reply<'_>, usize)>, String> {
    let Some(line_bytes) = line_bytes(bytes)? else { return Ok(None) };
    let line = &bytes[..line_bytes];
    let after = line_bytes + LINE_END.len();
    match line {
        b"STORED" => return Ok(Some((Reply::Stored, after))),
        b"END" => return Ok(Some((Reply::Missing, after))),
        _ if line.starts_with(b"SERVER_ERROR ") => return Ok(Some((Reply::Refused, after))),
        _ => {}
    }
    let (key, length) = parse_value_line(line).ok_or_else(|| show(line))?;
    let end = after + length;
    let total = end + LINE_END.len() + b"END\r\n".len();
    if bytes.len() < total {
        return Ok(None);
    }
    if &bytes[end..total] != b"\r\nEND\r\n" {
        return Err(show(&bytes[end..total]));
    }
    Ok(Some((Reply::Value { key, value: &bytes[after..end] }, total)))
}

/// Length of the first line without its end; `None` if there is no end yet.
fn line_bytes(bytes: &[u8]) -> Result<Option<usize>, String> {
    let part = &bytes[..bytes.len().min(LINE_BYTES_MAX)];
    match part.iter().position(|byte| *byte == b'\r') {
        Some(end) if part[end..].starts_with(LINE_END) => Ok(Some(end)),
        Some(end) if end + 1 == bytes.len() => Ok(None),
        None if part.len() < LINE_BYTES_MAX => Ok(None),
        _ => Err(show(part)),
    }
}

/// Key and length of a line `VALUE KEY FLAGS BYTES`.
fn parse_value_line(line: &[u8]) -> Option<(&[u8], usize)> {
    let mut words = line.strip_prefix(b"VALUE ")?.split(|byte| *byte == b' ');
    let (key, flags, length) = (words.next()?, words.next()?, words.next()?);
    if words.next().is_some() || flags != b"0" {
        return None;
    }
    let length: usize = std::str::from_utf8(length).ok()?.parse().ok()?;
    (length <= VALUE_BYTES_MAX).then_some((key, length))
}

fn show(bytes: &[u8]) -> String {
    let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(LINE_BYTES_MAX)]);
    format!("an unexpected reply: {shown:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reply_is_found_with_its_length() {
        assert_eq!(parse(b"STORED\r\nEND\r\n"), Ok(Some((Reply::Stored, 8))));
        assert_eq!(parse(b"END\r\n"), Ok(Some((Reply::Missing, 5))));
        assert_eq!(parse(b"SERVER_ERROR out of memory\r\n"), Ok(Some((Reply::Refused, 28))));
        let text = b"VALUE some 0 4\r\n\r\nEN\r\nEND\r\nrest";
        let value = Reply::Value { key: b"some", value: b"\r\nEN" };
        assert_eq!(parse(text), Ok(Some((value, 27))));
    }

    #[test]
    fn a_part_of_a_reply_is_none() {
        let text = b"VALUE some 0 4\r\nabcd\r\nEND\r\n";
        for length in 0..text.len() {
            assert_eq!(parse(&text[..length]), Ok(None), "{length}");
        }
        assert!(parse(text).unwrap().is_some());
    }

    #[test]
    fn other_text_is_refused() {
        for text in [
            "ERROR\r\n",
            "STORED\rx",
            "NOT_STORED\r\n",
            "VALUE some 1 4\r\nabcd\r\nEND\r\n",
            "VALUE some 0 4 7\r\nabcd\r\nEND\r\n",
            "VALUE some 0 3\r\nabcd\r\nEND\r\n",
            "VALUE some 0 99999999999\r\n",
            &"x".repeat(LINE_BYTES_MAX),
        ] {
            assert!(parse(text.as_bytes()).unwrap_err().starts_with("an unexpected reply"), "{text:?}");
        }
    }
}
