use std::io::Write;

use super::fuzz_target::{endpoint, fresh_memory};
use super::*;
use crate::tcp::wire::AnswerHead;

/// Sets the endpoint's state to that after its process was suspended for a minute.
fn stop_for_a_minute(endpoint: &mut TcpEndpoint) {
    endpoint.since = Instant::now().checked_sub(Duration::from_mins(1)).expect("the machine runs for longer");
}

#[test]
fn an_answer_after_a_stop_is_accepted_and_a_missing_one_times_out() {
    let (mut endpoint, mut far) = endpoint(&fresh_memory());
    let sent = endpoint.pending.len();
    stop_for_a_minute(&mut endpoint);
    endpoint.progress();
    assert!(endpoint.done.is_empty() && !endpoint.broken, "the process may have been suspended");
    // The head, the 16 bytes of the first READ, and nothing for the others.
    let head = AnswerHead::new(wire::ANSWER, Ok(16), 16);
    far.write_all(&[head.as_bytes(), &[7; 16]].concat()).expect("the socket has room");
    endpoint.progress();
    assert_eq!(endpoint.done.pop_front().map(|done| done.outcome), Some(Ok(16)));
    for _ in 0..2 {
        assert!(!endpoint.broken);
        stop_for_a_minute(&mut endpoint);
        endpoint.progress();
    }
    assert!(endpoint.broken);
    assert!(endpoint.done.iter().all(|done| done.outcome == Err(WorkError::Timeout)), "{:?}", endpoint.done);
    assert_eq!(endpoint.done.len(), sent - 1);
}

#[test]
fn answers_behind_a_fence_are_no_violation() {
    let (mut endpoint, _far) = endpoint(&fresh_memory());
    let sent = endpoint.pending.len();
    let fenced = AnswerHead::new(wire::ANSWER, Err(WorkError::Fenced), 0);
    assert!(endpoint.handle_answers(&fenced.as_bytes().repeat(sent)).is_some());
    let outcomes: Vec<_> = endpoint.done.iter().map(|done| done.outcome).collect();
    assert_eq!(outcomes.len(), sent);
    assert_eq!(outcomes[0], Err(WorkError::Fenced));
    assert!(outcomes[1..].iter().all(|outcome| *outcome == Err(WorkError::Flushed)), "{outcomes:?}");
}
