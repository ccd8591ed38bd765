//! Servers of blocks on this host: processes of their own, which reach the memory nodes as the host that the agent holds the lease of.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use aquifer_fabric::tcp::ClusterKey;
use aquifer_fabric::{Host, Identity, Reach, Tenant};
use aquifer_faults::serve::attach::{receive_frame, send_frame};
use aquifer_ipc::Frame;
use aquifer_pool::NodeId;
use serde::{Deserialize, Serialize};

use crate::nodes::Nodes;
use crate::socket::{connect_to, wait_readable};

/// Borrowers at once.
const BORROWERS_MAX: usize = 1024;
/// When the agent stops, borrowers have so long to end and give everything back.
const END_PATIENCE: Duration = Duration::from_secs(10);

/// A host's place in the cluster, for another process of the host.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lent {
    /// The host's number.
    pub host: u16,
    /// The fencing epoch of its lease.
    pub epoch: u64,
    /// The tenant.
    pub tenant: u32,
    /// The memory nodes there are.
    pub nodes: Vec<LentNode>,
    /// The cluster's key in hexadecimal, if there is one.
    pub key: Option<String>,
}

impl std::fmt::Debug for Lent {
    /// Without the key: it is a secret.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Lent(host {}, epoch {}, {} nodes)", self.host, self.epoch, self.nodes.len())
    }
}

/// A memory node as the directory has it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LentNode {
    /// Its number.
    pub id: u16,
    /// The provider.
    pub fabric: String,
    /// Where it is, in the provider's terms.
    pub address: String,
}

/// Why a borrower got nothing.
#[derive(Debug, thiserror::Error)]
pub enum BorrowError {
    /// Nobody listens.
    #[error("no cluster is up (nothing answers at {path}): start one with `aquifer up`", path = path.display())]
    NoAgent {
        /// Where it was looked for.
        path: std::path::PathBuf,
    },
    /// The agent said no.
    #[error("{0}")]
    Refused(String),
    /// It said something else.
    #[error("the agent does not answer as it should: {0}")]
    Answer(String),
}

/// Ask the agent at `path`. The connection is to be kept: [`Frame::Ended`] comes there when the agent stops.
///
/// # Errors
/// If there is no agent, or it gives nothing.
pub fn borrow(path: &Path) -> Result<(OwnedFd, Lent), BorrowError> {
    let socket = connect_to(path).map_err(|_| BorrowError::NoAgent { path: path.to_owned() })?;
    let answer = |error: &dyn std::fmt::Display| BorrowError::Answer(error.to_string());
    send_frame(&socket, &Frame::Borrow, &[]).map_err(|error| answer(&error))?;
    match receive_frame(&socket) {
        Ok((Frame::Lent(text), _)) => {
            let lent = serde_json::from_str(&text).map_err(|error| answer(&error))?;
            Ok((socket, lent))
        }
        Ok((Frame::Refused(reason), _)) => Err(BorrowError::Refused(reason)),
        Ok(_) => Err(answer(&"it said something else")),
        Err(error) => Err(answer(&error)),
    }
}

impl Lent {
    /// The nodes, to be connected to.
    ///
    /// # Errors
    /// A sentence, if the key is none.
    pub fn nodes(&self) -> Result<Arc<Nodes>, String> {
        let key = self.key.as_deref().map(parse_key).transpose()?;
        let identity = Identity { host: Host(self.host), epoch: self.epoch, tenant: Tenant(self.tenant) };
        let nodes = Nodes::new(identity, key);
        for node in &self.nodes {
            match Reach::parse(&node.fabric, &node.address) {
                Ok(reach) => nodes.put(NodeId(node.id), reach),
                Err(reason) => tracing::warn!(node = node.id, reason, "a memory node cannot be used"),
            }
        }
        Ok(nodes)
    }
}

fn parse_key(text: &str) -> Result<ClusterKey, String> {
    let wrong = || "the cluster's key is not 64 hexadecimal digits".to_owned();
    let mut key = [0; 32];
    if text.len() != 64 || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return Err(wrong());
    }
    for (byte, digits) in key.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        let digits = std::str::from_utf8(digits).map_err(|_| wrong())?;
        *byte = u8::from_str_radix(digits, 16).map_err(|_| wrong())?;
    }
    Ok(ClusterKey(key))
}

/// The connections of those who have borrowed.
#[derive(Debug, Default)]
pub(crate) struct Borrowers {
    sockets: Mutex<Vec<Arc<OwnedFd>>>,
}

impl Borrowers {
    /// Lend to who asks at `socket`, and stay until it has gone.
    pub(crate) fn attend(&self, socket: OwnedFd, nodes: &Nodes) {
        let socket = Arc::new(socket);
        let answer = self.take_in(&socket, nodes);
        if let Err(error) = send_frame(&*socket, &answer, &[]) {
            tracing::debug!(%error, "a borrower did not wait for its answer");
        }
        // It has nothing more to say: whatever comes is its end.
        while matches!(answer, Frame::Lent(_)) && !wait_readable(&[&*socket], END_PATIENCE).unwrap_or(true) {}
        self.lock().retain(|other| !Arc::ptr_eq(other, &socket));
    }

    fn take_in(&self, socket: &Arc<OwnedFd>, nodes: &Nodes) -> Frame {
        let mut sockets = self.lock();
        if sockets.len() >= BORROWERS_MAX {
            return Frame::Refused(format!("this agent already lends to {BORROWERS_MAX}: end some first"));
        }
        sockets.push(Arc::clone(socket));
        Frame::Lent(serde_json::to_string(&nodes.lent()).expect("numbers and texts can be written"))
    }

    /// Tell all that the agent stops, and wait until they have given everything back.
    pub(crate) fn end(&self, reason: &str) {
        let sockets = self.lock().clone();
        for socket in &sockets {
            // Who has gone already needs no telling.
            let _ = send_frame(&**socket, &Frame::Ended(reason.to_owned()), &[]);
        }
        let deadline = Instant::now() + END_PATIENCE;
        for socket in sockets {
            let left = deadline.saturating_duration_since(Instant::now());
            if !wait_readable(&[&*socket], left).unwrap_or(true) {
                tracing::error!("a server of blocks does not end");
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Arc<OwnedFd>>> {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lent(key: Option<&str>) -> Lent {
        let node = LentNode { id: 3, fabric: "tcp".into(), address: "127.0.0.1:7400".into() };
        Lent { host: 4, epoch: 9, tenant: 0, nodes: vec![node], key: key.map(str::to_owned) }
    }

    #[test]
    fn what_is_lent_is_usable_elsewhere() {
        let key = "0f".repeat(32);
        let nodes = lent(Some(&key)).nodes().unwrap();
        assert_eq!(nodes.count(), 1);
        assert_eq!(nodes.lent(), lent(Some(&key)));
        assert!(!format!("{:?}", nodes.lent()).contains("0f0f"), "a log must not give the key away");
        assert_eq!(lent(None).nodes().unwrap().lent(), lent(None));
    }

    #[test]
    fn a_key_that_is_none_is_refused() {
        for key in ["", "0f", &"0g".repeat(32), &"+f".repeat(32), &"0f".repeat(33)] {
            assert!(lent(Some(key)).nodes().is_err(), "{key}");
        }
    }
}
