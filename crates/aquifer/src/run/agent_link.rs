//! The conversation with the agent while a program runs.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use aquifer_agent::client;
use aquifer_faults::serve::attach::{AttachError, receive_frame, send_frame};
use aquifer_ipc::{Frame, OpenRun, Token};

use super::RunError;

/// After the program's end the agent gives everything back before it answers.
const STATISTICS_PATIENCE: Duration = Duration::from_secs(30);

/// A run that the agent has opened for us.
#[derive(Debug)]
pub(super) struct AgentLink {
    socket: Arc<OwnedFd>,
    token: Token,
    reason: Arc<Mutex<Option<String>>>,
    statistics: Option<Receiver<String>>,
}

impl AgentLink {
    pub(super) fn open(path: &Path, name: &str, limit_bytes: u64, replicas: u32) -> Result<Self, RunError> {
        let socket = client::connect(path).map_err(|_| RunError::NoCluster { path: path.to_owned() })?;
        let open = Frame::OpenRun(OpenRun { limit_bytes, replicas, name: name.to_owned() });
        send_frame(&socket, &open, &[]).map_err(RunError::Agent)?;
        match receive_frame(&socket) {
            Ok((Frame::RunOpened(token), _)) => {
                Ok(Self { socket: Arc::new(socket), token, reason: Arc::default(), statistics: None })
            }
            Ok((Frame::Refused(reason), _)) => Err(RunError::Refused(reason)),
            Ok(_) => Err(RunError::Agent(io::Error::other("it answered something else"))),
            Err(error) => Err(RunError::Agent(io::Error::other(error))),
        }
    }

    pub(super) fn token(&self) -> Token {
        self.token
    }

    /// Hear, while the program runs, what its user should know.
    pub(super) fn listen(&mut self, name: &str) {
        let (sender, receiver) = channel();
        self.statistics = Some(receiver);
        let (socket, reason, name) = (Arc::clone(&self.socket), Arc::clone(&self.reason), name.to_owned());
        let spawned = std::thread::Builder::new()
            .name("agent-link".into())
            .spawn(move || hear(&socket, &reason, &sender, &name));
        if let Err(error) = spawned {
            eprintln!("aquifer: no thread to hear the agent: {error}");
        }
    }

    /// The program has ended: get its statistics, as JSON.
    pub(super) fn close(&mut self) -> Option<String> {
        send_frame(&*self.socket, &Frame::CloseRun, &[]).ok()?;
        self.statistics.as_ref()?.recv_timeout(STATISTICS_PATIENCE).ok()
    }

    /// Why the program was ended, if it was.
    pub(super) fn reason(&self) -> Option<String> {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn hear(socket: &OwnedFd, reason: &Mutex<Option<String>>, statistics: &Sender<String>, name: &str) {
    loop {
        match receive_frame(socket) {
            Ok((Frame::News(text), _)) => eprintln!("aquifer: {text}"),
            Ok((Frame::Ended(text), _)) => {
                *reason.lock().unwrap_or_else(PoisonError::into_inner) = Some(text);
            }
            Ok((Frame::Statistics(text), _)) => {
                // Nobody may be waiting any more.
                let _ = statistics.send(text);
                return;
            }
            Ok(_) => {}
            Err(AttachError::System(error)) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => break,
        }
    }
    let text = format!("the agent died, and none came for {name} in time");
    reason.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(text);
}
