//! The readers of files, tables and words return what is there.

use std::collections::BTreeSet;

use aquifer_tests_tidy::markdown::{anchors, code_spans, headings, link_targets, prose_lines, table_rows};
use aquifer_tests_tidy::unsafe_code::{has_unsafe_code, listed_files};
use aquifer_tests_tidy::words::{banned_words, defined_name, find_phrases, glossary_entries, words};
use aquifer_tests_tidy::{
    ProjectFile, before_tests, golden_tests, has_word, mutations, names_in_table, parse_allowances,
};

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
fn permitted_dependencies_are_read() {
    let text = "before\n\n| folder | crates | may use |\n|---|---|---|\n\
                | [`base`](x) | `one`, `two` | – |\n| [`pool`](y) | `pool`, `more` | `one` |\n\
                | [`top`](z) | `top` | base, pool |\n| [`end`](z) | `end` | all above |\n\n\
                | crate | from outside |\n|---|---|\n| `two`, `pool` | libc |\n| `one` | – |\n";
    let table = parse_allowances(text);
    let internal = |name: &str| &table[name].internal;
    assert_eq!((internal("one"), internal("two")), (&set(&[]), &set(&["one"])));
    assert_eq!((internal("pool"), internal("more")), (&set(&["one"]), &set(&["one", "pool"])));
    assert_eq!(internal("top"), &set(&["one", "two", "pool", "more"]));
    assert_eq!(internal("end").len(), 5);
    assert_eq!((table["one"].folder.as_str(), table.len()), ("base", 6));
    assert_eq!(table["one"].external, Some(set(&[])));
    assert_eq!(table["pool"].external, Some(set(&["libc"])));
    assert_eq!(table["top"].external, None);
}

#[test]
#[should_panic(expected = "no table")]
fn a_missing_table_of_dependencies_is_noticed() {
    let _ = parse_allowances("| crate | is |\n");
}

#[test]
fn mutations_are_found() {
    let text = "x::mutations! {\n    /// Doc.\n    pub enum Mutation {\n        /// One.\n        \
                SkipFlush,\n        KeepOld,\n    }\n}\nX,\n";
    assert_eq!(mutations(text), ["SkipFlush", "KeepOld"]);
    assert!(mutations("pub enum Mutation {\n    A,\n}\n").is_empty());
}

#[test]
fn a_part_of_a_word_is_not_the_word() {
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

#[test]
fn a_file_belongs_to_its_crate_or_to_itself() {
    let unit = |path: &str| ProjectFile { path: path.to_owned(), bytes: 0 }.unit().to_owned();
    assert_eq!(unit("crates/pool/extents/src/core/book.rs"), "crates/pool/extents");
    assert_eq!(unit("crates/pool/README.md"), "crates/pool/README.md");
    assert_eq!(unit("tests/e2e/Cargo.toml"), "tests/e2e");
    assert_eq!(unit("docs/formats/pool.md"), "docs/formats/pool.md");
    assert_eq!(unit("Cargo.toml"), "Cargo.toml");
}

#[test]
fn identifiers_are_split_into_words() {
    let text = |text: &str| -> Vec<String> { words(text).into_iter().map(|word| word.text).collect() };
    assert_eq!(text("FreeExtent free_extents ID_MAX"), ["free", "extent", "free", "extents", "id", "max"]);
    assert_eq!(text("TCPTarget, É1"), ["tcp", "target", "é1"]);
    assert_eq!(text("the node's"), ["the", "node", "s"]);
}

#[test]
fn phrases_are_found_across_line_breaks_but_not_across_punctuation() {
    let phrases = ["red".to_owned(), "very red".to_owned()];
    let find = |text: &str| find_phrases(text, &phrases);
    assert_eq!(find("// it is very\n    // red"), [(1, "very red"), (2, "red")]);
    assert_eq!(find("is_very_red"), [(1, "red"), (1, "very red")]);
    assert_eq!(find("IsVery, Red"), [(1, "red")]);
    assert_eq!(find("reddish"), []);
}

#[test]
fn definitions_are_found() {
    assert_eq!(defined_name("    pub(crate) const unsafe fn close<T>(self)"), Some("close"));
    assert_eq!(defined_name("pub struct Lease;"), Some("Lease"));
    assert_eq!(defined_name("mod tests {"), Some("tests"));
    assert_eq!(defined_name("const FN: u8 = 1;"), None);
    assert_eq!(defined_name("// fn close"), None);
    assert_eq!(defined_name("x.close()"), None);
}

#[test]
fn the_glossarys_tables_are_read() {
    let text = "| word | meaning | where |\n|---|---|---|\n| chunk | 4 KiB | `a.rs`, `b` |\n\n\
                | write | not | where |\n|---|---|---|\n| a | b; c d | all |\n| e | f | names |\n\
                | g | h | sense |\n";
    let banned = banned_words(text);
    assert_eq!(banned.everywhere, ["b", "c d"]);
    assert_eq!(banned.in_names, ["f"]);
    let entries = glossary_entries(text);
    assert_eq!((entries.len(), entries[0].word.as_str()), (1, "chunk"));
    assert_eq!(entries[0].paths, ["a.rs", "b"]);
}

#[test]
#[should_panic(expected = "unknown place")]
fn an_unknown_place_of_a_banned_word_is_noticed() {
    let _ = banned_words("| write | not | where |\n|---|---|---|\n| a | b | somewhere |\n");
}

#[test]
fn markdown_is_read() {
    let text = "# A `b`, c\n\ntext\n```text\n# no heading\n```\n## D-e\n| x | y |\n|---|---|\n| 1 | 2 |\n";
    assert_eq!(headings(text, 1), ["A `b`, c"]);
    assert_eq!(headings(text, 2), ["D-e"]);
    assert_eq!(anchors(text), ["a-b-c", "d-e"]);
    assert_eq!(prose_lines(text).map(|line| line.number).collect::<Vec<_>>(), [1, 2, 3, 7, 8, 9, 10]);
    assert_eq!(table_rows(text, &["x", "y"]), [["1", "2"]]);
    assert_eq!(code_spans("a `b` c `d e` f").collect::<Vec<_>>(), ["b", "d e"]);
    assert_eq!(code_spans("a `b` c ` d").collect::<Vec<_>>(), ["b"]);
    assert_eq!(link_targets("[a](b#c) and [d](e)").collect::<Vec<_>>(), ["b#c", "e"]);
}

#[test]
fn unsafe_code_is_found_and_its_list_is_read() {
    for text in ["    unsafe { f() }", "pub unsafe fn f() {}", "unsafe impl Send for X {}", "#[unsafe(x)]"] {
        assert!(has_unsafe_code(text), "{text}");
    }
    for text in ["// unsafe { f() }", "#![forbid(unsafe_code)]", "let unsafety = 1;"] {
        assert!(!has_unsafe_code(text), "{text}");
    }
    let table = "| folder | files with unsafe code | reason |\n|---|---|---|\n\
                 | `crates/a/src` | `b.rs`, `c/d.rs` | mappings |\n";
    assert_eq!(listed_files(table), set(&["crates/a/src/b.rs", "crates/a/src/c/d.rs"]));
}
