//! Connects tenants to memory nodes.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use aquifer_channel::descriptor_shares::DescriptorShares;
use aquifer_fabric::reconnecting::{AwayPolicy, Reconnect, ReconnectingEndpoint, TargetDescription};
use aquifer_fabric::{Endpoint, EndpointError, Identity, Tenant};
use aquifer_pool::NodeId;

use super::reconnect::Reconnector;
use super::shares::ShareKey;
use super::view::{NodeState, PresentNode};
use super::{AfterFence, Contact, EndpointPurpose, NodeRegistry};

/// Interval between attempts to connect to a node that is away.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);
/// Interval between attempts to connect to a node that has fenced this host. The node refuses the
/// host until this process ends.
const FENCED_RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Interval between listings of the directory because of a node that is away.
const LISTING_INTERVAL: Duration = Duration::from_secs(1);
/// Descriptors of an endpoint. Its thread, if it has one, is shared by many users.
const ENDPOINT_DESCRIPTORS: usize = 3;

/// A failed attempt to connect.
#[derive(Debug)]
pub struct ConnectFailure {
    /// The error of the fabric.
    pub error: EndpointError,
    /// True if the node may return with its memory.
    pub is_temporary: bool,
}

impl NodeRegistry {
    /// Connects to a node on behalf of a tenant. Waits for a node that is away and whose memory
    /// is kept; READs and WRITEs on the endpoint wait for it, too.
    ///
    /// # Errors
    /// If the node cannot be reached or refuses the connection.
    pub fn connect(&self, node: NodeId, tenant: Tenant) -> Result<Box<dyn Endpoint>, EndpointError> {
        self.connect_for(node, tenant, EndpointPurpose::Write)
    }

    pub(super) fn connect_for(
        &self,
        node: NodeId,
        tenant: Tenant,
        purpose: EndpointPurpose,
    ) -> Result<Box<dyn Endpoint>, EndpointError> {
        self.connect_in(node, tenant, purpose, AwayPolicy::Wait)
    }

    /// Connects to a node as [`aquifer_pager::Connector::connect_without_waiting`] does.
    pub(crate) fn connect_without_waiting(
        &self,
        node: NodeId,
        tenant: Tenant,
    ) -> Result<Box<dyn Endpoint>, EndpointError> {
        self.connect_in(node, tenant, EndpointPurpose::Allocate, AwayPolicy::Fail)
    }

    /// Connects to a node as [`aquifer_pager::Connector::connect_lazily`] does.
    ///
    /// An endpoint whose operations wait connects by itself, if this tenant has connected to the
    /// node before: a node that does not answer must not stop a thread that can use other nodes.
    pub(crate) fn connect_lazily(
        &self,
        node: NodeId,
        tenant: Tenant,
        purpose: EndpointPurpose,
    ) -> Result<Box<dyn Endpoint>, EndpointError> {
        let policy = purpose.away_policy();
        let contact = self.contacts.lock().get(&(node, tenant)).cloned();
        let life = match self.state(node, self.now()) {
            NodeState::Present(last) | NodeState::Suspect(last) | NodeState::Away(Some(last)) => {
                Some(last.epoch)
            }
            NodeState::Away(None) => None,
            NodeState::Unknown => return Err(unknown_node(node)),
        };
        if policy == AwayPolicy::Fail {
            match self.try_connect(node, tenant, purpose, policy) {
                Err(ConnectFailure { is_temporary: true, .. }) => {}
                outcome => return outcome.map_err(|failure| failure.error),
            }
        }
        match (contact, self.me.upgrade()) {
            (Some(Contact { target, epoch }), Some(nodes)) if life.is_none_or(|life| life == epoch) => {
                let key = ShareKey { node, life: epoch, tenant, purpose };
                self.shares.endpoint(key, || {
                    let reconnector = Arc::new(Reconnector { nodes, node, tenant, epoch });
                    let endpoint = ReconnectingEndpoint::to_away_target(target, reconnector, policy);
                    Ok(self.charged(endpoint, tenant))
                })
            }
            _ => self.connect_in(node, tenant, purpose, policy),
        }
    }

    /// Connects to a node. With [`AwayPolicy::Wait`], waits for a node that is away. The later
    /// behaviour of the endpoint depends on its purpose.
    fn connect_in(
        &self,
        node: NodeId,
        tenant: Tenant,
        purpose: EndpointPurpose,
        policy: AwayPolicy,
    ) -> Result<Box<dyn Endpoint>, EndpointError> {
        loop {
            match self.try_connect(node, tenant, purpose, policy) {
                Ok(endpoint) => {
                    self.failures.lock().remove(&node);
                    self.has_connected.store(true, Relaxed);
                    return Ok(endpoint);
                }
                Err(failure) if policy == AwayPolicy::Fail || !failure.is_temporary => {
                    self.failures.lock().insert(node, failure.error.to_string());
                    return Err(failure.error);
                }
                Err(failure) => {
                    self.log_wait(node, &failure.error);
                    let is_fence = failure.error.is_fence();
                    std::thread::sleep(if is_fence { FENCED_RETRY_INTERVAL } else { RETRY_INTERVAL });
                }
            }
        }
    }

    /// Tries once to connect a tenant to a node, for a purpose. `policy` is whether the caller
    /// waits for a node that is away, and so repeats the attempt.
    ///
    /// # Errors
    /// If the node cannot be reached now, or refuses the connection.
    pub fn try_connect(
        &self,
        node: NodeId,
        tenant: Tenant,
        purpose: EndpointPurpose,
        policy: AwayPolicy,
    ) -> Result<Box<dyn Endpoint>, ConnectFailure> {
        let state = match policy {
            AwayPolicy::Wait => self.awaited_state(node),
            AwayPolicy::Fail => self.state(node, self.now()),
        };
        let (last, is_suspect) = match state {
            NodeState::Present(last) | NodeState::Away(Some(last)) => (last, false),
            NodeState::Suspect(last) => (last, true),
            NodeState::Away(None) => {
                return Err(ConnectFailure { error: away_node(node), is_temporary: true });
            }
            NodeState::Unknown => {
                return Err(ConnectFailure { error: unknown_node(node), is_temporary: false });
            }
        };
        self.share_endpoint(node, tenant, purpose, &last).map_err(|error| {
            let is_temporary = self.awaits_end_after(&error) || may_return(&last, is_suspect, &error);
            ConnectFailure { error, is_temporary }
        })
    }

    /// Whether the caller waits for the end of this process, because the host's lease has ended.
    fn awaits_end_after(&self, error: &EndpointError) -> bool {
        error.is_fence() && self.after_fence == AfterFence::Wait
    }

    /// Returns an endpoint to a node, exclusive or shared.
    fn share_endpoint(
        &self,
        node: NodeId,
        tenant: Tenant,
        purpose: EndpointPurpose,
        present: &PresentNode,
    ) -> Result<Box<dyn Endpoint>, EndpointError> {
        let key = ShareKey { node, life: present.epoch, tenant, purpose };
        self.shares.endpoint(key, || {
            let endpoint = self.open_endpoint(node, present, tenant)?;
            self.shares.forget_earlier_lives(node, present.epoch);
            let endpoint = self.wrap(node, tenant, endpoint, present, purpose.away_policy());
            Ok(self.charged(endpoint, tenant))
        })
    }

    /// Charges an endpoint to the user of a tenant, also beyond the user's share: without it,
    /// several programs, runs or sessions could not use the node. A user has few endpoints.
    fn charged(&self, endpoint: ReconnectingEndpoint, tenant: Tenant) -> ReconnectingEndpoint {
        let charge = |shares: &Arc<DescriptorShares>| shares.charge_always(tenant.0, ENDPOINT_DESCRIPTORS);
        let endpoint = endpoint.with_after_fence(self.after_fence);
        match self.descriptors.get().map(charge) {
            Some(charge) => endpoint.owning(charge),
            None => endpoint,
        }
    }

    /// Logs at intervals that connections wait for an endpoint.
    fn log_wait(&self, node: NodeId, error: &EndpointError) {
        if error.is_lack_of_room()
            && let Some(attempts) = self.waits.lock().record(self.now())
        {
            tracing::warn!(
                node = node.0, %error, attempts, "waiting for an endpoint; pages stay where they are"
            );
        }
    }

    /// Records a connection, unless another thread has recorded one to a later life of the node.
    fn record_contact(&self, node: NodeId, tenant: Tenant, contact: Contact) {
        let mut contacts = self.contacts.lock();
        if contacts.get(&(node, tenant)).is_none_or(|before| before.epoch <= contact.epoch) {
            contacts.insert((node, tenant), contact);
        }
    }

    /// Wraps an endpoint so that it survives a restart of the node, if the node's memory is kept,
    /// and so that operations that do not wait for the node can be abandoned.
    fn wrap(
        &self,
        node: NodeId,
        tenant: Tenant,
        endpoint: Box<dyn Endpoint>,
        present: &PresentNode,
        policy: AwayPolicy,
    ) -> ReconnectingEndpoint {
        let PresentNode { epoch, grace, .. } = *present;
        self.record_contact(node, tenant, Contact { target: TargetDescription::of(&*endpoint), epoch });
        let may_return = !grace.is_zero() || policy == AwayPolicy::Fail;
        let nodes = self.me.upgrade().filter(|_| may_return);
        let reconnect =
            nodes.map(|nodes| Arc::new(Reconnector { nodes, node, tenant, epoch }) as Arc<dyn Reconnect>);
        ReconnectingEndpoint::new(endpoint, reconnect, policy)
    }

    /// The state of a node for which a caller waits. Lists the nodes in the directory if only a
    /// listing can show whether the node has returned or is lost.
    pub(super) fn awaited_state(&self, node: NodeId) -> NodeState {
        if self.read_view().wants_listing(node, self.now())
            // Otherwise another thread lists the nodes, or has just done so.
            && let Some(mut listed_at) = self.listed_at.try_lock()
            && listed_at.is_none_or(|at| self.now().saturating_duration_since(at) >= LISTING_INTERVAL)
        {
            *listed_at = Some(self.now());
            if let Err(error) = self.refresh() {
                tracing::debug!(node = node.0, %error, "listing memory nodes failed; waiting for one");
            }
        }
        self.state(node, self.now())
    }

    /// Opens an endpoint, checks that the node has opened its memory, and records the outcome.
    pub(super) fn open_endpoint(
        &self,
        node: NodeId,
        present: &PresentNode,
        tenant: Tenant,
    ) -> Result<Box<dyn Endpoint>, EndpointError> {
        let begun = self.now();
        let opened = self.try_open_endpoint(present, tenant);
        match &opened {
            Ok(_) => self.write_view().note_connection(node),
            Err(error) if error.is_target_away() && (error.is_timeout() || !error.is_lack_of_room()) => {
                self.write_view().note_failed_attempt(node, begun);
            }
            // The node has answered, or this machine cannot connect.
            Err(_) => {}
        }
        opened
    }

    fn try_open_endpoint(
        &self,
        present: &PresentNode,
        tenant: Tenant,
    ) -> Result<Box<dyn Endpoint>, EndpointError> {
        let identity = Identity { tenant, ..self.identity };
        let endpoint = self.environment.connect(&present.address, present.class, identity)?;
        if endpoint.regions().is_empty() {
            // The node has just been restarted; the directory has the record of its last process.
            return Err(EndpointError::Unreachable {
                address: present.address.address(),
                source: std::io::Error::new(std::io::ErrorKind::NotConnected, "its memory is not open yet"),
            });
        }
        Ok(endpoint)
    }

    /// Connects to a node under another identity than this host's.
    pub(crate) fn connect_as(
        &self,
        node: NodeId,
        identity: Identity,
    ) -> Result<Box<dyn Endpoint>, EndpointError> {
        match self.state(node, self.now()) {
            NodeState::Present(last) | NodeState::Suspect(last) | NodeState::Away(Some(last)) => {
                self.environment.connect(&last.address, last.class, identity)
            }
            NodeState::Away(None) => Err(away_node(node)),
            NodeState::Unknown => Err(unknown_node(node)),
        }
    }
}

/// Whether a node that refused or did not answer still has its memory, or may return with it.
pub(super) fn may_return(last: &PresentNode, is_suspect: bool, error: &EndpointError) -> bool {
    if is_suspect {
        // A suspect node that does not answer is considered ended.
        return error.is_lack_of_room() && !error.is_timeout();
    }
    error.is_lack_of_room() || error.is_target_away() && !last.grace.is_zero()
}

fn unknown_node(node: NodeId) -> EndpointError {
    unreachable_node(node, "the directory has no such node")
}

fn away_node(node: NodeId) -> EndpointError {
    unreachable_node(node, "it is away, and its memory may be kept")
}

fn unreachable_node(node: NodeId, reason: &str) -> EndpointError {
    EndpointError::Unreachable {
        address: format!("memory node {}", node.0),
        source: std::io::Error::new(std::io::ErrorKind::NotFound, reason),
    }
}
