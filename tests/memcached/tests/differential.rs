//! Generated streams, sent to both servers.

use std::ops::Range;

use aquifer_tests_memcached::compare::{find_difference, shrink};
use aquifer_tests_memcached::server::memcached_is_installed;
use aquifer_tests_memcached::stream::chosen_seeds;
use aquifer_tests_memcached::{Options, Pair, Program, Script, Server, Stream, assert_equal};

use crate::Servers;

fn compare_seeds(pair: Pair<'_>, stream: Stream, own_seeds: Range<u64>) {
    for seed in chosen_seeds(own_seeds) {
        let mut script = stream.script(seed);
        if !pair.reference.has_cas() {
            remove_flushes(&mut script);
        }
        assert_equal(pair, &format!("{stream:?}, seed {seed}"), script);
    }
}

/// Removes all `flush_all`: without cas values it also deletes items that are stored later in the
/// same second.
fn remove_flushes(script: &mut Script) {
    for batch in &mut script.batches {
        batch.requests.retain(|request| !request.to_string().contains("flush_all"));
    }
}

fn compare(stream: Stream, own_seeds: Range<u64>) {
    let Some(servers) = Servers::start(&[]) else { return };
    compare_seeds(servers.pair(), stream, own_seeds);
}

/// Starts two servers of Debian's memcached with these arguments.
fn two_memcacheds(arguments: [&[&str]; 2]) -> Option<[Server; 2]> {
    let start = |arguments: &[&str]| Server::start(Options::new(Program::Memcached).with(arguments));
    memcached_is_installed().then(|| arguments.map(start))
}

#[test]
fn memcached_equals_itself() {
    let Some([reference, candidate]) = two_memcacheds([&[], &[]]) else { return };
    let pair = Pair { reference: &reference, candidate: &candidate };
    for stream in [Stream::Text, Stream::Meta, Stream::Mixed, Stream::Malformed] {
        compare_seeds(pair, stream, 0..10);
    }
    compare_seeds(pair, Stream::Large, 0..2);
}

/// Compares memcached with a memcached of other arguments. Returns the number of requests in the
/// script to which the first difference is shrunk.
fn shrunk_requests(stream: Stream, arguments: &[&str]) -> Option<usize> {
    let [reference, candidate] = two_memcacheds([&[], arguments])?;
    let pair = Pair { reference: &reference, candidate: &candidate };
    let mut scripts = (0..20).map(|seed| stream.script(seed));
    let found = scripts.find_map(|script| find_difference(pair, &script).map(|found| (script, found)));
    let (script, difference) = found.expect("the servers differ");
    let (script, _) = shrink(pair, script, difference);
    Some(script.requests())
}

#[test]
fn a_memcached_without_cas_is_found_and_shrunk_to_two_requests() {
    if let Some(requests) = shrunk_requests(Stream::Meta, &["-C"]) {
        assert!(requests <= 2, "{requests} requests");
    }
}

#[test]
fn a_memcached_with_smaller_items_is_found_and_shrunk_to_one_request() {
    if let Some(requests) = shrunk_requests(Stream::Large, &["-I", "512k"]) {
        assert_eq!(requests, 1);
    }
}

#[test]
fn text_commands_get_equal_replies() {
    compare(Stream::Text, 0..120);
}

#[test]
fn meta_commands_get_equal_replies() {
    compare(Stream::Meta, 0..120);
}

#[test]
fn text_and_meta_commands_get_equal_replies() {
    compare(Stream::Mixed, 0..120);
}

#[test]
fn malformed_commands_get_equal_replies() {
    compare(Stream::Malformed, 0..80);
}

#[test]
fn large_values_get_equal_replies() {
    compare(Stream::Large, 0..6);
}

#[test]
fn replies_without_cas_are_equal() {
    let Some(servers) = Servers::start(&["-C"]) else { return };
    for stream in [Stream::Text, Stream::Meta, Stream::Mixed] {
        compare_seeds(servers.pair(), stream, 0..20);
    }
}

#[test]
fn replies_on_a_socket_are_equal() {
    let folder = tempfile::tempdir().expect("a folder");
    if !memcached_is_installed() {
        return;
    }
    let start = |program, name| Server::start(Options::new(program).on_socket(&folder.path().join(name)));
    let reference = start(Program::Memcached, "memcached");
    let candidate = start(Program::Aquifer, "aquifer");
    compare_seeds(Pair { reference: &reference, candidate: &candidate }, Stream::Mixed, 0..20);
}

/// Long versions of the tests, with many more seeds.
mod long {
    use super::*;

    #[test]
    fn many_text_commands_get_equal_replies() {
        compare(Stream::Text, 1000..5000);
    }

    #[test]
    fn many_meta_commands_get_equal_replies() {
        compare(Stream::Meta, 1000..5000);
    }

    #[test]
    fn many_text_and_meta_commands_get_equal_replies() {
        compare(Stream::Mixed, 1000..5000);
    }

    #[test]
    fn many_malformed_commands_get_equal_replies() {
        compare(Stream::Malformed, 1000..4000);
    }

    #[test]
    fn many_large_values_get_equal_replies() {
        compare(Stream::Large, 1000..1100);
    }

    #[test]
    fn many_replies_without_cas_are_equal() {
        let Some(servers) = Servers::start(&["-C"]) else { return };
        for stream in [Stream::Text, Stream::Meta, Stream::Mixed] {
            compare_seeds(servers.pair(), stream, 1000..1800);
        }
    }
}
