//! Forked children that cannot reach the agent's socket, and knock: see [`aquifer_ipc::Knock`].

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use aquifer_channel::peer::peer_credentials;
use aquifer_channel::socket::wait_readable;
use aquifer_channel::{ReceiveError, receive_frame};
use aquifer_ipc::{Frame, KNOCK_OFFSET, Knock};
use aquifer_pager::PageNumber;
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};

use super::super::attach::{AttachError, send_device};
use super::super::attachment::Attachment;
use super::super::canary::{Canary, KnockStep, new_nonce};
use super::super::process::{ProgramProcess, ProofError, prove_one_of};
use super::super::program::MonitorRequest;
use super::{PAGE, ProcessEdge};
use crate::kernel::PageFault;
use crate::worker::WorkerPort;

/// Why a child that knocks is not served.
#[derive(Debug, thiserror::Error)]
enum KnockError {
    #[error("it is not known which process knocks")]
    Unknown,
    #[error("its descriptor cannot be taken: {0}")]
    NotTaken(#[from] io::Error),
    #[error("the descriptor is not a socket of its own with a frame in it")]
    OtherSocket,
    #[error("it has sent no frame: {0}")]
    NoFrame(#[from] ReceiveError),
    #[error("its frame is not that of a child of this run")]
    OtherFrame,
    #[error(transparent)]
    Proof(#[from] ProofError),
    #[error(transparent)]
    Attach(#[from] AttachError),
}

/// A knock that was begun.
#[derive(Debug)]
pub(super) struct Knocking {
    /// The first of its pages.
    page: PageNumber,
    /// The process that knocks, until its socket is taken.
    process: Option<ProgramProcess>,
}

impl ProcessEdge {
    /// Answers a knock, if the fault is one. Its page is filled afterwards, like any other; a child
    /// that is not served finds that its socket has no other end.
    pub(super) fn answer_knock(&mut self, fault: PageFault) {
        let answered = match self.canary().knock_step(fault.page) {
            None => return,
            Some(KnockStep::Prove) => self.prove_knocker(fault),
            Some(KnockStep::Take) => self.fetch_socket(fault),
        };
        if let Err(error) = answered {
            tracing::warn!(%error, pid = self.program.pid(), "cannot serve a forked child that knocks");
        }
    }

    /// Finds out which process knocks, by a nonce in the page on which it waits.
    fn prove_knocker(&mut self, fault: PageFault) -> Result<(), KnockError> {
        // The kernel reports a fault again if it has refused the fill.
        if self.knock.as_ref().is_some_and(|knock| knock.page == fault.page) {
            return Ok(());
        }
        let canary = Canary { page: fault.page, number: self.program.id, nonce: new_nonce()? };
        let processes = self.processes_with_thread(fault.thread);
        let process = prove_one_of(processes, canary, || canary.fill(&self.uffd).pages == 1)?;
        self.knock = Some(Knocking { page: fault.page, process: Some(process) });
        Ok(())
    }

    /// Takes the socket of the process that knocks, and serves the frame in it.
    fn fetch_socket(&mut self, fault: PageFault) -> Result<(), KnockError> {
        let knock = self.knock.as_mut().filter(|knock| knock.page + 1 == fault.page);
        let Some(process) = knock.ok_or(KnockError::Unknown)?.process.take() else { return Ok(()) };
        let mut bytes = [0; Knock::BYTES];
        let address = self.canary().page * PAGE + KNOCK_OFFSET as u64;
        if process.read_memory(address, &mut bytes)? != bytes.len() {
            return Err(KnockError::Unknown);
        }
        let knock = Knock::read(bytes);
        let number = i32::try_from(knock.socket).map_err(|_| KnockError::OtherSocket)?;
        let socket =
            pidfd_getfd(process.pidfd(), number, PidfdGetfdFlags::empty()).map_err(io::Error::from)?;
        // It has made the pair itself, so that no other process can speak through it. Who knocks
        // does not wait for this thread, which must not wait for it either.
        let is_own = peer_credentials(&socket).is_ok_and(|peer| peer.pid == process.pid());
        if !is_own || !wait_readable(&[&socket], Duration::ZERO).unwrap_or(false) {
            return Err(KnockError::OtherSocket);
        }
        if self.program.process().is_none() && knock.is_child == 1 {
            self.set_process(process)?;
        }
        self.serve_knocked(socket)
    }

    fn serve_knocked(&self, socket: OwnedFd) -> Result<(), KnockError> {
        match receive_frame(socket.as_fd())?.0 {
            Frame::DeviceRequest(token) if token == self.run.token() => send_device(&socket),
            Frame::Hello(hello)
                if hello.token == self.run.token()
                    && hello.is_child
                    && hello.child_number == self.program.id =>
            {
                let worker = WorkerPort::new()?;
                let attachment = Attachment { hello, socket: Arc::new(socket), worker };
                if !self.program.request(MonitorRequest::Attach(Box::new(attachment), None)) {
                    return Err(AttachError::TooManyHellos(1).into());
                }
            }
            _ => return Err(KnockError::OtherFrame),
        }
        Ok(())
    }
}
