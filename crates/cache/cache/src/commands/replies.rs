//! The replies of a connection in one turn.

use smallvec::SmallVec;

/// Values of at least this length in bytes are sent from the log; shorter ones are copied.
const COPIED_MAX: usize = 4096;
/// Most values that are sent from the log in one turn.
const VALUES_MAX: usize = 500;

/// Bytes to send: a buffer, and values in the log, which stay valid during the turn.
#[derive(Debug)]
pub struct Replies<'p> {
    bytes: Vec<u8>,
    /// Values, each with the offset in `bytes` before which it is sent.
    values: Vec<(usize, &'p [u8])>,
    values_len: usize,
}

/// A position in the replies.
#[derive(Clone, Copy, Debug)]
pub struct Mark {
    bytes: usize,
    values: usize,
    values_len: usize,
}

impl<'p> Replies<'p> {
    /// Empty replies in a buffer.
    #[must_use]
    pub fn new(mut buffer: Vec<u8>) -> Self {
        buffer.clear();
        Self { bytes: buffer, values: Vec::new(), values_len: 0 }
    }

    /// The number of bytes to send.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len() + self.values_len
    }

    /// Whether there are no bytes to send.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds bytes.
    #[inline]
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Adds a number.
    #[inline]
    pub fn push_number(&mut self, number: impl itoa::Integer) {
        self.bytes.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
    }

    /// Adds a line.
    #[inline]
    pub fn push_line(&mut self, text: &str) {
        self.push(text.as_bytes());
        self.push(b"\r\n");
    }

    /// Adds a value, which is not copied if it is long.
    #[inline]
    pub fn push_value(&mut self, value: &'p [u8]) {
        if value.len() < COPIED_MAX || self.values.len() >= VALUES_MAX {
            self.push(value);
        } else {
            self.values.push((self.bytes.len(), value));
            self.values_len += value.len();
        }
    }

    /// The buffer, to append to.
    #[inline]
    pub fn buffer(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    /// The current end.
    #[inline]
    #[must_use]
    pub fn mark(&self) -> Mark {
        Mark { bytes: self.bytes.len(), values: self.values.len(), values_len: self.values_len }
    }

    /// Removes the bytes and values that were added after a mark.
    pub fn truncate(&mut self, mark: Mark) {
        self.bytes.truncate(mark.bytes);
        self.values.truncate(mark.values);
        self.values_len = mark.values_len;
    }

    /// The parts to send, in order.
    #[must_use]
    pub fn parts(&self) -> SmallVec<[&[u8]; 8]> {
        let mut parts: SmallVec<[&[u8]; 8]> = SmallVec::new();
        let mut sent = 0;
        for (before, value) in &self.values {
            parts.push(&self.bytes[sent..*before]);
            parts.push(*value);
            sent = *before;
        }
        parts.push(&self.bytes[sent..]);
        parts.retain(|part| !part.is_empty());
        parts
    }

    /// Overwrites bytes that were added after a mark.
    pub fn overwrite(&mut self, mark: Mark, bytes: &[u8]) {
        self.bytes[mark.bytes..mark.bytes + bytes.len()].copy_from_slice(bytes);
    }

    /// The bytes that were added since a mark.
    #[must_use]
    pub fn bytes_since(&self, mark: Mark) -> Vec<u8> {
        self.parts().concat().split_off(mark.bytes + mark.values_len)
    }

    /// The number of bytes that were added since a mark.
    #[must_use]
    pub fn len_since(&self, mark: Mark) -> usize {
        self.len() - mark.bytes - mark.values_len
    }

    /// The buffer, for other replies.
    #[must_use]
    pub fn into_buffer(self) -> Vec<u8> {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_values_are_sent_in_their_place() {
        let value = vec![b'v'; COPIED_MAX];
        let mut replies = Replies::new(Vec::new());
        replies.push(b"first ");
        replies.push_value(b"short ");
        replies.push_value(&value);
        replies.push_number(7);
        let mark = replies.mark();
        replies.push_value(&value);
        replies.truncate(mark);
        let all = [b"first short ", &value[..], b"7"].concat();
        assert_eq!((replies.len(), replies.parts().concat()), (all.len(), all.clone()));
        assert_eq!(replies.len_since(mark), 0);
        replies.overwrite(Mark { bytes: 0, values: 0, values_len: 0 }, b"F");
        assert!(replies.parts().concat().starts_with(b"First short "));
    }
}
