//! Bytes as text, for messages.

/// Length up to which bytes are printed completely.
const WHOLE_MAX: usize = 400;
/// Printed bytes at the start and the end of longer ones.
const ENDS: usize = 120;

/// Escapes bytes, and leaves out the middle of long ones.
#[must_use]
pub fn escape(bytes: &[u8]) -> String {
    if bytes.len() <= WHOLE_MAX {
        return bytes.escape_ascii().to_string();
    }
    let (start, rest) = bytes.split_at(ENDS);
    let (middle, end) = rest.split_at(rest.len() - ENDS);
    format!("{}[... {} bytes ...]{}", start.escape_ascii(), middle.len(), end.escape_ascii())
}
