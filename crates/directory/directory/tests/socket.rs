//! Tests of the embedded directory's socket: access, limits, invalid bytes, and restarts of the
//! server.

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use aquifer_directory::embedded::wire::{self, DirectoryRequest, DirectoryResponse};
use aquifer_directory::embedded::{DirectoryServer, DirectoryServerOptions, EmbeddedDirectory, connect};
use aquifer_directory::{Directory, DirectoryError};

const TEST_TIMEOUT: Duration = Duration::from_secs(60);

struct SocketFixture {
    folder: tempfile::TempDir,
}

impl SocketFixture {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    fn start(&self, options: DirectoryServerOptions) -> DirectoryServer {
        let directory = EmbeddedDirectory::open(&self.folder.path().join("directory.redb")).unwrap();
        DirectoryServer::start(directory, &self.socket(), options).unwrap()
    }

    fn raw(&self) -> UnixStream {
        let stream = UnixStream::connect(self.socket()).unwrap();
        stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        stream
    }
}

fn frame(body: &[u8]) -> Vec<u8> {
    [&u32::try_from(body.len()).unwrap().to_le_bytes()[..], body].concat()
}

fn read_frame(stream: &mut UnixStream) -> Vec<u8> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).unwrap();
    let mut body = vec![0; usize::try_from(u32::from_le_bytes(length)).unwrap()];
    stream.read_exact(&mut body).unwrap();
    body
}

/// Checks that the server closes the connection, possibly after an answer.
fn assert_closed(stream: &mut UnixStream) {
    match stream.read_to_end(&mut Vec::new()) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}"),
    }
}

#[test]
fn the_socket_is_private_and_vanishes_with_the_server() {
    let fixture = SocketFixture::new();
    let server = fixture.start(DirectoryServerOptions::default());
    assert_eq!(std::fs::metadata(fixture.socket()).unwrap().permissions().mode() & 0o777, 0o600);
    drop(server);
    assert!(!fixture.socket().exists());
    let error = connect(&fixture.socket()).unwrap_err();
    assert!(matches!(error, DirectoryError::Unavailable { .. }));
    assert!(error.to_string().contains(fixture.socket().to_str().unwrap()), "{error}");
}

#[test]
fn a_socket_without_a_listener_is_replaced_and_others_are_not() {
    let fixture = SocketFixture::new();
    drop(std::os::unix::net::UnixListener::bind(fixture.socket()).unwrap());
    assert!(fixture.socket().exists(), "the file outlives its listener");
    let _server = fixture.start(DirectoryServerOptions::default());
    let other = EmbeddedDirectory::open(&fixture.folder.path().join("other.redb")).unwrap();
    let error =
        DirectoryServer::start(other, &fixture.socket(), DirectoryServerOptions::default()).unwrap_err();
    assert!(error.to_string().contains("another server"), "{error}");
    connect(&fixture.socket()).unwrap().put("k", b"", None).unwrap();
}

#[test]
fn a_file_that_is_no_socket_is_not_replaced() {
    let fixture = SocketFixture::new();
    std::fs::write(fixture.socket(), b"of a user").unwrap();
    let directory = EmbeddedDirectory::open(&fixture.folder.path().join("directory.redb")).unwrap();
    let error =
        DirectoryServer::start(directory, &fixture.socket(), DirectoryServerOptions::default()).unwrap_err();
    assert!(error.to_string().contains("is not a socket"), "{error}");
    assert_eq!(std::fs::read(fixture.socket()).unwrap(), b"of a user");
}

#[test]
fn a_socket_path_that_is_too_long_is_an_error() {
    let fixture = SocketFixture::new();
    let directory = EmbeddedDirectory::open(&fixture.folder.path().join("directory.redb")).unwrap();
    let long = fixture.folder.path().join("s".repeat(120));
    assert!(matches!(
        DirectoryServer::start(directory, &long, DirectoryServerOptions::default()),
        Err(DirectoryError::Unavailable { .. })
    ));
}

#[test]
fn a_wrong_hello_is_refused_with_a_reason() {
    let fixture = SocketFixture::new();
    let _server = fixture.start(DirectoryServerOptions::default());
    let mut newer = wire::hello(None);
    newer[8] = 9;
    for (hello, reason) in [(newer, "version 9"), (b"GET / HTTP/1.0\r\n".to_vec(), "protocol of Aquifer")] {
        let mut stream = fixture.raw();
        stream.write_all(&frame(&hello)).unwrap();
        let why = wire::check_server_hello(&read_frame(&mut stream)).unwrap_err().to_string();
        assert!(why.contains(reason), "{why}");
        assert_closed(&mut stream);
    }
}

#[test]
fn garbage_ends_its_own_connection_only() {
    let fixture = SocketFixture::new();
    let _server = fixture.start(DirectoryServerOptions::default());
    let client = connect(&fixture.socket()).unwrap();
    client.put("k", b"v", None).unwrap();
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/corpus/wire");
    let corpus = std::fs::read_dir(corpus).unwrap().map(|file| std::fs::read(file.unwrap().path()).unwrap());
    let oversized = (u32::MAX).to_le_bytes().to_vec();
    let cut = frame(&wire::hello(None))[..7].to_vec();
    for bytes in corpus.map(|body| frame(&body)).chain([oversized.clone(), cut]) {
        let mut stream = fixture.raw();
        let _refused = stream.write_all(&bytes);
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        assert_closed(&mut stream);
    }
    // Invalid bytes after a valid hello.
    for bytes in [frame(b"\xff"), frame(b""), oversized] {
        let mut stream = fixture.raw();
        stream.write_all(&frame(&wire::hello(None))).unwrap();
        assert_eq!(wire::check_server_hello(&read_frame(&mut stream)), Ok(()));
        stream.write_all(&bytes).unwrap();
        assert_closed(&mut stream);
    }
    assert!(client.get("k").unwrap().is_some());
}

#[test]
fn a_peer_that_stalls_within_a_frame_is_dropped() {
    let fixture = SocketFixture::new();
    let _server = fixture
        .start(DirectoryServerOptions { stall_timeout: Duration::from_millis(50), ..Default::default() });
    let mut stream = fixture.raw();
    stream.write_all(&frame(&wire::hello(None))[..7]).unwrap();
    assert_closed(&mut stream);
}

#[test]
fn a_request_is_answered_byte_for_byte_as_described() {
    let fixture = SocketFixture::new();
    let _server = fixture.start(DirectoryServerOptions::default());
    let mut stream = fixture.raw();
    stream.write_all(&frame(&wire::hello(None))).unwrap();
    assert_eq!(wire::check_server_hello(&read_frame(&mut stream)), Ok(()));
    stream.write_all(&frame(&DirectoryRequest::Get("absent".to_owned()).encode())).unwrap();
    assert_eq!(DirectoryResponse::decode(&read_frame(&mut stream)), Some(DirectoryResponse::Entry(None)));
}

#[test]
fn connections_are_bounded() {
    let fixture = SocketFixture::new();
    let _server = fixture.start(DirectoryServerOptions { connections_max: 2, ..Default::default() });
    let first = connect(&fixture.socket()).unwrap();
    let mut watch = first.watch("", 0).expect("the second connection");
    let error = connect(&fixture.socket()).unwrap_err();
    assert!(
        matches!(&error, DirectoryError::Refused { why, .. } if why.contains("2 connections")),
        "{error}"
    );
    first.put("k", b"", None).expect("present connections are still served");
    assert_eq!(watch.next(TEST_TIMEOUT).unwrap().unwrap().key, "k");
    drop(watch);
    // The server detects the end of the watch some time later.
    while let Err(error) = connect(&fixture.socket()) {
        assert!(matches!(error, DirectoryError::Refused { .. }), "{error}");
        std::thread::yield_now();
    }
}

#[test]
fn a_client_outlives_a_restart_of_the_server() {
    let fixture = SocketFixture::new();
    let server = fixture.start(DirectoryServerOptions::default());
    let client = connect(&fixture.socket()).unwrap();
    let revision = client.put("w/1", b"", None).unwrap();
    let mut watch = client.watch("w/", 0).unwrap();
    let lease = client.lease_grant(TEST_TIMEOUT).unwrap();
    drop(server);
    assert!(matches!(client.get("w/1"), Err(DirectoryError::Unavailable { .. })));
    assert!(matches!(watch.next(TEST_TIMEOUT), Err(DirectoryError::Unavailable { .. })));

    let _server = fixture.start(DirectoryServerOptions::default());
    assert!(client.get("w/1").unwrap().is_some());
    client.lease_keep_alive(lease.id).unwrap();
    let mut watch = client.watch("w/", revision + 1).unwrap();
    client.put("w/2", b"", Some(lease.id)).unwrap();
    assert_eq!(watch.next(TEST_TIMEOUT).unwrap().unwrap().key, "w/2");
}

/// Waits until [`DirectoryServer::is_used`] has the expected value.
fn await_used(server: &DirectoryServer, is_used: bool) {
    let end = Instant::now() + TEST_TIMEOUT;
    while server.is_used().unwrap() != is_used {
        assert!(Instant::now() < end, "the server does not detect it");
        std::thread::yield_now();
    }
}

#[test]
fn a_server_is_used_while_a_client_is_connected_or_has_a_lease() {
    let fixture = SocketFixture::new();
    let mut server = fixture.start(DirectoryServerOptions::default());
    assert!(!server.is_used().unwrap());
    let client = connect(&fixture.socket()).unwrap();
    client.put("k", b"", None).unwrap();
    assert!(server.is_used().unwrap());
    let lease = client.lease_grant(Duration::from_secs(1000)).unwrap();
    client.lease_revoke(lease.id).unwrap();
    drop(client);
    await_used(&server, false);
    let client = connect(&fixture.socket()).unwrap();
    let lease = client.lease_grant(Duration::from_secs(1000)).unwrap();
    drop(client);
    let client = connect(&fixture.socket()).unwrap();
    client.lease_revoke(lease.id).unwrap();
    drop(client);
    await_used(&server, false);

    // Another server may listen at the path of a deleted socket.
    std::fs::remove_file(fixture.socket()).unwrap();
    std::fs::write(fixture.socket(), "of another server").unwrap();
    server.leave_socket_file();
    drop(server);
    assert!(fixture.socket().exists());
}

/// Leases end by the system's clock, and a watch reports it without any further call.
#[test]
fn a_lease_ends_without_a_further_call() {
    let fixture = SocketFixture::new();
    let _server = fixture.start(DirectoryServerOptions::default());
    let client = connect(&fixture.socket()).unwrap();
    let mut watch = client.watch("", 0).unwrap();
    // On a machine that stalls for a moment, the lease may end before it is used.
    let lease = loop {
        let lease = client.lease_grant(aquifer_directory::limits::TTL_MIN).unwrap();
        match client.put("k", b"", Some(lease.id)) {
            Err(DirectoryError::LeaseGone(_)) => {}
            put => break put.map(|_| lease).unwrap(),
        }
    };
    let kinds =
        [watch.next(TEST_TIMEOUT).unwrap().unwrap().kind, watch.next(TEST_TIMEOUT).unwrap().unwrap().kind];
    assert_eq!(kinds[1], aquifer_directory::WatchEventKind::Delete);
    assert_eq!(client.lease_keep_alive(lease.id), Err(DirectoryError::LeaseGone(lease.id)));
}
