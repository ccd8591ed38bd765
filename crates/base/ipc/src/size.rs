//! Memory sizes as text.

use std::fmt;

/// Suffixes, and the power of two that each stands for.
const UNITS: [(&str, u32); 5] = [("K", 10), ("M", 20), ("G", 30), ("T", 40), ("B", 0)];
/// Largest size that is accepted.
const SIZE_BYTES_MAX: u64 = 1 << 60;

/// Why a text is not a memory size. Each variant has the text.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SizeError {
    /// The text has another form.
    Malformed(String),
    /// The size is 0.
    Zero(String),
    /// The size is above 2^60 bytes.
    TooLarge(String),
}

impl fmt::Display for SizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Malformed(text) => write!(
                f,
                "\"{text}\" is not a size: write bytes, or a number with K, M, G or T, such as 512M"
            ),
            Self::Zero(text) => write!(f, "\"{text}\" is zero: write a size of at least one byte"),
            Self::TooLarge(text) => write!(f, "\"{text}\" is too large: the maximum is 2^60 bytes"),
        }
    }
}

impl std::error::Error for SizeError {}

/// Parses a size in bytes, such as `4096`, `512M`, `1g`, `4KiB` or `2.5G`.
///
/// Units are powers of 1024, in either case, with or without `B`, `i` or `iB` at the end.
///
/// # Errors
/// If the text is not a size, or the size is 0 or above 2^60.
pub fn parse(text: &str) -> Result<u64, SizeError> {
    let malformed = || SizeError::Malformed(text.to_owned());
    let too_large = || SizeError::TooLarge(text.to_owned());
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = shift_of(unit).ok_or_else(malformed)?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() || number.ends_with('.') || fraction.len() > 9 {
        return Err(malformed());
    }
    let whole: u128 = whole.parse().map_err(|_| too_large())?;
    let scale = 10_u128.pow(u32::try_from(fraction.len()).unwrap_or(0));
    let fraction: u128 = if fraction.is_empty() { 0 } else { fraction.parse().map_err(|_| malformed())? };
    let scaled =
        whole.checked_mul(scale).and_then(|whole| whole.checked_add(fraction)).ok_or_else(too_large)?;
    let bytes = scaled.checked_mul(1 << shift).ok_or_else(too_large)? / scale;
    match u64::try_from(bytes).ok().filter(|bytes| *bytes <= SIZE_BYTES_MAX) {
        Some(0) => Err(SizeError::Zero(text.to_owned())),
        Some(bytes) => Ok(bytes),
        None => Err(too_large()),
    }
}

/// Parses a size as [`parse`] does, or `0`.
///
/// # Errors
/// If the text is neither `0` nor a size.
pub fn parse_or_zero(text: &str) -> Result<u64, SizeError> {
    if text == "0" { Ok(0) } else { parse(text) }
}

/// Parses a size as [`parse`] does, or `auto`, which is [`LIMIT_MAX_AUTO`](crate::LIMIT_MAX_AUTO).
///
/// # Errors
/// If the text is neither.
pub fn parse_or_auto(text: &str) -> Result<u64, SizeError> {
    if text == "auto" { Ok(crate::LIMIT_MAX_AUTO) } else { parse(text) }
}

/// The power of two that a unit stands for; `None` for an unknown unit.
fn shift_of(unit: &str) -> Option<u32> {
    let unit = unit.to_ascii_uppercase();
    if unit.is_empty() {
        return Some(0);
    }
    let (_, shift) = UNITS.iter().find(|(prefix, _)| unit.starts_with(prefix))?;
    let rest = &unit[1..];
    let is_known = rest.is_empty() || (*shift != 0 && ["B", "I", "IB"].contains(&rest));
    is_known.then_some(*shift)
}

/// Displays a number of bytes in the largest unit that fits, to one decimal place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ByteSize(pub u64);

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0;
        let unit = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)]
            .into_iter()
            .find(|(_, shift)| bytes >> shift > 0);
        let Some((name, shift)) = unit else { return write!(f, "{bytes} B") };
        let tenths = (u128::from(bytes) * 10) >> shift;
        match tenths % 10 {
            0 => write!(f, "{} {name}", tenths / 10),
            tenth => write!(f, "{}.{tenth} {name}", tenths / 10),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sizes_are_parsed() {
        let known = [
            ("1", 1),
            ("4096", 4096),
            ("1B", 1),
            ("4096K", 4 << 20),
            ("512M", 512 << 20),
            ("512m", 512 << 20),
            ("1G", 1 << 30),
            ("1gb", 1 << 30),
            ("1GiB", 1 << 30),
            ("1kib", 1024),
            ("64Mi", 64 << 20),
            ("2T", 2 << 40),
            ("1.5G", 3 << 29),
            ("0.25m", 256 << 10),
            ("1048576T", 1 << 60),
        ];
        for (text, bytes) in known {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn invalid_sizes_are_refused_with_a_reason() {
        for text in [
            "",
            "G",
            "one",
            "-1G",
            "1 G",
            "1X",
            "1GG",
            "1iB",
            "1i",
            "1BB",
            ".5G",
            "1.G",
            "1..5G",
            "1.0000000000G",
            "½G",
        ] {
            assert_eq!(parse(text), Err(SizeError::Malformed(text.into())));
        }
        for text in [
            "1048577T",
            "99999999999999999999999999999999999999999G",
            "340282366920938463463374607431768211455T",
        ] {
            assert_eq!(parse(text), Err(SizeError::TooLarge(text.into())));
        }
        for text in ["0", "0G", "0.0K"] {
            assert_eq!(parse(text), Err(SizeError::Zero(text.into())));
        }
    }

    #[test]
    fn sizes_are_displayed_in_the_largest_unit() {
        let known = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1536 << 20, "1.5 GiB"),
            (1 << 40, "1 TiB"),
            (5_000_000, "4.7 MiB"),
        ];
        for (bytes, text) in known {
            assert_eq!(ByteSize(bytes).to_string(), text);
        }
        assert_eq!(ByteSize(u64::MAX).to_string(), "16777215.9 TiB");
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "\\PC{0,40}") {
            let _refused = parse(&text);
        }

        #[test]
        fn whole_sizes_are_parsed_as_displayed(
            number in 1_u64..1024,
            shift in prop::sample::select(vec![0, 10, 20, 30, 40]),
        ) {
            let bytes = number << shift;
            prop_assert_eq!(parse(&ByteSize(bytes).to_string().replace(' ', "")), Ok(bytes));
        }
    }
}
