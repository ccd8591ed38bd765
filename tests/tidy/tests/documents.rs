//! Documents agree with the repository: links, formats, decisions and glossary.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

use aquifer_tests_tidy::markdown::{anchors, code_spans, headings, link_targets, prose_lines, table_rows};
use aquifer_tests_tidy::words::glossary_entries;
use aquifer_tests_tidy::{
    ProjectFile, allowances, before_tests, crates, files, golden_tests, has_word, mutations, root,
};

use crate::assert_no_violations;

/// Folders whose paths are checked wherever a document names one.
const TOP_FOLDERS: [&str; 8] =
    ["bench/", "bindings/", "crates/", "docs/", "examples/", "packaging/", "scripts/", "tests/"];
const DECISIONS: &str = "docs/decisions/";
/// The parts of a decision record, in order.
const DECISION_PARTS: [&str; 6] = ["Status", "Date", "Context", "Decision", "Consequences", "Alternatives"];

fn documents() -> Vec<ProjectFile> {
    files().into_iter().filter(|file| file.has_extension(&["md"])).collect()
}

/// Whether a file or folder exists, by its path from the root.
fn exists(path: &str) -> bool {
    root().join(path).exists()
}

/// Whether a code span is a path from the root, without placeholders.
fn is_path(span: &str) -> bool {
    let is_plain = |character: char| character.is_ascii_alphanumeric() || "/._-".contains(character);
    TOP_FOLDERS.iter().any(|folder| span.starts_with(folder)) && span.chars().all(is_plain)
}

/// The path from the root that a code span in the README of a folder of `crates/` names: a path
/// from that folder, to a file or folder of a crate.
fn room_path(document: &ProjectFile, span: &str) -> Option<String> {
    let folder = document.path.strip_suffix("/README.md").filter(|path| path.starts_with("crates/"))?;
    let is_plain = |character: char| character.is_ascii_alphanumeric() || "/._-".contains(character);
    let is_source = ["/src", "/tests"].iter().any(|part| span.contains(part));
    let is_path = is_source && !span.starts_with('/') && span.chars().all(is_plain);
    is_path.then(|| link_path(&format!("{folder}/x"), span))
}

/// The path from the root that a link in a document leads to.
fn link_path(document: &str, target: &str) -> String {
    let folder = Path::new(document).parent().unwrap_or(Path::new(""));
    let mut path = PathBuf::new();
    for component in folder.join(target).components() {
        match component {
            Component::ParentDir => drop(path.pop()),
            Component::CurDir => {}
            other => path.push(other),
        }
    }
    path.display().to_string()
}

/// The defect of a link; `None` if it is valid.
fn broken_link(document: &ProjectFile, target: &str) -> Option<String> {
    if target.starts_with("https://") || target.starts_with("http://") {
        return None;
    }
    let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
    let path = if file.is_empty() { document.path.clone() } else { link_path(&document.path, file) };
    if !exists(&path) {
        return Some(format!("{path} does not exist"));
    }
    if anchor.is_empty() || !path.ends_with(".md") {
        return None;
    }
    let text = ProjectFile { path: path.clone(), bytes: 0 }.text();
    (!anchors(&text).iter().any(|known| known == anchor)).then(|| format!("{path} has no heading #{anchor}"))
}

#[test]
fn links_and_paths_lead_somewhere() {
    let mut violations = Vec::new();
    for document in documents() {
        for line in prose_lines(&document.text()) {
            let place = format!("{}:{}", document.path, line.number);
            let links = link_targets(line.text).filter_map(|target| broken_link(&document, target));
            let in_room = |span: &str| room_path(&document, span);
            let spans = code_spans(line.text).filter(|span| {
                (is_path(span) || in_room(span).is_some())
                    && !exists(span)
                    && !in_room(span).is_some_and(|path| exists(&path))
            });
            violations.extend(links.map(|why| format!("{place}: {why}")));
            violations.extend(spans.map(|path| format!("{place}: {path} does not exist")));
        }
    }
    assert_no_violations("documents refer only to what exists:", &violations);
}

#[test]
fn comments_refer_to_documents_that_exist() {
    let mut violations = Vec::new();
    for file in files().iter().filter(|file| file.has_extension(&["rs", "c", "h", "sh", "py", "toml"])) {
        for (line, number) in file.text().lines().zip(1..) {
            for (at, _) in line.match_indices("docs/") {
                let is_end =
                    |character: char| !character.is_ascii_alphanumeric() && !"/._-".contains(character);
                let path = line[at..].split(is_end).next().unwrap_or_default().trim_end_matches('.');
                let is_longer =
                    line[..at].ends_with(|before: char| before.is_alphanumeric() || before == '/');
                if path.ends_with(".md") && !is_longer && !exists(path) {
                    violations.push(format!("{}:{number}: {path}", file.path));
                }
            }
        }
    }
    assert_no_violations("these documents do not exist:", &violations);
}

#[test]
fn decision_records_have_the_one_form() {
    let readme = ProjectFile { path: format!("{DECISIONS}README.md"), bytes: 0 }.text();
    let listed = table_rows(&readme, &["number", "title", "status", "date"]);
    let mut violations = Vec::new();
    for file in documents() {
        let Some(name) = file.path.strip_prefix(DECISIONS).filter(|name| *name != "README.md") else {
            continue;
        };
        let text = file.text();
        let Some((number, _)) = name.split_once('-') else {
            violations.push(format!("{}: the name is not NUMBER-TITLE.md", file.path));
            continue;
        };
        let title = headings(&text, 1).first().and_then(|title| title.strip_prefix(&format!("{number}: ")));
        let Some(title) = title else {
            violations.push(format!("{}: the first heading is not '# {number}: TITLE'", file.path));
            continue;
        };
        if headings(&text, 2) != DECISION_PARTS {
            violations.push(format!("{}: the parts are not {}", file.path, DECISION_PARTS.join(", ")));
        }
        let link = format!("[{number}]({name})");
        if !listed.iter().any(|row| row[0] == link && row[1] == title) {
            violations
                .push(format!("{}: docs/decisions/README.md has no row '| {link} | {title} |'", file.path));
        }
    }
    assert_no_violations("decision records have one form, and a row in the list:", &violations);
}

#[test]
fn words_of_the_glossary_name_code_that_exists() {
    let glossary = ProjectFile { path: "docs/glossary.md".to_owned(), bytes: 0 }.text();
    let entries = glossary_entries(&glossary);
    assert!(!entries.is_empty(), "docs/glossary.md has no table '| word | meaning | where |'");
    let mut violations = Vec::new();
    for entry in entries {
        if entry.paths.is_empty() {
            violations.push(format!("{}: no path", entry.word));
        }
        let missing = entry.paths.iter().filter(|path| !exists(path));
        violations.extend(missing.map(|path| format!("{}: {path} does not exist", entry.word)));
    }
    assert_no_violations("each word of docs/glossary.md names its code:", &violations);
}

#[test]
fn every_crate_has_a_section_in_the_readme_of_its_folder() {
    let mut violations = Vec::new();
    for (name, path) in crates() {
        let folder = path.strip_suffix(&name).expect("a path ends with the name");
        let readme = std::fs::read_to_string(root().join(folder).join("README.md")).unwrap_or_default();
        if !readme.contains(&format!("\n### `{name}`")) {
            violations.push(format!("{folder}README.md: '### `{name}`'"));
        }
    }
    assert_no_violations("these sections are missing:", &violations);
}

#[test]
fn every_crate_in_the_table_of_folders_exists() {
    let existing = crates();
    let violations: Vec<String> =
        allowances().into_keys().filter(|name| !existing.contains_key(name)).collect();
    assert_no_violations("remove these from the table in ARCHITECTURE.md:", &violations);
}

#[test]
fn every_mutation_is_named_in_the_document_of_its_protocol() {
    let text: String = documents()
        .iter()
        .filter(|file| file.path.starts_with("docs/formats/"))
        .map(ProjectFile::text)
        .collect();
    let mut seen = BTreeSet::new();
    let mut violations = Vec::new();
    for file in files() {
        if !file.path.starts_with("crates/") || !file.has_extension(&["rs"]) || file.is_test() {
            continue;
        }
        for name in mutations(before_tests(&file.text())) {
            if !has_word(&text, &name) {
                violations.push(format!("{name} ({})", file.path));
            }
            seen.insert(name);
        }
    }
    assert!(!seen.is_empty(), "no `mutations!` was found: adapt this test to its new form");
    assert_no_violations("docs/formats must name the step that each of these breaks:", &violations);
}

#[test]
fn every_format_document_names_golden_tests_that_exist() {
    let files = files();
    let formats: Vec<_> = files
        .iter()
        .filter(|file| file.path.starts_with("docs/formats/") && file.has_extension(&["md"]))
        .collect();
    assert!(!formats.is_empty(), "docs/formats is empty: correct the path in this test");
    let mut violations = Vec::new();
    for document in formats {
        let text = document.text();
        let named = golden_tests(&text);
        if named.is_empty() {
            violations.push(format!("{}: no paragraph 'Golden tests: `PATH`, …'", document.path));
        }
        for path in named {
            match files.iter().find(|file| file.path == path) {
                None => violations.push(format!("{}: {path} does not exist", document.path)),
                Some(file) if !file.text().contains("fn golden_") => {
                    violations.push(format!("{}: {path} has no test named golden_…", document.path));
                }
                Some(_) => {}
            }
        }
    }
    assert_no_violations("each format document names its golden tests below the title:", &violations);
}

/// SECURITY.md names the tests of its claims; each must exist.
#[test]
fn the_tests_that_security_md_names_exist() {
    let text = std::fs::read_to_string(root().join("SECURITY.md")).expect("the file is there");
    let sources: Vec<String> =
        files().into_iter().filter(|file| file.has_extension(&["rs"])).map(|file| file.text()).collect();
    let names: Vec<&str> = text
        .lines()
        .filter(|line| line.starts_with('|'))
        .flat_map(|line| line.split('`').skip(1).step_by(2))
        .filter(|name| name.contains('_') && name.chars().all(|c| c == '_' || c.is_ascii_lowercase()))
        .collect();
    assert!(names.len() > 10, "the tables name tests: {names:?}");
    let is_missing = |name: &&str| !sources.iter().any(|text| text.contains(&format!("fn {name}")));
    let missing: Vec<String> = names.into_iter().filter(is_missing).map(str::to_owned).collect();
    assert_no_violations("SECURITY.md names tests that do not exist:", &missing);
}

/// `aquifer check` shows this list.
#[test]
fn the_readme_has_the_list_of_what_is_not_supported() {
    let read = |path: &str| std::fs::read_to_string(root().join(path)).expect("it exists");
    let list = read("crates/cli/aquifer/src/check/unsupported.txt");
    let readme = read("README.md");
    assert!(list.len() > 1000 && readme.contains(&list), "README.md has another list");
}
