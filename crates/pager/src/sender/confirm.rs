//! Pages that leave as they came are not written: their copies are asked for. A memory node that answers a READ by the slab's key has what was
//! written there before, as one that acknowledges a WRITE has what was written just now; of one that does not, pages are written anew.

use aquifer_fabric::{Verb, Work};

use super::heal::{PROBE_BYTES, PROBE_OFFSET};
use super::{Digest, PostReadiness, Sender, bits};
use crate::mutation::Mutation;
use crate::page::Location;
use crate::slabs::{SlabReplicas, page_of};

impl Sender {
    /// Whether these bytes are at a location, as far as is known, and may stay there.
    pub(super) fn is_at(&self, location: Location, digest: Digest) -> bool {
        !self.slabs.is_vacating(location.slab()) && self.is_known_at(location, digest)
    }

    fn is_known_at(&self, location: Location, digest: Digest) -> bool {
        Mutation::TrustCopy.is_active() || self.digests.get(location) == Some(digest)
    }

    /// Ask for the copies of all that is unchanged, as far as the nodes' queues have room.
    pub(super) fn confirm_all(&mut self) {
        for at in 0..self.batches.len() {
            while self.batches[at].unchanged != 0 && self.confirm(at) {}
        }
    }

    /// Ask for copies that are on the same nodes, all by one READ for each node; false if a node's queue is full.
    fn confirm(&mut self, at: usize) -> bool {
        let batch = &mut self.batches[at];
        let first = batch.unchanged.trailing_zeros() as usize;
        let location = batch.locations[first].expect("it came from there");
        let copies = self.slabs.replicas(location.slab());
        let mut pages = 0;
        let mut lost = 0;
        for index in bits(batch.unchanged) {
            let location = batch.locations[index].expect("it came from there");
            if !Mutation::TrustCopy.is_active() && self.digests.get(location).is_none() {
                lost |= 1 << index;
            } else if are_together(self.slabs.replicas(location.slab()), copies) {
                pages |= 1 << index;
            }
        }
        if lost != 0 {
            // Meanwhile the last node that had them was.
            batch.unchanged &= !lost;
            batch.write_anew(&self.slabs, lost);
            return true;
        }
        let Some(buffer) = self.buffer() else {
            let batch = &mut self.batches[at];
            batch.unchanged &= !pages;
            batch.write_anew(&self.slabs, pages);
            return true;
        };
        assert!(!copies.is_empty(), "what is referred to and known is on some node");
        match self.post_readiness(copies) {
            PostReadiness::Open => {}
            PostReadiness::Full => return false,
            PostReadiness::NodeGone => return true,
        }
        let batch = &mut self.batches[at];
        for (place, copy) in copies.placed() {
            let port = self.ports.open_port(copy.node).expect("it was opened just now");
            let local = port.slice_of(buffer, PROBE_OFFSET, PROBE_BYTES);
            let verb = Verb::Read { local, remote: page_of(&copy, location.index()) };
            let work = Work { id: batch.id(place, first), verb, signalled: true };
            port.endpoint.post(&[work]).expect("there was room for one more");
            port.in_flight += 1;
            batch.posted(first);
        }
        batch.unchanged &= !pages;
        batch.begin_run(first, pages);
        true
    }
}

/// Whether copies of two slabs are on the same nodes, and have the same places in their records.
fn are_together(one: SlabReplicas, other: SlabReplicas) -> bool {
    let nodes = |copies: SlabReplicas| copies.placed().map(|(place, copy)| (place, copy.node));
    nodes(one).eq(nodes(other))
}
