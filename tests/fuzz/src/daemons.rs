//! Input of the keeper and of the metrics server, and messages of RDMA connections.

use aquifer_fabric_verbs::fuzz_target as verbs;
use aquifer_keeper::fuzz_target::{frame_seeds, handle_frames};
use aquifer_metrics::fuzz_target::answer;
use aquifer_mutation::Mutations;

use crate::Target;

pub(crate) const KEEPER: Target = Target {
    name: "keeper-frames",
    run: handle_frames,
    seeds: frame_seeds,
    with_mutation: |work| aquifer_keeper::Mutation::SkipOwner.while_active(work),
};

pub(crate) const VERBS: Target = Target {
    name: "verbs-messages",
    run: verbs::parse,
    seeds: verbs::seeds,
    with_mutation: |work| aquifer_fabric_verbs::Mutation::OpenWithoutRights.while_active(work),
};

pub(crate) const METRICS: Target = Target {
    name: "metrics-http",
    run: request_metrics,
    seeds: requests,
    with_mutation: |work| aquifer_metrics::Mutation::AnswerAnyMethod.while_active(work),
};

/// Bound of an answer: the registry is empty.
const ANSWER_BYTES_MAX: usize = 1024;

/// Sends a request. Returns whether it is answered with the metrics.
fn request_metrics(request: &[u8]) -> bool {
    let answer = answer(request);
    assert!(answer.len() <= ANSWER_BYTES_MAX, "{} bytes", answer.len());
    if answer.is_empty() {
        return false;
    }
    let has_version = [&b"HTTP/1.1 "[..], b"HTTP/1.0 "].iter().any(|version| answer.starts_with(version));
    assert!(has_version, "{}", String::from_utf8_lossy(&answer));
    let is_metrics = answer[9..].starts_with(b"200 ");
    if is_metrics {
        let line = request.trim_ascii_start();
        let is_read = line.starts_with(b"GET ") || line.starts_with(b"HEAD ");
        let asks = is_read && line.windows(8).any(|word| word == b"/metrics");
        assert!(asks, "the metrics answer {}", String::from_utf8_lossy(request));
    }
    is_metrics
}

fn requests() -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("plain", b"GET /metrics HTTP/1.0\r\n\r\n".to_vec()),
        ("host", b"GET /metrics?x=1 HTTP/1.1\r\nHost: a\r\nAccept: text/plain\r\n\r\n".to_vec()),
        ("head", b"HEAD /metrics HTTP/1.1\r\nHost: a\r\n\r\n".to_vec()),
        (
            "openmetrics",
            b"GET /metrics HTTP/1.1\r\nHost: a\r\nAccept: application/openmetrics-text\r\n\r\n".to_vec(),
        ),
    ]
}
