//! Attacks on the memory and the descriptors of the agent.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use aquifer_channel::paths::agent_socket;
use aquifer_channel::{connect, receive_frame, send_frame};
use aquifer_ipc::{Frame, OpenRun};

use crate::sys;

/// Touches one page in each 2 MiB. Each costs the agent a page of its page table.
pub fn sparse() -> bool {
    const STEP: usize = 2 << 20;
    let count = 1_100_000;
    let first = sys::reserve(count * STEP);
    for number in 0..count {
        sys::touch(first + number * STEP);
    }
    println!("touched {count} pages");
    false
}

/// Fills as many MiB of memory as the second argument says, reports it, and waits for the end of
/// standard input.
pub fn fill() -> bool {
    let mib = std::env::args().nth(2).and_then(|text| text.parse::<usize>().ok()).expect("a size");
    let first = sys::reserve(mib << 20);
    for offset in (0..mib << 20).step_by(sys::PAGE) {
        sys::touch(first + offset);
    }
    println!("sent");
    let _end = std::io::Read::read(&mut std::io::stdin(), &mut [0]);
    true
}

/// Allocates extents until a request is refused, reports it, and waits for the end of standard
/// input.
pub fn fill_by_extents() -> bool {
    let mut session = aquifer_client::Session::open().expect("the agent serves sessions");
    for bytes in [2 << 20, 64 << 10, 4 << 10] {
        while session.allocate(bytes).is_ok() {}
    }
    println!("sent");
    let _end = std::io::Read::read(&mut std::io::stdin(), &mut [0]);
    true
}

/// Connections, runs, sessions and segments in the agent, up to the share of a user.
#[derive(Default)]
struct Held {
    connections: Vec<OwnedFd>,
    /// The connection of a process with segments.
    segments: Option<OwnedFd>,
    segment_count: u64,
    /// The first words of the refusals.
    refusals: BTreeSet<String>,
}

impl Held {
    /// Connects, sends a request, and keeps the connection if the request was not refused.
    fn request(&mut self, request: &Frame) -> Option<Frame> {
        let socket = connect(&agent_socket()).ok()?;
        send_frame(&socket, request, &[]).ok()?;
        let (answer, _) = receive_frame(&socket).ok()?;
        if let Frame::Refused(reason) = answer {
            self.refusals.insert(reason);
            return None;
        }
        self.connections.push(socket);
        Some(answer)
    }

    fn open_run(&mut self) -> bool {
        let open = OpenRun {
            limit_bytes: 8 << 20,
            limit_max_bytes: None,
            replicas: 1,
            backup: None,
            outlives_owner: false,
            is_strict: false,
            wait_for_room_ms: None,
            name: "empty".into(),
        };
        self.request(&Frame::OpenRun(open)).is_some()
    }

    fn open_session(&mut self) -> bool {
        self.request(&Frame::OpenSession).is_some()
    }

    /// Opens a connection with the keep-alives of a process.
    fn open_pulse(&mut self) -> bool {
        self.request(&Frame::SegmentCall("\"pulse\"".into())).is_some()
    }

    fn allocate_segment(&mut self) -> bool {
        if self.segments.is_none() {
            let open = Frame::SegmentCall(r#"{"open":{"process":"attacker"}}"#.into());
            self.segments = self.request(&open).and_then(|_| self.connections.pop());
        }
        let Some(socket) = &self.segments else { return false };
        let id = self.segment_count;
        let allocate = format!(r#"{{"allocate":{{"id":{id},"bytes":4096}}}}"#);
        let sent = send_frame(socket, &Frame::SegmentCall(allocate), &[]);
        match sent.map(|()| receive_frame(socket)) {
            Ok(Ok((Frame::SegmentAnswer(answer), _))) if answer.contains("failed") => {
                self.refusals.insert(answer);
                false
            }
            Ok(Ok(_)) => {
                self.segment_count += 1;
                true
            }
            _ => {
                self.segments = None;
                false
            }
        }
    }

    /// Tries each kind once. Returns whether anything was got.
    fn open_more(&mut self) -> bool {
        let kinds = [Self::open_run, Self::open_session, Self::open_pulse, Self::allocate_segment];
        kinds.iter().filter(|open| open(self)).count() > 0
    }
}

/// Opens runs, sessions, connections and segments at the agent until all are refused, reports it,
/// and continues to try until standard input ends. Returns whether all refusals name the share of
/// the user.
pub fn use_up_descriptors() -> bool {
    sys::raise_descriptor_limit();
    let mut held = Held::default();
    while held.open_more() {}
    println!("sent");
    let is_over = Arc::new(AtomicBool::new(false));
    let over = Arc::clone(&is_over);
    std::thread::spawn(move || {
        let _end = std::io::Read::read(&mut std::io::stdin(), &mut [0]);
        over.store(true, Relaxed);
    });
    while !is_over.load(Relaxed) {
        held.open_more();
    }
    eprintln!("{} connections, {} segments: {:?}", held.connections.len(), held.segment_count, held.refusals);
    held.refusals.iter().all(|reason| reason.contains("has its share of the descriptors"))
}
