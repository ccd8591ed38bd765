//! Waits for the operations that a dropped user has left in flight.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Shared;
use crate::handshake::HANDSHAKE_TIMEOUT;
use crate::work::{DrainHandle, EndpointError};

/// The interval at which the endpoint is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Drains the operations that one user had in flight. Other users are not affected.
#[derive(Debug)]
pub(super) struct MultiplexedDrain {
    pub shared: Arc<Shared>,
    /// The numbers of the operations.
    pub unfinished: Vec<u64>,
    /// The drain handle of the endpoint, which is used if the endpoint is broken.
    pub drain: Option<Box<dyn DrainHandle>>,
}

impl DrainHandle for MultiplexedDrain {
    fn drain(&mut self) -> Result<(), EndpointError> {
        let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
        loop {
            let mut state = self.shared.state.lock();
            state.collect(None);
            if state.endpoint.is_broken() {
                // The operations failed with an unknown outcome: the target must confirm their end.
                drop(state);
                return self.drain.as_mut().map_or(Ok(()), |drain| drain.drain());
            }
            if !state.table.has_any(&self.unfinished) {
                return Ok(());
            }
            drop(state);
            if Instant::now() >= deadline {
                let source = io::ErrorKind::TimedOut.into();
                return Err(EndpointError::Unreachable { address: "a shared endpoint".into(), source });
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}
