//! A program's first words to the agent. Everything it says is checked; what cannot be is refused with the reason.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use aquifer_ipc::{FRAME_BYTES_MAX, Frame, FrameError, Hello};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use super::Service;
use super::edge::Attachment;
use super::program::{self, Mail};
use super::run::Run;
use crate::uffd::Userfaultfd;
use crate::worker::WorkerPort;

/// Descriptors that may come with a frame.
const FDS_MAX: usize = 8;

/// Why a program was not taken in.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The socket failed.
    #[error("the connection failed: {0}")]
    System(#[from] io::Error),
    /// What came is not a frame.
    #[error("{0}")]
    Frame(#[from] FrameError),
    /// The other end has closed.
    #[error("the other end has closed the connection")]
    Closed,
    /// The token is nobody's.
    #[error(
        "no such run: the agent has been restarted, or the run has ended; start the program again with `aquifer run`"
    )]
    NoSuchRun,
    /// The program sent no userfaultfd, or something else.
    #[error("a program's hello must come with its userfaultfd")]
    NoUserfaultfd,
    /// A child that no fork told of.
    #[error("this process was not forked from a program of the run")]
    UnknownChild,
    /// The run was ended.
    #[error("the run has been ended: {0}")]
    Ended(String),
}

/// Send one frame with descriptors.
///
/// # Errors
/// If the other end is gone.
pub fn send_frame(socket: impl AsFd, frame: &Frame, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut bytes = Vec::new();
    frame.write(&mut bytes);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(fds));
    }
    sendmsg(socket, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receive one frame with its descriptors.
///
/// # Errors
/// If the other end is gone or sends anything but a frame.
pub fn receive_frame(socket: impl AsFd) -> Result<(Frame, Vec<OwnedFd>), AttachError> {
    let mut bytes = vec![0; FRAME_BYTES_MAX + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        match recvmsg(&socket, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            other => break other.map_err(io::Error::from)?,
        }
    };
    if received.bytes == 0 {
        return Err(AttachError::Closed);
    }
    let mut fds = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    Ok((Frame::parse(&bytes[..received.bytes])?, fds))
}

impl Service {
    /// Take in a program that said hello on `socket`. `pid` is what the kernel says of the other end. If it is refused,
    /// it has been told why.
    ///
    /// # Errors
    /// Why it was refused.
    pub fn welcome(
        &self,
        hello: Hello,
        fds: Vec<OwnedFd>,
        socket: OwnedFd,
        pid: u32,
    ) -> Result<(), AttachError> {
        let told = socket.try_clone()?;
        self.admit(hello, fds, socket, pid).inspect_err(|error| {
            let refusal = Frame::Refused(error.to_string());
            if let Err(error) = send_frame(&told, &refusal, &[]) {
                tracing::debug!(%error, "a refused program did not wait for the reason");
            }
        })
    }

    fn admit(&self, hello: Hello, fds: Vec<OwnedFd>, socket: OwnedFd, pid: u32) -> Result<(), AttachError> {
        let run = self.run(hello.token).ok_or(AttachError::NoSuchRun)?;
        if let Some(reason) = run.reason() {
            return Err(AttachError::Ended(reason));
        }
        let attachment = Attachment { hello, socket, worker: WorkerPort::new()? };
        if hello.is_child {
            return attach_child(&run, pid, attachment);
        }
        let uffd = fds.into_iter().next().filter(is_userfaultfd).ok_or(AttachError::NoUserfaultfd)?;
        program::start_root(&run, pid, Userfaultfd::from(uffd), attachment)?;
        Ok(())
    }
}

fn attach_child(run: &Arc<Run>, pid: u32, attachment: Attachment) -> Result<(), AttachError> {
    let program = run
        .programs()
        .into_iter()
        .find(|program| {
            program.pid() == pid && program.thread.load(std::sync::atomic::Ordering::Relaxed) == 0
        })
        .ok_or(AttachError::UnknownChild)?;
    program.post(Mail::Attach(Box::new(attachment)));
    Ok(())
}

/// Reads on any other kind of descriptor could block or mislead the monitor.
fn is_userfaultfd(fd: &OwnedFd) -> bool {
    use std::os::fd::AsRawFd;
    std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))
        .is_ok_and(|target| target.as_os_str() == "anon_inode:[userfaultfd]")
        && rustix::fs::fcntl_getfl(fd).is_ok_and(|flags| flags.contains(rustix::fs::OFlags::NONBLOCK))
}
