//! Tickets for the heaps of the users of this host.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use aquifer_channel::descriptor_shares::DescriptorShares;
use aquifer_channel::socket::wait_readable;
use aquifer_channel::{connect, receive_frame, send_frame};
use aquifer_directory::names::HeapsRecord;
use aquifer_directory::{Directory, names};
use aquifer_fabric::{ClusterKey, Identity, Tenant, Ticket};
use aquifer_ipc::Frame;
use aquifer_objects::access::HeapAccess;
use aquifer_objects::service::{OPERATOR, TICKET_SERVICE};
use parking_lot::Mutex;

/// Lifetime of a ticket, in which it can be used to connect.
const TICKET_TIME: Duration = Duration::from_secs(24 * 3600);

/// Descriptors of a heap while they are sent to a program: the connection, the bytes and the names.
const HEAP_DESCRIPTORS: usize = 4;
/// Maximum number of user ids of one owner that get tickets. Each of them has a heap.
const TENANTS_PER_OWNER_MAX: usize = 16;
/// Longest wait for a service on this machine.
const OPEN_TIMEOUT: Duration = Duration::from_secs(2);

/// Issues tickets for heaps.
#[derive(Debug)]
pub(crate) struct HeapTickets {
    pub directory: Arc<dyn Directory>,
    pub key: Option<ClusterKey>,
    /// The host, with the epoch of its lease.
    pub identity: Identity,
    /// The folder with the sockets of the services on this machine.
    pub folder: PathBuf,
    /// The descriptors of the agent, which are charged to users.
    pub descriptors: Arc<DescriptorShares>,
    /// The user ids with tickets, by their owner.
    pub tenants: Mutex<BTreeMap<u32, BTreeSet<u32>>>,
}

impl HeapTickets {
    /// Answers a program of a user that requests the heap on `node`, or on any node if `node` is 0.
    pub fn answer(&self, socket: &OwnedFd, uid: u32, node: u16) -> io::Result<()> {
        let charged = self.descriptors.charge(uid, HEAP_DESCRIPTORS);
        let charged = charged.map_err(|error| error.to_string());
        let access = charged.and_then(|charge| {
            self.admit(charge.owner(), uid)?;
            Ok((self.access(Tenant(uid), node)?, charge))
        });
        match access {
            Ok(((json, fds), _charge)) => {
                let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
                send_frame(socket, &Frame::HeapAccess(json), &fds)
            }
            Err(reason) => send_frame(socket, &Frame::Refused(reason), &[]),
        }
    }

    /// Counts a user id that gets a ticket, because a service has a bounded number of heaps.
    fn admit(&self, owner: u32, uid: u32) -> Result<(), String> {
        let mut tenants = self.tenants.lock();
        let of_owner = tenants.entry(owner).or_default();
        if of_owner.len() >= TENANTS_PER_OWNER_MAX && !of_owner.contains(&uid) {
            return Err(format!(
                "{TENANTS_PER_OWNER_MAX} ids of user {owner} have heaps already (/etc/subuid)"
            ));
        }
        of_owner.insert(uid);
        Ok(())
    }

    fn access(&self, tenant: Tenant, node: u16) -> Result<(String, Vec<OwnedFd>), String> {
        let mut services =
            names::heaps(&*self.directory).map_err(|error| format!("the directory failed: {error}"))?;
        services.retain(|service| node == 0 || service.node == node);
        let is_here = |service: &HeapsRecord| self.socket_of(service.node).exists();
        let chosen = services.iter().find(|service| is_here(service)).or_else(|| services.first());
        let Some(service) = chosen else { return Ok(("null".to_owned(), Vec::new())) };
        let key = self.key.as_ref().ok_or("this agent has no cluster key: start it with --key FILE")?;
        if tenant == OPERATOR {
            return Err("this user has no number of its own".to_owned());
        }
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let Identity { host, epoch, .. } = self.identity;
        let expiry_s = (now + TICKET_TIME).as_secs();
        let ticket = Ticket { tenant, host, epoch, expiry_s, service: TICKET_SERVICE };
        let parse = |address: &String| {
            address.parse().map_err(|error| {
                format!("the service of heaps on node {} has no address: {error}", service.node)
            })
        };
        let device = service.device.as_ref().map(parse).transpose()?;
        let mut access = HeapAccess::new(service.node, parse(&service.address)?, &ticket, key);
        access.device = device;
        let json = serde_json::to_string(&access).map_err(|error| error.to_string())?;
        let shared = if is_here(service) { self.share(service.node, tenant) } else { Ok(Vec::new()) };
        let shared = shared.unwrap_or_else(|error| {
            tracing::debug!(node = service.node, %error, "a heap is not shared: programs use the network");
            Vec::new()
        });
        Ok((json, shared))
    }

    /// Opens the heap of a tenant at a service on this machine. Returns the connection, the bytes
    /// and the names.
    fn share(&self, node: u16, tenant: Tenant) -> io::Result<Vec<OwnedFd>> {
        let socket = connect(&self.socket_of(node))?;
        send_frame(&socket, &Frame::OpenHeap(tenant.0), &[])?;
        if !wait_readable(&[&socket], OPEN_TIMEOUT)? {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match receive_frame(&socket) {
            Ok((Frame::HeapOpened, fds)) => Ok(std::iter::once(socket).chain(fds).collect()),
            Ok((Frame::Refused(reason), _)) => Err(io::Error::other(reason)),
            Ok(_) => Err(io::Error::other("unexpected answer")),
            Err(error) => Err(io::Error::other(error)),
        }
    }

    fn socket_of(&self, node: u16) -> PathBuf {
        self.folder.join(format!("heaps-{node}.sock"))
    }
}
