//! Tickets for the heaps of the users of this host.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use aquifer_directory::{Directory, names};
use aquifer_fabric::{ClusterKey, Identity, Tenant, Ticket};
use aquifer_ipc::Frame;
use aquifer_objects::access::HeapAccess;
use aquifer_objects::service::{OPERATOR, TICKET_SERVICE};

/// Time for which a ticket can be used to connect.
const TICKET_TIME: Duration = Duration::from_secs(24 * 3600);

/// What tickets are made of.
#[derive(Debug)]
pub(crate) struct HeapTickets {
    pub directory: Arc<dyn Directory>,
    pub key: Option<ClusterKey>,
    /// The host, with the epoch of its lease.
    pub identity: Identity,
}

impl HeapTickets {
    /// Answers a program of a user.
    pub fn answer(&self, uid: u32) -> Frame {
        match self.access(Tenant(uid)) {
            Ok(json) => Frame::HeapAccess(json),
            Err(reason) => Frame::Refused(reason),
        }
    }

    fn access(&self, tenant: Tenant) -> Result<String, String> {
        let services =
            names::heaps(&*self.directory).map_err(|error| format!("the directory failed: {error}"))?;
        if services.is_empty() {
            return Ok("[]".to_owned());
        }
        let key = self.key.as_ref().ok_or("this agent has no cluster key: start it with --key FILE")?;
        if tenant == OPERATOR {
            return Err("this user has no number of its own".to_owned());
        }
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let Identity { host, epoch, .. } = self.identity;
        let expiry_s = (now + TICKET_TIME).as_secs();
        let ticket = Ticket { tenant, host, epoch, expiry_s, service: TICKET_SERVICE };
        let mut all = Vec::new();
        for service in services {
            match service.address.parse() {
                Ok(address) => all.push(HeapAccess::new(service.node, address, &ticket, key)),
                Err(error) => {
                    tracing::warn!(node = service.node, %error, "a service of heaps has no address")
                }
            }
        }
        serde_json::to_string(&all).map_err(|error| error.to_string())
    }
}
