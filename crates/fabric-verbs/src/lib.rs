//! Provider for RDMA devices, over libibverbs and librdmacm: READ, WRITE, compare-and-swap and fetch-and-add are done by the devices, without the
//! target's processor.
//!
//! A connection is a reliable queue pair, made by librdmacm. Both ends prove with a Noise handshake, in messages over that very pair, that they have the
//! cluster's key; until then nothing else is said. No memory is open to peers as such: the target binds a window of type 2, for one queue pair alone,
//! for each key that an initiator asks about. `docs/formats/fabric-verbs.md` has the messages.
//!
//! - [`sys`]: safe handles of what the libraries give; all calls into them are there, and all unsafe code but where work is posted.
//! - [`queue`], [`keys`], [`letters`]: pure parts of the initiator, and the bytes of messages.
//! - [`remap`]: what a target lends, and how pages change under it.
//! - [`link`], [`endpoint`], [`locals`]: the initiator's end. [`target`], [`serve`], [`session`], [`peer`]: the target's.

mod answered;
mod endpoint;
#[cfg(test)]
mod golden_tests;
mod key_cache;
mod link;
mod local_memory;
mod messages;
mod queue;
mod remap;
mod serve;
mod session;
mod slots;
mod sys;
mod target;

pub use endpoint::{VerbsEndpoint, connect};
pub use remap::RemapMethod;
pub use sys::device::{DeviceCaps, devices};
pub use target::VerbsTarget;

use std::sync::Arc;

use aquifer_fabric::limits::{ENDPOINTS_LIMIT, Limits, OutOfBounds, check_options};
use aquifer_fabric::{ClusterKey, Target, TargetError, VerbsProvider};

/// Makes this the process' provider for RDMA devices.
pub fn install() {
    let listen = |address, key: &ClusterKey| {
        let target = VerbsTarget::listen(address, key, Options::default())?;
        let address = target.address();
        Ok((Arc::new(target) as Arc<dyn Target>, address))
    };
    VerbsProvider { connect: |address, key, who| connect(address, key, who), listen }.install();
}

/// Operations that one endpoint may have under way, at most.
const QUEUE_DEPTH_LIMIT: usize = 256;
/// Messages that may wait for the receiver, at most.
const RECEIVE_DEPTH_LIMIT: usize = 64;
/// Bytes of one message of a user, at most.
const MESSAGE_BYTES_LIMIT: usize = 4096;
/// Bytes of a place for a message: one of a user, or one of the handshake.
const MESSAGE_SLOT_BYTES: usize = messages::HEAD_BYTES + MESSAGE_BYTES_LIMIT;
/// Places that an initiator has: for messages, for answers, and a few more.
#[expect(clippy::cast_possible_truncation, reason = "a small number")]
const MESSAGE_SLOTS_MAX: u32 = 2 * RECEIVE_DEPTH_LIMIT as u32 + 8;
/// Messages and WRITEs that are this short go without being fetched from memory.
const INLINE_BYTES: u32 = 64;
/// Windows that are bound for one endpoint at a time.
const WINDOWS_EACH: usize = 256;

/// How a target is set up. Limits are told to endpoints when they connect.
#[derive(Clone, Debug)]
pub struct Options {
    /// Endpoints, at most [`ENDPOINTS_LIMIT`].
    pub endpoints_max: usize,
    /// Regions, at most [`aquifer_fabric::REGIONS_LIMIT`].
    pub regions_max: usize,
    /// KeyCache of windows, at most [`aquifer_fabric::WINDOWS_LIMIT`]. The device's windows are bound for those that are in use.
    pub windows_max: usize,
    /// What one endpoint can bear: at most 256 operations under way, 64 messages waiting, of 4096 bytes.
    pub limits: Limits,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            endpoints_max: ENDPOINTS_LIMIT,
            regions_max: aquifer_fabric::REGIONS_LIMIT,
            windows_max: 65_536,
            limits: Limits::default(),
        }
    }
}

impl Options {
    fn check(&self) -> Result<(), TargetError> {
        let fault = OutOfBounds::first(&[
            ("endpoints_max", self.endpoints_max, ENDPOINTS_LIMIT),
            ("regions_max", self.regions_max, aquifer_fabric::REGIONS_LIMIT),
            ("windows_max", self.windows_max, aquifer_fabric::WINDOWS_LIMIT),
            ("queue_depth", self.limits.queue_depth, QUEUE_DEPTH_LIMIT),
            ("receive_depth", self.limits.receive_depth, RECEIVE_DEPTH_LIMIT),
            ("message_bytes_max", self.limits.message_bytes_max as usize, MESSAGE_BYTES_LIMIT),
        ]);
        check_options("cannot set up a verbs target", fault.map(|fault| fault.to_string()))
    }
}
