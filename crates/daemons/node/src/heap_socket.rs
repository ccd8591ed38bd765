//! The socket at which the service of heaps on this machine requests memory for its heaps.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use aquifer_channel::socket::{accept, listen_at, wait_readable};
use aquifer_channel::{receive_frame, send_frame};
use aquifer_ipc::{Frame, HoldSpans};

use crate::heap_spans::HeapSpans;
use crate::shutdown::Shutdown;

/// Longest time in which a request to stop goes unnoticed, and interval between attempts to hold
/// memory that was not free.
const TICK: Duration = Duration::from_millis(100);
/// The reason why a node with pinned memory holds none for heaps.
pub(crate) const PINNED: &str = "the memory of this node is pinned, so it cannot lend part of it to heaps";

/// The thread that serves the socket. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct HeapSocket {
    path: PathBuf,
    stop: Shutdown,
    thread: Option<JoinHandle<()>>,
}

impl HeapSocket {
    /// Serves at a path. Without `spans` all requests are refused.
    ///
    /// # Errors
    /// If the socket cannot be created.
    pub fn start(path: &Path, spans: Option<HeapSpans>) -> io::Result<Self> {
        let listener = listen_at(path, 0o600)?;
        let stop = Shutdown::new();
        let server = Server {
            listener,
            spans,
            service: None,
            has_served: false,
            goal: HoldSpans { spans: 0, kept_ms: 0 },
            release_at: None,
        };
        let until = stop.clone();
        let thread =
            std::thread::Builder::new().name("heap-spans".into()).spawn(move || server.run(&until))?;
        Ok(Self { path: path.to_owned(), stop, thread: Some(thread) })
    }
}

impl Drop for HeapSocket {
    fn drop(&mut self) {
        self.stop.request();
        let ended = self.thread.take().map(JoinHandle::join);
        debug_assert!(ended.is_none_or(|ended| ended.is_ok()), "the thread of heaps panicked");
        let _ = std::fs::remove_file(&self.path);
    }
}

struct Server {
    listener: OwnedFd,
    spans: Option<HeapSpans>,
    service: Option<OwnedFd>,
    /// Whether a service has ever connected to this process.
    has_served: bool,
    /// The last request of the service.
    goal: HoldSpans,
    /// The time when all spans are freed; `Some` after the service has ended.
    release_at: Option<Instant>,
}

impl Server {
    fn run(mut self, stop: &Shutdown) {
        while !stop.is_requested() {
            let sockets: Vec<&OwnedFd> = std::iter::once(&self.listener).chain(&self.service).collect();
            if wait_readable(&sockets, TICK).is_err() {
                // Retried after a pause.
                let _ = stop.wait(TICK);
            }
            if is_readable(&self.listener) {
                self.accept();
            }
            match &self.service {
                Some(service) if is_readable(service) => self.answer(),
                _ => self.update_held(),
            }
        }
    }

    /// Accepts a connection, which replaces the last one.
    fn accept(&mut self) {
        match accept(&self.listener) {
            Ok((socket, peer)) if peer.uid == rustix::process::geteuid().as_raw() => {
                self.service = Some(socket);
                self.has_served = true;
                self.release_at = None;
            }
            Ok((_, peer)) => tracing::warn!(uid = peer.uid, "refused a connection of another user"),
            Err(error) => tracing::warn!(%error, "cannot accept a connection"),
        }
    }

    /// Answers a request of the service. If the connection has ended, sets the time of the release.
    fn answer(&mut self) {
        let Some(service) = self.service.take() else { return };
        if let Ok((Frame::HoldSpans(goal), _)) = receive_frame(&service) {
            self.goal = goal;
            let answer = match self.hold() {
                Some(held) => Frame::SpansHeld(held),
                None => Frame::Refused(PINNED.to_owned()),
            };
            if send_frame(&service, &answer, &[]).is_ok() {
                self.service = Some(service);
                return;
            }
        }
        self.release_at = Instant::now().checked_add(Duration::from_millis(self.goal.kept_ms));
    }

    /// Tries to hold the requested memory that was not free before. Frees all once the time of the
    /// release has passed.
    fn update_held(&mut self) {
        if self.release_at.is_some_and(|at| Instant::now() >= at) {
            self.goal.spans = 0;
            self.release_at = None;
        }
        // A node whose machine has no service of heaps never holds memory.
        if self.has_served && (self.service.is_some() || self.release_at.is_none()) {
            self.hold();
        }
    }

    /// Holds the requested spans. Returns the number of held spans; `None` if the memory is pinned.
    fn hold(&mut self) -> Option<u32> {
        Some(self.spans.as_mut()?.hold(self.goal.spans))
    }
}

fn is_readable(socket: &OwnedFd) -> bool {
    wait_readable(&[socket], Duration::ZERO).unwrap_or(false)
}
