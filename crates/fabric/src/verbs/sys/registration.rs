//! Memory that a device may reach.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use rdma_mummy_sys as sys;

use super::device::Device;
use crate::Memory;

/// What the device may do with it, beside reading it for this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::verbs) enum Use {
    /// Local work: the source of WRITEs, the destination of READs.
    Local,
    /// Windows may be bound to it. By itself it is closed to peers.
    Windows,
}

/// A part of a memory, known to the device.
#[derive(Debug)]
pub(in crate::verbs) struct Registration {
    region: *mut sys::ibv_mr,
    memory: Arc<Memory>,
}

// SAFETY: libibverbs lets any thread use a registration; the fields never change.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

impl Registration {
    /// Register a range of a memory. Peers and work that is posted know it by addresses from `base` on. Its pages are pinned: they take memory from now on.
    ///
    /// # Errors
    /// What the device says; `ENOMEM` mostly means that the limit of locked memory (`ulimit -l`) is too low.
    ///
    /// # Panics
    /// If the range is not inside the memory.
    pub fn new(
        device: &'static Device,
        memory: Arc<Memory>,
        range: Range<usize>,
        base: u64,
        what: Use,
    ) -> io::Result<Self> {
        assert!(range.start < range.end && range.end <= memory.len(), "{range:?} of {} bytes", memory.len());
        let flags = sys::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0
            | match what {
                Use::Local => 0,
                Use::Windows => sys::ibv_access_flags::IBV_ACCESS_MW_BIND.0,
            };
        let flags = i32::try_from(flags).expect("a few low bits");
        // SAFETY: the range is mapped for as long as `memory` lives, which this holds longer than the registration: fields drop after `drop`.
        let region = unsafe {
            let start = memory.as_ptr().add(range.start);
            sys::ibv_reg_mr_iova(device.domain, start.cast(), range.len(), base, flags)
        };
        if region.is_null() {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { region, memory })
    }

    /// The key for work that is posted here.
    pub fn local_key(&self) -> u32 {
        // SAFETY: the registration lives.
        unsafe { (*self.region).lkey }
    }

    pub fn raw(&self) -> *mut sys::ibv_mr {
        self.region
    }

    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: it is ours, and dropped once. Whoever bound windows to it has freed them, else the system refuses and it stays.
        let error = unsafe { sys::ibv_dereg_mr(self.region) };
        if error != 0 {
            tracing::warn!(error = %io::Error::from_raw_os_error(error), "a registration cannot be undone");
        }
    }
}
