//! What targets and endpoints can bear, and the bounds of it that are the same for all providers.

use std::fmt;

use crate::target::TargetError;

/// Endpoints of one target, at most.
pub const ENDPOINTS_LIMIT: usize = 256;
/// Posted and not yet polled operations of one endpoint, at most.
pub const QUEUE_DEPTH_LIMIT: usize = 65_536;
/// Bytes of one message, at most.
pub const MESSAGE_BYTES_LIMIT: u32 = 65_536;
/// Messages waiting in one direction of one endpoint, at most.
pub const RECEIVE_DEPTH_LIMIT: usize = 4096;
/// Pieces of local memory of one endpoint, at most.
pub const LOCAL_REGIONS_LIMIT: usize = 65_536;

/// What one endpoint can bear.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Posted and not yet polled operations (unsignalled ones count until they are done).
    pub queue_depth: usize,
    /// Bytes of one READ or WRITE.
    pub transfer_bytes_max: u32,
    /// Bytes of one message.
    pub message_bytes_max: u32,
    /// Messages waiting at the receiver.
    pub receive_depth: usize,
    /// Pieces of local memory registered with one endpoint.
    pub local_regions_max: usize,
}

impl Default for Limits {
    /// What pages need: many operations at once, of up to the largest extent.
    fn default() -> Self {
        Self {
            queue_depth: 256,
            transfer_bytes_max: 2 << 20,
            message_bytes_max: 4096,
            receive_depth: 64,
            local_regions_max: 64,
        }
    }
}

impl Limits {
    /// The first limit that is zero or beyond its bound.
    #[must_use]
    pub fn fault(&self) -> Option<OutOfBounds> {
        OutOfBounds::first(&[
            ("the queue depth", self.queue_depth, QUEUE_DEPTH_LIMIT),
            ("the size of messages", self.message_bytes_max as usize, MESSAGE_BYTES_LIMIT as usize),
            ("the receive depth", self.receive_depth, RECEIVE_DEPTH_LIMIT),
            ("the local regions", self.local_regions_max, LOCAL_REGIONS_LIMIT),
        ])
    }
}

/// A number that is zero or beyond its limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OutOfBounds {
    /// What it counts.
    pub name: &'static str,
    value: usize,
    limit: usize,
}

impl OutOfBounds {
    /// The first of some numbers, each with its name and its limit, that is out of bounds.
    #[must_use]
    pub fn first(numbers: &[(&'static str, usize, usize)]) -> Option<Self> {
        let (name, value, limit) = *numbers.iter().find(|&&(_, value, limit)| value == 0 || value > limit)?;
        Some(Self { name, value, limit })
    }
}

impl fmt::Display for OutOfBounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, value, limit } = self;
        write!(f, "{name} is {value}, it must be between 1 and {limit}")
    }
}

/// Refuses the options of a target if there is something wrong with them.
///
/// # Errors
/// The fault, as a sentence about `what`.
pub fn check_options(what: &'static str, fault: Option<String>) -> Result<(), TargetError> {
    let Some(fault) = fault else { return Ok(()) };
    let source = std::io::Error::new(std::io::ErrorKind::InvalidInput, fault);
    Err(TargetError::System { what, source })
}
