//! One connection at the target: from a stranger's first message to the windows that are bound for it.

use std::collections::{HashMap, VecDeque};
use std::io::{self, Read, Write};
use std::sync::Arc;
use std::time::Instant;

use super::peer::Peer;
use super::sys::connection::Connection;
use super::sys::pair::Pair;
use super::sys::window::Window;
use crate::tcp::secure::{ClusterKey, Seal, SecureError, respond};
use crate::work::Key;

/// How far it has come.
#[derive(Debug)]
pub(super) enum Phase {
    /// It must prove by then that it has the cluster's key.
    Proving(Instant),
    /// It has; now it must say who it is, by then.
    Greeting(Seal, Instant),
    Open(Arc<Peer>),
    /// It was refused, and told so.
    Refused(Instant),
}

#[derive(Debug)]
pub(super) struct Session {
    // Windows go before the queue pair that they are bound to: devices may wait for that for long.
    pub windows: HashMap<Key, Window>,
    pub connection: Connection,
    pub pair: Pair,
    pub phase: Phase,
    /// Letters for which there was no place.
    pub unsaid: VecDeque<Vec<u8>>,
    /// Letters and binds that the device has.
    pub under_way: usize,
}

impl Session {
    pub fn new(connection: Connection, pair: Pair, deadline: Instant) -> Self {
        Self {
            windows: HashMap::new(),
            connection,
            pair,
            phase: Phase::Proving(deadline),
            unsaid: VecDeque::new(),
            under_way: 0,
        }
    }

    pub fn peer(&self) -> Option<&Arc<Peer>> {
        match &self.phase {
            Phase::Open(peer) => Some(peer),
            _ => None,
        }
    }

    /// Whether it took too long to say who it is.
    pub fn is_late(&self, now: Instant) -> bool {
        match self.phase {
            Phase::Proving(deadline) | Phase::Greeting(_, deadline) | Phase::Refused(deadline) => {
                now >= deadline
            }
            Phase::Open(_) => false,
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.pair.stop();
        self.windows.clear();
        self.connection.disconnect();
    }
}

/// One message in, one message out, to those who expect a stream.
#[derive(Debug, Default)]
struct Script {
    heard: Vec<u8>,
    taken: usize,
    said: Vec<u8>,
}

impl Read for Script {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let count = out.len().min(self.heard.len() - self.taken);
        out[..count].copy_from_slice(&self.heard[self.taken..self.taken + count]);
        self.taken += count;
        Ok(count)
    }
}

impl Write for Script {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.said.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What a stranger's first message proves, and what it is answered.
pub(super) fn prove(message: &[u8], key: &ClusterKey) -> (Result<Seal, SecureError>, Vec<u8>) {
    let mut script = Script { heard: message.to_vec(), ..Script::default() };
    let outcome = respond(&mut script, key).map(|secured| secured.into_parts().1);
    (outcome, script.said)
}
