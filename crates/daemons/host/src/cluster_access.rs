//! Access to the cluster that the server of a swap device requests from the agent of its machine.
//!
//! Such a server is a process and a host of its own, with a host number and a lease. It needs the
//! agent only when it starts: for the address of the directory and for the cluster key. While it
//! runs, it reports its statistics, and the agent notifies it of new limits and of the cluster's
//! stop.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use aquifer_channel::socket::wait_readable;
use aquifer_channel::{ReceiveError, connect, receive_frame, send_frame};
use aquifer_fabric::ClusterKey;
use aquifer_ipc::Frame;
use aquifer_report::RunStatistics;
use serde::{Deserialize, Serialize};

/// Timeout of an agent's answer. A stopped agent must not stop swap devices.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// The access data that another process of this machine needs to reach the memory nodes.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterAccess {
    /// Description of the directory, as the command line that started the agent has it.
    pub directory: String,
    /// True if the traffic with nodes on other machines is encrypted.
    pub encrypt: bool,
    /// True if the agent accepts a [`SwapReport`]; older agents do not.
    #[serde(default)]
    pub takes_reports: bool,
    /// The cluster key in hexadecimal digits, if the cluster has one.
    key: Option<String>,
}

impl std::fmt::Debug for ClusterAccess {
    /// Omits the key, which is a secret.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let key = if self.key.is_some() { "a" } else { "no" };
        write!(formatter, "ClusterAccess({}, {key} key)", self.directory)
    }
}

/// The report of a swap server to the agent, sent as [`Frame::Statistics`].
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct SwapReport {
    /// The server's number in the cluster.
    pub host: u16,
    /// Process id of the `aquifer run` that started the program.
    pub runner: u32,
    /// Name of the cgroup that the run's processes are in.
    pub cgroup: String,
    /// The smallest limit that the run may get.
    pub least_limit_bytes: u64,
    /// Statistics of the run.
    pub statistics: RunStatistics,
}

/// Why the agent has given no access to the cluster.
#[derive(Debug, thiserror::Error)]
pub enum ClusterAccessError {
    /// No agent listens.
    #[error(
        "no agent answers at {path}: no cluster is up, or its agent has ended; start it with `aquifer up`",
        path = path.display()
    )]
    NoAgent {
        /// The agent's socket.
        path: PathBuf,
    },
    /// The agent refused.
    #[error("{0}")]
    Refused(String),
    /// The request could not be sent.
    #[error("the agent has closed the connection: {0}")]
    Send(io::Error),
    /// The agent has not answered in time.
    #[error("the agent has not answered within {} s", ANSWER_TIMEOUT.as_secs())]
    NoAnswer,
    /// The answer could not be received.
    #[error("the agent's answer cannot be read: {0}")]
    Receive(ReceiveError),
    /// The answer cannot be parsed by this build.
    #[error("the agent's answer cannot be parsed: {0}; use an agent of the same build")]
    Parse(serde_json::Error),
    /// The answer is a frame of another kind.
    #[error("the agent has answered with an unexpected frame; use an agent of the same build")]
    UnexpectedFrame,
}

/// The cluster key is malformed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the cluster key is not 64 hexadecimal digits")]
pub struct MalformedKey;

/// Requests access to the cluster from the agent at `path`.
///
/// The caller must keep the connection open: [`Frame::Ended`] arrives there when the agent stops.
///
/// # Errors
/// If no agent listens, or the agent refuses or sends an unexpected answer.
pub fn request_cluster_access(path: &Path) -> Result<(OwnedFd, ClusterAccess), ClusterAccessError> {
    let socket = connect(path).map_err(|_| ClusterAccessError::NoAgent { path: path.to_owned() })?;
    send_frame(&socket, &Frame::ClusterAccessRequest, &[]).map_err(ClusterAccessError::Send)?;
    let is_answered = wait_readable(&[&socket], ANSWER_TIMEOUT);
    if !is_answered.map_err(|error| ClusterAccessError::Receive(error.into()))? {
        return Err(ClusterAccessError::NoAnswer);
    }
    match receive_frame(&socket).map_err(ClusterAccessError::Receive)? {
        (Frame::ClusterAccess(text), _) => {
            Ok((socket, serde_json::from_str(&text).map_err(ClusterAccessError::Parse)?))
        }
        (Frame::Refused(reason), _) => Err(ClusterAccessError::Refused(reason)),
        _ => Err(ClusterAccessError::UnexpectedFrame),
    }
}

impl ClusterAccess {
    /// The access that an agent with these options gives.
    #[must_use]
    pub fn new(directory: &str, encrypt: bool, key: Option<&ClusterKey>) -> Self {
        let key = key.map(|key| key.0.iter().map(|byte| format!("{byte:02x}")).collect());
        Self { directory: directory.to_owned(), encrypt, takes_reports: true, key }
    }

    /// The cluster key, if the cluster has one.
    ///
    /// # Errors
    /// If the key is malformed.
    pub fn key(&self) -> Result<Option<ClusterKey>, MalformedKey> {
        self.key.as_deref().map(parse_key).transpose()
    }
}

fn parse_key(text: &str) -> Result<ClusterKey, MalformedKey> {
    let mut key = [0; 32];
    if text.len() != 64 || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return Err(MalformedKey);
    }
    for (byte, digits) in key.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        let digits = std::str::from_utf8(digits).map_err(|_| MalformedKey)?;
        *byte = u8::from_str_radix(digits, 16).map_err(|_| MalformedKey)?;
    }
    Ok(ClusterKey(key))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_survives_serialisation_and_debug_output_omits_it() {
        let access = ClusterAccess::new("{}", true, Some(&ClusterKey([0x5a; 32])));
        let text = serde_json::to_string(&access).unwrap();
        let parsed: ClusterAccess = serde_json::from_str(&text).unwrap();
        assert_eq!(parsed, access);
        assert_eq!(parsed.key().unwrap().unwrap().0, [0x5a; 32]);
        assert!(!format!("{parsed:?}").contains("5a5a"));
        assert!(ClusterAccess::new("", false, None).key().unwrap().is_none());
    }

    #[test]
    fn a_malformed_key_is_refused() {
        for key in ["", "0f", &"0g".repeat(32), &"+f".repeat(32), &"0f".repeat(33)] {
            assert!(
                ClusterAccess { key: Some(key.to_owned()), ..ClusterAccess::new("", false, None) }
                    .key()
                    .is_err(),
                "{key}"
            );
        }
    }
}
