//! Fields of `/proc/PID/stat`.

/// Field number of the start time of the process, in clock ticks since the start of the machine.
pub(super) const START: usize = 19;
/// Field numbers of the addresses at which the code begins and ends, and the stack begins.
pub(super) const CODE_AND_STACK: [usize; 3] = [23, 24, 25];
/// Field number of the core on which the thread ran last.
pub(super) const PROCESSOR: usize = 36;

/// Returns a numeric field. Fields are counted after the name, which may contain spaces and
/// parentheses.
pub(super) fn field(text: &[u8], index: usize) -> Option<u64> {
    word(text, index)?.parse().ok()
}

/// Returns a field as text.
fn word(text: &[u8], index: usize) -> Option<&str> {
    let end = text.iter().rposition(|byte| *byte == b')')?;
    let rest = std::str::from_utf8(&text[end + 1..]).ok()?;
    rest.split_ascii_whitespace().nth(index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_after_any_name() {
        let text = b"7 (a ) b (c) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 \
                     21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 5 37";
        assert_eq!(field(text, PROCESSOR), Some(5));
        assert_eq!(word(text, 0), Some("S"));
        assert_eq!(field(b"7 (a", PROCESSOR), None);
        assert_eq!(field(b"7 (a) S 1", PROCESSOR), None);
        let own = std::fs::read("/proc/thread-self/stat").unwrap();
        assert!(field(&own, PROCESSOR).is_some());
    }
}
