//! A node that wants its memory back: it publishes that in its figures, and holds the spans that
//! become free, as `recalled_spans` in `crates/daemons/node` does.

use aquifer_fabric::Key;
use aquifer_fabric::sim::Rng;
use aquifer_pool::size::SECTION_BYTES;
use aquifer_pool::{Extent, NodeFigures, NodeId, PoolClient};

use super::cluster::SimCluster;

/// The number of the host as which a node allocates its own memory.
const NODE_HOST: u16 = 4095;
/// Decides which schedules have withdrawals, by the seed only, so that other schedules do not
/// change.
const WITHDRAWALS: u64 = 0x0057_AD0F;

/// The node whose memory is wanted back, and what the node holds.
#[derive(Debug)]
pub struct Withdrawal {
    rng: Rng,
    wanted: Option<WantedNode>,
}

#[derive(Debug)]
struct WantedNode {
    node: NodeId,
    /// The key of the memory that is wanted back.
    region: Key,
    client: PoolClient,
    held: Vec<Extent>,
}

impl Withdrawal {
    /// The withdrawals of a schedule; `None` if it has none.
    pub fn of(seed: u64) -> Option<Self> {
        let mut rng = Rng::new(seed ^ WITHDRAWALS);
        rng.chance(1, 4).then_some(Self { rng, wanted: None })
    }

    /// Whether a node wants its memory back.
    pub fn is_active(&self) -> bool {
        self.wanted.is_some()
    }

    /// Begins or ends a withdrawal at random, or holds what is free. Returns whether one began.
    pub fn step(&mut self, cluster: &mut SimCluster) -> bool {
        match self.rng.below(48) {
            0 if self.wanted.is_none() => return self.begin(cluster),
            0 if self.rng.chance(1, 3) => self.end(cluster),
            1..8 => self.hold(cluster),
            _ => {}
        }
        false
    }

    fn begin(&mut self, cluster: &mut SimCluster) -> bool {
        let nodes: Vec<NodeId> = cluster.nodes().collect();
        let node = nodes[self.rng.index(nodes.len())];
        let region = cluster.node_memory(node).region.key;
        self.wanted = Some(WantedNode { node, region, client: cluster.pool(NODE_HOST), held: Vec::new() });
        self.hold(cluster);
        true
    }

    /// Ends the withdrawal: the node lends its memory again.
    pub fn end(&mut self, cluster: &mut SimCluster) {
        let Some(WantedNode { node, .. }) = self.wanted.take() else { return };
        cluster.figures.forget(node);
        // The node may have been away in the middle of an allocation, so all is freed that it owns.
        let mut client = cluster.pool(NODE_HOST);
        if client.nodes().any(|other| other == node) {
            client.free_unrecorded(node, 0..1, &|_| false).expect("it is alive");
        }
    }

    /// Holds the free spans of the node, and writes its figures.
    fn hold(&mut self, cluster: &mut SimCluster) {
        let Some(wanted) = &mut self.wanted else { return };
        let is_alive = cluster.nodes().any(|node| node == wanted.node);
        if !is_alive || cluster.node_memory(wanted.node).region.key != wanted.region {
            // It has died. What returns under its number is other memory.
            cluster.figures.forget(wanted.node);
            self.wanted = None;
            return;
        }
        let WantedNode { node, client, held, .. } = wanted;
        let held_before: u64 = held.iter().map(|extent| extent.class.bytes()).sum();
        let free = |order| cluster.node_memory(*node).find_free(0, order, false);
        while let Some(group) = (0..=4).rev().find_map(free) {
            match client.allocate_group(*node, 0, group) {
                Ok(Some(extent)) => held.push(extent),
                Ok(None) => break,
                // The node was away.
                Err(_) => {
                    *client = cluster.pool(NODE_HOST);
                    break;
                }
            }
        }
        let held_bytes: u64 = held.iter().map(|extent| extent.class.bytes()).sum();
        let in_use = SECTION_BYTES - held_bytes;
        let figures = NodeFigures {
            free_bytes: 0,
            lent_bytes: in_use,
            recalled_bytes: in_use.max(u64::from(held_before == held_bytes)),
            first_recalled: 0,
        };
        cluster.figures.set(*node, figures);
    }

    /// Whether the node whose memory is wanted back has nothing of other hosts any more.
    pub fn is_empty(&mut self, cluster: &mut SimCluster) -> bool {
        self.hold(cluster);
        let Some(wanted) = &self.wanted else { return true };
        wanted.held.iter().map(|extent| extent.class.bytes()).sum::<u64>() == SECTION_BYTES
    }
}
