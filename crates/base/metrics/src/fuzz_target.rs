//! The fuzz target for requests to the HTTP server.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::runtime::Runtime;

use crate::Registry;
use crate::server::serve_connection;

/// Number of reads after the last byte until the client closes its end. The server answers no
/// client that closes its end earlier.
const WAITS: u32 = 4;

/// A connection whose client sends fixed bytes, waits for a while, and closes its end.
struct FixedStream<'a> {
    input: &'a [u8],
    waits: u32,
    output: &'a mut Vec<u8>,
}

impl AsyncRead for FixedStream<'_> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.input.is_empty() && self.waits > 0 {
            self.waits -= 1;
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        let (now, later) = self.input.split_at(self.input.len().min(buffer.remaining()));
        buffer.put_slice(now);
        self.input = later;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for FixedStream<'_> {
    fn poll_write(mut self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.output.extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

thread_local! {
    static SERVER: (Runtime, Registry) = (
        tokio::runtime::Builder::new_current_thread().enable_time().build().expect("the system has memory"),
        Registry::default(),
    );
}

/// The server's answer to these bytes on a new connection.
#[must_use]
pub fn answer(request: &[u8]) -> Vec<u8> {
    let mut output = Vec::new();
    let stream = FixedStream { input: request, waits: WAITS, output: &mut output };
    SERVER.with(|(runtime, registry)| runtime.block_on(serve_connection(stream, registry)));
    output
}
