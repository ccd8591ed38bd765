//! The service for segments: its start, and the segments of an earlier agent.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use aquifer_channel::RestoredItem;
use aquifer_directory::DirectoryRetries;
use aquifer_directory::names::AgentRecord;
use aquifer_fabric::ClusterKey;
use aquifer_host::membership::Membership;
use aquifer_keeper::{KeeperClient, KeeperStore};
use aquifer_ownership::Life;
use aquifer_segments::host::{HostLease, KeptSegment, SegmentHost, SegmentOptions};

use super::{AgentError, AgentOptions, HostServices, SegmentSettings};

/// Starts the service for segments.
pub(super) fn start_segments(
    options: &AgentOptions,
    membership: &Membership,
    services: &Arc<HostServices>,
    kept: Vec<KeptSegment>,
    retries: DirectoryRetries,
) -> Result<Arc<SegmentHost>, AgentError> {
    let SegmentSettings { listen, bytes_per_user, pull_rate } = options.segments;
    let refuse = |address, why| AgentError::SegmentAddress { address, why };
    let key = match (listen, &options.key) {
        (Some(address), _) if address.ip().is_unspecified() => {
            return Err(refuse(address, "give the address at which other hosts reach this one"));
        }
        (Some(address), None) => {
            return Err(refuse(
                address,
                "agents prove that they belong to the cluster by its key: give --key",
            ));
        }
        (_, Some(key)) => key.clone(),
        // A random key, which no other process has.
        (None, None) => ClusterKey::generate().map_err(AgentError::Threads)?,
    };
    let AgentRecord { host, claim_epoch: epoch, .. } = *membership.record();
    let life = Life { host, epoch };
    // Other hosts count the grace time from the end of the lease by their own clocks.
    let grace = options.grace.mul_f64(0.75);
    let (bytes_per_tenant, sockets) = (bytes_per_user, options.sockets());
    let descriptors = Arc::clone(&services.descriptors);
    let own = SegmentOptions {
        life,
        listen,
        key,
        bytes_per_tenant,
        pull_rate,
        grace,
        sockets,
        descriptors,
        retries,
        lease: Arc::clone(services) as Arc<dyn HostLease>,
    };
    let directory = Arc::clone(membership.directory());
    let keeper = Arc::clone(&services.keeper) as Arc<dyn KeeperStore>;
    Ok(Arc::new(SegmentHost::start(&own, directory, membership.lease(), keeper, kept)?))
}

/// Returns the segments of an earlier agent. The keeper releases unreadable ones. If `resumes` is
/// false all of them are lost, because other hosts consider the earlier agent dead.
pub(super) fn restorable_segments(
    kept: Vec<RestoredItem>,
    resumes: bool,
    keeper: &KeeperClient,
) -> Vec<KeptSegment> {
    let mut restorable = Vec::new();
    for RestoredItem { item, fds } in kept {
        let segment = serde_json::from_str(&item.record).ok();
        match (segment, <[OwnedFd; 2]>::try_from(fds)) {
            (Some(segment), Ok([data, present])) if resumes => {
                restorable.push(KeptSegment { number: item.id, segment, data, present });
            }
            _ => keeper.release(item.kind, item.id),
        }
    }
    restorable
}
