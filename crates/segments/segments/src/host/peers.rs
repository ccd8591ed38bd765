//! The connections of a host to other agents.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::peer::{Lane, Peer};
use aquifer_ownership::Life;

/// A connection that several threads use.
pub(super) type SharedPeer = Arc<Mutex<Peer>>;

/// The connections, by the life of the other agent and the lane.
#[derive(Debug, Default)]
pub(super) struct Peers(Mutex<HashMap<(Life, Lane), SharedPeer>>);

impl Peers {
    pub fn get(&self, life: Life, lane: Lane) -> Option<SharedPeer> {
        self.0.lock().get(&(life, lane)).cloned()
    }

    /// Adds a connection, unless another thread has added one. Returns the connection to use.
    pub fn add(&self, life: Life, lane: Lane, peer: Peer) -> SharedPeer {
        let peer = Arc::new(Mutex::new(peer));
        Arc::clone(self.0.lock().entry((life, lane)).or_insert(peer))
    }

    /// Removes a connection. Threads that hold a reference may still use it.
    pub fn remove(&self, life: Life, lane: Lane, peer: &SharedPeer) {
        let mut peers = self.0.lock();
        if peers.get(&(life, lane)).is_some_and(|known| Arc::ptr_eq(known, peer)) {
            peers.remove(&(life, lane));
        }
    }
}
