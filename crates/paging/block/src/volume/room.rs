//! Waiting for an open block, and for all written pages to be on memory nodes.

use std::time::Instant;

use parking_lot::MutexGuard;

use super::{BlockVolume, VolumeState};
use crate::error::BlockError;

impl BlockVolume {
    /// Waits until a block is open.
    pub(super) fn with_room<'a>(
        &self,
        mut state: MutexGuard<'a, VolumeState>,
    ) -> Result<MutexGuard<'a, VolumeState>, BlockError> {
        let mut deadline = None;
        loop {
            if state.is_closed {
                return Err(BlockError::Closed);
            }
            if self.ensure_open_block(&mut state) {
                return Ok(state);
            }
            let now = Instant::now();
            if state.is_awaiting_node && !self.room_timeout.is_zero() {
                deadline = None;
                self.changed.wait_for(&mut state, self.room_timeout);
                continue;
            }
            let since = state.pool_full.as_ref().map(|(since, _)| *since);
            // The timeout counts from the time when the pool became full, so that later writes do
            // not wait for the whole timeout again.
            let until = *deadline.get_or_insert_with(|| since.unwrap_or(now) + self.room_timeout);
            if now >= until {
                let reason = state.pool_full.as_ref().map(|(_, reason)| reason.clone());
                drop(state);
                return Err(self.no_room(reason));
            }
            self.changed.wait_for(&mut state, until - now);
        }
    }

    /// Opens a block if none is open and the mempool has one. Returns whether a block is open.
    pub(crate) fn ensure_open_block(&self, state: &mut VolumeState) -> bool {
        if state.open.is_none() && !state.is_closed {
            state.open = state.volume.open_block();
        }
        state.open.is_some()
    }

    fn no_room(&self, reason: Option<String>) -> BlockError {
        let reason = reason.unwrap_or_else(|| "the memory nodes do not answer".into());
        let error = BlockError::NoRoom { waited: self.room_timeout, reason: reason.clone() };
        let before = self.last_refusal.lock().replace(reason);
        if before.is_none() {
            tracing::error!(%error, "refusing writes");
        }
        error
    }

    /// Waits until all pages that were written before are on memory nodes.
    ///
    /// # Errors
    /// If the nodes do not acknowledge them within the timeout of the volume.
    pub fn flush(&self) -> Result<(), BlockError> {
        let mut state = self.lock();
        self.seal(&mut state);
        let before = state.next_sealed;
        let mut deadline = Instant::now() + self.room_timeout;
        while state.unwritten.iter().any(|(number, _)| *number < before) {
            if state.is_awaiting_node {
                deadline = Instant::now() + self.room_timeout;
            }
            let remaining = deadline.saturating_duration_since(Instant::now());
            if state.is_closed {
                return Err(BlockError::Closed);
            }
            if remaining.is_zero() {
                let reason = state.pool_full.as_ref().map(|(_, reason)| reason.clone());
                drop(state);
                return Err(self.no_room(reason));
            }
            self.changed.wait_for(&mut state, remaining);
        }
        Ok(())
    }

    /// Records whether the pool is full, with the error.
    pub(crate) fn set_pool_full(&self, reason: Option<String>) {
        let mut state = self.lock();
        match (reason, &mut state.pool_full) {
            (Some(reason), None) => {
                tracing::warn!(reason, "no room for written pages; writes wait");
                state.pool_full = Some((Instant::now(), reason));
            }
            (Some(reason), Some((_, last))) => *last = reason,
            (None, pool_full) => *pool_full = None,
        }
    }

    /// Records whether the pump waits for a node that is away.
    pub(crate) fn set_awaiting_node(&self, is_awaiting_node: bool) {
        self.lock().is_awaiting_node = is_awaiting_node;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use std::sync::Arc;

    use aquifer_fabric::{Endpoint, EndpointError};
    use aquifer_pager::{BLOCK_PAGES, Budget, Connector, Mempool, PAGE_BYTES};
    use aquifer_pool::NodeId;

    use super::*;

    #[derive(Debug)]
    struct NoNodes;

    impl Connector for NoNodes {
        fn connect(&self, node: NodeId) -> Result<Box<dyn Endpoint>, EndpointError> {
            unreachable!("nothing was written to {node:?}")
        }
    }

    #[test]
    fn without_a_timeout_no_write_waits_for_a_node_that_is_away() {
        let mempool = Arc::new(Mempool::new(BLOCK_PAGES * PAGE_BYTES).unwrap());
        let budget = Arc::new(Budget::new(64 << 20));
        let volume = BlockVolume::new(64 << 20, mempool, budget, Duration::ZERO).unwrap();
        let mut reader = volume.reader(Arc::new(NoNodes)).unwrap();
        volume.set_awaiting_node(true);
        let page = [1; PAGE_BYTES];
        let results: Vec<_> = (0..=BLOCK_PAGES as u64)
            .map(|number| volume.write(&mut reader, number * PAGE_BYTES as u64, &page))
            .collect();
        assert!(results[..BLOCK_PAGES].iter().all(Result::is_ok));
        assert!(matches!(results[BLOCK_PAGES], Err(BlockError::NoRoom { .. })));
    }
}
