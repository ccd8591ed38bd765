//! Connection of `aquifer run` to the agent, or to a swap server.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use aquifer_channel::socket::wait_readable;
use aquifer_channel::{ReceiveError, receive_frame, send_frame};
use aquifer_host::client;
use aquifer_ipc::{Frame, OpenRun, RunToken};
use parking_lot::Mutex;

use super::RunError;

/// Timeout of the statistics. The agent frees the run's memory before it sends them.
const STATISTICS_TIMEOUT: Duration = Duration::from_secs(30);

/// Time without an answer after which a message says what the run waits for. systemd restarts an
/// agent sooner.
const NOTICE_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum number of agents that are asked for a run, one after the other.
const OPEN_ATTEMPTS_MAX: u32 = 5;

/// An open run: the socket to its agent or swap server, and the thread that receives from it.
#[derive(Debug)]
pub(super) struct RunConnection {
    socket: Arc<OwnedFd>,
    token: RunToken,
    reason: Arc<Mutex<Option<String>>>,
    statistics: Option<Receiver<String>>,
    thread: Option<JoinHandle<()>>,
}

impl RunConnection {
    /// Opens a run at the agent.
    ///
    /// An agent that is killed before it answers has opened no run: the next agent is asked.
    pub(super) fn open(path: &Path, open: &OpenRun) -> Result<Self, RunError> {
        for _ in 1..OPEN_ATTEMPTS_MAX {
            match Self::try_open(path, open) {
                Err(RunError::Agent(error)) if is_peer_gone(&error) => {}
                opened => return opened,
            }
        }
        Self::try_open(path, open)
    }

    fn try_open(path: &Path, open: &OpenRun) -> Result<Self, RunError> {
        let socket = client::connect(path).map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied => RunError::OtherUser(error),
            _ => RunError::NoCluster { path: path.to_owned() },
        })?;
        send_frame(&socket, &Frame::OpenRun(open.clone()), &[]).map_err(RunError::Agent)?;
        // The keeper holds the socket of an agent that has ended, for the next agent.
        if !wait_readable(&[&socket], NOTICE_TIMEOUT).map_err(RunError::Agent)? {
            crate::say::say_error!(
                "waiting for the agent at {}, which does not answer: if it has ended, start it again with \
                 `aquifer up`, or as it was started",
                path.display()
            );
        }
        match receive_frame(&socket) {
            Ok((Frame::RunOpened(token), _)) => Ok(Self::new(socket, token)),
            Ok((Frame::Refused(reason), _)) => Err(RunError::Refused(reason)),
            Ok(_) => Err(RunError::Agent(io::Error::other("unexpected answer"))),
            Err(ReceiveError::Closed) => Err(RunError::Agent(io::ErrorKind::ConnectionReset.into())),
            Err(ReceiveError::System(error)) => Err(RunError::Agent(error)),
            Err(error) => Err(RunError::Agent(io::Error::other(error))),
        }
    }

    /// A run that is already open on a socket.
    pub(super) fn new(socket: OwnedFd, token: RunToken) -> Self {
        Self { socket: Arc::new(socket), token, reason: Arc::default(), statistics: None, thread: None }
    }

    /// The secret by which the program's shim joins the run.
    pub(super) fn token(&self) -> RunToken {
        self.token
    }

    /// Starts the thread that receives notices, the reason for an end, and statistics.
    ///
    /// If the other end closes the connection, the thread calls `on_gone`, which returns the reason
    /// why the program was ended.
    pub(super) fn listen(&mut self, on_gone: impl FnOnce() -> String + Send + 'static) {
        let (sender, receiver) = channel();
        self.statistics = Some(receiver);
        let (socket, reason) = (Arc::clone(&self.socket), Arc::clone(&self.reason));
        let spawned = std::thread::Builder::new()
            .name("run-connection".into())
            .spawn(move || receive_loop(&socket, &reason, &sender, on_gone));
        match spawned {
            Ok(thread) => self.thread = Some(thread),
            Err(error) => {
                crate::say::say_error!("cannot start the thread that receives from the agent: {error}")
            }
        }
    }

    /// Closes the run and returns its statistics as JSON; `None` if they do not arrive.
    ///
    /// If the other end has closed the connection, [`Self::reason`] returns the reason afterwards.
    pub(super) fn close(&mut self) -> Option<String> {
        // If the frame cannot be sent, the connection is closed, and the thread ends.
        let _ = send_frame(&*self.socket, &Frame::CloseRun, &[]);
        self.statistics.as_ref()?.recv_timeout(STATISTICS_TIMEOUT).ok()
    }

    /// Waits for the end of the thread, which calls `on_gone` if the other end has closed the
    /// connection.
    pub(super) fn join_listener(&mut self) {
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            crate::say::say_error!("the thread that received from the agent panicked");
        }
    }

    /// The reason why the program was ended, if it was.
    pub(super) fn reason(&self) -> Option<String> {
        self.reason.lock().clone()
    }
}

/// Returns the function to call if the connection to the agent is closed: it ends the program, and
/// returns the reason.
///
/// The keeper holds this connection, too, so it is closed only if the keeper has ended the run, or
/// if agent and keeper have died. Then no agent can take over, and nothing would end the program.
pub(super) fn on_agent_gone() -> impl FnOnce() -> String + Send {
    || {
        super::signals::kill_program();
        "its agent died, and no agent took over within the grace time".to_owned()
    }
}

/// Whether the other end has closed the connection.
fn is_peer_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
}

fn receive_loop(
    socket: &OwnedFd,
    reason: &Mutex<Option<String>>,
    statistics: &Sender<String>,
    on_gone: impl FnOnce() -> String,
) {
    loop {
        match receive_frame(socket) {
            Ok((Frame::Notice(text), _)) => crate::say::say_error!("{text}"),
            Ok((Frame::Ended(text), _)) => {
                reason.lock().get_or_insert(text);
            }
            Ok((Frame::Statistics(text), _)) => {
                // Fails if `close` does not wait any more.
                let _ = statistics.send(text);
                return;
            }
            Ok(_) => {}
            Err(ReceiveError::System(error)) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => break,
        }
    }
    let text = on_gone();
    reason.lock().get_or_insert(text);
}
