//! The rules of the code base. Each says, when it is broken, where and what to do instead.

use std::collections::BTreeSet;

use aquifer_tests_tidy::{
    ProjectFile, allowances, before_tests, cargo_table, crates, files, golden_tests, has_word, mutations,
};

const LINES_MAX: usize = 600;
const FILE_BYTES_MAX: u64 = 500 << 10;
/// Code that people write and read.
const CODE: [&str; 6] = ["rs", "c", "h", "py", "sh", "sql"];
/// Files in which words are looked for.
const TEXT: [&str; 12] = ["rs", "c", "h", "py", "sh", "sql", "md", "toml", "yml", "json", "html", "txt"];
/// Cores: they decide, and leave files, clocks, threads and sockets to their edges.
const PURE: [&str; 16] = [
    "crates/directory/src/core/",
    "crates/extents/src/session.rs",
    "crates/extents/src/stock.rs",
    "crates/faults/src/areas.rs",
    "crates/faults/src/edge.rs",
    "crates/faults/src/kernel.rs",
    "crates/faults/src/maps.rs",
    "crates/faults/src/monitor.rs",
    "crates/faults/src/stream.rs",
    "crates/ipc/src/",
    "crates/pager/src/page.rs",
    "crates/pager/src/volume.rs",
    "crates/pager/src/volume/",
    "crates/pool/src/op/",
    "crates/pool/src/word/",
    "crates/pool/src/size.rs",
];
/// A polling loop needs a pause between two looks; each of these has a deadline and waits for a condition, not for time.
const MAY_SLEEP: [&str; 3] = [
    "tests/e2e/src/eventually.rs",       // the pause between two looks
    "tests/e2e/programs/redis_check.py", // the same, for the end of BGSAVE
    "tests/tidy/",                       // names what is banned
];

fn complain(rule: &str, offences: &[String]) {
    assert!(offences.is_empty(), "{rule}\n  {}", offences.join("\n  "));
}

/// `path:line: text` for each line that offends.
fn offending_lines(file: &ProjectFile, text: &str, offends: impl Fn(&str) -> bool) -> Vec<String> {
    text.lines()
        .enumerate()
        .filter(|(_, line)| offends(line))
        .map(|(at, line)| format!("{}:{}: {}", file.path, at + 1, line.trim()))
        .collect()
}

fn rust_files() -> impl Iterator<Item = ProjectFile> {
    files().into_iter().filter(|file| file.has_extension(&["rs"]))
}

/// This crate names what it bans.
fn is_tidy(file: &ProjectFile) -> bool {
    file.path.starts_with("tests/tidy/")
}

#[test]
fn crates_use_only_what_the_table_in_architecture_md_allows() {
    let allowances = allowances();
    let mut offences = Vec::new();
    for folder in crates() {
        let Some(allowed) = allowances.get(&folder) else {
            offences.push(format!("crates/{folder} has no row in the table"));
            continue;
        };
        for name in cargo_table(&folder, "dependencies") {
            let is_allowed = match name.strip_prefix("aquifer-") {
                Some(ours) => allowed.ours.contains(ours),
                None => allowed.others.as_ref().is_none_or(|others| others.contains(&name)),
            };
            if !is_allowed {
                offences.push(format!("crates/{folder} must not use {name}"));
            }
        }
    }
    complain("arrows point down only; see the table in ARCHITECTURE.md:", &offences);
}

#[test]
fn no_row_of_the_table_is_about_a_crate_that_is_not_there() {
    let there = crates();
    let offences: Vec<String> = allowances().into_keys().filter(|name| !there.contains(name)).collect();
    complain("remove these rows from the table in ARCHITECTURE.md:", &offences);
}

#[test]
fn every_crate_has_a_section_in_architecture_md() {
    let text = std::fs::read_to_string(aquifer_tests_tidy::root().join("ARCHITECTURE.md"))
        .expect("ARCHITECTURE.md is there");
    let offences: Vec<String> =
        crates().into_iter().filter(|name| !text.contains(&format!("\n### `crates/{name}`"))).collect();
    complain("ARCHITECTURE.md needs a section '### `crates/NAME`' for each of:", &offences);
}

#[test]
fn no_file_of_code_is_too_long() {
    let offences: Vec<String> = files()
        .iter()
        .filter(|file| file.has_extension(&CODE))
        .map(|file| (file, file.text().lines().count()))
        .filter(|(_, lines)| *lines > LINES_MAX)
        .map(|(file, lines)| format!("{}: {lines} lines", file.path))
        .collect();
    complain("no file of code has more than 600 lines; divide these by what they know:", &offences);
}

#[test]
fn no_file_is_too_large() {
    let offences: Vec<String> = files()
        .iter()
        .filter(|file| file.bytes > FILE_BYTES_MAX)
        .map(|file| format!("{}: {} bytes", file.path, file.bytes))
        .collect();
    complain("no file has more than 500 KiB; make it at build time, or fetch it:", &offences);
}

#[test]
fn nothing_is_left_to_be_written() {
    let mut offences = Vec::new();
    for file in rust_files().filter(|file| !is_tidy(file)) {
        offences.extend(offending_lines(&file, &file.text(), |line| {
            ["todo!(", "unimplemented!(", "dbg!("].iter().any(|banned| line.contains(banned))
        }));
    }
    complain("write it, or leave it out:", &offences);
}

#[test]
fn no_test_is_switched_off() {
    let mut offences = Vec::new();
    for file in rust_files().filter(|file| !is_tidy(file)) {
        offences.extend(offending_lines(&file, &file.text(), |line| line.trim().starts_with("#[ignore")));
    }
    complain("a test that is not run proves nothing; make it run, or remove it:", &offences);
}

#[test]
fn notes_to_oneself_are_issues_not_comments() {
    let mut offences = Vec::new();
    for file in files().iter().filter(|file| file.has_extension(&TEXT) && !is_tidy(file)) {
        offences.extend(offending_lines(file, &file.text(), |line| {
            ["TODO", "FIXME", "XXX"].iter().any(|word| has_word(line, word))
        }));
    }
    complain("open an issue instead:", &offences);
}

#[test]
fn tests_wait_for_conditions_not_for_time() {
    let mut offences = Vec::new();
    for file in files().iter().filter(|file| file.has_extension(&CODE)) {
        if MAY_SLEEP.iter().any(|path| file.path.starts_with(path)) {
            continue;
        }
        let text = file.text();
        let tests = if file.is_test() { &text } else { &text[before_tests(&text).len()..] };
        let calls_sleep = |line: &str| has_word(line, "sleep") && line.contains("sleep(");
        offences.extend(offending_lines(file, tests, calls_sleep));
    }
    complain("wait for what you wait for (a message, a lock, a pidfd, `eventually`):", &offences);
}

#[test]
fn product_code_does_not_unwrap() {
    let mut offences = Vec::new();
    for file in rust_files().filter(|file| file.path.starts_with("crates/") && !file.is_test()) {
        let text = file.text();
        offences.extend(offending_lines(&file, before_tests(&text), |line| {
            line.contains(".unwrap()") && !line.trim_start().starts_with("//")
        }));
    }
    complain("return an error, or say with `expect` why it cannot fail:", &offences);
}

/// Crates whose code runs as a command or a daemon.
const COMMANDS: [&str; 2] = ["crates/aquifer/src/", "crates/bench/src/"];

#[test]
fn commands_do_not_panic_when_nobody_can_read() {
    let mut offences = Vec::new();
    for file in
        rust_files().filter(|file| COMMANDS.iter().any(|path| file.path.starts_with(path)) && !file.is_test())
    {
        let text = file.text();
        offences.extend(offending_lines(&file, before_tests(&text), |line| {
            !line.trim_start().starts_with("//")
                && ["print!", "println!", "eprint!", "eprintln!"]
                    .iter()
                    .any(|name| line.contains(&format!("{name}(")))
        }));
    }
    complain("`println!` panics on a full disk; use say!, say_line! or say_error!:", &offences);
}

#[test]
fn cores_do_no_input_or_output() {
    let banned = [
        "std::fs",
        "std::net",
        "std::process",
        "std::thread",
        "std::io",
        "std::time::Instant",
        "Instant::now",
        "SystemTime",
        "rustix::",
        "libc::",
    ];
    let mut offences = Vec::new();
    for path in PURE {
        assert!(
            rust_files().any(|file| file.path.starts_with(path)),
            "{path} is a core no more: correct the list in this test"
        );
    }
    for file in
        rust_files().filter(|file| PURE.iter().any(|path| file.path.starts_with(path)) && !file.is_test())
    {
        let text = file.text();
        offences.extend(offending_lines(&file, before_tests(&text), |line| {
            !line.trim_start().starts_with("//") && banned.iter().any(|name| line.contains(name))
        }));
    }
    complain("cores are pure; let the edge do it and tell the core:", &offences);
}

#[test]
fn every_mutation_is_named_in_the_document_of_its_protocol() {
    let documents: String = files()
        .iter()
        .filter(|file| file.path.starts_with("docs/formats/") && file.has_extension(&["md"]))
        .map(ProjectFile::text)
        .collect();
    let mut seen = BTreeSet::new();
    let mut offences = Vec::new();
    for file in rust_files().filter(|file| file.path.starts_with("crates/") && !file.is_test()) {
        for name in mutations(before_tests(&file.text())) {
            if !has_word(&documents, &name) {
                offences.push(format!("{name} ({})", file.path));
            }
            seen.insert(name);
        }
    }
    assert!(!seen.is_empty(), "no `mutations!` was found: has it another form now?");
    complain("docs/formats/*.md must name the step that each of these breaks:", &offences);
}

#[test]
fn every_format_document_names_golden_tests_that_exist() {
    let files = files();
    let documents: Vec<_> = files
        .iter()
        .filter(|file| file.path.starts_with("docs/formats/") && file.has_extension(&["md"]))
        .collect();
    assert!(!documents.is_empty(), "docs/formats is empty: correct the path in this test");
    let mut offences = Vec::new();
    for document in documents {
        let text = document.text();
        let named = golden_tests(&text);
        if named.is_empty() {
            offences.push(format!("{}: it has no paragraph 'Golden tests: `PATH`, …'", document.path));
        }
        for path in named {
            match files.iter().find(|file| file.path == path) {
                None => offences.push(format!("{}: {path} does not exist", document.path)),
                Some(file) if !file.text().contains("fn golden_") => {
                    offences.push(format!("{}: {path} has no test named golden_…", document.path));
                }
                Some(_) => {}
            }
        }
    }
    complain("the bytes of a format are fixed by tests; name them below the document's title:", &offences);
}

#[test]
fn nothing_depends_on_one_machine() {
    // In two parts, so that this file does not name them.
    let banned =
        [concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/ho", "me/"), concat!("/tmp/", "brief")];
    let mut offences = Vec::new();
    for file in files().iter().filter(|file| file.has_extension(&TEXT) || !file.path.contains('.')) {
        offences.extend(offending_lines(file, &file.text(), |line| {
            banned.iter().any(|path| {
                line.match_indices(path).any(|(at, _)| {
                    // A longer path or name may end like this.
                    !line[..at].ends_with(|before: char| before.is_alphanumeric() || "_-.}".contains(before))
                })
            })
        }));
    }
    complain("name no folder of one machine:", &offences);
}
