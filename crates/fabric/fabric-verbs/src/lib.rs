//! Provider for RDMA devices, over libibverbs and librdmacm. The devices do READ, WRITE,
//! compare-and-swap and fetch-and-add without the target's processor.
//!
//! A connection is a reliable queue pair that librdmacm establishes. Both ends first prove by a
//! Noise handshake, in messages over that queue pair, that they hold the cluster key. No region is
//! open to peers as such: for each key that an initiator requests, the target binds a window of
//! type 2 to the initiator's queue pair. The messages are in `docs/formats/fabric-verbs.md`.
//!
//! - [`sys`]: safe wrappers of the two libraries, with all calls of them. The other unsafe code
//!   posts work.
//! - [`queue`], [`key_cache`], [`messages`]: pure parts of the initiator, and the bytes of
//!   messages.
//! - [`remap`]: lent regions, and changing their pages.
//! - [`link`], [`endpoint`], [`local_memory`]: the initiator's end.
//! - [`target`], [`serve`], [`session`], [`answered`]: the target's end.

mod answered;
mod endpoint;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod fuzz_target;
#[cfg(test)]
mod golden_tests;
mod key_cache;
mod link;
mod local_memory;
mod messages;
mod mutation;
mod queue;
mod remap;
mod serve;
mod session;
mod slots;
mod sys;
mod target;

pub use endpoint::{VerbsEndpoint, connect};
pub use mutation::Mutation;
pub use remap::RemapMethod;
pub use sys::device::{DeviceCaps, devices};
pub use target::VerbsTarget;

use std::sync::Arc;

use aquifer_fabric::limits::{ENDPOINTS_DEFAULT, ENDPOINTS_LIMIT, Limits, OutOfBounds, check_options};
use aquifer_fabric::{Admission, Target, TargetError, UnixClock, VerbsProvider};

/// Installs this crate as the provider for RDMA devices.
pub fn install() {
    VerbsProvider {
        connect: |address, credential, identity| {
            Ok(Box::new(VerbsEndpoint::connect_by(address, credential, identity)?))
        },
        listen: |address, key, admission| {
            let options = VerbsOptions { admission, ..VerbsOptions::default() };
            let target = VerbsTarget::listen(address, key, options)?;
            let address = target.address();
            Ok((Arc::new(target) as Arc<dyn Target>, address))
        },
    }
    .install();
}

/// Bound of the operations in flight of one endpoint.
const QUEUE_DEPTH_LIMIT: usize = 256;
/// Bound of the messages that wait at the receiver.
const RECEIVE_DEPTH_LIMIT: usize = 64;
/// Bound of the bytes of one message of a user.
const MESSAGE_BYTES_LIMIT: usize = 4096;
/// Bytes of a slot for a message of a user or of the handshake.
const MESSAGE_SLOT_BYTES: usize = messages::HEAD_BYTES + MESSAGE_BYTES_LIMIT;
/// Number of message slots of an initiator: for messages, for answers, and a few more.
#[expect(clippy::cast_possible_truncation, reason = "a small number")]
const MESSAGE_SLOTS_MAX: u32 = 2 * RECEIVE_DEPTH_LIMIT as u32 + 8;
/// Greatest length of messages and WRITEs that are copied into the work request.
const INLINE_BYTES: u32 = 64;
/// Bound of the windows that are bound for one endpoint.
const WINDOWS_EACH: usize = 256;

/// The options of a target. Endpoints learn the limits when they connect.
#[derive(Clone, Debug)]
pub struct VerbsOptions {
    /// Greatest number of endpoints, at most [`ENDPOINTS_LIMIT`].
    pub endpoints_max: usize,
    /// Greatest number of regions, at most [`aquifer_fabric::REGIONS_LIMIT`].
    pub regions_max: usize,
    /// Greatest number of windows, at most [`aquifer_fabric::WINDOWS_LIMIT`]. Windows of the device
    /// are bound only for keys in use.
    pub windows_max: usize,
    /// The limits of one endpoint: at most 256 operations in flight, and 64 waiting messages of
    /// 4096 bytes.
    pub limits: Limits,
    /// The initiators that are admitted.
    pub admission: Admission,
    /// The clock by which tickets expire.
    pub clock: UnixClock,
}

impl Default for VerbsOptions {
    fn default() -> Self {
        Self {
            endpoints_max: ENDPOINTS_DEFAULT,
            regions_max: aquifer_fabric::keys::REGIONS_DEFAULT,
            windows_max: 65_536,
            limits: Limits::default(),
            admission: Admission::Members,
            clock: UnixClock::default(),
        }
    }
}

impl VerbsOptions {
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
