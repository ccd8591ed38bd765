//! A connection as both ends see it.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::net::sockopt;

/// Data that the other end does not acknowledge for so long breaks the connection.
const SILENCE_MAX: Duration = Duration::from_secs(5);
/// An idle connection is probed so often.
const PROBE_EVERY: Duration = Duration::from_secs(2);
/// Room for a few large transfers in the kernel.
const KERNEL_BUFFER_BYTES: usize = 1 << 20;

/// What every connection wants: no delay, and an end to silence.
pub(super) fn tune(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let fd = stream.as_fd();
    sockopt::set_socket_keepalive(fd, true)?;
    sockopt::set_tcp_keepidle(fd, PROBE_EVERY)?;
    sockopt::set_tcp_keepintvl(fd, PROBE_EVERY)?;
    sockopt::set_tcp_keepcnt(fd, 2)?;
    let silence = u32::try_from(SILENCE_MAX.as_millis()).expect("seconds");
    sockopt::set_tcp_user_timeout(fd, silence)?;
    // Only a wish: the system's limits stand.
    let _ = sockopt::set_socket_send_buffer_size(fd, KERNEL_BUFFER_BYTES);
    let _ = sockopt::set_socket_recv_buffer_size(fd, KERNEL_BUFFER_BYTES);
    Ok(())
}

/// A blocking connection on which everything must be said by a certain time.
#[derive(Debug)]
pub(super) struct Deadlined {
    stream: TcpStream,
    deadline: Instant,
}

impl Deadlined {
    pub fn new(stream: TcpStream, deadline: Instant) -> Self {
        Self { stream, deadline }
    }

    /// The connection, without deadline.
    pub fn into_inner(self) -> TcpStream {
        self.stream
    }

    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(Some(left)) }
    }
}

/// A timeout shows as `WouldBlock`.
fn named(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock => io::Error::new(io::ErrorKind::TimedOut, "it said nothing in time"),
        _ => error,
    }
}

impl Read for Deadlined {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(buffer).map_err(named)
    }
}

impl Write for Deadlined {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(bytes).map_err(named)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
