//! Unsafe code is where `ARCHITECTURE.md` says, and impossible elsewhere.

use std::collections::BTreeSet;

use aquifer_tests_tidy::unsafe_code::{FORBID, has_unsafe_code, listed_files};
use aquifer_tests_tidy::{ProjectFile, architecture, files};

use crate::assert_no_violations;

/// A crate in the folder of another.
const NESTED: &str = "tests/fuzz/libfuzzer";

/// The folder of the crate that a file belongs to.
fn crate_of(file: &ProjectFile) -> &str {
    if file.path.starts_with(NESTED) { NESTED } else { file.unit() }
}

/// Rust files below the `src` folder of a crate.
fn source_files() -> Vec<ProjectFile> {
    let is_source = |file: &ProjectFile| {
        file.has_extension(&["rs"]) && file.path.starts_with(&format!("{}/src/", crate_of(file)))
    };
    files().into_iter().filter(is_source).collect()
}

#[test]
fn crates_without_unsafe_code_forbid_it() {
    let sources = source_files();
    let with_unsafe: BTreeSet<&str> =
        sources.iter().filter(|file| has_unsafe_code(&file.text())).map(crate_of).collect();
    let roots = sources.iter().filter(|file| {
        ["lib.rs", "main.rs"].iter().any(|root| file.path == format!("{}/src/{root}", crate_of(file)))
    });
    let violations: Vec<String> = roots
        .filter(|root| !with_unsafe.contains(crate_of(root)) && !root.text().contains(FORBID))
        .map(|root| root.path.clone())
        .collect();
    assert_no_violations(&format!("add {FORBID} to each of:"), &violations);
}

#[test]
fn architecture_md_lists_the_files_with_unsafe_code() {
    let found: BTreeSet<String> = source_files()
        .into_iter()
        .filter(|file| has_unsafe_code(&file.text()))
        .map(|file| file.path)
        .collect();
    let listed = listed_files(&architecture());
    let missing = found.difference(&listed).map(|path| format!("add {path}"));
    let outdated = listed.difference(&found).map(|path| format!("remove {path}"));
    let violations: Vec<String> = missing.chain(outdated).collect();
    assert_no_violations("correct the table of unsafe code in ARCHITECTURE.md:", &violations);
}
