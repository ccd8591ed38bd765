//! Restarts of a server whose items outlive an orderly stop, with `-e`.

use aquifer_tests_memcached::{Options, Program, Server};
use rustix::process::Signal;

use crate::start_aquifer;

const ITEMS: u32 = 2000;

/// The replies for all items, with their cas numbers.
fn items(server: &Server) -> Vec<u8> {
    let mut connection = server.connect();
    (0..ITEMS).flat_map(|number| connection.request(format!("gets key-{number}\r\n"))).collect()
}

fn is_empty(server: &Server) -> bool {
    items(server) == b"END\r\n".repeat(ITEMS as usize)
}

#[test]
fn items_outlive_an_orderly_stop() {
    let folder = tempfile::tempdir_in("/dev/shm").expect("there is a file system in memory");
    let file = folder.path().join("items");
    let file = file.to_str().expect("the name is text");
    let mut expected = Vec::new();
    for signal in [Signal::USR1, Signal::TERM, Signal::INT] {
        let server = start_aquifer(&["-e", file]);
        let mut connection = server.connect();
        if expected.is_empty() {
            assert!(is_empty(&server));
            for number in 0..ITEMS {
                let value = format!("{number}-").repeat(usize::try_from(number % 40).expect("small"));
                let request = format!("set key-{number} {number} 5000 {}\r\n{value}\r\n", value.len());
                assert_eq!(connection.request(request), b"STORED\r\n");
            }
        } else {
            assert!(items(&server) == expected, "the items differ after a restart");
        }
        // A new item has a cas number that no item had before.
        let request = format!("ms key-{} 1 c\r\nx\r\n", signal.as_raw());
        assert!(connection.request(request).starts_with(b"HD c"));
        let left = connection.request("mg key-7 t\r\n");
        let left = std::str::from_utf8(&left).ok().and_then(|reply| reply.strip_prefix("HD t"));
        let left: u32 = left.and_then(|seconds| seconds.trim_end().parse().ok()).expect("the item expires");
        assert!((4000..=5000).contains(&left), "{left} s are left of 5000");
        expected = items(&server);
        assert!(server.end_by(signal));
    }
    let server = start_aquifer(&["-e", file]);
    assert!(items(&server) == expected);
    assert!(!server.end_by(Signal::KILL));
    assert!(is_empty(&start_aquifer(&["-e", file])), "the items of a killed server are not used");
}

#[test]
fn a_server_whose_file_was_shortened_ends_with_a_message() {
    let folder = tempfile::tempdir_in("/dev/shm").expect("there is a file system in memory");
    let file = folder.path().join("items");
    let log = folder.path().join("log");
    let options = Options::new(Program::Aquifer).with(&["-e", file.to_str().expect("the name is text")]);
    let server = Server::start(options.with_log(&log));
    assert_eq!(server.connect().request("set key 0 0 1\r\nx\r\n"), b"STORED\r\n");
    std::fs::File::options()
        .write(true)
        .open(&file)
        .and_then(|file| file.set_len(0))
        .expect("the file is writable");
    server.connect().send(b"get key\r\n");
    assert!(!server.await_end());
    let said = std::fs::read_to_string(&log).expect("the log can be read");
    assert!(said.contains("the file of -e was shortened"), "{said}");
}

#[test]
fn items_of_a_server_with_other_options_are_not_used() {
    let folder = tempfile::tempdir_in("/dev/shm").expect("there is a file system in memory");
    let file = folder.path().join("items");
    let file = file.to_str().expect("the name is text");
    for arguments in [&["-e", file][..], &["-e", file, "-C"], &["-e", file, "--partitions", "7"]] {
        let server = start_aquifer(arguments);
        assert!(is_empty(&server));
        assert_eq!(server.connect().request("set key-1 0 0 1\r\nx\r\n"), b"STORED\r\n");
        assert!(server.end_by(Signal::TERM));
    }
}
