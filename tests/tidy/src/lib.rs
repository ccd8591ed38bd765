//! Reads the files, tables and words of the project that the rules of the code base check.
//!
//! The rules are this crate's tests, one test for each rule.

#![forbid(unsafe_code)]

pub mod markdown;
pub mod unsafe_code;
pub mod words;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Folders with files that do not belong to the project: build output and the repository of git.
const FOREIGN_FOLDERS: [&str; 2] = [".git", "target"];

/// A file of the project.
#[derive(Clone, Debug)]
pub struct ProjectFile {
    /// The path from the root, with `/`.
    pub path: String,
    /// The length.
    pub bytes: u64,
}

impl ProjectFile {
    /// Whether the name ends in one of these extensions.
    #[must_use]
    pub fn has_extension(&self, extensions: &[&str]) -> bool {
        let extension = Path::new(&self.path).extension().and_then(|extension| extension.to_str());
        extension.is_some_and(|extension| extensions.contains(&extension))
    }

    /// Whether the file is a test: in a `tests` folder, or a module of unit tests in its own file.
    #[must_use]
    pub fn is_test(&self) -> bool {
        self.path.starts_with("tests/")
            || self.path.contains("/tests/")
            || self.path.ends_with("/tests.rs")
            || self.path.ends_with("_tests.rs")
    }

    /// The unit to which the file belongs: its crate's folder, or the file itself.
    #[must_use]
    pub fn unit(&self) -> &str {
        let folders = match self.path.split('/').next() {
            Some("crates") => 3,
            Some("bindings" | "tests") => 2,
            _ => return &self.path,
        };
        self.path.match_indices('/').nth(folders - 1).map_or(&self.path, |(end, _)| &self.path[..end])
    }

    /// The text.
    ///
    /// # Panics
    /// If the file cannot be read.
    #[must_use]
    pub fn text(&self) -> String {
        let bytes = std::fs::read(root().join(&self.path))
            .unwrap_or_else(|error| panic!("cannot read {}: {error}", self.path));
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// The root folder of the project.
#[must_use]
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// All files of the project, in the order of their paths.
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
            // In a worktree of git, `.git` is a file.
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

/// Whether a text has a word with no alphanumeric character or underscore beside it.
#[must_use]
pub fn has_word(text: &str, word: &str) -> bool {
    let is_part = |character: char| character.is_alphanumeric() || character == '_';
    text.match_indices(word).any(|(at, _)| {
        !text[..at].chars().next_back().is_some_and(is_part)
            && !text[at + word.len()..].chars().next().is_some_and(is_part)
    })
}

/// The crates in the folders of `crates/`: their paths from the root, by name.
///
/// # Panics
/// If a folder cannot be read.
#[must_use]
pub fn crates() -> BTreeMap<String, String> {
    let manifests = files().into_iter().filter_map(|file| {
        let path = file.path.strip_suffix("/Cargo.toml")?;
        let (_folder, name) = path.strip_prefix("crates/")?.split_once('/')?;
        Some((name.to_owned(), path.to_owned()))
    });
    manifests.collect()
}

/// The names in a table of the `Cargo.toml` in a folder, such as `dependencies`.
///
/// # Panics
/// If the file does not exist.
#[must_use]
pub fn cargo_table(folder: &str, table: &str) -> Vec<String> {
    let path = root().join(folder).join("Cargo.toml");
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

/// The dependencies that a crate may have, as the tables of `ARCHITECTURE.md` say.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Allowance {
    /// The folder of `crates/` that has the crate.
    pub folder: String,
    /// Crates of the project.
    pub internal: BTreeSet<String>,
    /// Crates from a registry; `None` for any.
    pub external: Option<BTreeSet<String>>,
}

/// The dependencies that each crate may have.
///
/// # Panics
/// If a table is missing or a row names what no row above has.
#[must_use]
pub fn allowances() -> BTreeMap<String, Allowance> {
    parse_allowances(&architecture())
}

/// The text of `ARCHITECTURE.md`.
///
/// # Panics
/// If the file cannot be read.
#[must_use]
pub fn architecture() -> String {
    std::fs::read_to_string(root().join("ARCHITECTURE.md"))
        .unwrap_or_else(|error| panic!("cannot read ARCHITECTURE.md: {error}"))
}

/// Reads the tables `| folder | crates | may use |` and `| crate | from outside |`.
///
/// A crate may use the folders and crates in its row, and those that its row lists before it. A
/// name of a crate is in backticks; `all above` is all crates of earlier rows.
///
/// # Panics
/// If a table is missing, or a row names a folder or crate that no row above has.
#[must_use]
pub fn parse_allowances(text: &str) -> BTreeMap<String, Allowance> {
    let rows = markdown::table_rows(text, &["folder", "crates", "may use"]);
    assert!(!rows.is_empty(), "there is no table '| folder | crates | may use |'");
    let outside: BTreeMap<String, BTreeSet<String>> = markdown::table_rows(text, &["crate", "from outside"])
        .iter()
        .flat_map(|row| names(&row[0]).into_iter().map(|name| (name, names(&row[1]).into_iter().collect())))
        .collect();
    let mut folders: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut found = BTreeMap::new();
    for row in rows {
        let folder = row[0].split('`').nth(1).expect("a folder is in backticks").to_owned();
        let mut internal = BTreeSet::new();
        for name in row[2].split(',').map(str::trim).filter(|name| *name != "–") {
            let all = || folders.values().flatten().cloned();
            match name.strip_prefix('`').and_then(|name| name.strip_suffix('`')) {
                Some(name) => {
                    assert!(all().any(|known| known == name), "no row above has the crate {name}");
                    internal.insert(name.to_owned());
                }
                None if name == "all above" => internal.extend(all()),
                None => internal
                    .extend(folders.get(name).unwrap_or_else(|| panic!("no row above is {name}")).clone()),
            }
        }
        let crates = names(&row[1]);
        for name in &crates {
            let external = outside.get(name).cloned();
            let allowance = Allowance { folder: folder.clone(), internal: internal.clone(), external };
            found.insert(name.clone(), allowance);
            internal.insert(name.clone());
        }
        folders.insert(folder, crates.into_iter().collect());
    }
    found
}

/// Splits a list with commas; `–` is the empty list.
fn names(list: &str) -> Vec<String> {
    list.split(',')
        .map(|name| name.trim().trim_matches('`'))
        .filter(|name| *name != "–" && !name.is_empty())
        .map(str::to_owned)
        .collect()
}

/// The variants of the `enum Mutation` that a Rust file declares with `mutations!`.
///
/// No variants if the file has no such enum.
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

/// The paths in the paragraph `Golden tests: …` of a format document.
#[must_use]
pub fn golden_tests(text: &str) -> Vec<&str> {
    let paragraph = text.split("\n\n").find_map(|paragraph| paragraph.strip_prefix("Golden tests:"));
    paragraph.into_iter().flat_map(|paragraph| paragraph.split('`').skip(1).step_by(2)).collect()
}
