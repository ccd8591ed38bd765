//! Requests of clients of the cache.

use std::fmt::Display;
use std::sync::atomic::AtomicU32;

use aquifer_cache::clock::Clock;
use aquifer_cache::commands::elsewhere::Task;
use aquifer_cache::commands::peek::peek;
use aquifer_cache::commands::{Context, Mutation, Protocol, Replies, ServerReport, Service, Session, Step};
use aquifer_cache::counters::Counters;
use aquifer_cache::operations::Access;
use aquifer_cache::server::peers::frame::{
    self, Answer, AnswerEnd, ENTRIES_MAX, Frame, answer_head, complete_len, push_frame, set_serve_until,
};
use aquifer_cache::store::hash::{HashSecret, KeyHasher};
use aquifer_cache::store::presence::Place;
use aquifer_cache::store::{Store, StoreOptions, Until};
use aquifer_mutation::Mutations;

use crate::Target;

pub(crate) const REQUESTS: Target = Target {
    name: "cache-requests",
    run: serve_requests,
    seeds: requests,
    with_mutation: |work| Mutation::AcceptAnyEnd.while_active(work),
};

pub(crate) const FRAMES: Target = Target {
    name: "cache-frames",
    run: read_frames,
    seeds: frame_seeds,
    with_mutation: |work| frame::Mutation::AcceptRest.while_active(work),
};

/// The server that the sessions belong to, which does nothing.
#[derive(Debug)]
struct NoServer;

impl ServerReport for NoServer {
    fn general(&self, _: &Context<'_>, add: &mut dyn FnMut(&str, &dyn Display)) {
        add("pid", &1);
    }

    fn settings(&self, _: &Context<'_>, _: &mut dyn FnMut(&str, &dyn Display)) {}

    fn connections(&self, _: &mut dyn FnMut(&str, &dyn Display)) {}

    fn reset(&self) {}

    fn refresh_certificates(&self) -> Result<(), String> {
        Ok(())
    }

    fn shut_down(&self, _: bool) {}
}

/// Serves requests at once, and again as they arrive in pieces of the length of the first byte: the
/// replies must be the same.
fn serve_requests(bytes: &[u8]) -> bool {
    let Some((&piece, input)) = bytes.split_first() else { return false };
    let (whole, is_open) = serve(input, input.len().max(1));
    if is_open {
        // If the connection ends depends on how much of a line has arrived.
        let (pieces, still_open) = serve(input, usize::from(piece).max(1));
        assert!(!still_open || whole == pieces, "replies depend on how requests arrive");
    }
    check_first_set(input, &whole);
    is_open && !whole.is_empty() && !whole.starts_with(b"ERROR") && !whole.starts_with(b"CLIENT_ERROR")
}

/// Serves requests that arrive in pieces; returns the replies, and whether the connection stays
/// open.
fn serve(input: &[u8], piece: usize) -> (Vec<u8>, bool) {
    let hasher = KeyHasher::new(HashSecret([1, 2]));
    let options = StoreOptions {
        limit: 4 << 20,
        partitions: 1,
        threads: 1,
        has_cas: true,
        evicts: true,
        pool: 0,
        hasher,
    };
    let store = Store::new(&options).expect("there is memory for a small store");
    let service = Service {
        tokens: None,
        protocol: None,
        flush_is_enabled: true,
        dump_is_enabled: false,
        shutdown_is_enabled: false,
        verbosity: AtomicU32::new(0),
        report: Box::new(NoServer),
    };
    let (clock, counters) = (Clock::start(), Counters::default());
    let mut session = Session::default();
    let (mut at, mut arrived, mut replies) = (0, 0, Vec::new());
    while arrived < input.len() {
        arrived = (arrived + piece).min(input.len());
        let mut goes_on = true;
        while goes_on && at < arrived {
            let pin = store.pin(0);
            let access = Access {
                store: &store,
                pin: &pin,
                clock: &clock,
                now_s: 100,
                counters: &counters,
                item_size_max: 1 << 20,
            };
            let context = Context { access, service: &service };
            let mut out = Replies::new(Vec::new());
            let is_at_request = session.is_at_request();
            let step = session.step(&input[at..arrived], &context, &mut out);
            if is_at_request {
                check_peek(&session, &input[at..arrived], access.value_max(), step);
            }
            replies.extend(out.parts().concat());
            match step {
                Step::Used(used) => {
                    assert!(used > 0 && at + used <= arrived, "{used} bytes of {}", arrived - at);
                    at += used;
                }
                Step::Incomplete(needs) => {
                    assert!(needs > arrived - at, "{needs} bytes are there");
                    goes_on = false;
                }
                Step::Again(Until::NextTurn) => {}
                Step::Elsewhere { .. } | Step::Scatter | Step::Again(Until::Fetched) => {
                    panic!("all items are here")
                }
                Step::Close => return (replies, false),
            }
        }
    }
    (replies, true)
}

/// Checks that a request that `peek` accepts for forwarding is one for the session, too.
fn check_peek(session: &Session, input: &[u8], value_max: usize, step: Step) {
    if let Some(peeked) = peek(session.protocol(), input, value_max) {
        let is_same = match step {
            Step::Again(_) => true,
            // The value of a request that is refused is skipped afterwards.
            Step::Used(used) => used == peeked.len || used < peeked.len && !session.is_at_request(),
            _ => false,
        };
        assert!(is_same, "{step:?} for {peeked:?}");
    }
}

/// Frames of other servers are read without a panic, and are encoded to the same bytes again.
fn read_frames(input: &[u8]) -> bool {
    let frame = Frame::read(input);
    if let Ok(frame) = &frame {
        let mut bytes = Vec::new();
        push_frame(&mut bytes, frame.number, frame.waits, &frame.entries);
        set_serve_until(&mut bytes, frame.until_us);
        assert_eq!(bytes[4..], input[4..], "a frame is written in one way");
    }
    let answer = Answer::read(input);
    if let Ok(answer) = &answer {
        assert!(answer.replies.len() <= ENTRIES_MAX);
    }
    let _len = complete_len(input);
    frame.is_ok() || answer.is_ok()
}

fn frame_seeds() -> Vec<(&'static str, Vec<u8>)> {
    let mut frame = Vec::new();
    let tasks =
        [(1, Task::Request(Protocol::Text, b"get a\r\n")), (2, Task::Flush(9)), (3, Task::Delete(b"k"))];
    push_frame(&mut frame, 7, true, &tasks);
    let place = Place { server: 3, generation: 5 };
    let answer = [&answer_head((7, 8), 1, AnswerEnd::Moved(9, place), &[5, 0], 5)[..], b"END\r\n"].concat();
    vec![("frame", frame), ("answer", answer)]
}

/// Checks that a value is stored only if it ends with a line end.
fn check_first_set(input: &[u8], replies: &[u8]) {
    let Some(rest) = input.strip_prefix(b"set k 0 0 ") else { return };
    let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let len = std::str::from_utf8(&rest[..digits]).ok().and_then(|digits| digits.parse::<usize>().ok());
    let (Some(len), Some(block)) = (len, rest[digits..].strip_prefix(b"\r\n")) else { return };
    if len < 1000 && replies.starts_with(b"STORED") {
        assert_eq!(block.get(len..len + 2), Some(&b"\r\n"[..]), "a value without its end was stored");
    }
}

fn requests() -> Vec<(&'static str, Vec<u8>)> {
    let text = |requests: &str| [&[3], requests.as_bytes()].concat();
    let mut binary = vec![5];
    for (opcode, extras, value) in
        [(1, &[0; 8][..], "value"), (0, &[], ""), (5, &[0; 20], ""), (0x0a, &[], "")]
    {
        let key = if opcode == 0x0a { "" } else { "k" };
        let body = [extras, key.as_bytes(), value.as_bytes()].concat();
        let mut header = [0; 24];
        (header[0], header[1], header[3], header[11]) = (0x80, opcode, length(key.len()), length(body.len()));
        header[4] = length(extras.len());
        binary.extend(header);
        binary.extend(body);
    }
    vec![
        ("set", text("set k 0 0 5\r\nvalue\r\nget k a k\r\ngets k\r\n")),
        ("storage", text("add k 1 0 1\r\n5\r\nappend k 0 0 1\r\n6\r\nincr k 7\r\ndecr k 60\r\nget k\r\n")),
        ("noreply", text("set k 0 0 1 noreply\r\n5\r\ndelete k noreply\r\ntouch k 5\r\nversion\r\n")),
        (
            "meta",
            text("ms k 2 T30 F5 c\r\nhi\r\nmg k v t f s k O1\r\nmd k I T5\r\nmg k v\r\nma n N0 J5 v\r\n"),
        ),
        ("base64", text("ms Zm9v 2 b\r\nhi\r\nmg Zm9v b k v\r\nme Zm9v b\r\nmn\r\n")),
        ("large", text("set k 0 0 2000000\r\nshort")),
        ("binary", binary),
    ]
}

fn length(bytes: usize) -> u8 {
    u8::try_from(bytes).expect("short")
}
