//! Single commands with replies that are easy to get wrong. All differing cases are reported
//! together.
//!
//! Before each case the key `k` has the value `10`, flags 5 and a lifetime of 1000 s, and `n` does
//! not exist. After the case, the keys are read. `{251}` stands for 251 times `x`.

use aquifer_tests_memcached::compare::find_difference;
use aquifer_tests_memcached::escape::escape;
use aquifer_tests_memcached::script::Key;
use aquifer_tests_memcached::{Batch, End, Pair, Request, Script};

use crate::Servers;
use crate::case_lists::{CLOSING, LINES, META, NUMBERS, STORAGE, UNFINISHED};

fn expand(case: &str) -> String {
    [31, 32, 250, 251]
        .iter()
        .fold(case.to_owned(), |text, length| text.replace(&format!("{{{length}}}"), &"x".repeat(*length)))
}

fn script(case: &str, end: End) -> Script {
    let batch = |text: &str| Batch::new(vec![Request::literal(text)]);
    let case = Batch { end, ..batch(&expand(case)) };
    let keys = ["k", "n", "foo"].map(Key::plain).to_vec();
    let state: String = keys
        .iter()
        .map(|key| String::from_utf8(key.meta_line("mg", "k s f t c v")).expect("the bytes are text"))
        .collect();
    Script { batches: vec![batch("set k 5 1000 2\r\n10\r\n"), case, batch(&state)], keys }
}

/// The differences of all cases.
fn differences(pair: Pair<'_>, cases: &[String], end: End) -> Vec<String> {
    let compare = |case: &String| {
        let difference = find_difference(pair, &script(case, end))?;
        Some(format!("{}\n{difference}", escape(case.as_bytes())))
    };
    cases.iter().filter_map(compare).collect()
}

fn assert_equal_cases(cases: &[String], end: End) {
    let Some(servers) = Servers::start(&[]) else { return };
    let differences = differences(servers.pair(), cases, end);
    let (wrong, all) = (differences.len(), cases.len());
    assert!(wrong == 0, "{wrong} of {all} cases differ:\n{}", differences.join("\n"));
}

fn owned(cases: &[&str]) -> Vec<String> {
    cases.iter().map(ToString::to_string).collect()
}

#[test]
fn text_commands_get_the_replies_of_memcached() {
    assert_equal_cases(&owned(LINES), End::Sentinel);
}

#[test]
fn storage_commands_get_the_replies_of_memcached() {
    assert_equal_cases(&owned(STORAGE), End::Sentinel);
}

#[test]
fn meta_commands_get_the_replies_of_memcached() {
    assert_equal_cases(&owned(META), End::Sentinel);
}

#[test]
fn numbers_are_changed_as_by_memcached() {
    let set = |number: &&str| format!("set k 5 1000 {}\r\n{number}\r\n", number.len());
    let change = |change: &str| NUMBERS.iter().map(|number| set(number) + change).collect::<Vec<String>>();
    let changes =
        ["incr k 1\r\nget k\r\n", "decr k 1\r\nget k\r\n", "ma k v\r\nmg k v\r\n", "ma k MD v\r\nmg k v\r\n"];
    for cases in changes.map(change) {
        assert_equal_cases(&cases, End::Sentinel);
    }
}

#[test]
fn the_server_closes_connections_when_memcached_does() {
    let cases: Vec<String> = CLOSING.iter().map(|case| format!("version\r\nmn\r\n{case}")).collect();
    assert_equal_cases(&cases, End::Sentinel);
}

#[test]
fn an_unfinished_command_has_no_effect() {
    assert_equal_cases(&owned(UNFINISHED), End::HalfClose);
}

#[test]
fn replies_are_complete_when_the_client_closes_its_writing_side() {
    assert_equal_cases(&owned(LINES), End::HalfClose);
    assert_equal_cases(&owned(META), End::HalfClose);
}
