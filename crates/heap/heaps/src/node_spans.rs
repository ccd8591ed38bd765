//! The node on this machine, of whose memory the heaps take a part.

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
/// Longest wait for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause between attempts to connect.
const CONNECT_INTERVAL: Duration = Duration::from_millis(100);

/// The connection to the node. It is opened again after it has broken.
#[derive(Debug)]
pub(crate) struct NodeSpans {
    path: PathBuf,
    kept_ms: u64,
    link: Mutex<Link>,
}

#[derive(Debug, Default)]
struct Link {
    socket: Option<OwnedFd>,
    /// When a connection was tried last.
    tried: Option<Instant>,
    /// Whether the node held all that it was asked for.
    is_held: bool,
    refusal: Option<String>,
}

impl NodeSpans {
    /// The node whose socket is at `path`. It holds what the heaps have for `kept_ms` milliseconds
    /// after this process has ended.
    pub fn new(path: &Path, kept_ms: u64) -> Self {
        Self { path: path.to_owned(), kept_ms, link: Mutex::default() }
    }

    /// Why the node gives no memory to heaps, if it has said so.
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
            Err(error) => tracing::debug!(%error, "the node does not answer"),
        }
        None
    }

    fn is_held(&self) -> bool {
        let mut link = self.link.lock();
        // The node sends nothing by itself: what is readable is the end of the connection.
        let has_ended =
            |socket: &OwnedFd| wait_readable(&[socket], Duration::ZERO).is_ok_and(|is_readable| is_readable);
        if link.socket.as_ref().is_some_and(has_ended) {
            link.socket = None;
        }
        link.socket.is_some() && link.is_held
    }
}
