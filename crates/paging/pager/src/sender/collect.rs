//! Applies the completions of all ports.

use std::time::Duration;

use aquifer_fabric::{Completion, WorkError};

use super::batch::{BatchWrite, bits};
use super::heal::Healer;
use super::{HEAL_WORK_ID, Sender};
use crate::mempool::BLOCK_PAGES;
use crate::mutation::Mutation;

/// Times that pages of a batch are written again because one of their replicas lacks them. After
/// that the replica is dropped: nodes that answer probes and no WRITEs would keep the batch for
/// ever.
const REWRITES_MAX: u32 = 8;

impl Sender {
    /// Polls all ports, applies the completions, and drops the nodes of failed operations.
    pub(super) fn collect(&mut self) {
        let mut completions = std::mem::take(&mut self.completions);
        let mut unwritable = Vec::new();
        for (node, port) in self.ports.open_ports() {
            completions.clear();
            while port.in_flight > completions.len() && port.endpoint.poll(&mut completions, BLOCK_PAGES) > 0
            {
            }
            port.in_flight -= completions.len();
            if !completions.is_empty() {
                port.unanswered = Duration::ZERO;
            }
            for completion in &completions {
                let is_done = if completion.id >= HEAL_WORK_ID {
                    self.healer.apply_completion(
                        &self.slabs,
                        node,
                        self.filler.any_replica_on(node),
                        completion,
                    )
                } else {
                    Self::apply_completion(&mut self.batches, completion)
                };
                if completion.outcome == Err(WorkError::Storage) {
                    self.stats.disk_errors += 1;
                    if !is_done {
                        unwritable.push(node);
                    }
                    continue;
                }
                let nodes = match completion.outcome {
                    Err(WorkError::Away) => &mut self.away,
                    _ if !is_done => &mut self.lost,
                    Ok(_) if Healer::is_probe(completion) => &mut self.answering,
                    _ => continue,
                };
                if !nodes.contains(&node) {
                    nodes.push(node);
                }
            }
        }
        self.completions = completions;
        let ports = &mut self.ports;
        self.draining_nodes.retain(|(node, _)| ports.open_port(*node).is_some_and(|port| port.in_flight > 0));
        for node in std::mem::take(&mut self.answering) {
            self.resume_node(node);
        }
        for node in std::mem::take(&mut self.away) {
            self.suspend_node(node);
        }
        for node in std::mem::take(&mut self.lost) {
            self.drop_node(node);
        }
        unwritable.into_iter().for_each(|node| self.suspend_writes(node));
        self.end_failed_groups();
    }

    /// Records the completion of an operation of a batch. Returns false if the operation failed.
    fn apply_completion(batches: &mut [BatchWrite], completion: &Completion) -> bool {
        let number = completion.id >> 16;
        let place = completion.id >> 8 & 0xff;
        let first = usize::try_from(completion.id & 0xff).expect("8 bits");
        let is_done = completion.outcome.is_ok()
            || completion.outcome == Err(WorkError::Storage) && Mutation::AcknowledgeDiskError.is_active();
        let Some(batch) = batches.iter_mut().find(|batch| batch.number == number) else {
            return is_done;
        };
        batch.outstanding -= 1;
        batch.group_outstanding[first] -= 1;
        if is_done {
            batch.group_acknowledged[first] |= 1 << place;
            batch.awaited_groups &= !(1 << first);
        } else {
            batch.failed_groups |= 1 << first;
            batch.group_failed[first] |= 1 << place;
        }
        is_done
    }

    /// Ends the page groups of which an operation has failed. If a replica that is left lacks them,
    /// or none is left, their pages are written again.
    fn end_failed_groups(&mut self) {
        let mut incomplete = Vec::new();
        for batch in &mut self.batches {
            let mut has_rewritten = false;
            for first in bits(batch.failed_groups) {
                if batch.group_outstanding[first] > 0 {
                    continue;
                }
                batch.failed_groups &= !(1 << first);
                batch.awaited_groups &= !(1 << first);
                let slab = batch.locations[first].expect("it was posted to a location").slab();
                let places = self.slabs.replicas(slab).placed().map(|(place, _)| 1 << place);
                let left: u8 = places.fold(0, |left, place| left | place);
                let acknowledged = left & batch.group_acknowledged[first];
                // A node that did not confirm clean copies may have them nevertheless.
                let may_lack = batch.is_confirming(first) || Mutation::KeepIncomplete.is_active();
                if acknowledged == left && left != 0 || acknowledged != 0 && may_lack {
                    continue;
                }
                if acknowledged != 0 && batch.rewrites >= REWRITES_MAX {
                    incomplete.push((slab, left & !acknowledged));
                    continue;
                }
                has_rewritten |= acknowledged != 0;
                let pages = batch.group_pages[first];
                self.stats.rewritten_pages += u64::from(pages.count_ones());
                batch.rewrite(&self.slabs, pages);
            }
            batch.rewrites += u32::from(has_rewritten);
        }
        incomplete.into_iter().for_each(|(slab, lacking)| self.drop_incomplete_replicas(slab, lacking));
    }
}
