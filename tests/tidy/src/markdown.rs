//! Reads Markdown: tables, headings, links and code spans.

/// A line of a Markdown file outside code blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProseLine<'a> {
    /// The line's number, counted from 1.
    pub number: usize,
    /// The line's text.
    pub text: &'a str,
}

/// The lines outside code blocks.
pub fn prose_lines(text: &str) -> impl Iterator<Item = ProseLine<'_>> {
    let mut is_code = false;
    text.lines().zip(1..).filter_map(move |(text, number)| {
        let is_fence = text.trim_start().starts_with("```");
        is_code ^= is_fence;
        (!is_fence && !is_code).then_some(ProseLine { number, text })
    })
}

/// The headings of a level, 1 for `#`.
#[must_use]
pub fn headings(text: &str, level: usize) -> Vec<&str> {
    let marker = format!("{} ", "#".repeat(level));
    prose_lines(text).filter_map(|line| line.text.strip_prefix(marker.as_str())).collect()
}

/// The anchors of all headings, as GitHub forms them.
#[must_use]
pub fn anchors(text: &str) -> Vec<String> {
    prose_lines(text)
        .filter_map(|line| {
            let heading = line.text.trim_start_matches('#');
            (heading.len() < line.text.len()).then(|| heading.strip_prefix(' ')).flatten()
        })
        .map(|heading| {
            let is_kept = |character: &char| character.is_alphanumeric() || "-_ ".contains(*character);
            heading.trim().to_lowercase().chars().filter(is_kept).collect::<String>().replace(' ', "-")
        })
        .collect()
}

/// The texts between backticks on a line.
pub fn code_spans(line: &str) -> impl Iterator<Item = &str> {
    // A part after an odd number of backticks is a span if another backtick ends it.
    let ends = line.matches('`').count() / 2;
    line.split('`').skip(1).step_by(2).take(ends)
}

/// The targets of the links on a line: the texts between `](` and `)`.
pub fn link_targets(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| rest.split(')').next())
}

/// The cells of a table's row.
#[must_use]
pub fn table_cells(row: &str) -> Vec<String> {
    row.trim().trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()
}

/// The rows of the first table with this header; no rows if there is no such table.
///
/// # Panics
/// If a row has not as many cells as the header.
#[must_use]
pub fn table_rows(text: &str, header: &[&str]) -> Vec<Vec<String>> {
    let rows: Vec<_> = text
        .lines()
        .skip_while(|line| !line.starts_with('|') || table_cells(line) != header)
        .take_while(|line| line.starts_with('|'))
        .skip(2)
        .map(table_cells)
        .collect();
    for row in &rows {
        assert_eq!(row.len(), header.len(), "a row of the table {header:?} has another length: {row:?}");
    }
    rows
}
