//! What the keeper holds of a run and of a program: descriptors, and a record for the agent that takes over.
//!
//! Records are JSON: they are read once, by the next agent, which may be of a newer build.

use std::io;
use std::os::fd::OwnedFd;

use aquifer_ipc::{Hello, KeptKind, Put, Token};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Something that the keeper holds, as it comes back.
#[derive(Debug)]
pub struct Kept {
    /// What it is.
    pub put: Put,
    /// The descriptors with which it was put. Behind them a program whose process is known has a pidfd.
    pub fds: Vec<OwnedFd>,
}

/// A run. With its slabs' memory, and the socket of whoever started it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct RunRecord {
    /// As hexadecimal digits.
    pub token: String,
    pub name: String,
    pub limit_bytes: u64,
    /// The user that it belongs to.
    pub tenant: u32,
    pub replicas: usize,
}

/// A program. With its userfaultfd, its page table and its journal; if it has said hello, with the control memory and its socket, too.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct ProgramRecord {
    /// The run's number.
    pub run: u64,
    /// A forked child's parent, and how many of that one's events had been heeded before the fork.
    pub origin: Option<(u64, u64)>,
    /// The shim's own memory, from, to, and the canary page.
    pub private: [u64; 3],
    pub hello: Option<HelloRecord>,
}

/// What a program said of itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct HelloRecord {
    pub is_child: bool,
    pub antechamber: u64,
    pub staging: u64,
}

impl RunRecord {
    pub fn put(&self, id: u64) -> Put {
        Put { kind: KeptKind::Run, id, pid: 0, record: encode(self) }
    }

    pub fn token(&self) -> io::Result<Token> {
        Token::from_hex(self.token.as_bytes()).ok_or_else(|| io::Error::other("a run's token is damaged"))
    }
}

impl ProgramRecord {
    pub fn put(&self, id: u64, pid: u32) -> Put {
        Put { kind: KeptKind::Program, id, pid, record: encode(self) }
    }

    /// The words with which it came.
    pub fn hello(&self, token: Token) -> Option<Hello> {
        let HelloRecord { is_child, antechamber, staging } = self.hello?;
        let [private_start, private_end, canary] = self.private;
        // It has been recognised.
        let number = 0;
        Some(Hello { token, is_child, number, antechamber, staging, canary, private_start, private_end })
    }
}

impl From<&Hello> for HelloRecord {
    fn from(hello: &Hello) -> Self {
        Self { is_child: hello.is_child, antechamber: hello.antechamber, staging: hello.staging }
    }
}

fn encode(record: &impl Serialize) -> String {
    serde_json::to_string(record).expect("plain structs are JSON")
}

/// A record that an agent before this one wrote.
pub(crate) fn decode<T: DeserializeOwned>(put: &Put) -> io::Result<T> {
    serde_json::from_str(&put.record).map_err(io::Error::other)
}
