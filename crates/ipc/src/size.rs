//! Sizes of memory, as people write them.

use std::fmt;

const UNITS: [(&str, u32); 5] = [("K", 10), ("M", 20), ("G", 30), ("T", 40), ("B", 0)];

/// Read `4096`, `512M`, `1g`, `4KiB`, `2.5G`…: powers of 1024, in either case, with or without `B` or `iB` at the end.
///
/// # Errors
/// A sentence on what is wrong with it.
pub fn parse(text: &str) -> Result<u64, String> {
    let wrong =
        || format!("\"{text}\" is not a size: write bytes, or a number with K, M, G or T, such as 512M");
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = shift_of(unit).ok_or_else(wrong)?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() || number.ends_with('.') || fraction.len() > 9 {
        return Err(wrong());
    }
    let too_large = || format!("\"{text}\" is more than any machine has");
    let whole: u128 = whole.parse().map_err(|_| too_large())?;
    let scale = 10_u128.pow(u32::try_from(fraction.len()).unwrap_or(0));
    let fraction: u128 = if fraction.is_empty() { 0 } else { fraction.parse().map_err(|_| wrong())? };
    let scaled =
        whole.checked_mul(scale).and_then(|whole| whole.checked_add(fraction)).ok_or_else(too_large)?;
    let bytes = scaled.checked_mul(1 << shift).ok_or_else(too_large)? / scale;
    match u64::try_from(bytes).ok().filter(|bytes| *bytes <= 1 << 60) {
        Some(0) => Err(format!("\"{text}\" is no memory at all")),
        Some(bytes) => Ok(bytes),
        None => Err(too_large()),
    }
}

/// The same, or 0.
///
/// # Errors
/// As [`parse`].
pub fn parse_or_zero(text: &str) -> Result<u64, String> {
    if text == "0" { Ok(0) } else { parse(text) }
}

fn shift_of(unit: &str) -> Option<u32> {
    let unit = unit.to_ascii_uppercase();
    if unit.is_empty() {
        return Some(0);
    }
    let (_, shift) = UNITS.iter().find(|(letter, _)| unit.starts_with(letter))?;
    let rest = &unit[1..];
    let is_known = rest.is_empty() || (*shift != 0 && (rest == "B" || rest == "IB"));
    is_known.then_some(*shift)
}

/// Shows a number of bytes as people read it: exact where a unit fits, else to a tenth.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Size(pub u64);

impl fmt::Display for Size {
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
    fn sizes_as_people_write_them() {
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
    fn what_is_no_size_is_refused_with_a_reason() {
        for text in [
            "",
            "G",
            "one",
            "-1G",
            "1 G",
            "1X",
            "1GG",
            "1iB",
            "1BB",
            ".5G",
            "1.G",
            "1..5G",
            "1.0000000000G",
            "½G",
        ] {
            assert!(parse(text).unwrap_err().contains("is not a size"), "{text}");
        }
        for text in [
            "1048577T",
            "99999999999999999999999999999999999999999G",
            "340282366920938463463374607431768211455T",
        ] {
            assert!(parse(text).unwrap_err().contains("more than any machine"), "{text}");
        }
        for text in ["0", "0G", "0.0K"] {
            assert!(parse(text).unwrap_err().contains("no memory"), "{text}");
        }
    }

    #[test]
    fn sizes_are_shown_as_people_read_them() {
        let known = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1536 << 20, "1.5 GiB"),
            (1 << 40, "1 TiB"),
            (5_000_000, "4.7 MiB"),
        ];
        for (bytes, text) in known {
            assert_eq!(Size(bytes).to_string(), text);
        }
        assert_eq!(Size(u64::MAX).to_string(), "16777215.9 TiB");
    }

    proptest! {
        #[test]
        fn nothing_that_is_typed_panics(text in "\\PC{0,40}") {
            let _refused = parse(&text);
        }

        #[test]
        fn whole_sizes_shown_are_read_back(number in 1_u64..1024, shift in prop::sample::select(vec![0, 10, 20, 30, 40])) {
            let bytes = number << shift;
            prop_assert_eq!(parse(&Size(bytes).to_string().replace(' ', "")), Ok(bytes));
        }
    }
}
