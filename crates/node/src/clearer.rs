//! Clears memory that was used and is free again, so that other tenants than its last may have it.
//!
//! The node does with its own memory what a host does: it takes a group of free spans, by the same operations over the same fabric. When nobody can
//! get at it any more it is cleared and given back, nobody's. Its last tenant may have been faster, and takes it as it is.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

use aquifer_fabric::tcp::{ClusterKey, ConnectOptions};
use aquifer_fabric::{EndpointError, Host, Identity, Reach, Target, Tenant};
use aquifer_pool::{Donation, NodeId, PoolClient, PoolError};

use crate::shutdown::Shutdown;

/// How often to look. What has been left alone from one look to the next is cleared: whoever goes on taking and giving back keeps its own.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Nobody's user id.
const NOBODY: Tenant = Tenant(u32::MAX);

/// Where the node reaches itself.
#[derive(Debug)]
pub(crate) struct Own {
    pub reach: Reach,
    pub key: Option<ClusterKey>,
}

/// The thread that clears. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Clearer {
    stop: Shutdown,
    thread: Option<JoinHandle<()>>,
}

impl Clearer {
    /// Start it. `cleared_bytes` counts what it clears.
    pub fn start(
        own: Own,
        donation: Donation,
        target: Arc<dyn Target>,
        cleared_bytes: Arc<AtomicU64>,
    ) -> std::io::Result<Self> {
        let stop = Shutdown::new();
        let clearing = Clearing {
            seen: vec![Seen::default(); donation.layout.sections() as usize],
            own,
            donation,
            target,
            pool: None,
            connections: 0,
            has_failed: false,
            cleared_bytes,
        };
        let asked = stop.clone();
        let thread =
            std::thread::Builder::new().name("clearer".into()).spawn(move || clearing.run(&asked))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Clearer {
    fn drop(&mut self) {
        self.stop.request();
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            debug_assert!(ended.is_ok(), "the thread that clears memory panicked");
        }
    }
}

/// A section as it was at the last look.
#[derive(Clone, Copy, Default)]
struct Seen {
    word: u64,
    /// There was nothing to be cleared in it, and there is not as long as its word stays so.
    is_clear: bool,
}

struct Clearing {
    own: Own,
    donation: Donation,
    target: Arc<dyn Target>,
    pool: Option<PoolClient>,
    /// Connections made so far.
    connections: u64,
    has_failed: bool,
    seen: Vec<Seen>,
    cleared_bytes: Arc<AtomicU64>,
}

impl Clearing {
    fn run(mut self, stop: &Shutdown) {
        while !stop.wait(LOOK_EVERY) {
            // If the connection was lost something may have been taken over it: so it is made anew at once.
            let is_connected = self.connections == 0 || self.note(|own| own.pool().map(drop));
            if is_connected {
                self.look(stop);
            }
        }
    }

    fn look(&mut self, stop: &Shutdown) {
        for section in 0..self.donation.layout.sections() {
            if stop.is_requested() {
                return;
            }
            let word = self.donation.section_word(section);
            let seen = &mut self.seen[section as usize];
            if seen.word != word {
                *seen = Seen { word, is_clear: false };
            } else if !seen.is_clear && !self.note(|own| own.clear_section(section, stop)) {
                return;
            }
        }
    }

    /// Do something; whether it went well. If not it is told, once in a row, and the connection is given up.
    fn note(&mut self, work: impl FnOnce(&mut Self) -> Result<(), ClearError>) -> bool {
        let outcome = work(self);
        if let Err(error) = &outcome {
            self.pool = None;
            if !std::mem::replace(&mut self.has_failed, true) {
                tracing::warn!(%error, "memory that was given back is not cleared for other users; trying again");
            }
        } else {
            self.has_failed = false;
        }
        outcome.is_ok()
    }

    fn clear_section(&mut self, section: u32, stop: &Shutdown) -> Result<(), ClearError> {
        let outcome = self.clear_free_groups(section, stop);
        // What is wrong in the memory itself stays so until somebody changes it: other sections shall not wait for that one.
        let is_damaged = matches!(outcome, Err(ClearError::Pool(PoolError::Damaged { .. })));
        self.seen[section as usize].is_clear = is_damaged || self.donation.uncleared(section).is_none();
        outcome
    }

    fn clear_free_groups(&mut self, section: u32, stop: &Shutdown) -> Result<(), ClearError> {
        while self.clear_some(section)? && !stop.is_requested() {}
        Ok(())
    }

    /// Clear one group of a section; whether there was one.
    fn clear_some(&mut self, section: u32) -> Result<bool, ClearError> {
        let Some(group) = self.donation.uncleared(section) else { return Ok(false) };
        let node = NodeId(self.donation.layout.node());
        let Some(taken) = self.pool()?.take_to_clear(node, section, group)? else { return Ok(false) };
        self.donation.shut(&taken);
        self.target.expel(taken.addr..taken.addr + taken.class.bytes());
        self.donation.clear(&taken);
        self.pool()?.free(taken)?;
        self.cleared_bytes.fetch_add(taken.class.bytes(), Relaxed);
        Ok(true)
    }

    fn pool(&mut self) -> Result<&mut PoolClient, ClearError> {
        match &mut self.pool {
            Some(pool) => Ok(pool),
            none => {
                self.connections += 1;
                let node = NodeId(self.donation.layout.node());
                Ok(none.insert(connect(&self.own, node, self.connections)?))
            }
        }
    }
}

/// Connect to ourselves. What we had taken when an earlier connection broke is given back first: it is as it was, or clear.
fn connect(own: &Own, node: NodeId, epoch: u64) -> Result<PoolClient, ClearError> {
    let who = Identity { host: Host::NODE, epoch, tenant: NOBODY };
    let endpoint = own.reach.connect(who, own.key.as_ref(), &ConnectOptions::default())?;
    let mut pool = PoolClient::new(who.host, who.tenant);
    pool.add_node(node, endpoint)?;
    if epoch > 1 {
        // The new epoch has fenced the one before.
        pool.recover(node, who.host)?;
    }
    Ok(pool)
}

/// Why nothing is cleared.
#[derive(Debug, thiserror::Error)]
enum ClearError {
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    #[error(transparent)]
    Pool(#[from] PoolError),
}
