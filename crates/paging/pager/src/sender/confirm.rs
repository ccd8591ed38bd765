//! Confirms the clean copies of unchanged pages, which are not written again.
//!
//! The sender reads a few bytes of the slab by its key from each replica. A node that answers still
//! has the bytes that were written before. If no node answers, the pages are written again.

use aquifer_fabric::{Verb, Work};

use super::heal::{PROBE_BYTES, PROBE_OFFSET};
use super::{Digest, GroupKind, PostReadiness, Sender, bits};
use crate::mutation::Mutation;
use crate::page::Location;
use crate::slabs::{SlabReplicas, page_of};

impl Sender {
    /// Whether a location is known to have these bytes, and is not in a slab that is being vacated.
    pub(super) fn is_at(&self, location: Location, digest: Digest) -> bool {
        !self.slabs.is_vacating(location.slab()) && self.is_known_at(location, digest)
    }

    fn is_known_at(&self, location: Location, digest: Digest) -> bool {
        Mutation::TrustCopy.is_active() || self.digests.get(location) == Some(digest)
    }

    /// Posts READs for all unchanged pages, as far as the queues of the nodes have room.
    pub(super) fn confirm_all(&mut self) {
        for at in 0..self.batches.len() {
            while self.batches[at].unchanged != 0 && self.confirm(at) {}
        }
    }

    /// Confirms the clean copies of one batch whose replicas are on the same nodes, with one READ
    /// for each node. Returns false if the queue of a node is full.
    fn confirm(&mut self, at: usize) -> bool {
        let batch = &mut self.batches[at];
        let first = batch.unchanged.trailing_zeros() as usize;
        let location = batch.locations[first].expect("it came from there");
        let replicas = self.slabs.replicas(location.slab());
        let mut pages = 0;
        let mut lost = 0;
        for index in bits(batch.unchanged) {
            let location = batch.locations[index].expect("it came from there");
            if !Mutation::TrustCopy.is_active() && self.digests.get(location).is_none() {
                lost |= 1 << index;
            } else if are_on_same_nodes(self.slabs.replicas(location.slab()), replicas) {
                pages |= 1 << index;
            }
        }
        if lost != 0 {
            // The last node of these slabs was lost in the meantime.
            batch.unchanged &= !lost;
            batch.rewrite(&self.slabs, lost);
            return true;
        }
        let Some(buffer) = self.buffer() else {
            let batch = &mut self.batches[at];
            batch.unchanged &= !pages;
            batch.rewrite(&self.slabs, pages);
            return true;
        };
        assert!(!replicas.is_empty(), "a slab with known digests has a replica");
        match self.post_readiness(replicas) {
            PostReadiness::Open => {}
            PostReadiness::Full => return false,
            PostReadiness::NodeGone => return true,
        }
        let batch = &mut self.batches[at];
        for (place, replica) in replicas.placed() {
            let port = self.ports.open_port(replica.node).expect("its readiness was checked");
            let local = port.slice_of(buffer, PROBE_OFFSET, PROBE_BYTES);
            let verb = Verb::Read { local, remote: page_of(&replica, location.index()) };
            let work = Work { id: batch.id(place, first), verb, signalled: true };
            port.endpoint.post(&[work]).expect("its readiness was checked");
            port.in_flight += 1;
            batch.posted(first);
        }
        batch.unchanged &= !pages;
        batch.begin_group(first, pages, GroupKind::Confirm);
        true
    }
}

/// Whether two slabs have replicas on the same nodes, at the same places of their records.
fn are_on_same_nodes(one: SlabReplicas, other: SlabReplicas) -> bool {
    let nodes = |replicas: SlabReplicas| replicas.placed().map(|(place, replica)| (place, replica.node));
    nodes(one).eq(nodes(other))
}
