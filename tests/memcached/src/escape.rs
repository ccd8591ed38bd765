//! Conversion of bytes to text, for messages.

/// Greatest length of bytes that are printed completely.
const WHOLE_MAX: usize = 400;
/// Bytes that are printed at each end of longer ones.
const END_BYTES: usize = 120;

/// Escapes bytes, and omits the middle of long ones.
#[must_use]
pub fn escape(bytes: &[u8]) -> String {
    if bytes.len() <= WHOLE_MAX {
        return bytes.escape_ascii().to_string();
    }
    let (start, rest) = bytes.split_at(END_BYTES);
    let (middle, end) = rest.split_at(rest.len() - END_BYTES);
    format!("{}[... {} bytes ...]{}", start.escape_ascii(), middle.len(), end.escape_ascii())
}
