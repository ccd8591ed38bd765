//! Encrypted connections, with `-Z`.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use aquifer_tests_memcached::Server;
use aquifer_tests_memcached::connection::STALL_TIMEOUT;
use aquifer_tests_memcached::server::free_port;
use aquifer_tests_support::skip;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use crate::start_aquifer;

type Client = BufReader<StreamOwned<ClientConnection, TcpStream>>;

/// Writes a self-signed certificate and its key; returns false if openssl is not installed.
fn write_certificate(folder: &Path) -> bool {
    let mut command = Command::new("openssl");
    command.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]);
    command.args(["-days", "2", "-subj", "/CN=cache", "-addext", "subjectAltName=IP:127.0.0.1"]);
    command.args(["-addext", "basicConstraints=critical,CA:FALSE"]);
    command.args(["-keyout", "key.pem", "-out", "chain.pem"]).current_dir(folder);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    match command.status() {
        Ok(status) => {
            assert!(status.success(), "openssl writes no certificate");
            true
        }
        Err(error) => {
            skip(&format!("openssl cannot be started: {error}"));
            false
        }
    }
}

fn connect(server: &Server, chain: &Path) -> Client {
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_file(chain).expect("a certificate"))
        .expect("the certificate is valid");
    let config = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
    let name = ServerName::from(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST));
    let connection = ClientConnection::new(Arc::new(config), name).expect("the options are valid");
    let socket = TcpStream::connect((Ipv4Addr::LOCALHOST, server.port())).expect("the server listens");
    socket.set_read_timeout(Some(STALL_TIMEOUT)).expect("the socket has the option");
    BufReader::new(StreamOwned::new(connection, socket))
}

fn line(client: &mut Client) -> String {
    let mut line = String::new();
    client.read_line(&mut line).expect("the server replies with a line");
    line
}

#[test]
fn requests_and_long_replies_are_encrypted() {
    let folder = tempfile::tempdir().expect("a folder can be made");
    if !write_certificate(folder.path()) {
        return;
    }
    let chain = folder.path().join("chain.pem");
    let files =
        format!("ssl_chain_cert={},ssl_key={}", chain.display(), folder.path().join("key.pem").display());
    let server = start_aquifer(&["-Z", "-o", &files]);
    let mut client = connect(&server, &chain);
    let value: Vec<u8> =
        (0..700_000u32).flat_map(|number| number.to_le_bytes().into_iter().take(1)).collect();
    let request = [format!("set long 0 0 {}\r\n", value.len()).as_bytes(), &value, b"\r\n"].concat();
    client.get_mut().write_all(&request).expect("the server reads");
    assert_eq!(line(&mut client), "STORED\r\n");
    // Replies that are longer than the socket's buffers wait, and other clients are served.
    client.get_mut().write_all(&b"get long\r\n".repeat(10)).expect("the server reads");
    let mut other = connect(&server, &chain);
    other.get_mut().write_all(b"refresh_certs\r\nset a 0 0 1\r\nx\r\nget a\r\n").expect("the server reads");
    let replies: Vec<_> = (0..5).map(|_| line(&mut other)).collect();
    assert_eq!(replies, ["OK\r\n", "STORED\r\n", "VALUE a 0 1\r\n", "x\r\n", "END\r\n"]);
    for _ in 0..10 {
        assert_eq!(line(&mut client), format!("VALUE long 0 {}\r\n", value.len()));
        let mut found = vec![0; value.len() + 2];
        client.read_exact(&mut found).expect("the value arrives");
        assert!(found[..value.len()] == value);
        assert_eq!(line(&mut client), "END\r\n");
    }
    // The request after a long value arrives in the same record as the value's end.
    let requests = [&request[..], b"get a\r\n"].concat();
    other.get_mut().write_all(&requests).expect("the server reads");
    let replies: Vec<_> = (0..4).map(|_| line(&mut other)).collect();
    assert_eq!(replies, ["STORED\r\n", "VALUE a 0 1\r\n", "x\r\n", "END\r\n"]);
    // A client that does not encrypt receives no value, and is disconnected.
    let mut plain = TcpStream::connect((Ipv4Addr::LOCALHOST, server.port())).expect("the server listens");
    plain.write_all(b"get a\r\n").expect("the server reads");
    let mut reply = Vec::new();
    // The connection may end by a reset.
    let _end = plain.read_to_end(&mut reply);
    assert!(!reply.windows(5).any(|part| part == b"VALUE"), "{}", reply.escape_ascii());
}

/// Starts a server with files that it must refuse, and returns the error.
fn refusal(chain: &Path, key: &Path) -> String {
    let files = format!("ssl_chain_cert={},ssl_key={}", chain.display(), key.display());
    let port = free_port().to_string();
    let mut command = Command::new(aquifer_tests_e2e::build::binary());
    let output = command.args(["cache", "-p", &port, "-Z", "-o", &files]).output();
    let output = output.expect("the binary can be started");
    assert!(!output.status.success());
    String::from_utf8(output.stderr).expect("text")
}

#[test]
fn a_key_is_used_with_any_label_and_errors_name_the_file_of_the_key() {
    let folder = tempfile::tempdir().expect("a folder can be made");
    if !write_certificate(folder.path()) {
        return;
    }
    let [chain, key, other] = ["chain.pem", "key.pem", "other.pem"].map(|name| folder.path().join(name));
    let text = std::fs::read_to_string(&key).expect("openssl has written it");
    for label in ["RSA PRIVATE KEY", "EC PRIVATE KEY", "PRIVATE KEY"] {
        std::fs::write(&other, text.replace("PRIVATE KEY", label)).expect("the folder is writable");
        let files = format!("ssl_chain_cert={},ssl_key={}", chain.display(), other.display());
        let server = start_aquifer(&["-Z", "-o", &files]);
        let mut client = connect(&server, &chain);
        client.get_mut().write_all(b"get a\r\n").expect("the server reads");
        assert_eq!(line(&mut client), "END\r\n", "{label}");
    }
    let pem = "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n";
    std::fs::write(&other, pem).expect("the folder is writable");
    let why = refusal(&chain, &other);
    assert!(why.contains("the private key of") && why.contains("other.pem cannot be used"), "{why}");
    let second = tempfile::tempdir().expect("a folder can be made");
    assert!(write_certificate(second.path()));
    let why = refusal(&chain, &second.path().join("key.pem"));
    assert!(why.contains("is not that of the certificate of"), "{why}");
}
