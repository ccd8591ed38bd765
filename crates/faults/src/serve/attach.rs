//! A program's first words to the agent. Everything it says is checked; what cannot be is refused with the reason.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use aquifer_channel::send_frame;
use aquifer_ipc::{Frame, ProgramHello};

use super::PagingService;
use super::edge::Attachment;
use super::program::{self, MonitorRequest, Program};
use super::run::Run;
use crate::uffd::Userfaultfd;
use crate::worker::WorkerPort;

/// Why a program was not taken in.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The socket failed.
    #[error("the connection failed: {0}")]
    System(#[from] io::Error),
    /// The token is nobody's.
    #[error(
        "no such run: the agent has been restarted, or the run has ended; start the program again with `aquifer run`"
    )]
    NoSuchRun,
    /// The program sent no userfaultfd, or something else.
    #[error("a program's hello must come with its userfaultfd")]
    NoUserfaultfd,
    /// The kernel does not let the agent hear what it must.
    #[error(
        "the agent cannot page programs: {0}. It takes Linux 6.8 or newer, and the right to hear of forks (CAP_SYS_PTRACE): start the agent as root"
    )]
    Features(io::Error),
    /// A child that no fork told of.
    #[error("this process was not forked from a program of the run")]
    UnknownChild,
    /// The run was ended.
    #[error("the run has been ended: {0}")]
    Ended(String),
}

impl PagingService {
    /// Take in a program that said hello on `socket`. `pid` is what the kernel says of the other end. If it is refused,
    /// it has been told why.
    ///
    /// # Errors
    /// Why it was refused.
    pub fn attach_program(
        &self,
        hello: ProgramHello,
        fds: Vec<OwnedFd>,
        socket: OwnedFd,
        pid: u32,
    ) -> Result<(), AttachError> {
        let told = socket.try_clone()?;
        self.try_attach(hello, fds, socket, pid).inspect_err(|error| {
            let refusal = Frame::Refused(error.to_string());
            if let Err(error) = send_frame(&told, &refusal, &[]) {
                tracing::debug!(%error, "a refused program did not wait for the reason");
            }
        })
    }

    fn try_attach(
        &self,
        hello: ProgramHello,
        fds: Vec<OwnedFd>,
        socket: OwnedFd,
        pid: u32,
    ) -> Result<(), AttachError> {
        let run = self.run(hello.token).ok_or(AttachError::NoSuchRun)?;
        if let Some(reason) = run.end_reason() {
            return Err(AttachError::Ended(reason));
        }
        let attachment = Attachment { hello, socket, worker: WorkerPort::new()? };
        if hello.is_child {
            return self.attach_child(&run, pid, attachment);
        }
        let uffd = fds.into_iter().next().filter(is_userfaultfd).ok_or(AttachError::NoUserfaultfd)?;
        let uffd = Userfaultfd::from(uffd);
        uffd.enable().map_err(AttachError::Features)?;
        program::serve_root(&run, pid, uffd, attachment)?;
        Ok(())
    }

    fn attach_child(&self, run: &Run, pid: u32, attachment: Attachment) -> Result<(), AttachError> {
        let is_it = |program: &Arc<Program>| {
            program.id == attachment.hello.child_number
                && program.thread.load(Relaxed) == 0
                && [0, pid].contains(&program.pid())
        };
        let program = run.programs().into_iter().find(is_it).ok_or(AttachError::UnknownChild)?;
        // One in a name space of processes of its own is not recognised before it speaks.
        if program.pid() == 0 {
            program.set_pid(pid, &self.exit_watcher);
        }
        program.request(MonitorRequest::Attach(Box::new(attachment)));
        Ok(())
    }
}

/// Reads on any other kind of descriptor could block or mislead the monitor.
fn is_userfaultfd(fd: &OwnedFd) -> bool {
    use std::os::fd::AsRawFd;
    std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))
        .is_ok_and(|target| target.as_os_str() == "anon_inode:[userfaultfd]")
        && rustix::fs::fcntl_getfl(fd).is_ok_and(|flags| flags.contains(rustix::fs::OFlags::NONBLOCK))
}
