//! Rules of the code. A broken rule names the places and says what to do instead.

use aquifer_tests_tidy::{ProjectFile, allowances, before_tests, cargo_table, crates, files, has_word};

use crate::assert_no_violations;

const LINES_MAX: usize = 600;
const FILE_BYTES_MAX: u64 = 500 << 10;
/// Extensions of code.
const CODE: [&str; 6] = ["rs", "c", "h", "py", "sh", "sql"];
/// Extensions of text.
const TEXT: [&str; 12] = ["rs", "c", "h", "py", "sh", "sql", "md", "toml", "yml", "json", "html", "txt"];
/// Cores: code without system calls, clock, threads and random numbers.
const PURE: [&str; 41] = [
    "crates/base/ipc/src/",
    "crates/cache/cache-cluster/src/placement.rs",
    "crates/cache/cache/src/commands/",
    "crates/cache/cache/src/protocol/",
    "crates/cache/cache/src/store/index.rs",
    "crates/cache/cache/src/store/runs.rs",
    "crates/cli/aquifer/src/cluster/supervisor/",
    "crates/daemons/host/src/nodes/away.rs",
    "crates/daemons/host/src/nodes/view.rs",
    "crates/daemons/node/src/fences.rs",
    "crates/directory/directory/src/core/",
    "crates/heap/kv/src/",
    "crates/heap/objects/src/block.rs",
    "crates/heap/objects/src/heap.rs",
    "crates/heap/objects/src/heap/",
    "crates/heap/objects/src/packing.rs",
    "crates/heap/objects/src/slot.rs",
    "crates/ownership/ownership/src/holder.rs",
    "crates/ownership/ownership/src/record.rs",
    "crates/paging/faults/src/areas.rs",
    "crates/paging/faults/src/edge.rs",
    "crates/paging/faults/src/kernel.rs",
    "crates/paging/faults/src/maps.rs",
    "crates/paging/faults/src/monitor.rs",
    "crates/paging/faults/src/monitor/",
    "crates/paging/faults/src/stream.rs",
    "crates/paging/pager/src/page.rs",
    "crates/paging/pager/src/volume.rs",
    "crates/paging/pager/src/volume/",
    "crates/pool/extents/src/core/",
    "crates/pool/pool/src/op.rs",
    "crates/pool/pool/src/op/",
    "crates/pool/pool/src/size.rs",
    "crates/pool/pool/src/word.rs",
    "crates/pool/pool/src/word/",
    "crates/segments/copies/src/tree.rs",
    "crates/segments/copies/src/writer.rs",
    "crates/segments/segments/src/host/pull_rate_limiter.rs",
    "crates/segments/segments/src/host/ranges.rs",
    "crates/segments/segments/src/pulling.rs",
    "crates/segments/segments/src/pulling/",
];
/// Polling loops that sleep between two polls. Each has a deadline and waits for a condition.
const MAY_SLEEP: [&str; 3] = [
    "tests/support/src/eventually.rs",   // polls a condition
    "tests/e2e/programs/redis_check.py", // polls for the end of BGSAVE
    "tests/tidy/",                       // names what is banned
];

/// The lines that violate a rule, each as `path:line: text`.
fn violating_lines(file: &ProjectFile, text: &str, violates: impl Fn(&str) -> bool) -> Vec<String> {
    text.lines()
        .enumerate()
        .filter(|(_, line)| violates(line))
        .map(|(at, line)| format!("{}:{}: {}", file.path, at + 1, line.trim()))
        .collect()
}

fn rust_files() -> impl Iterator<Item = ProjectFile> {
    files().into_iter().filter(|file| file.has_extension(&["rs"]))
}

/// Whether a file belongs to this crate, which names what it bans.
fn is_tidy(file: &ProjectFile) -> bool {
    file.path.starts_with("tests/tidy/")
}

#[test]
fn crates_use_only_what_the_tables_in_architecture_md_allow() {
    let allowances = allowances();
    let mut violations = Vec::new();
    for (crate_name, path) in crates() {
        let Some(allowed) = allowances.get(&crate_name) else {
            violations.push(format!("{path} is not in the table of folders"));
            continue;
        };
        if path != format!("crates/{}/{crate_name}", allowed.folder) {
            violations.push(format!("{path} is not in the row of its folder"));
        }
        for name in cargo_table(&path, "dependencies") {
            let internal = match name.as_str() {
                "aquifer" => Some("aquifer"),
                name => name.strip_prefix("aquifer-"),
            };
            let is_allowed = match internal {
                Some(name) => allowed.internal.contains(name),
                None => allowed.external.as_ref().is_none_or(|external| external.contains(&name)),
            };
            if !is_allowed {
                violations.push(format!("{path} must not use {name}"));
            }
        }
    }
    assert_no_violations("the tables in ARCHITECTURE.md permit no such dependency:", &violations);
}

#[test]
fn all_crates_but_research_are_built_by_default() {
    let workspace = files().into_iter().find(|file| file.path == "Cargo.toml").expect("the workspace").text();
    let list = workspace.split_once("\ndefault-members = [").and_then(|(_, rest)| rest.split_once("\n]"));
    let (list, _) = list.expect("Cargo.toml has default-members");
    let mut violations = Vec::new();
    for (name, path) in crates() {
        let folder = path.strip_suffix(&name).expect("a path ends with the name");
        let is_listed = list.contains(&format!("\"{folder}*\"")) || list.contains(&format!("\"{path}\""));
        if is_listed == (name == "research") {
            violations.push(path);
        }
    }
    assert_no_violations("add these to default-members in Cargo.toml, or remove `research`:", &violations);
}

/// Such a library is not compiled a second time for its unit tests, which would not run.
#[test]
fn libraries_without_a_test_target_have_no_unit_tests() {
    let has_none = "\n[lib]\ntest = false\n";
    let manifests = files().into_iter().filter(|file| file.path.ends_with("/Cargo.toml"));
    let folders: Vec<String> = manifests
        .filter(|file| file.text().contains(has_none))
        .map(|file| file.path.replace("Cargo.toml", "src/"))
        .collect();
    assert!(!folders.is_empty(), "the text {has_none:?} is in no manifest: correct this test");
    let mut violations = Vec::new();
    for file in rust_files().filter(|file| folders.iter().any(|folder| file.path.starts_with(folder))) {
        violations.extend(violating_lines(&file, &file.text(), |line| line.trim() == "#[test]"));
    }
    assert_no_violations("remove `test = false` from the manifests of these:", &violations);
}

#[test]
fn a_module_with_parts_is_a_file_beside_its_folder() {
    let violations: Vec<String> = rust_files()
        .filter(|file| file.path.contains("/src/") && file.path.ends_with("/mod.rs"))
        .map(|file| file.path)
        .collect();
    assert_no_violations("rename x/mod.rs to x.rs:", &violations);
}

#[test]
fn no_file_of_code_is_too_long() {
    let violations: Vec<String> = files()
        .iter()
        .filter(|file| file.has_extension(&CODE))
        .map(|file| (file, file.text().lines().count()))
        .filter(|(_, lines)| *lines > LINES_MAX)
        .map(|(file, lines)| format!("{}: {lines} lines", file.path))
        .collect();
    assert_no_violations("a file of code has at most 600 lines; split these:", &violations);
}

#[test]
fn no_file_is_too_large() {
    let violations: Vec<String> = files()
        .iter()
        .filter(|file| file.bytes > FILE_BYTES_MAX)
        .map(|file| format!("{}: {} bytes", file.path, file.bytes))
        .collect();
    assert_no_violations(
        "a file has at most 500 KiB; generate or download these at build time:",
        &violations,
    );
}

#[test]
fn no_code_is_a_placeholder() {
    let mut violations = Vec::new();
    for file in rust_files().filter(|file| !is_tidy(file)) {
        violations.extend(violating_lines(&file, &file.text(), |line| {
            ["todo!(", "unimplemented!(", "dbg!("].iter().any(|banned| line.contains(banned))
        }));
    }
    assert_no_violations("implement or remove these:", &violations);
}

#[test]
fn no_test_is_disabled() {
    let mut violations = Vec::new();
    for file in rust_files().filter(|file| !is_tidy(file)) {
        violations.extend(violating_lines(&file, &file.text(), |line| line.trim().starts_with("#[ignore")));
    }
    assert_no_violations("enable or remove these tests:", &violations);
}

#[test]
fn notes_to_oneself_are_issues_and_not_comments() {
    let mut violations = Vec::new();
    for file in files().iter().filter(|file| file.has_extension(&TEXT) && !is_tidy(file)) {
        violations.extend(violating_lines(file, &file.text(), |line| {
            ["TODO", "FIXME", "XXX"].iter().any(|word| has_word(line, word))
        }));
    }
    assert_no_violations("open an issue instead:", &violations);
}

#[test]
fn tests_wait_for_conditions_not_for_time() {
    let mut violations = Vec::new();
    for file in files().iter().filter(|file| file.has_extension(&CODE)) {
        if MAY_SLEEP.iter().any(|path| file.path.starts_with(path)) {
            continue;
        }
        let text = file.text();
        let tests = if file.is_test() { &text } else { &text[before_tests(&text).len()..] };
        let calls_sleep = |line: &str| has_word(line, "sleep") && line.contains("sleep(");
        violations.extend(violating_lines(file, tests, calls_sleep));
    }
    assert_no_violations(
        "wait for a condition instead of sleeping (a message, a lock, a pidfd, `eventually`):",
        &violations,
    );
}

#[test]
fn product_code_does_not_unwrap() {
    let mut violations = Vec::new();
    for file in rust_files().filter(|file| file.path.starts_with("crates/") && !file.is_test()) {
        let text = file.text();
        violations.extend(violating_lines(&file, before_tests(&text), |line| {
            line.contains(".unwrap()") && !line.trim_start().starts_with("//")
        }));
    }
    assert_no_violations("return an error, or use `expect` with the reason why it cannot fail:", &violations);
}

/// Crates that write to standard output or standard error.
const COMMANDS: [&str; 3] =
    ["crates/cli/aquifer/src/", "crates/bench/bench/src/", "crates/bench/research/src/"];

#[test]
fn commands_do_not_panic_if_their_output_fails() {
    let mut violations = Vec::new();
    for file in
        rust_files().filter(|file| COMMANDS.iter().any(|path| file.path.starts_with(path)) && !file.is_test())
    {
        let text = file.text();
        violations.extend(violating_lines(&file, before_tests(&text), |line| {
            !line.trim_start().starts_with("//")
                && ["print!", "println!", "eprint!", "eprintln!"]
                    .iter()
                    .any(|name| line.contains(&format!("{name}(")))
        }));
    }
    assert_no_violations(
        "`println!` panics if writing fails; use say!, say_line! or say_error!:",
        &violations,
    );
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
    let mut violations = Vec::new();
    for path in PURE {
        assert!(
            rust_files().any(|file| file.path.starts_with(path)),
            "{path} does not exist: correct the list of cores in this test"
        );
    }
    for file in
        rust_files().filter(|file| PURE.iter().any(|path| file.path.starts_with(path)) && !file.is_test())
    {
        let text = file.text();
        violations.extend(violating_lines(&file, before_tests(&text), |line| {
            !line.trim_start().starts_with("//") && banned.iter().any(|name| line.contains(name))
        }));
    }
    assert_no_violations("cores are pure; move this to their edge:", &violations);
}

#[test]
fn nothing_depends_on_one_machine() {
    // In two parts, so that this file does not contain them.
    let banned =
        [concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/ho", "me/"), concat!("/tmp/", "brief")];
    let mut violations = Vec::new();
    for file in files().iter().filter(|file| file.has_extension(&TEXT) || !file.path.contains('.')) {
        violations.extend(violating_lines(file, &file.text(), |line| {
            banned.iter().any(|path| {
                line.match_indices(path).any(|(at, _)| {
                    // A longer path may contain one of them.
                    !line[..at].ends_with(|before: char| before.is_alphanumeric() || "_-.}".contains(before))
                })
            })
        }));
    }
    assert_no_violations("these folders exist on one machine only:", &violations);
}
