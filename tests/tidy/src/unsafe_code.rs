//! Finds unsafe code, and reads the list of unsafe code in `ARCHITECTURE.md`.

use std::collections::BTreeSet;

use crate::markdown::{code_spans, table_rows};

/// The attribute of a crate without unsafe code.
pub const FORBID: &str = "#![forbid(unsafe_code)]";

/// Whether a Rust file has unsafe code: a block, function, trait, implementation or attribute.
#[must_use]
pub fn has_unsafe_code(text: &str) -> bool {
    let lines = text.lines().map(str::trim_start).filter(|line| !line.starts_with("//"));
    lines.into_iter().any(|line| {
        line.match_indices("unsafe").any(|(at, keyword)| {
            let after = &line[at + keyword.len()..];
            let is_longer = line[..at].ends_with(|before: char| before.is_alphanumeric() || before == '_');
            !is_longer
                && [" {", " fn ", " impl", " extern", " trait", "("]
                    .iter()
                    .any(|next| after.starts_with(next))
        })
    })
}

/// The files in the table `| folder | files with unsafe code | reason |` of `ARCHITECTURE.md`.
///
/// # Panics
/// If the first cell of a row is not one code span.
#[must_use]
pub fn listed_files(architecture: &str) -> BTreeSet<String> {
    table_rows(architecture, &["folder", "files with unsafe code", "reason"])
        .into_iter()
        .flat_map(|row| {
            let folder = row[0].trim_matches('`').to_owned();
            assert!(!folder.contains('`'), "the row of {folder} does not begin with one folder");
            code_spans(&row[1]).map(|file| format!("{folder}/{file}")).collect::<Vec<_>>()
        })
        .collect()
}
