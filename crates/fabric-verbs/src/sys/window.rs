//! Windows: what opens registered memory to one queue pair.

use std::io;

use rdma_mummy_sys as sys;

use super::device::Device;

/// A window of type 2; bound by work that is posted, see [`super::queue_pair::WorkKind::Bind`]. It goes before its queue pair, and before the registration that it is
/// bound to.
#[derive(Debug)]
pub(crate) struct Window(*mut sys::ibv_mw);

// SAFETY: libibverbs lets any thread use a window.
unsafe impl Send for Window {}
// SAFETY: as above.
unsafe impl Sync for Window {}

impl Window {
    /// One that is bound to nothing.
    ///
    /// # Errors
    /// What the device says.
    pub fn new(device: &'static Device) -> io::Result<Self> {
        // SAFETY: the domain lives as long as the process.
        let window = unsafe { sys::ibv_alloc_mw(device.domain, sys::ibv_mw_type::IBV_MW_TYPE_2) };
        if window.is_null() { Err(io::Error::last_os_error()) } else { Ok(Self(window)) }
    }

    pub fn raw(&self) -> *mut sys::ibv_mw {
        self.0
    }

    /// A key that it can be bound with: its low byte is the owner's to choose, and not that of before.
    pub fn fresh_key(&self) -> u32 {
        // SAFETY: the window lives; the key is a number.
        unsafe { sys::ibv_inc_rkey((*self.0).rkey) }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: it is ours and dropped once; if it is bound, this ends that.
        let error = unsafe { sys::ibv_dealloc_mw(self.0) };
        if error != 0 {
            tracing::warn!(error = %io::Error::from_raw_os_error(error), "a window cannot be freed");
        }
    }
}
