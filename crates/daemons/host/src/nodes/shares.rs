//! Shared endpoints, which limit how many endpoints a tenant has to a node.
//!
//! A node grants a bounded number of endpoints to the whole cluster, and each costs both machines
//! descriptors and memory. So the first users of a tenant get exclusive endpoints, which are
//! faster, and all further users share endpoints.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use aquifer_fabric::multiplex::{Multiplexer, WeakMultiplexer};
use aquifer_fabric::reconnecting::{AwayPolicy, ReconnectingEndpoint};
use aquifer_fabric::{Endpoint, EndpointError, Tenant};
use aquifer_pool::NodeId;
use parking_lot::Mutex;

/// Maximum number of exclusive endpoints of one tenant to one node for one purpose.
const OWN_MAX: usize = 8;
/// Maximum number of users of a shared endpoint.
const USERS_MAX: usize = 16;

/// The purpose of an endpoint. Endpoints are shared for the same purpose only, so that a fetch does
/// not wait behind many WRITEs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum EndpointPurpose {
    /// Reads pages that a program waits for.
    Fetch,
    /// Writes pages.
    Write,
    /// Writes pages with several replicas. No operation waits for a node that is away.
    WriteReplicas,
    /// Allocates and frees extents.
    Allocate,
}

impl EndpointPurpose {
    /// The policy for operations while a node is away.
    pub(super) const fn away_policy(self) -> AwayPolicy {
        match self {
            Self::Fetch | Self::Write => AwayPolicy::Wait,
            Self::WriteReplicas | Self::Allocate => AwayPolicy::Fail,
        }
    }
}

/// The key of a group of users that can share endpoints.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct ShareKey {
    pub node: NodeId,
    /// The epoch of the node's life. Another life is other memory.
    pub life: u64,
    pub tenant: Tenant,
    pub purpose: EndpointPurpose,
}

/// All endpoints of this host.
#[derive(Debug, Default)]
pub(super) struct EndpointShares(Mutex<HashMap<ShareKey, Arc<ShareSlot>>>);

#[derive(Debug, Default)]
struct ShareSlot {
    /// One reference for each exclusive endpoint.
    own: Mutex<Arc<()>>,
    shared: Mutex<SharedEndpoints>,
    /// Number of failed attempts to open a shared endpoint.
    failures: AtomicU64,
}

#[derive(Debug, Default)]
struct SharedEndpoints {
    /// The multiplexers. Each closes its endpoint with its last user.
    multiplexers: Vec<WeakMultiplexer>,
    last_error: Option<EndpointError>,
}

impl EndpointShares {
    /// Returns an endpoint for a new user. Calls `open` unless an endpoint can be shared.
    ///
    /// # Errors
    /// Those of `open`.
    pub fn endpoint(
        &self,
        key: ShareKey,
        open: impl FnOnce() -> Result<ReconnectingEndpoint, EndpointError>,
    ) -> Result<Box<dyn Endpoint>, EndpointError> {
        let slot = Arc::clone(self.0.lock().entry(key).or_default());
        if let Some(counted) = slot.count_own() {
            return Ok(Box::new(open()?.owning(counted)));
        }
        slot.shared_endpoint(slot.failures.load(Relaxed), open)
    }

    /// Removes the earlier lives of a node. Their endpoints close with their users.
    pub fn forget_earlier_lives(&self, node: NodeId, life: u64) {
        self.0.lock().retain(|key, _| key.node != node || key.life >= life);
    }
}

impl ShareSlot {
    /// Counts a user with an exclusive endpoint; `None` if there are [`OWN_MAX`] already.
    fn count_own(&self) -> Option<Arc<()>> {
        let own = self.own.lock();
        (Arc::strong_count(&own) <= OWN_MAX).then(|| Arc::clone(&own))
    }

    /// Returns an endpoint that shares another one. `failures` is the number of failed attempts
    /// before the user called.
    fn shared_endpoint(
        &self,
        failures: u64,
        open: impl FnOnce() -> Result<ReconnectingEndpoint, EndpointError>,
    ) -> Result<Box<dyn Endpoint>, EndpointError> {
        // Held while connecting, so that users that call meanwhile share the new endpoint.
        let mut shared = self.shared.lock();
        if self.failures.load(Relaxed) != failures
            && let Some(error) = &shared.last_error
        {
            // Otherwise the users would wait for a node that does not answer one after the other.
            return Err(copy_error(error));
        }
        let result = shared.endpoint(open);
        if let Err(error) = &result {
            shared.last_error = Some(copy_error(error));
            self.failures.fetch_add(1, Relaxed);
        }
        result
    }
}

/// Copies an error for another user.
fn copy_error(error: &EndpointError) -> EndpointError {
    let copy_source = |source: &io::Error| {
        source
            .raw_os_error()
            .map_or_else(|| io::Error::new(source.kind(), source.to_string()), io::Error::from_raw_os_error)
    };
    match error {
        EndpointError::Unreachable { address, source } => {
            EndpointError::Unreachable { address: address.clone(), source: copy_source(source) }
        }
        EndpointError::Refused { address, refusal } => {
            EndpointError::Refused { address: address.clone(), refusal: refusal.clone() }
        }
        EndpointError::Protocol { address, reason } => {
            EndpointError::Protocol { address: address.clone(), reason: reason.clone() }
        }
        EndpointError::Local { bytes, source } => {
            EndpointError::Local { bytes: *bytes, source: copy_source(source) }
        }
        EndpointError::ReadOnlyLocal => EndpointError::ReadOnlyLocal,
        EndpointError::TooManyLocal { limit } => EndpointError::TooManyLocal { limit: *limit },
    }
}

impl SharedEndpoints {
    /// Adds a user to a shared endpoint. Calls `open` if all have [`USERS_MAX`] users.
    fn endpoint(
        &mut self,
        open: impl FnOnce() -> Result<ReconnectingEndpoint, EndpointError>,
    ) -> Result<Box<dyn Endpoint>, EndpointError> {
        let mut added = None;
        self.multiplexers.retain(|multiplexer| {
            let Some(multiplexer) = multiplexer.upgrade() else { return false };
            if added.is_none() {
                added = multiplexer.add_user();
            }
            true
        });
        if let Some(endpoint) = added {
            return Ok(Box::new(endpoint));
        }
        let unreachable = |source| EndpointError::Unreachable { address: "a shared endpoint".into(), source };
        let multiplexer = Multiplexer::new(Box::new(open()?), USERS_MAX).map_err(unreachable)?;
        let broken = || unreachable(std::io::ErrorKind::ConnectionAborted.into());
        let endpoint = multiplexer.add_user().ok_or_else(broken)?;
        self.multiplexers.push(multiplexer.downgrade());
        Ok(Box::new(endpoint))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use aquifer_fabric::sim::{SimFabric, SimOptions};
    use aquifer_fabric::{Host, Identity};

    use super::*;

    #[test]
    fn the_first_users_have_their_own_and_the_others_share() {
        let fabric = SimFabric::new(1, SimOptions::default());
        let node = fabric.add_node();
        let who = Identity { host: Host(1), epoch: 1, tenant: Tenant(7) };
        let shares = EndpointShares::default();
        let opened = Cell::new(0);
        let key = ShareKey { node: NodeId(1), life: 1, tenant: Tenant(7), purpose: EndpointPurpose::Fetch };
        let endpoint = |key| {
            let open = || {
                opened.set(opened.get() + 1);
                let endpoint = fabric.connect(node.node(), who)?;
                Ok(ReconnectingEndpoint::new(endpoint, None, AwayPolicy::Wait))
            };
            shares.endpoint(key, open).unwrap()
        };
        let mut users: Vec<_> = (0..OWN_MAX).map(|_| endpoint(key)).collect();
        assert_eq!(opened.get(), OWN_MAX);
        users.extend((0..2 * USERS_MAX).map(|_| endpoint(key)));
        assert_eq!(opened.get(), OWN_MAX + 2);
        users.truncate(OWN_MAX + 3);
        users.extend((0..USERS_MAX - 3).map(|_| endpoint(key)));
        assert_eq!(opened.get(), OWN_MAX + 2, "places that are free again are used");
        users.remove(0);
        users.push(endpoint(key));
        assert_eq!(opened.get(), OWN_MAX + 3, "another one has its own");
        let other = ShareKey { purpose: EndpointPurpose::Write, ..key };
        users.push(endpoint(other));
        assert_eq!(opened.get(), OWN_MAX + 4);
        users.clear();
        let slot = Arc::clone(&shares.0.lock()[&key]);
        // The thread of each multiplexer may still hold a reference for a moment.
        while slot.shared.lock().multiplexers.iter().any(|multiplexer| multiplexer.upgrade().is_some()) {
            std::thread::yield_now();
        }
        shares.forget_earlier_lives(NodeId(1), 2);
        assert!(shares.0.lock().is_empty());
    }

    #[test]
    fn a_user_that_waited_for_a_failed_attempt_gets_its_error() {
        let slot = ShareSlot::default();
        let error = || EndpointError::TooManyLocal { limit: 7 };
        let expected = error().to_string();
        let before = slot.failures.load(Relaxed);
        assert_eq!(slot.shared_endpoint(before, || Err(error())).unwrap_err().to_string(), expected);
        let waited = slot.shared_endpoint(before, || unreachable!("it does not try, too"));
        assert_eq!(waited.unwrap_err().to_string(), expected);
        let mut has_tried = false;
        let later = slot.shared_endpoint(slot.failures.load(Relaxed), || {
            has_tried = true;
            Err(error())
        });
        assert!(later.is_err() && has_tried);
    }
}
