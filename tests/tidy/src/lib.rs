//! What the rules of the code base are checked against: the files of the project, and the table in `ARCHITECTURE.md`.
//! The rules are this crate's tests, one for each.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Folders that are not the project's: what is built, and what git keeps.
const FOREIGN_FOLDERS: [&str; 2] = [".git", "target"];

/// One file of the project.
#[derive(Clone, Debug)]
pub struct ProjectFile {
    /// Its path from the root, with `/`.
    pub path: String,
    /// Its length.
    pub bytes: u64,
}

impl ProjectFile {
    /// Whether its name ends in one of these extensions.
    #[must_use]
    pub fn has_extension(&self, extensions: &[&str]) -> bool {
        let extension = Path::new(&self.path).extension().and_then(|extension| extension.to_str());
        extension.is_some_and(|extension| extensions.contains(&extension))
    }

    /// Whether it is a test: in a crate's `tests` folder, in the root's, or a module of unit tests in a file of its own.
    #[must_use]
    pub fn is_test(&self) -> bool {
        self.path.starts_with("tests/")
            || self.path.contains("/tests/")
            || self.path.ends_with("/tests.rs")
            || self.path.ends_with("_tests.rs")
    }

    /// Its text.
    ///
    /// # Panics
    /// If it cannot be read.
    #[must_use]
    pub fn text(&self) -> String {
        let bytes = std::fs::read(root().join(&self.path))
            .unwrap_or_else(|error| panic!("cannot read {}: {error}", self.path));
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// The root of the project.
#[must_use]
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Every file of the project.
///
/// # Panics
/// If a folder cannot be read.
#[must_use]
pub fn files() -> Vec<ProjectFile> {
    let mut found = Vec::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        let entries = std::fs::read_dir(root().join(&folder))
            .unwrap_or_else(|error| panic!("cannot list {}: {error}", folder.display()));
        for entry in entries.map(|entry| entry.expect("a folder's entry can be read")) {
            let path = folder.join(entry.file_name());
            let kind = entry.file_type().expect("an entry has a type");
            let is_foreign = FOREIGN_FOLDERS.iter().any(|name| entry.file_name() == *name);
            // A worktree's `.git` is a file.
            if is_foreign {
                continue;
            }
            if kind.is_dir() {
                folders.push(path);
            } else if kind.is_file() {
                let bytes = entry.metadata().map_or(0, |metadata| metadata.len());
                let path = path.to_str().expect("names are UTF-8").to_owned();
                found.push(ProjectFile { path, bytes });
            }
        }
    }
    found.sort_by(|one, other| one.path.cmp(&other.path));
    found
}

/// The part of a Rust file before its unit tests.
#[must_use]
pub fn before_tests(text: &str) -> &str {
    text.find("\n#[cfg(test)]\nmod tests").map_or(text, |at| &text[..at])
}

/// Whether `word` stands in `text` with no letter, digit or underscore beside it.
#[must_use]
pub fn has_word(text: &str, word: &str) -> bool {
    let is_part = |character: char| character.is_alphanumeric() || character == '_';
    text.match_indices(word).any(|(at, _)| {
        !text[..at].chars().next_back().is_some_and(is_part)
            && !text[at + word.len()..].chars().next().is_some_and(is_part)
    })
}

/// The crates under `crates/`, by folder.
///
/// # Panics
/// If the folder cannot be read.
#[must_use]
pub fn crates() -> BTreeSet<String> {
    files()
        .iter()
        .filter_map(|file| {
            let name = file.path.strip_prefix("crates/")?.strip_suffix("/Cargo.toml")?;
            Some(name.to_owned())
        })
        .collect()
}

/// The names in one table of a crate's `Cargo.toml`, such as `dependencies`.
///
/// # Panics
/// If there is no such crate.
#[must_use]
pub fn cargo_table(folder: &str, table: &str) -> Vec<String> {
    let path = root().join("crates").join(folder).join("Cargo.toml");
    let text = std::fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()));
    names_in_table(&text, table)
}

/// The keys of a TOML table: `name = …`, `name.workspace = true`, or `[table.name]`.
#[must_use]
pub fn names_in_table(text: &str, table: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut is_inside = false;
    for line in text.lines().map(str::trim) {
        if let Some(header) = line.strip_prefix('[').and_then(|rest| rest.split(']').next()) {
            is_inside = header == table;
            if let Some(name) = header.strip_prefix(table).and_then(|rest| rest.strip_prefix('.')) {
                names.push(name.to_owned());
            }
        } else if is_inside && !line.is_empty() && !line.starts_with('#') {
            let end = line.find(['.', '=', ' ']).unwrap_or(line.len());
            names.push(line[..end].to_owned());
        }
    }
    names
}

/// A crate's row in the table of dependencies.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Allowance {
    /// Crates of the project that it may use.
    pub ours: BTreeSet<String>,
    /// Crates of others that it may use; `None` for any.
    pub others: Option<BTreeSet<String>>,
}

/// The table `| crate | … | may use | from outside |` of `ARCHITECTURE.md`.
///
/// # Panics
/// If there is no such table, or a row of it cannot be understood.
#[must_use]
pub fn allowances() -> BTreeMap<String, Allowance> {
    let text = std::fs::read_to_string(root().join("ARCHITECTURE.md"))
        .unwrap_or_else(|error| panic!("cannot read ARCHITECTURE.md: {error}"));
    parse_allowances(&text, &crates())
}

/// As [`allowances`], from a text.
///
/// # Panics
/// If there is no such table, or a row of it cannot be understood.
#[must_use]
pub fn parse_allowances(text: &str, all: &BTreeSet<String>) -> BTreeMap<String, Allowance> {
    let cells = |line: &str| -> Vec<String> {
        line.trim().trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()
    };
    let rows: Vec<Vec<String>> = text
        .lines()
        .skip_while(|line| cells(line).get(2).map(String::as_str) != Some("may use"))
        .take_while(|line| line.starts_with('|'))
        .skip(2)
        .map(cells)
        .collect();
    assert!(!rows.is_empty(), "ARCHITECTURE.md has no table with a third column 'may use'");
    rows.into_iter()
        .map(|row| {
            let [name, _, ours, others] = row.as_slice() else {
                panic!("a row of the table of dependencies has not four cells: {row:?}");
            };
            let allowance = Allowance {
                ours: match ours.as_str() {
                    "all" => all.clone(),
                    list => names(list),
                },
                others: match others.as_str() {
                    "any" => None,
                    list => Some(names(list)),
                },
            };
            (name.trim_matches('`').to_owned(), allowance)
        })
        .collect()
}

/// `a, b` as a set; `–` is the empty one.
fn names(list: &str) -> BTreeSet<String> {
    list.split(',')
        .map(|name| name.trim().trim_matches('`'))
        .filter(|name| *name != "–" && !name.is_empty())
        .map(str::to_owned)
        .collect()
}

/// The variants of the `enum Mutation` that a Rust file declares with `mutations!`.
#[must_use]
pub fn mutations(text: &str) -> Vec<String> {
    let Some(start) =
        text.find("mutations! {").and_then(|at| Some(at + text[at..].find("pub enum Mutation {")?))
    else {
        return Vec::new();
    };
    text[start..]
        .lines()
        .skip(1)
        .map(str::trim)
        .take_while(|line| *line != "}")
        .filter(|line| line.starts_with(char::is_uppercase))
        .map(|line| line.trim_end_matches(',').to_owned())
        .collect()
}

/// The paths in the paragraph of a format document that begins with `Golden tests:`.
#[must_use]
pub fn golden_tests(text: &str) -> Vec<&str> {
    let paragraph = text.split("\n\n").find_map(|paragraph| paragraph.strip_prefix("Golden tests:"));
    paragraph.into_iter().flat_map(|paragraph| paragraph.split('`').skip(1).step_by(2)).collect()
}
