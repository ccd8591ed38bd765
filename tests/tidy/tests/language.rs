//! Words and line lengths, as `docs/STYLE.md` and `docs/glossary.md` have them.

use std::collections::BTreeSet;
use std::path::Path;

use aquifer_tests_tidy::words::{banned_words, defined_name, find_phrases};
use aquifer_tests_tidy::{ProjectFile, files, root};

use crate::assert_no_violations;
use crate::unfinished;

/// Files in which words are banned.
const WITH_WORDS: [&str; 4] = ["rs", "md", "sh", "toml"];
/// Files that explain which words are banned.
const EXEMPT_FROM_WORDS: [&str; 2] = ["docs/STYLE.md", "docs/glossary.md"];
/// Files with code, each with the text that begins a comment's line.
const COMMENT_MARKERS: [(&str, &[&str]); 9] = [
    ("rs", &["//"]),
    ("c", &["//", "/*", "*"]),
    ("h", &["//", "/*", "*"]),
    ("py", &["#"]),
    ("sh", &["#"]),
    ("toml", &["#"]),
    ("service", &["#"]),
    ("socket", &["#"]),
    ("sql", &["--"]),
];
/// Words with which no doc comment begins, because the reader would have to find their noun.
const BANNED_FIRST_WORDS: [&str; 13] = [
    "Its", "It", "Of", "That", "The same", "Their", "These", "They", "This", "Those", "What", "Which", "Who",
];
const MARKDOWN_COLUMNS_MAX: usize = 200;
const CODE_COLUMNS_MAX: usize = 110;
const COMMENT_COLUMNS_MAX: usize = 100;

/// A violation of a rule of style.
struct Violation {
    /// The crate's folder, or the file.
    unit: String,
    text: String,
}

impl Violation {
    fn new(file: &ProjectFile, line: usize, text: &str) -> Self {
        Self { unit: file.unit().to_owned(), text: format!("{}:{line}: {text}", file.path) }
    }
}

/// Fails if a finished unit violates the rule, or if an unfinished one no longer does.
#[track_caller]
fn assert_only_unfinished(rule: &str, violations: &[Violation], unfinished: &[&str]) {
    let unit_of = |violation: &Violation| violation.unit.clone();
    let found: BTreeSet<String> = violations.iter().map(unit_of).collect();
    let texts: Vec<String> = violations
        .iter()
        .filter(|violation| !unfinished.contains(&violation.unit.as_str()))
        .map(|violation| violation.text.clone())
        .collect();
    assert_no_violations(rule, &texts);
    let finished: Vec<String> =
        unfinished.iter().filter(|unit| !found.contains(**unit)).map(ToString::to_string).collect();
    assert_no_violations("remove what is finished from tests/tidy/tests/unfinished.rs:", &finished);
}

/// The comment markers of a file, if it is code.
fn comment_markers(file: &ProjectFile) -> Option<&'static [&'static str]> {
    COMMENT_MARKERS
        .iter()
        .find(|(extension, _)| file.has_extension(&[extension]))
        .map(|(_, markers)| *markers)
}

/// Names that a Rust file defines, its own included; tests may have sentences as names.
fn defined_names<'a>(file: &'a ProjectFile, text: &'a str) -> Vec<(usize, &'a str)> {
    let own = Path::new(&file.path).file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    let mut names = vec![(1, own)];
    let mut is_test = false;
    for (line, number) in text.lines().zip(1..) {
        names.extend(defined_name(line).filter(|_| !is_test).map(|name| (number, name)));
        is_test = line.trim() == "#[test]";
    }
    names
}

#[test]
fn words_that_the_glossary_bans_are_not_used() {
    let glossary = std::fs::read_to_string(root().join("docs/glossary.md")).expect("docs/glossary.md exists");
    let banned = banned_words(&glossary);
    let mut violations = Vec::new();
    for file in files() {
        if !file.has_extension(&WITH_WORDS) || EXEMPT_FROM_WORDS.contains(&file.path.as_str()) {
            continue;
        }
        let text = file.text();
        let in_path = find_phrases(&file.path, &banned.everywhere);
        for (line, word) in find_phrases(&text, &banned.everywhere).into_iter().chain(in_path) {
            violations.push(Violation::new(&file, line, &format!("\"{word}\"")));
        }
        if file.has_extension(&["rs"]) {
            for (line, name) in defined_names(&file, &text) {
                for (_, word) in find_phrases(name, &banned.in_names) {
                    violations.push(Violation::new(&file, line, &format!("\"{word}\" in a name")));
                }
            }
        }
    }
    assert_only_unfinished(
        "docs/glossary.md says what to write instead of these:",
        &violations,
        unfinished::WORDS,
    );
}

#[test]
fn lines_of_markdown_are_short() {
    let mut violations = Vec::new();
    for file in files().iter().filter(|file| file.has_extension(&["md"])) {
        for (line, number) in file.text().lines().zip(1..) {
            let columns = line.chars().count();
            if columns > MARKDOWN_COLUMNS_MAX {
                violations.push(Violation::new(file, number, &format!("{columns} characters")));
            }
        }
    }
    assert_only_unfinished(
        "one sentence on a line, and at most 200 characters:",
        &violations,
        unfinished::MARKDOWN_LINES,
    );
}

#[test]
fn lines_of_code_and_comments_are_short() {
    let mut violations = Vec::new();
    for file in files() {
        let Some(markers) = comment_markers(&file) else { continue };
        for (line, number) in file.text().lines().zip(1..) {
            let is_comment = markers.iter().any(|marker| line.trim_start().starts_with(marker));
            let most = if is_comment { COMMENT_COLUMNS_MAX } else { CODE_COLUMNS_MAX };
            let columns = line.chars().count();
            if columns > most {
                violations.push(Violation::new(&file, number, &format!("{columns} columns, not {most}")));
            }
        }
    }
    assert_only_unfinished(
        "code has at most 110 columns, comments at most 100:",
        &violations,
        unfinished::CODE_LINES,
    );
}

/// The first lines of the doc comments of a Rust file, with their numbers.
fn first_doc_lines(text: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    let mut is_inside = false;
    for (line, number) in text.lines().zip(1..) {
        let line = line.trim_start();
        let comment = line.strip_prefix("/// ").or_else(|| line.strip_prefix("//! "));
        if let Some(comment) = comment.filter(|_| !is_inside) {
            found.push((number, comment));
        }
        is_inside = line.starts_with("///") || line.starts_with("//!");
    }
    found
}

#[test]
fn doc_comments_name_their_noun_first() {
    let mut violations = Vec::new();
    for file in files().iter().filter(|file| file.has_extension(&["rs"])) {
        for (line, comment) in first_doc_lines(&file.text()) {
            let is_banned =
                |word: &&str| comment.strip_prefix(*word).is_some_and(|rest| rest.starts_with(' '));
            if BANNED_FIRST_WORDS.iter().any(is_banned) {
                violations.push(Violation::new(file, line, comment));
            }
        }
    }
    let texts: Vec<String> = violations.into_iter().map(|violation| violation.text).collect();
    assert_no_violations("name the noun in the first words of these comments:", &texts);
}
