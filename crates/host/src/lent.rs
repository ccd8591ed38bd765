//! Servers of blocks on this host: processes of their own, with a host number and a lease of their own, so that they and the agent cannot harm
//! each other, nor need each other while they live. From the agent they have where the directory is, the cluster's key, and its word when the
//! cluster goes down.

use std::os::fd::OwnedFd;
use std::path::Path;

use aquifer_channel::{connect, receive_frame, send_frame};
use aquifer_fabric::ClusterKey;
use aquifer_ipc::Frame;
use serde::{Deserialize, Serialize};

/// What another process of this host needs to reach the memory nodes.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lent {
    /// Where the directory is, in the words of whoever started the agent.
    pub directory: String,
    /// Whether what goes to nodes on other machines is encrypted.
    pub encrypt: bool,
    /// The cluster's key in hexadecimal, if there is one.
    key: Option<String>,
}

impl std::fmt::Debug for Lent {
    /// Without the key: it is a secret.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Lent({}, {} key)", self.directory, if self.key.is_some() { "a" } else { "no" })
    }
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
    let socket = connect(path).map_err(|_| BorrowError::NoAgent { path: path.to_owned() })?;
    let answer = |error: &dyn std::fmt::Display| BorrowError::Answer(error.to_string());
    send_frame(&socket, &Frame::ClusterAccessRequest, &[]).map_err(|error| answer(&error))?;
    match receive_frame(&socket) {
        Ok((Frame::ClusterAccess(text), _)) => {
            let lent = serde_json::from_str(&text).map_err(|error| answer(&error))?;
            Ok((socket, lent))
        }
        Ok((Frame::Refused(reason), _)) => Err(BorrowError::Refused(reason)),
        Ok(_) => Err(answer(&"it said something else")),
        Err(error) => Err(answer(&error)),
    }
}

impl Lent {
    /// What an agent with these options lends.
    #[must_use]
    pub fn new(directory: &str, encrypt: bool, key: Option<&ClusterKey>) -> Self {
        let key = key.map(|key| key.0.iter().map(|byte| format!("{byte:02x}")).collect());
        Self { directory: directory.to_owned(), encrypt, key }
    }

    /// The cluster's key, if there is one.
    ///
    /// # Errors
    /// A sentence, if it is none.
    pub fn key(&self) -> Result<Option<ClusterKey>, String> {
        self.key.as_deref().map(parse_key).transpose()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_survives_the_way_and_no_log_gives_it_away() {
        let lent = Lent::new("{}", true, Some(&ClusterKey([0x5a; 32])));
        let text = serde_json::to_string(&lent).unwrap();
        let again: Lent = serde_json::from_str(&text).unwrap();
        assert_eq!(again, lent);
        assert_eq!(again.key().unwrap().unwrap().0, [0x5a; 32]);
        assert!(!format!("{again:?}").contains("5a5a"));
        assert!(Lent::new("", false, None).key().unwrap().is_none());
    }

    #[test]
    fn a_key_that_is_none_is_refused() {
        for key in ["", "0f", &"0g".repeat(32), &"+f".repeat(32), &"0f".repeat(33)] {
            assert!(Lent { key: Some(key.to_owned()), ..Lent::new("", false, None) }.key().is_err(), "{key}");
        }
    }
}
