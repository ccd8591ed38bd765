//! Limits of targets and endpoints, and the bounds of these limits that all providers share.

use std::fmt;

use crate::target::TargetError;

/// The default of the greatest number of endpoints of one target.
pub const ENDPOINTS_DEFAULT: usize = 256;
/// Bound of the endpoints of one target.
pub const ENDPOINTS_LIMIT: usize = 8192;
/// Bound of the regions that are announced to an endpoint when it connects.
pub const ANNOUNCED_MAX: usize = 64;
/// Bound of the operations of one endpoint that are posted and not yet polled.
pub const QUEUE_DEPTH_LIMIT: usize = 65_536;
/// Bound of the bytes of one message.
pub const MESSAGE_BYTES_LIMIT: u32 = 65_536;
/// Bound of the messages that wait in one direction of one endpoint.
pub const RECEIVE_DEPTH_LIMIT: usize = 4096;
/// Bound of the local memories of one endpoint.
pub const LOCAL_REGIONS_LIMIT: usize = 65_536;

/// The limits of one endpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Operations that are posted and not yet polled. An unsignalled operation counts until it is
    /// done.
    pub queue_depth: usize,
    /// Bytes of one READ or WRITE.
    pub transfer_bytes_max: u32,
    /// Bytes of one message.
    pub message_bytes_max: u32,
    /// Messages that wait at the receiver.
    pub receive_depth: usize,
    /// Local memories registered with one endpoint.
    pub local_regions_max: usize,
}

impl Default for Limits {
    /// Limits for paging: many operations at once, each up to the size of the largest extent.
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
    /// The first limit that is zero or exceeds its bound.
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

/// A number that is zero or exceeds its limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OutOfBounds {
    /// The name of the counted things.
    pub name: &'static str,
    value: usize,
    limit: usize,
}

impl OutOfBounds {
    /// The first number that is out of bounds. Each has its name and its limit.
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

/// Refuses options of a target that are out of bounds.
///
/// # Errors
/// The `fault`, with `what` as the failed action.
pub fn check_options(what: &'static str, fault: Option<String>) -> Result<(), TargetError> {
    let Some(fault) = fault else { return Ok(()) };
    let source = std::io::Error::new(std::io::ErrorKind::InvalidInput, fault);
    Err(TargetError::System { what, source })
}
