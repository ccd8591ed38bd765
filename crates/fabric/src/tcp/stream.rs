//! A connection as both ends see it.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::net::sockopt;
use socket2::{Domain, Protocol, Socket, Type};

/// Data that the other end does not acknowledge for so long breaks the connection.
const UNACKED_TIME_MAX: Duration = Duration::from_secs(5);
/// An idle connection is probed so often.
const PROBE_EVERY: Duration = Duration::from_secs(2);
/// Room for a few large transfers in the kernel.
const KERNEL_BUFFER_BYTES: usize = 1 << 20;

/// Ways to avoid congestion that hold data back by a timer begin with this.
const PACING: &str = "bbr";
/// What is used in their stead, if the system allows it.
const UNPACED: [&str; 2] = ["cubic", "reno"];

/// Connect without pacing.
///
/// # Errors
/// If nobody answers within `timeout`, or the system refuses.
pub fn connect_unpaced(address: SocketAddr, timeout: Duration) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    avoid_pacing(&socket);
    socket.connect_timeout(&address.into(), timeout)?;
    Ok(socket.into())
}

/// Have what is sent on this socket leave at once, and on whatever a listening one accepts. A timer costs more time than a page over a fast
/// network does (decision 9). Only before it is connected: what paces once does so for good.
pub fn avoid_pacing(socket: impl AsFd) {
    let paces = sockopt::tcp_congestion(&socket).is_ok_and(|name| name.starts_with(PACING));
    if paces && !UNPACED.iter().any(|name| sockopt::set_tcp_congestion(&socket, name).is_ok()) {
        tracing::warn!("TCP connections are paced ({PACING}), and that cannot be changed: answers come late");
    }
}

/// What every connection wants: no delay, and an end to unacked_ms.
pub(super) fn configure(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let fd = stream.as_fd();
    sockopt::set_socket_keepalive(fd, true)?;
    sockopt::set_tcp_keepidle(fd, PROBE_EVERY)?;
    sockopt::set_tcp_keepintvl(fd, PROBE_EVERY)?;
    sockopt::set_tcp_keepcnt(fd, 2)?;
    let unacked_ms = u32::try_from(UNACKED_TIME_MAX.as_millis()).expect("seconds");
    sockopt::set_tcp_user_timeout(fd, unacked_ms)?;
    // Only a wish: the system's limits stand.
    let _ = sockopt::set_socket_send_buffer_size(fd, KERNEL_BUFFER_BYTES);
    let _ = sockopt::set_socket_recv_buffer_size(fd, KERNEL_BUFFER_BYTES);
    Ok(())
}

/// A blocking connection on which everything must be said by a certain time.
#[derive(Debug)]
pub(super) struct DeadlineStream {
    stream: TcpStream,
    deadline: Instant,
}

impl DeadlineStream {
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

    /// On a host that paces by default (as some are set up) this fails without the mend; elsewhere it can only pass.
    #[test]
    fn neither_end_is_paced_whatever_the_host_does_by_default() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        // Only where it may be chosen can it be avoided.
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
    fn what_the_host_chose_stays_if_it_does_not_pace() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        sockopt::set_tcp_congestion(&listener, "reno").unwrap();
        avoid_pacing(&listener);
        assert_eq!(sockopt::tcp_congestion(&listener).unwrap(), "reno");
    }
}
