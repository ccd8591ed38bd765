//! The conversation with the agent, or with the server of a swap device, while a program runs.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use aquifer_channel::{ReceiveError, receive_frame, send_frame};
use aquifer_host::client;
use aquifer_ipc::{Frame, OpenRun, RunToken};

use super::RunError;

/// After the program's end the agent gives everything back before it answers.
const STATISTICS_PATIENCE: Duration = Duration::from_secs(30);

/// A run that the agent has opened for us.
#[derive(Debug)]
pub(super) struct AgentLink {
    socket: Arc<OwnedFd>,
    token: RunToken,
    reason: Arc<Mutex<Option<String>>>,
    statistics: Option<Receiver<String>>,
    thread: Option<JoinHandle<()>>,
}

impl AgentLink {
    pub(super) fn open(path: &Path, name: &str, limit_bytes: u64, replicas: u32) -> Result<Self, RunError> {
        let socket = client::connect(path).map_err(|_| RunError::NoCluster { path: path.to_owned() })?;
        let open = Frame::OpenRun(OpenRun { limit_bytes, replicas, name: name.to_owned() });
        send_frame(&socket, &open, &[]).map_err(RunError::Agent)?;
        match receive_frame(&socket) {
            Ok((Frame::RunOpened(token), _)) => Ok(Self::over(socket, token)),
            Ok((Frame::Refused(reason), _)) => Err(RunError::Refused(reason)),
            Ok(_) => Err(RunError::Agent(io::Error::other("it answered something else"))),
            Err(error) => Err(RunError::Agent(io::Error::other(error))),
        }
    }

    /// A conversation that others have begun.
    pub(super) fn over(socket: OwnedFd, token: RunToken) -> Self {
        Self { socket: Arc::new(socket), token, reason: Arc::default(), statistics: None, thread: None }
    }

    pub(super) fn token(&self) -> RunToken {
        self.token
    }

    /// Hear, while the program runs, what its user should know. If the other end goes, `on_gone` does what is to be done then, and gives the
    /// reason for the program's end.
    pub(super) fn listen(&mut self, on_gone: impl FnOnce() -> String + Send + 'static) {
        let (sender, receiver) = channel();
        self.statistics = Some(receiver);
        let (socket, reason) = (Arc::clone(&self.socket), Arc::clone(&self.reason));
        let spawned = std::thread::Builder::new()
            .name("agent-link".into())
            .spawn(move || hear(&socket, &reason, &sender, on_gone));
        match spawned {
            Ok(thread) => self.thread = Some(thread),
            Err(error) => crate::say::say_error!("no thread to hear the agent: {error}"),
        }
    }

    /// The program has ended: get its statistics, as JSON.
    pub(super) fn close(&mut self) -> Option<String> {
        send_frame(&*self.socket, &Frame::CloseRun, &[]).ok()?;
        self.statistics.as_ref()?.recv_timeout(STATISTICS_PATIENCE).ok()
    }

    /// The other end is gone: wait until what is to be done then is done.
    pub(super) fn settle(&mut self) {
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            crate::say::say_error!("the thread that heard the agent has panicked");
        }
    }

    /// Why the program was ended, if it was.
    pub(super) fn reason(&self) -> Option<String> {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// What to say, and what the program's end will be for, when the agent goes.
pub(super) fn agent_is_gone(name: String) -> impl FnOnce() -> String + Send {
    move || {
        crate::say::say_error!(
            "the agent is gone. {name} waits for it, and is ended if it does not come back for it"
        );
        "the agent that paged it died and did not come back for it".to_owned()
    }
}

fn hear(
    socket: &OwnedFd,
    reason: &Mutex<Option<String>>,
    statistics: &Sender<String>,
    on_gone: impl FnOnce() -> String,
) {
    loop {
        match receive_frame(socket) {
            Ok((Frame::Notice(text), _)) => crate::say::say_error!("{text}"),
            Ok((Frame::Ended(text), _)) => {
                reason.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(text);
            }
            Ok((Frame::Statistics(text), _)) => {
                // Nobody may be waiting any more.
                let _ = statistics.send(text);
                return;
            }
            Ok(_) => {}
            Err(ReceiveError::System(error)) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => break,
        }
    }
    let text = on_gone();
    reason.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(text);
}
