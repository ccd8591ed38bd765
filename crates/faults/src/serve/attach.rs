//! Attaches programs that have said hello. All that a program says is checked.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use aquifer_channel::peer::PeerProcess;
use aquifer_channel::{HoldRefused, send_frame};
use aquifer_ipc::{Frame, ProgramHello};

use super::PagingService;
use super::attachment::Attachment;
use super::process::{ProofError, UnprovenProcess};
use super::program::{self, MonitorRequest, Program};
use super::run::Run;
use crate::uffd::Userfaultfd;
use crate::worker::WorkerPort;

/// Why a program was refused.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The socket failed.
    #[error("the connection failed: {0}")]
    System(#[from] io::Error),
    /// No run has this token.
    #[error(
        "no such run: the agent has been restarted, or the run has ended; \
         start the program again with `aquifer run`"
    )]
    NoSuchRun,
    /// The program sent no userfaultfd.
    #[error("the hello came without a userfaultfd: the shim and the agent are not of one build")]
    NoUserfaultfd,
    /// The kernel refuses features that the monitor needs.
    #[error(
        "the agent cannot page programs: {0}. It needs Linux 6.8 or newer, \
         and CAP_SYS_PTRACE for the events of forks: start the agent as root"
    )]
    Features(io::Error),
    /// The process is not the one that the userfaultfd serves.
    #[error("the agent cannot tell which process this is: {0}")]
    Proof(#[from] ProofError),
    /// No fork was reported for this child.
    #[error("no program of the run has forked this process")]
    UnknownChild,
    /// The process has said hello this many times, and what it was before has not ended.
    #[error("this process has already said hello {0} times")]
    TooManyHellos(usize),
    /// The keeper does not hold the program.
    #[error(transparent)]
    NotHeld(#[from] HoldRefused),
    /// The run was ended.
    #[error("the run has been ended: {0}")]
    Ended(String),
}

impl PagingService {
    /// Attaches a program that has said hello on `socket`.
    ///
    /// `peer` is the process at the other end, as the kernel reports it, and `userfaultfd` what
    /// came with the hello. A program that is refused is told the reason.
    ///
    /// # Errors
    /// If the program was refused.
    pub fn attach_program(
        &self,
        hello: ProgramHello,
        userfaultfd: Option<OwnedFd>,
        socket: OwnedFd,
        peer: PeerProcess,
    ) -> Result<(), AttachError> {
        let reply_to = socket.try_clone()?;
        self.try_attach(hello, userfaultfd, socket, peer).inspect_err(|error| {
            let refusal = Frame::Refused(error.to_string());
            if let Err(error) = send_frame(&reply_to, &refusal, &[]) {
                tracing::debug!(%error, "cannot send the refusal: the program has ended");
            }
        })
    }

    fn try_attach(
        &self,
        hello: ProgramHello,
        userfaultfd: Option<OwnedFd>,
        socket: OwnedFd,
        peer: PeerProcess,
    ) -> Result<(), AttachError> {
        let run = self.run(hello.token).ok_or(AttachError::NoSuchRun)?;
        if let Some(reason) = run.end_reason() {
            return Err(AttachError::Ended(reason));
        }
        let user = peer.uid;
        let process = UnprovenProcess::peer(peer)?;
        let attachment = Attachment { hello, socket: Arc::new(socket), worker: WorkerPort::new()? };
        if hello.is_child {
            return attach_child(&run, process, user, attachment);
        }
        let uffd = Userfaultfd::from(userfaultfd.ok_or(AttachError::NoUserfaultfd)?);
        uffd.enable().map_err(AttachError::Features)?;
        program::serve_root(&run, process, uffd, attachment)
    }
}

/// Passes the hello of a forked child to its monitor, which finds out whether it is that child's.
fn attach_child(
    run: &Run,
    process: UnprovenProcess,
    user: u32,
    attachment: Attachment,
) -> Result<(), AttachError> {
    let number = attachment.hello.child_number;
    let is_this_child = |program: &Arc<Program>| program.id == number && program.is_forked.load(Relaxed);
    let program = run.programs().into_iter().find(is_this_child).ok_or(AttachError::UnknownChild)?;
    // Each proof of another process uses up a page by which the child can prove its memory.
    if !program.may_be_of(user, run.tenant()) {
        return Err(AttachError::UnknownChild);
    }
    if !program.request(MonitorRequest::Attach(Box::new(attachment), process)) {
        return Err(AttachError::TooManyHellos(1));
    }
    Ok(())
}
