//! Memory that a device may reach.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use rdma_mummy_sys as sys;

use super::device::Device;
use aquifer_fabric::{AliasMapping, Memory};

/// What the device may do with it, beside reading it for this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RegistrationUse {
    /// RegisteredMemory work: the source of WRITEs, the destination of READs.
    Local,
    /// Windows may be bound to it. By itself it is closed to peers.
    Windows,
    /// So, and its pages are fetched when they are touched: they may be others later.
    WindowsOnDemand,
}

impl RegistrationUse {
    fn flags(self) -> i32 {
        use sys::ibv_access_flags as access;
        let more = match self {
            Self::Local => 0,
            Self::Windows => access::IBV_ACCESS_MW_BIND.0,
            Self::WindowsOnDemand => access::IBV_ACCESS_MW_BIND.0 | access::IBV_ACCESS_ON_DEMAND.0,
        };
        i32::try_from(access::IBV_ACCESS_LOCAL_WRITE.0 | more).expect("a few low bits")
    }
}

/// A part of a memory, known to the device.
#[derive(Debug)]
pub(crate) struct Registration {
    device: &'static Device,
    region: *mut sys::ibv_mr,
    memory: Arc<Memory>,
    /// What it is of, if that is not the memory's own mapping.
    #[expect(dead_code, reason = "it is mapped for as long as it is kept")]
    view: Option<Arc<AliasMapping>>,
}

/// Have pages fetched before the call returns.
const FLUSH: u32 = 1;

// SAFETY: libibverbs lets any thread use a registration; the fields never change.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

impl Registration {
    /// Register a range of a memory. PeerSessions and work that is posted know it by addresses from `base` on. Its pages are pinned: they take memory from now on.
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
        what: RegistrationUse,
    ) -> io::Result<Self> {
        assert!(range.start < range.end && range.end <= memory.len(), "{range:?} of {} bytes", memory.len());
        // SAFETY: the range is mapped for as long as `memory` lives, which this holds longer than the registration: fields drop after `drop`.
        let region = unsafe {
            let start = memory.as_ptr().add(range.start);
            sys::ibv_reg_mr_iova(device.domain, start.cast(), range.len(), base, what.flags())
        };
        if region.is_null() {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { device, region, memory, view: None })
    }

    /// Register all of a view. PeerSessions know it by addresses from `base` on.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn of_view(
        device: &'static Device,
        view: Arc<AliasMapping>,
        base: u64,
        what: RegistrationUse,
    ) -> io::Result<Self> {
        let len = view.memory().len();
        // SAFETY: the view is mapped for as long as it lives, which this holds longer than the registration: fields drop after `drop`.
        let region =
            unsafe { sys::ibv_reg_mr_iova(device.domain, view.as_ptr().cast(), len, base, what.flags()) };
        if region.is_null() {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { device, region, memory: Arc::clone(view.memory()), view: Some(view) })
    }

    /// Have the device fetch pages now that peers will touch soon: `len` bytes from `addr` on, as peers know them.
    ///
    /// # Errors
    /// What the device says; `EOPNOTSUPP` if it cannot.
    pub fn prefetch(&self, addr: u64, len: u64) -> io::Result<()> {
        let advice = sys::ib_uverbs_advise_mr_advice::IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE;
        let length = u32::try_from(len).unwrap_or(u32::MAX);
        let mut piece = sys::ibv_sge { addr, length, lkey: self.local_key() };
        // SAFETY: the domain lives as long as the process, the list outlives the call.
        let error = unsafe { sys::ibv_advise_mr(self.device.domain, advice, FLUSH, &raw mut piece, 1) };
        if error == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(error.abs())) }
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
