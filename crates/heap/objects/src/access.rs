//! Access of a program to the heaps of its user: the agent of its host issues tickets for them.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use aquifer_channel::{connect, receive_frame, send_frame};
use aquifer_fabric::handshake::Credential;
use aquifer_fabric::tcp::{self, ConnectOptions};
use aquifer_fabric::{ClusterKey, Endpoint, EndpointError, Ticket, TicketSecret, VerbsProvider};
use aquifer_ipc::Frame;
use serde::{Deserialize, Serialize};

use crate::client::HeapRoute;
use crate::shared::SharedHeap;

/// Why no heap can be reached.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// No agent listens.
    #[error("no agent listens at {path}: start a cluster (aquifer up): {source}", path = path.display())]
    NoAgent {
        /// The socket.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The agent refused.
    #[error("the agent refused: {0}")]
    Refused(String),
    /// The agent's answer is not valid.
    #[error("the agent gave an invalid answer: it is of another build")]
    Answer,
    /// There is no such service.
    #[error("{}", no_service(*.0))]
    NoService(Option<u16>),
    /// The service does not accept the connection.
    #[error("cannot connect to the heaps on node {node}: {source}")]
    Connect {
        /// The node.
        node: u16,
        /// The fabric's error.
        source: EndpointError,
    },
}

fn no_service(node: Option<u16>) -> String {
    let advice =
        "give nodes memory for heaps (aquifer up --heap-memory SIZE), or start those that have stopped";
    match node {
        Some(node) => format!("node {node} serves no heaps: {advice}"),
        None => format!("no node serves heaps: {advice}"),
    }
}

/// The address of a service of heaps, and a ticket for it; as JSON in the agent's answer.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeapAccess {
    /// The number of the service's node.
    pub node: u16,
    /// The TCP address of the service.
    pub address: SocketAddr,
    /// The address of the service's RDMA device, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<SocketAddr>,
    ticket: String,
    secret: String,
}

impl std::fmt::Debug for HeapAccess {
    /// Omits the secret, so that it stays out of logs.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "HeapAccess(node {}, {})", self.node, self.address)
    }
}

impl HeapAccess {
    /// Creates access by a ticket, whose secret is derived from the cluster's key.
    #[must_use]
    pub fn new(node: u16, address: SocketAddr, ticket: &Ticket, key: &ClusterKey) -> Self {
        let (secret, ticket) = (hex(&ticket.secret(key).0), hex(&ticket.encode()));
        Self { node, address, device: None, ticket, secret }
    }

    /// Connects to the service, and to its RDMA device if it has one and this program can use it.
    ///
    /// # Errors
    /// If it cannot be reached, or refuses the ticket.
    pub fn route(&self) -> Result<HeapRoute, AccessError> {
        let control = self.connect()?;
        match self.device.zip(VerbsProvider::installed()) {
            None => Ok(HeapRoute::Remote(control)),
            Some((address, verbs)) => {
                let (ticket, secret) = self.credential()?;
                let device = (verbs.connect)(address, &Credential::Ticket(ticket, secret), ticket.identity())
                    .map_err(|source| AccessError::Connect { node: self.node, source })?;
                Ok(HeapRoute::Device { control, device })
            }
        }
    }

    /// Connects to the service.
    ///
    /// # Errors
    /// If it cannot be reached, or refuses the ticket.
    pub fn connect(&self) -> Result<Box<dyn Endpoint>, AccessError> {
        self.connect_with(ConnectOptions::default())
    }

    /// Connects as [`Self::connect`] does, with these options.
    ///
    /// # Errors
    /// Those of [`Self::connect`].
    pub fn connect_with(&self, options: ConnectOptions) -> Result<Box<dyn Endpoint>, AccessError> {
        let (ticket, secret) = self.credential()?;
        tcp::connect_with_ticket(self.address, &ticket, &secret, options)
            .map_err(|source| AccessError::Connect { node: self.node, source })
    }

    fn credential(&self) -> Result<(Ticket, TicketSecret), AccessError> {
        let ticket = parse_hex(&self.ticket).and_then(|bytes| Ticket::parse(&bytes));
        let secret = parse_hex::<32>(&self.secret).map(TicketSecret);
        ticket.zip(secret).ok_or(AccessError::Answer)
    }
}

/// Asks the agent at `socket` for access to the heap of this process' user, on a node or on one
/// that the agent chooses. If the heap is on this machine, the answer carries its descriptors.
///
/// # Errors
/// If there is no agent, or it refuses.
pub fn request_access(
    socket: &Path,
    node: Option<u16>,
) -> Result<(HeapAccess, Option<SharedHeap>), AccessError> {
    let no_agent = |source| AccessError::NoAgent { path: socket.to_owned(), source };
    let agent = connect(socket).map_err(no_agent)?;
    send_frame(&agent, &Frame::HeapAccessRequest(node.unwrap_or(0)), &[]).map_err(no_agent)?;
    match receive_frame(&agent) {
        Ok((Frame::HeapAccess(json), fds)) => {
            let access =
                serde_json::from_str::<Option<HeapAccess>>(&json).map_err(|_| AccessError::Answer)?;
            let shared = <[OwnedFd; 3]>::try_from(fds).ok();
            let shared = shared.map(|[socket, data, names]| SharedHeap { socket, data, names });
            Ok((access.ok_or(AccessError::NoService(node))?, shared))
        }
        Ok((Frame::Refused(reason), _)) => Err(AccessError::Refused(reason)),
        _ => Err(AccessError::Answer),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn parse_hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    let digits = text.as_bytes();
    if digits.len() != 2 * N || !digits.is_ascii() {
        return None;
    }
    for (byte, digits) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        let digits = std::str::from_utf8(digits).ok()?;
        *byte = u8::from_str_radix(digits, 16).ok().filter(|_| !digits.starts_with('+'))?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use aquifer_fabric::{Host, Tenant};

    use super::*;

    #[test]
    fn access_is_written_as_documented_and_its_secret_is_not_shown() {
        let ticket = Ticket { tenant: Tenant(1), host: Host(2), epoch: 3, expiry_s: 4, service: 5 };
        let access = HeapAccess::new(9, "127.0.0.1:8".parse().unwrap(), &ticket, &ClusterKey([7; 32]));
        let json = serde_json::to_string(&access).unwrap();
        let parsed: HeapAccess = serde_json::from_str(&json).unwrap();
        assert_eq!(parsed, access);
        let ticket = "050002000100000003000000000000000400000000000000";
        assert!(
            json.starts_with(&format!(r#"{{"node":9,"address":"127.0.0.1:8","ticket":"{ticket}","#)),
            "{json}"
        );
        assert_eq!(format!("{access:?}"), "HeapAccess(node 9, 127.0.0.1:8)");
    }

    #[test]
    fn only_plain_digits_are_read() {
        assert_eq!(parse_hex("0aFf"), Some([10, 255]));
        for text in ["", "0a", "0aff00", "0ag0", "+a0b", "é00"] {
            assert_eq!(parse_hex::<2>(text), None, "{text}");
        }
    }
}
