//! The names and types of statistics.

use std::collections::BTreeMap;

use crate::connection::Connection;

/// The kind of text of a statistic.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A whole number.
    Whole,
    /// A number with a fraction.
    Fraction,
    /// Any other text.
    Text,
}

impl Kind {
    fn of(text: &str) -> Self {
        if text.parse::<i128>().is_ok() {
            Self::Whole
        } else if text.contains('.') && text.parse::<f64>().is_ok() {
            Self::Fraction
        } else {
            Self::Text
        }
    }
}

/// Sends a `stats` command, and returns the names and kinds of its statistics.
///
/// # Panics
/// If the reply is not `STAT name value` on each line, and `END` on the last.
#[must_use]
pub fn stats(connection: &mut Connection, command: &str) -> BTreeMap<String, Kind> {
    values(connection, command).into_iter().map(|(name, value)| (name, Kind::of(&value))).collect()
}

/// Sends a `stats` command, and returns the statistics.
///
/// # Panics
/// If the reply is not `STAT name value` on each line, and `END` on the last.
#[must_use]
pub fn values(connection: &mut Connection, command: &str) -> BTreeMap<String, String> {
    let bytes = connection.request(format!("{command}\r\n"));
    let text = String::from_utf8(bytes).expect("statistics are text");
    let lines = text.strip_suffix("END\r\n").unwrap_or_else(|| panic!("{command}: no END in {text:?}"));
    lines
        .split_terminator("\r\n")
        .map(|line| {
            let pair = line.strip_prefix("STAT ").and_then(|pair| pair.split_once(' '));
            let (name, value) = pair.unwrap_or_else(|| panic!("{command}: not a statistic: {line:?}"));
            (name.to_owned(), value.to_owned())
        })
        .collect()
}
