//! A program's worker, and its welcome.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use aquifer_channel::send_frame;
use aquifer_ipc::{Frame, ProgramHello};

use crate::uffd::Userfaultfd;
use crate::worker::WorkerPort;

/// What a program's hello brought: the hello, its socket, and the memory shared with its worker.
#[derive(Debug)]
pub(crate) struct Attachment {
    pub(crate) hello: ProgramHello,
    pub(crate) socket: Arc<OwnedFd>,
    pub(crate) worker: WorkerPort,
}

impl Attachment {
    /// Welcomes the program. A forked child gets its userfaultfd.
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
/// It is not enough to close the socket, because the keeper has it, too.
pub(crate) fn shut_down(socket: impl AsFd) {
    // It fails if the worker has ended.
    let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
}

/// The outcome of a message to a program whose end is watched: it is no failure if the program has
/// ended.
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
        // With a message that it has not read, the error is another one.
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
