//! Splits the bytes that a server sent into replies.

/// A line of a server, with the data that follow it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reply<'a> {
    /// The line without its end.
    pub line: &'a [u8],
    /// The data of a value without its end.
    pub data: Option<&'a [u8]>,
    /// Whether the reply is whole, and its data end with `\r\n`.
    pub is_complete: bool,
}

/// Splits bytes into replies: lines, and values of the lengths that their lines announce.
#[must_use]
pub fn split(mut bytes: &[u8]) -> Vec<Reply<'_>> {
    let mut replies = Vec::new();
    while !bytes.is_empty() {
        let Some(end) = find_line_end(bytes) else {
            replies.push(Reply { line: bytes, data: None, is_complete: false });
            break;
        };
        let line = &bytes[..end];
        bytes = &bytes[end + 2..];
        let Some(length) = announced_length(line) else {
            replies.push(Reply { line, data: None, is_complete: true });
            continue;
        };
        let available = length.min(bytes.len());
        let (data, rest) = bytes.split_at(available);
        let is_complete = available == length && rest.starts_with(b"\r\n");
        bytes = if is_complete { &rest[2..] } else { rest };
        replies.push(Reply { line, data: Some(data), is_complete });
    }
    replies
}

fn find_line_end(bytes: &[u8]) -> Option<usize> {
    bytes.windows(2).position(|pair| pair == b"\r\n")
}

/// The length of the data after `VALUE key flags length [cas]` or `VA length flags`.
fn announced_length(line: &[u8]) -> Option<usize> {
    let words: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
    let length = match words.as_slice() {
        [b"VALUE", _, _, length] | [b"VALUE", _, _, length, _] | [b"VA", length, ..] => *length,
        _ => return None,
    };
    std::str::from_utf8(length).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(line: &[u8]) -> Reply<'_> {
        Reply { line, data: None, is_complete: true }
    }

    fn value<'a>(line: &'a [u8], data: &'a [u8]) -> Reply<'a> {
        Reply { line, data: Some(data), is_complete: true }
    }

    #[test]
    fn data_may_contain_line_ends_and_replies() {
        let bytes = b"VALUE k 0 9\r\nEND\r\nEN\r\n\r\nEND\r\nVA 2 c5 kx\r\n\r\n\r\nHD\r\n";
        let value = [value(b"VALUE k 0 9", b"END\r\nEN\r\n"), line(b"END"), value(b"VA 2 c5 kx", b"\r\n")];
        assert_eq!(split(bytes)[..3], value);
        assert_eq!(split(bytes)[3..], [line(b"HD")]);
    }

    #[test]
    fn a_line_may_end_in_a_second_carriage_return() {
        assert_eq!(split(b"HD kx\r\r\nHD\r\n"), [line(b"HD kx\r"), line(b"HD")]);
    }

    #[test]
    fn a_truncated_reply_is_incomplete() {
        let incomplete = |reply| Reply { is_complete: false, ..reply };
        assert_eq!(split(b"EN"), [incomplete(line(b"EN"))]);
        assert_eq!(split(b"VA 5\r\nab"), [incomplete(value(b"VA 5", b"ab"))]);
        assert_eq!(split(b"VA 2\r\nabcd\r\n"), [incomplete(value(b"VA 2", b"ab")), line(b"cd")]);
    }
}
