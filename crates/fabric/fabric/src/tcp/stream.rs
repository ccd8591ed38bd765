//! Socket options that both ends of a connection use.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::net::sockopt;
use socket2::{Domain, Protocol, Socket, Type};

/// Longest time for which data may be unacknowledged before the connection breaks.
const UNACKED_TIME_MAX: Duration = Duration::from_secs(5);
/// The interval of keep-alive probes on an idle connection.
const PROBE_INTERVAL: Duration = Duration::from_secs(2);
/// Size of the kernel's buffers: a few large transfers.
const KERNEL_BUFFER_BYTES: usize = 1 << 20;

/// The prefix of congestion control algorithms that delay data by a timer.
const PACING: &str = "bbr";
/// The algorithms that replace algorithms with pacing, if the system permits.
const UNPACED: [&str; 2] = ["cubic", "reno"];

/// Connects a socket without pacing.
///
/// Public for measuring only: benches compare this provider with plain TCP connections, which must
/// not be paced either.
///
/// # Errors
/// If the peer does not answer within `timeout`, or the system refuses.
pub fn connect_unpaced(address: SocketAddr, timeout: Duration) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    avoid_pacing(&socket);
    socket.connect_timeout(&address.into(), timeout)?;
    Ok(socket.into())
}

/// Disables pacing on a socket, and on connections that a listening socket accepts (decision 9):
/// the timer takes longer than a page over a fast network. Must be called before the socket is
/// connected, because pacing cannot be disabled later.
///
/// Public for measuring only, like [`connect_unpaced`].
pub fn avoid_pacing(socket: impl AsFd) {
    let paces = sockopt::tcp_congestion(&socket).is_ok_and(|name| name.starts_with(PACING));
    if paces && !UNPACED.iter().any(|name| sockopt::set_tcp_congestion(&socket, name).is_ok()) {
        tracing::warn!(
            algorithm = PACING,
            "cannot replace the congestion control, which paces connections: latency will be high"
        );
    }
}

/// Sets the options of every connection: no delay, and timeouts for an unresponsive peer.
pub(super) fn configure(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let fd = stream.as_fd();
    sockopt::set_socket_keepalive(fd, true)?;
    sockopt::set_tcp_keepidle(fd, PROBE_INTERVAL)?;
    sockopt::set_tcp_keepintvl(fd, PROBE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(fd, 2)?;
    let unacked_ms = u32::try_from(UNACKED_TIME_MAX.as_millis()).expect("seconds");
    sockopt::set_tcp_user_timeout(fd, unacked_ms)?;
    // Best effort: the system's limits apply.
    let _ = sockopt::set_socket_send_buffer_size(fd, KERNEL_BUFFER_BYTES);
    let _ = sockopt::set_socket_recv_buffer_size(fd, KERNEL_BUFFER_BYTES);
    Ok(())
}

/// A blocking connection with a deadline for all reads and writes.
#[derive(Debug)]
pub(super) struct DeadlineStream {
    stream: TcpStream,
    deadline: Instant,
}

impl DeadlineStream {
    pub fn new(stream: TcpStream, deadline: Instant) -> Self {
        Self { stream, deadline }
    }

    /// The connection without the deadline.
    pub fn into_inner(self) -> TcpStream {
        self.stream
    }

    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(Some(left)) }
    }
}

/// Replaces `WouldBlock`, by which the system reports a timeout.
fn name_timeout(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock => {
            io::Error::new(io::ErrorKind::TimedOut, "the peer did not answer in time")
        }
        _ => error,
    }
}

impl Read for DeadlineStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(buffer).map_err(name_timeout)
    }
}

impl Write for DeadlineStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(bytes).map_err(name_timeout)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// Fails without `avoid_pacing` on a host that paces by default. Passes elsewhere in any case.
    #[test]
    fn neither_end_is_paced_whatever_the_host_does_by_default() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        // Pacing is only there to be avoided if the system permits the algorithm.
        let _ = sockopt::set_tcp_congestion(&listener, "bbr");
        avoid_pacing(&listener);
        let ours = connect_unpaced(listener.local_addr().unwrap(), UNACKED_TIME_MAX).unwrap();
        let (theirs, _) = listener.accept().unwrap();
        for end in [&ours, &theirs] {
            let name = sockopt::tcp_congestion(end).unwrap();
            assert!(!name.starts_with(PACING), "{name}");
        }
    }

    #[test]
    fn the_algorithm_of_the_host_stays_if_it_does_not_pace() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        sockopt::set_tcp_congestion(&listener, "reno").unwrap();
        avoid_pacing(&listener);
        assert_eq!(sockopt::tcp_congestion(&listener).unwrap(), "reno");
    }
}
