//! The readers that the rules rely on read what is there.

use std::collections::BTreeSet;

use aquifer_tests_tidy::{before_tests, golden_tests, has_word, mutations, names_in_table, parse_allowances};

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(ToString::to_string).collect()
}

#[test]
fn dependencies_are_read_in_all_their_forms() {
    let text = "[package]\nname = \"x\"\n[dependencies]\naquifer-pool.workspace = true\n# a remark\n\
                libc = \"1\"\nrustix={ version = \"1\" }\n[dependencies.serde]\nversion = \"1\"\n\
                [dev-dependencies]\nproptest.workspace = true\n";
    assert_eq!(names_in_table(text, "dependencies"), ["aquifer-pool", "libc", "rustix", "serde"]);
    assert_eq!(names_in_table(text, "dev-dependencies"), ["proptest"]);
}

#[test]
fn the_table_says_who_may_use_what() {
    let text = "before\n\n| crate | is | may use | from outside |\n|---|---|---|---|\n\
                | `pool` | it | `fabric`, `ipc` | any |\n| `shim` | it | – | `libc` |\n| `top` | it | all | any |\n\nafter | x";
    let table = parse_allowances(text, &set(&["pool", "shim", "top"]));
    assert_eq!(table["pool"].ours, set(&["fabric", "ipc"]));
    assert_eq!(table["pool"].others, None);
    assert_eq!(table["shim"].ours, set(&[]));
    assert_eq!(table["shim"].others, Some(set(&["libc"])));
    assert_eq!(table["top"].ours.len(), 3);
    assert_eq!(table.len(), 3);
}

#[test]
#[should_panic(expected = "no table")]
fn a_missing_table_is_noticed() {
    let _ = parse_allowances("| crate | is |\n", &set(&[]));
}

#[test]
fn mutations_are_found() {
    let text = "x::mutations! {\n    /// Doc.\n    pub enum Mutation {\n        /// One.\n        SkipFlush,\n        KeepOld,\n    }\n}\nX,\n";
    assert_eq!(mutations(text), ["SkipFlush", "KeepOld"]);
    assert!(mutations("pub enum Mutation {\n    A,\n}\n").is_empty());
}

#[test]
fn words_stand_alone() {
    assert!(has_word("a sleep(1)", "sleep"));
    assert!(!has_word("asleep(1)", "sleep"));
    assert!(!has_word("sleep_until", "sleep"));
}

#[test]
fn unit_tests_are_cut_off() {
    let text = "code\n\n#[cfg(test)]\nmod tests {\n}\n";
    assert_eq!(before_tests(text), "code\n");
    assert_eq!(before_tests("code\n"), "code\n");
}

#[test]
fn golden_tests_are_read_over_several_lines() {
    let text = "# Title\n\nGolden tests: `a/b.rs`,\n`c.rs`.\n\nCode: `d.rs`.\n";
    assert_eq!(golden_tests(text), ["a/b.rs", "c.rs"]);
    assert!(golden_tests("# Title\n\nCode: `d.rs`.\n").is_empty());
}
