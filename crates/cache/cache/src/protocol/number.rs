//! Decimal numbers as the functions `strtol` and `strtoull` read them.
//!
//! White space and a sign may precede the digits. After the digits the word must end, or white
//! space or a zero byte must follow; any further bytes are ignored.

/// Parses a signed number of 32 bits. Greater numbers lose their high bits.
#[must_use]
pub fn int32(word: &[u8]) -> Option<i32> {
    let (is_negative, magnitude) = parse(word)?;
    let number =
        if is_negative { 0i64.checked_sub_unsigned(magnitude)? } else { i64::try_from(magnitude).ok()? };
    Some(low_half(number.cast_unsigned()).cast_signed())
}

/// Parses an unsigned number of 32 bits. Greater numbers lose their high bits.
#[must_use]
pub fn uint32(word: &[u8]) -> Option<u32> {
    uint64(word).map(low_half)
}

/// Parses an unsigned number of 64 bits.
#[must_use]
pub fn uint64(word: &[u8]) -> Option<u64> {
    let (is_negative, magnitude) = parse(word)?;
    let number = if is_negative { magnitude.wrapping_neg() } else { magnitude };
    // The minus sign is only checked if the number is at least 2^63.
    if number.cast_signed() < 0 && word.contains(&b'-') { None } else { Some(number) }
}

fn low_half(number: u64) -> u32 {
    u32::try_from(number & u64::from(u32::MAX)).expect("32 bits")
}

fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t'..=b'\r')
}

fn parse(word: &[u8]) -> Option<(bool, u64)> {
    let start = word.iter().position(|byte| !is_space(*byte))?;
    let mut rest = &word[start..];
    let is_negative = rest[0] == b'-';
    if matches!(rest[0], b'-' | b'+') {
        rest = &rest[1..];
    }
    let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
    if digits == 0 || rest.get(digits).is_some_and(|byte| !is_space(*byte) && *byte != 0) {
        return None;
    }
    let mut magnitude = 0u64;
    for digit in &rest[..digits] {
        magnitude = magnitude.checked_mul(10)?.checked_add(u64::from(digit - b'0'))?;
    }
    Some((is_negative, magnitude))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_strtol() {
        let cases: [(&str, Option<i32>, Option<u64>); 15] = [
            ("0", Some(0), Some(0)),
            ("+007", Some(7), Some(7)),
            ("-1", Some(-1), None),
            ("-", None, None),
            ("", None, None),
            ("\t5\tx", Some(5), Some(5)),
            ("5x", None, None),
            ("4294967297", Some(1), Some(4_294_967_297)),
            ("2147483648", Some(i32::MIN), Some(2_147_483_648)),
            ("9223372036854775807", Some(-1), Some(i64::MAX.cast_unsigned())),
            ("9223372036854775808", None, Some(1 << 63)),
            ("-9223372036854775808", Some(0), None),
            ("18446744073709551615", None, Some(u64::MAX)),
            ("18446744073709551616", None, None),
            ("-18446744073709551615", None, Some(1)),
        ];
        for (word, signed, unsigned) in cases {
            assert_eq!(int32(word.as_bytes()), signed, "{word}");
            assert_eq!(uint64(word.as_bytes()), unsigned, "{word}");
        }
        assert_eq!(uint32(b"4294967297"), Some(1));
    }
}
