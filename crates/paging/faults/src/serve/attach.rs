//! Attachment of programs that have sent a hello. Every field of a hello is checked.

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

/// The reason why a program was refused.
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
    /// The process has not proved that it has the memory of the userfaultfd.
    #[error("the agent cannot identify this process: {0}")]
    Proof(#[from] ProofError),
    /// No fork of this child was reported.
    #[error("no program of the run has forked this process")]
    UnknownChild,
    /// The process has sent this number of hellos, and its earlier programs have not ended.
    #[error("this process has already sent {0} hellos")]
    TooManyHellos(usize),
    /// The keeper does not hold the program.
    #[error(transparent)]
    NotHeld(#[from] HoldRefused),
    /// The run was ended.
    #[error("the run has been ended: {0}")]
    Ended(String),
}

impl PagingService {
    /// Attaches a program that has sent a hello on `socket`. Sends the reason to a program that is
    /// refused.
    ///
    /// `peer` is the process at the other end, as the kernel reports it. `userfaultfd` is the
    /// descriptor of the hello.
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

/// Passes a hello to the monitor of the forked child that it names. The monitor checks that the
/// process is that child.
fn attach_child(
    run: &Run,
    process: UnprovenProcess,
    user: u32,
    attachment: Attachment,
) -> Result<(), AttachError> {
    let number = attachment.hello.child_number;
    let is_this_child = |program: &Arc<Program>| program.id == number && program.is_forked.load(Relaxed);
    let program = run.programs().into_iter().find(is_this_child).ok_or(AttachError::UnknownChild)?;
    // Each attempt of another process uses up a page with which the child can prove its memory.
    if !program.may_be_of(user, run.tenant()) {
        return Err(AttachError::UnknownChild);
    }
    if !program.request(MonitorRequest::Attach(Box::new(attachment), process)) {
        return Err(AttachError::TooManyHellos(1));
    }
    Ok(())
}
