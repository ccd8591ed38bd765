//! The memory node on this machine, from which the heaps get their memory.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use aquifer_channel::socket::wait_readable;
use aquifer_channel::{connect, receive_frame, send_frame};
use aquifer_ipc::{Frame, HoldSpans};
use aquifer_objects::service::FrameSource;
use parking_lot::Mutex;

/// Frames of a span.
const SPAN_FRAMES: u32 = 32;
/// Timeout of an answer of the node.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Shortest interval between attempts to connect to the node.
const CONNECT_INTERVAL: Duration = Duration::from_millis(100);

/// The connection to the node, which is opened again after a failure.
#[derive(Debug)]
pub(crate) struct NodeSpans {
    path: PathBuf,
    kept_ms: u64,
    link: Mutex<Link>,
}

#[derive(Debug, Default)]
struct Link {
    socket: Option<OwnedFd>,
    /// Time of the last attempt to connect.
    tried: Option<Instant>,
    /// Whether the node has granted all spans of the last request.
    is_held: bool,
    refusal: Option<String>,
}

impl NodeSpans {
    /// A connection to the node whose socket is at `path`, not open yet. The node keeps the spans
    /// of the heaps for `kept_ms` milliseconds after this process has ended.
    pub fn new(path: &Path, kept_ms: u64) -> Self {
        Self { path: path.to_owned(), kept_ms, link: Mutex::default() }
    }

    /// The reason of the node's last refusal to grant memory, if any.
    pub fn refusal(&self) -> Option<String> {
        self.link.lock().refusal.clone()
    }

    fn ask(&self, link: &mut Link, spans: u32) -> io::Result<Frame> {
        if link.socket.is_none() {
            if link.tried.is_some_and(|tried| tried.elapsed() < CONNECT_INTERVAL) {
                return Err(io::ErrorKind::NotConnected.into());
            }
            link.tried = Some(Instant::now());
        }
        let socket = link.socket.take().map_or_else(|| connect(&self.path), Ok)?;
        send_frame(&socket, &Frame::HoldSpans(HoldSpans { spans, kept_ms: self.kept_ms }), &[])?;
        if !wait_readable(&[&socket], ANSWER_TIMEOUT)? {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let (frame, _) = receive_frame(&socket).map_err(io::Error::other)?;
        link.socket = Some(socket);
        Ok(frame)
    }
}

impl FrameSource for NodeSpans {
    fn hold(&self, frames: u32) -> Option<u32> {
        let mut link = self.link.lock();
        let spans = frames.div_ceil(SPAN_FRAMES);
        let answer = self.ask(&mut link, spans);
        link.is_held = matches!(answer, Ok(Frame::SpansHeld(held)) if held >= spans);
        match answer {
            Ok(Frame::SpansHeld(held)) => return Some(held.saturating_mul(SPAN_FRAMES)),
            Ok(Frame::Refused(reason)) => link.refusal = Some(reason),
            Ok(_) => {}
            Err(error) => tracing::debug!(%error, spans, "cannot request spans from the node"),
        }
        None
    }

    fn is_held(&self) -> bool {
        let mut link = self.link.lock();
        // The node sends only answers: if the socket is readable, the connection has ended.
        let has_ended =
            |socket: &OwnedFd| wait_readable(&[socket], Duration::ZERO).is_ok_and(|is_readable| is_readable);
        if link.socket.as_ref().is_some_and(has_ended) {
            link.socket = None;
        }
        link.socket.is_some() && link.is_held
    }
}
