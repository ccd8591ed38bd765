//! What the server says to a scraper, and to whoever is none.

use std::fmt;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use aquifer_metrics::server::{CONNECTIONS_MAX, HEADERS_MAX, REQUEST_BYTES_MAX};
use aquifer_metrics::write::{Family, Histogram, counters, gauges, histograms, label};
use aquifer_metrics::{Collector, DescriptorEncoder, Listener, MetricsError, Place, Registry, Server, Unit};
use aquifer_tests_support::openmetrics::{Answer, ask, hear, scrape};

const GET: &[u8] = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";
/// As long a name as a program can give itself, and as bad a one.
const NAME: &str = "a\"} 1\nb\\{";
/// More than any socket's buffer takes.
const ROWS: u64 = 200_000;

#[derive(Debug)]
struct Figures {
    rows: u64,
    value: u64,
}

impl Collector for Figures {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let family = |name, unit| Family { name, help: "Of a test.", unit };
        counters(&mut encoder, family("things", None), [(vec![label("name", NAME)], 7)])?;
        let rows = (0..self.rows).map(|row| (vec![label("row", row)], row));
        gauges(&mut encoder, family("row", None), rows)?;
        gauges(&mut encoder, family("size", Some(&Unit::Bytes)), [(vec![], self.value)])?;
        let histogram = Histogram { sum: 2.5, count: 3, buckets: vec![(0.5, 2), (1.0, 0), (f64::MAX, 1)] };
        histograms(&mut encoder, family("wait", Some(&Unit::Seconds)), [(vec![label("a", 1)], histogram)])
    }
}

fn server_of(place: &str, figures: Figures) -> Server {
    let listener = Listener::bind(&place.parse().expect("a fit place")).expect("the place is free");
    let mut registry = Registry::with_prefix("test");
    registry.register_collector(Box::new(figures));
    Server::start(listener, registry).expect("there are threads")
}

fn server() -> Server {
    server_of("127.0.0.1:0", Figures { rows: 1, value: 5 })
}

fn connect(server: &Server) -> TcpStream {
    TcpStream::connect(server.place().to_string()).expect("it listens")
}

#[test]
fn figures_are_read_back() {
    let server = server();
    let samples = scrape(&server.place().to_string()).expect("they are right");
    assert_eq!(samples.sum("test_things_total", &[("name", NAME)]), Some(7.0));
    assert_eq!(samples.sum("test_size_bytes", &[]), Some(5.0));
    assert_eq!(samples.sum("test_wait_seconds_bucket", &[("le", "1.0")]), Some(2.0));
    assert_eq!(samples.sum("test_wait_seconds_bucket", &[("le", "+Inf")]), Some(3.0));
    assert_eq!(samples.sum("test_wait_seconds_sum", &[]), Some(2.5));
}

#[test]
fn long_texts_come_whole() {
    let server = server_of("127.0.0.1:0", Figures { rows: ROWS, value: 5 });
    let samples = scrape(&server.place().to_string()).expect("they are right");
    assert_eq!(samples.of("test_row", &[]).count() as u64, ROWS);
}

#[test]
fn a_unix_socket_is_this_users_and_goes_with_the_server() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("metrics");
    let place = format!("unix:{}", path.display());
    // A server that was killed leaves its socket.
    drop(UnixListener::bind(&path).expect("a socket"));
    let server = server_of(&place, Figures { rows: 1, value: 5 });
    assert_eq!(std::fs::metadata(&path).expect("it is there").permissions().mode() & 0o777, 0o600);
    assert_eq!(scrape(&place).expect("they are right").sum("test_size_bytes", &[]), Some(5.0));
    drop(server);
    assert!(!path.exists());
}

#[test]
fn what_is_in_the_way_is_not_removed() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("metrics");
    let place: Place = format!("unix:{}", path.display()).parse().expect("a fit place");
    std::fs::write(&path, "precious").expect("a file");
    assert!(matches!(Listener::bind(&place), Err(MetricsError::Listen { .. })));
    assert_eq!(std::fs::read_to_string(&path).expect("it is still there"), "precious");
    std::fs::remove_file(&path).expect("it is ours");
    let other = UnixListener::bind(&path).expect("a socket");
    assert!(matches!(Listener::bind(&place), Err(MetricsError::Listen { .. })));
    drop(UnixStream::connect(&path).expect("it still listens"));
    drop(other);
    let tcp = server();
    let why = Listener::bind(tcp.place()).expect_err("it is taken").to_string();
    assert!(why.contains(&tcp.place().to_string()) && why.contains("--metrics"), "{why}");
}

#[test]
fn only_get_metrics_is_answered() {
    let server = server();
    let place = server.place().to_string();
    let said = |line: &str| {
        ask(&place, format!("{line} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n").as_bytes())
            .expect("an answer")
    };
    assert_eq!(said("GET /metrics?a=b").status, 200);
    for path in ["/", "/metric", "/metrics/", "//metrics", "/METRICS", "/../metrics", "*"] {
        assert!(matches!(said(&format!("GET {path}")).status, 404 | 400), "{path}");
    }
    for method in ["POST", "PUT", "HEAD", "DELETE", "OPTIONS", "NONSENSE"] {
        let Answer { status, head, .. } = said(&format!("{method} /metrics"));
        assert_eq!(status, 405, "{method}");
        assert!(head.to_lowercase().contains("allow: get"), "{head}");
    }
}

#[test]
fn what_cannot_be_written_is_an_error_and_no_lie() {
    let server = server_of("127.0.0.1:0", Figures { rows: 1, value: u64::MAX });
    assert_eq!(ask(&server.place().to_string(), GET).expect("an answer").status, 500);
}

#[test]
fn requests_are_bounded() {
    let server = server();
    let place = server.place().to_string();
    let of_headers = |count: usize| {
        let lines: String = (0..count).map(|number| format!("x-{number}: y\r\n")).collect();
        ask(&place, format!("GET /metrics HTTP/1.1\r\n{lines}\r\n").as_bytes())
    };
    assert_eq!(of_headers(HEADERS_MAX).expect("an answer").status, 200);
    assert_eq!(of_headers(HEADERS_MAX + 1).expect("an answer").status, 431);
    let long = |bytes: usize| {
        ask(&place, format!("GET /metrics HTTP/1.1\r\nx: {}\r\n\r\n", "y".repeat(bytes)).as_bytes())
    };
    assert_eq!(long(REQUEST_BYTES_MAX / 2).expect("an answer").status, 200);
    // Whoever says far too much may be cut off before it hears the answer.
    assert!(long(REQUEST_BYTES_MAX * 2).is_ok_and(|answer| answer.status == 431) || long(1 << 20).is_err());
    assert!(ask(&place, GET).is_ok_and(|answer| answer.status == 200));
}

#[test]
fn nonsense_harms_nobody() {
    let server = server();
    let place = server.place().to_string();
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
        let _either = hear(&stream);
    }
    assert!(scrape(&place).is_ok());
}

#[test]
fn slow_ones_are_cut_off_and_others_wait_for_their_turn() {
    let server = server();
    // Half a request from as many as are talked to at once; whoever comes after them waits until they are cut off.
    let mut slow: Vec<TcpStream> = (0..CONNECTIONS_MAX).map(|_| connect(&server)).collect();
    for stream in &mut slow {
        stream.write_all(b"GET /metrics HTTP/1.1\r\n").expect("it listens");
    }
    assert_eq!(ask(&server.place().to_string(), GET).expect("an answer").status, 200);
    for mut stream in slow {
        stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a plain option");
        let mut told = Vec::new();
        let _either = stream.read_to_end(&mut told);
        assert!(!told.starts_with(b"HTTP/1.1 200"));
    }
}

#[test]
fn a_server_ends_though_somebody_talks_to_it() {
    let server = server();
    let mut stream = connect(&server);
    stream.write_all(b"GET /met").expect("it listens");
    let place = server.place().to_string();
    drop(server);
    assert!(TcpStream::connect(place).is_err());
}

mod long {
    use super::*;

    #[test]
    fn whoever_does_not_read_its_answer_is_cut_off() {
        let server = server_of("127.0.0.1:0", Figures { rows: ROWS, value: 5 });
        let mut deaf: Vec<TcpStream> = (0..CONNECTIONS_MAX).map(|_| connect(&server)).collect();
        for stream in &mut deaf {
            stream.write_all(GET).expect("it listens");
        }
        // It is answered only after they are gone: theirs are all the places there are.
        assert_eq!(ask(&server.place().to_string(), GET).expect("an answer").status, 200);
    }
}
