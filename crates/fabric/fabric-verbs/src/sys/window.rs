//! Windows, which open registered memory to one queue pair.

use std::io;

use rdma_mummy_sys as sys;

use super::device::Device;

/// A window of type 2, which [`super::queue_pair::WorkKind::Bind`] binds. Must be dropped before
/// its queue pair and before the registration to which it is bound.
#[derive(Debug)]
pub(crate) struct Window(*mut sys::ibv_mw);

// SAFETY: libibverbs lets any thread use a window.
unsafe impl Send for Window {}
// SAFETY: the same reason as for `Send`.
unsafe impl Sync for Window {}

impl Window {
    /// Creates a window that is not bound.
    ///
    /// # Errors
    /// The error of the device.
    pub fn new(device: &'static Device) -> io::Result<Self> {
        // SAFETY: the domain lives as long as the process.
        let window = unsafe { sys::ibv_alloc_mw(device.domain, sys::ibv_mw_type::IBV_MW_TYPE_2) };
        if window.is_null() { Err(io::Error::last_os_error()) } else { Ok(Self(window)) }
    }

    pub fn raw(&self) -> *mut sys::ibv_mw {
        self.0
    }

    /// A key for the next bind. The low byte, which is free to choose, differs from that of the
    /// last bind.
    pub fn fresh_key(&self) -> u32 {
        // SAFETY: the window lives; the key is a number.
        unsafe { sys::ibv_inc_rkey((*self.0).rkey) }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: `self` owns it and drops it once. This ends a bind.
        let error = unsafe { sys::ibv_dealloc_mw(self.0) };
        if error != 0 {
            tracing::warn!(error = %io::Error::from_raw_os_error(error), "cannot free a window");
        }
    }
}
