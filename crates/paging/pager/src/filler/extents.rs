//! The choice of the nodes on which extents are allocated.

use aquifer_pool::{Extent, NodeClass, NodeId, PoolClient, PoolError, SizeClass};

use super::{Filler, NoRoom, node_class};

/// A request for extents of the pool.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExtentRequest {
    pub class: SizeClass,
    /// The number of nodes.
    pub nodes: usize,
    /// The maximum number of extents on each node. There is at least one.
    pub each: u32,
    /// The class of the nodes.
    pub on: NodeClass,
}

impl Filler {
    /// Allocates the requested extents on nodes for which `may_be_on` returns true; returns fewer
    /// if there is not enough memory.
    ///
    /// Each extent is on the node with more free memory of two random ones. If that node has no
    /// memory, the others are tried in the order of their free memory. Slow nodes are last, and
    /// behind them those that recall memory. `refused` receives the last error.
    pub(super) fn allocate_on_nodes(
        &mut self,
        pool: &mut PoolClient,
        request: ExtentRequest,
        may_be_on: impl Fn(NodeId) -> bool,
        refused: &mut NoRoom,
    ) -> Vec<Extent> {
        let mut allocated = Vec::new();
        let mut nodes_found = 0;
        let is_of_class = |node: NodeId| node_class(pool, node) == request.on;
        let mut nodes: Vec<NodeId> =
            pool.nodes().filter(|node| is_of_class(*node) && may_be_on(*node)).collect();
        if let Some(away) = nodes.extract_if(.., |node| self.suspended.contains(node)).last() {
            *refused = NoRoom::Away(away);
        }
        nodes.sort_unstable_by_key(|node| {
            let is_reluctant = (self.recalls_memory(*node), self.slabs.is_slow(*node));
            (is_reluctant, std::cmp::Reverse(pool.usable_bytes(*node)))
        });
        let mut is_first_choice = true;
        while nodes_found < request.nodes && !nodes.is_empty() {
            let at = if is_first_choice { self.choose(&nodes) } else { 0 };
            let node = nodes.remove(at);
            is_first_choice = false;
            if let Err(not_allowed) = self.check_allowance(pool, request) {
                *refused = not_allowed;
                break;
            }
            match pool.allocate_many(node, request.class, request.each) {
                Ok(extents) => {
                    self.allowance.spend(request.class.bytes() * extents.len() as u64);
                    allocated.extend(extents);
                    nodes_found += 1;
                    is_first_choice = true;
                }
                Err(error) => {
                    if let PoolError::NodeGone { node, .. } = error {
                        self.gone_nodes.push(node);
                    }
                    match error {
                        PoolError::Away { node } => *refused = NoRoom::Away(node),
                        // A node that is away may have free memory, so this error is reported
                        // before *full*.
                        _ if matches!(refused, NoRoom::Away(_)) => {}
                        error => *refused = NoRoom::Pool(error),
                    }
                }
            }
        }
        allocated
    }

    /// Whether the allowance permits a request to one node.
    fn check_allowance(&self, pool: &PoolClient, request: ExtentRequest) -> Result<(), NoRoom> {
        let bytes = request.class.bytes() * u64::from(request.each);
        if bytes > self.allowance.bytes_max {
            return Err(NoRoom::NotAllowed);
        }
        let leave_free = self.allowance.leave_free_on(request.on);
        // Most runs need not leave memory free, and so need not sum up the free memory.
        if leave_free == 0 {
            return Ok(());
        }
        let nodes = pool.nodes().filter(|node| node_class(pool, *node) == request.on);
        let free_bytes = nodes.map(|node| pool.free_bytes(node)).sum();
        if free_bytes >= bytes + leave_free { Ok(()) } else { Err(NoRoom::LeftToOthers { free_bytes }) }
    }

    /// Draws two of the nodes, which are sorted by preference, and returns the index of the better
    /// one.
    fn choose(&mut self, nodes: &[NodeId]) -> usize {
        match nodes.len() {
            0..=2 => 0,
            // The nodes are sorted, so the smaller index is the better node.
            count => self.random_below(count).min(self.random_below(count)),
        }
    }

    fn random_below(&mut self, below: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        usize::try_from(self.random >> 33).expect("31 bits") % below
    }
}
