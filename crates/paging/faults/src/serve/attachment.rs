//! The attachment of a program's worker.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use aquifer_channel::send_frame;
use aquifer_ipc::{Frame, ProgramHello};

use crate::uffd::Userfaultfd;
use crate::worker::WorkerPort;

/// The attached worker of a program: the hello, its socket, and the control memory.
#[derive(Debug)]
pub(crate) struct Attachment {
    pub(crate) hello: ProgramHello,
    pub(crate) socket: Arc<OwnedFd>,
    pub(crate) worker: WorkerPort,
}

impl Attachment {
    /// Sends the welcome to the program, with the control memory. A forked child also gets its
    /// userfaultfd.
    pub(crate) fn welcome(&self, uffd: &Userfaultfd) -> io::Result<()> {
        if self.hello.is_child {
            send_frame(&self.socket, &Frame::Welcome, &[self.worker.fd(), uffd.as_fd()])
        } else {
            send_frame(&self.socket, &Frame::Welcome, &[self.worker.fd()])
        }
    }
}

/// Ends the connection to a worker, which then ends as soon as no other process has the memory.
///
/// Closing the socket is not enough, because the keeper has a duplicate.
pub(crate) fn shut_down(socket: impl AsFd) {
    // The call fails if the worker has ended.
    let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
}

/// Converts the result of a message to a program: the end of the program is not a failure, because
/// it is watched for.
pub(crate) fn unless_ended(sent: io::Result<()>) -> io::Result<()> {
    match sent {
        Err(error) if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => {
            tracing::debug!(%error, "cannot welcome a program: it has ended");
            Ok(())
        }
        sent => sent,
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    #[test]
    fn a_program_that_ends_while_it_is_resumed_is_no_failure() {
        let pair = || socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let (agent, worker) = pair().unwrap();
        assert!(unless_ended(send_frame(&agent, &Frame::Welcome, &[])).is_ok());
        // If the worker ends without reading a message, the error differs.
        drop(worker);
        for _ in 0..2 {
            assert!(unless_ended(send_frame(&agent, &Frame::Welcome, &[])).is_ok());
        }
        let (agent, worker) = pair().unwrap();
        drop(worker);
        let sent = send_frame(&agent, &Frame::Welcome, &[]);
        assert_eq!(sent.as_ref().unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        assert!(unless_ended(sent).is_ok());
        let refused = unless_ended(Err(io::ErrorKind::PermissionDenied.into()));
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }
}
