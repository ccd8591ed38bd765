//! The answers of the metrics server to collectors and to other clients.

use std::fmt;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use aquifer_metrics::server::{CONNECTIONS_MAX, HEADERS_MAX, REQUEST_BYTES_MAX};
use aquifer_metrics::write::{HistogramValue, MetricFamily, counters, gauges, histograms, label};
use aquifer_metrics::{
    Collector, DescriptorEncoder, MetricsAddress, MetricsError, MetricsListener, MetricsServer, Registry,
    Unit,
};
use aquifer_tests_support::openmetrics::{HttpAnswer, read_answer, scrape, send_request};

const GET: &[u8] = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";
/// The name of a program that needs escaping.
const NAME: &str = "a\"} 1\nb\\{";
/// Rows that do not fit into the buffer of a socket.
const ROWS: u64 = 200_000;

#[derive(Debug)]
struct TestMetrics {
    rows: u64,
    value: u64,
}

impl Collector for TestMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let family = |name, unit| MetricFamily { name, help: "Of a test.", unit };
        counters(&mut encoder, family("things", None), [(vec![label("name", NAME)], 7)])?;
        let rows = (0..self.rows).map(|row| (vec![label("row", row)], row));
        gauges(&mut encoder, family("row", None), rows)?;
        gauges(&mut encoder, family("size", Some(&Unit::Bytes)), [(vec![], self.value)])?;
        let histogram =
            HistogramValue { sum: 2.5, count: 3, buckets: vec![(0.5, 2), (1.0, 0), (f64::MAX, 1)] };
        histograms(&mut encoder, family("wait", Some(&Unit::Seconds)), [(vec![label("a", 1)], histogram)])
    }
}

fn server_of(address: &str, metrics: TestMetrics) -> MetricsServer {
    let listener =
        MetricsListener::bind(&address.parse().expect("the address is valid")).expect("the address is free");
    let mut registry = Registry::with_prefix("test");
    registry.register_collector(Box::new(metrics));
    MetricsServer::start(listener, registry).expect("a thread can be started")
}

fn server() -> MetricsServer {
    server_of("127.0.0.1:0", TestMetrics { rows: 1, value: 5 })
}

fn connect(server: &MetricsServer) -> TcpStream {
    TcpStream::connect(server.address().to_string()).expect("it listens")
}

#[test]
fn metrics_are_read_back() {
    let server = server();
    let samples = scrape(&server.address().to_string()).expect("the metrics are valid");
    assert_eq!(samples.sum("test_things_total", &[("name", NAME)]), Some(7.0));
    assert_eq!(samples.sum("test_size_bytes", &[]), Some(5.0));
    assert_eq!(samples.sum("test_wait_seconds_bucket", &[("le", "1.0")]), Some(2.0));
    assert_eq!(samples.sum("test_wait_seconds_bucket", &[("le", "+Inf")]), Some(3.0));
    assert_eq!(samples.sum("test_wait_seconds_sum", &[]), Some(2.5));
}

#[test]
fn long_answers_are_complete() {
    let server = server_of("127.0.0.1:0", TestMetrics { rows: ROWS, value: 5 });
    let samples = scrape(&server.address().to_string()).expect("the metrics are valid");
    assert_eq!(samples.of("test_row", &[]).count() as u64, ROWS);
}

#[test]
fn a_unix_socket_is_private_and_is_removed_with_the_server() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("metrics");
    let address = format!("unix:{}", path.display());
    // A killed server leaves the file of its socket.
    drop(UnixListener::bind(&path).expect("a socket"));
    let server = server_of(&address, TestMetrics { rows: 1, value: 5 });
    assert_eq!(std::fs::metadata(&path).expect("it is there").permissions().mode() & 0o777, 0o600);
    assert_eq!(scrape(&address).expect("the metrics are valid").sum("test_size_bytes", &[]), Some(5.0));
    drop(server);
    assert!(!path.exists());
}

#[test]
fn other_files_and_sockets_in_use_are_not_removed() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("metrics");
    let address: MetricsAddress = format!("unix:{}", path.display()).parse().expect("the address is valid");
    std::fs::write(&path, "precious").expect("a file");
    assert!(matches!(MetricsListener::bind(&address), Err(MetricsError::Listen { .. })));
    assert_eq!(std::fs::read_to_string(&path).expect("it is still there"), "precious");
    std::fs::remove_file(&path).expect("it is ours");
    let other = UnixListener::bind(&path).expect("a socket");
    assert!(matches!(MetricsListener::bind(&address), Err(MetricsError::Listen { .. })));
    drop(UnixStream::connect(&path).expect("it still listens"));
    drop(other);
    let tcp = server();
    let why = MetricsListener::bind(tcp.address()).expect_err("it is taken").to_string();
    assert!(why.contains(&tcp.address().to_string()) && why.contains("--metrics"), "{why}");
}

#[test]
fn only_get_metrics_is_answered() {
    let server = server();
    let address = server.address().to_string();
    let ask_for = |line: &str| {
        send_request(&address, format!("{line} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n").as_bytes())
            .expect("an answer")
    };
    assert_eq!(ask_for("GET /metrics?a=b").status, 200);
    for path in ["/", "/metric", "/metrics/", "//metrics", "/METRICS", "/../metrics", "*"] {
        assert!(matches!(ask_for(&format!("GET {path}")).status, 404 | 400), "{path}");
    }
    for method in ["POST", "PUT", "DELETE", "OPTIONS", "NONSENSE"] {
        let HttpAnswer { status, head, .. } = ask_for(&format!("{method} /metrics"));
        assert_eq!(status, 405, "{method}");
        assert!(head.to_lowercase().contains("allow: get, head"), "{head}");
    }
    let HttpAnswer { status, body, .. } = ask_for("HEAD /metrics");
    assert_eq!((status, body.as_str()), (200, ""));
}

#[test]
fn collectors_get_the_format_that_they_accept() {
    let server = server();
    let ask = |accepted: &str| {
        let request = format!("GET /metrics HTTP/1.1\r\nHost: x\r\n{accepted}\r\n");
        send_request(&server.address().to_string(), request.as_bytes()).expect("an answer")
    };
    for accepted in ["", "Accept: */*\r\n", "Accept: text/plain;version=0.0.4\r\n"] {
        let answer = ask(accepted);
        assert!(answer.head.contains("text/plain; version=0.0.4") && !answer.body.contains("# EOF"));
    }
    let answer = ask("Accept: application/openmetrics-text;version=1.0.0;q=0.8,text/plain;q=0.5\r\n");
    assert!(answer.head.contains("application/openmetrics-text") && answer.body.ends_with("# EOF\n"));
}

#[test]
fn a_value_that_cannot_be_encoded_is_an_error() {
    let server = server_of("127.0.0.1:0", TestMetrics { rows: 1, value: u64::MAX });
    assert_eq!(send_request(&server.address().to_string(), GET).expect("an answer").status, 500);
}

#[test]
fn requests_are_bounded() {
    let server = server();
    let address = server.address().to_string();
    let of_headers = |count: usize| {
        let lines: String = (0..count).map(|number| format!("x-{number}: y\r\n")).collect();
        send_request(&address, format!("GET /metrics HTTP/1.1\r\n{lines}\r\n").as_bytes())
    };
    assert_eq!(of_headers(HEADERS_MAX).expect("an answer").status, 200);
    assert_eq!(of_headers(HEADERS_MAX + 1).expect("an answer").status, 431);
    let long = |bytes: usize| {
        send_request(
            &address,
            format!("GET /metrics HTTP/1.1\r\nx: {}\r\n\r\n", "y".repeat(bytes)).as_bytes(),
        )
    };
    assert_eq!(long(REQUEST_BYTES_MAX / 2).expect("an answer").status, 200);
    // The connection may be closed before a client has sent all of a much too long request.
    assert!(long(REQUEST_BYTES_MAX * 2).is_ok_and(|answer| answer.status == 431) || long(1 << 20).is_err());
    assert!(send_request(&address, GET).is_ok_and(|answer| answer.status == 200));
}

#[test]
fn invalid_requests_do_not_disturb_others() {
    let server = server();
    let address = server.address().to_string();
    let mut garbage = 0x9e37_79b9_u64;
    for length in [0, 1, 7, 100, 5000, 60_000] {
        let bytes: Vec<u8> = (0..length)
            .map(|_| {
                garbage = garbage.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                garbage.to_le_bytes()[7]
            })
            .collect();
        let _gone = connect(&server).write_all(&bytes);
    }
    for text in [
        "\r\n\r\n\r\n",
        "GET /metrics HTTP/0.9\r\n\r\n",
        "GET /metrics HTTP/9.9\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "GET /metrics HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        "GET /metrics HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
        "GET /metrics HTTP/1.1\r\nContent-Length: 18446744073709551615\r\n\r\n",
    ] {
        let mut stream = connect(&server);
        stream.write_all(text.as_bytes()).expect("it listens");
        let _either = read_answer(&stream);
    }
    assert!(scrape(&address).is_ok());
}

#[test]
fn slow_clients_make_room_for_others() {
    let server = server();
    // Incomplete requests on all connections that are served at a time. A further client replaces
    // the oldest.
    let mut slow: Vec<TcpStream> = (0..CONNECTIONS_MAX).map(|_| connect(&server)).collect();
    for stream in &mut slow {
        stream.write_all(b"GET /metrics HTTP/1.1\r\n").expect("it listens");
    }
    assert_eq!(send_request(&server.address().to_string(), GET).expect("an answer").status, 200);
    for stream in &mut slow {
        stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a plain option");
    }
    let mut answer = Vec::new();
    let _either = slow[0].read_to_end(&mut answer);
    assert_eq!(answer, b"", "the oldest connection is closed without an answer");
    for stream in &mut slow[1..] {
        answer.clear();
        let _either = stream.read_to_end(&mut answer);
        assert!(!answer.starts_with(b"HTTP/1.1 200"));
    }
}

#[test]
fn a_server_stops_while_a_client_is_connected() {
    let server = server();
    let mut stream = connect(&server);
    stream.write_all(b"GET /met").expect("it listens");
    let address = server.address().to_string();
    drop(server);
    assert!(TcpStream::connect(address).is_err());
}

mod long {
    use super::*;

    #[test]
    fn a_client_that_does_not_read_is_disconnected() {
        let server = server_of("127.0.0.1:0", TestMetrics { rows: ROWS, value: 5 });
        let mut deaf: Vec<TcpStream> = (0..CONNECTIONS_MAX).map(|_| connect(&server)).collect();
        for stream in &mut deaf {
            stream.write_all(GET).expect("it listens");
        }
        assert_eq!(send_request(&server.address().to_string(), GET).expect("an answer").status, 200);
    }
}
