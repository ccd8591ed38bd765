//! Memory that is registered with a device.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use rdma_mummy_sys as sys;

use super::device::Device;
use aquifer_fabric::{AliasMapping, Memory};

/// The permitted use, besides reading for this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RegistrationUse {
    /// Memory of local work: the source of WRITEs, the destination of READs.
    Local,
    /// Memory to which windows may be bound. Peers cannot access it otherwise.
    Windows,
    /// Memory to which windows may be bound. The device fetches pages when they are touched, so the
    /// pages may change.
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

/// A registered range of a memory.
#[derive(Debug)]
pub(crate) struct Registration {
    device: &'static Device,
    region: *mut sys::ibv_mr,
    memory: Arc<Memory>,
    /// The registered mapping, if that is not the memory's own.
    #[expect(dead_code, reason = "the field keeps the mapping")]
    view: Option<Arc<AliasMapping>>,
}

/// A flag of the call: fetch the pages before it returns.
const FLUSH: u32 = 1;

// SAFETY: libibverbs lets any thread use a registration; the fields never change.
unsafe impl Send for Registration {}
// SAFETY: the same reason as for `Send`.
unsafe impl Sync for Registration {}

impl Registration {
    /// Registers a range of a memory. Peers and posted work use addresses from `base`. The pages
    /// are pinned.
    ///
    /// # Errors
    /// The error of the device. `ENOMEM` mostly means that the limit of locked memory (`ulimit -l`)
    /// is too low.
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
        // SAFETY: the range is mapped for as long as `memory` lives. `self` holds `memory` longer
        // than the registration, since fields are dropped after `drop`.
        let region = unsafe {
            let start = memory.as_ptr().add(range.start);
            sys::ibv_reg_mr_iova(device.domain, start.cast(), range.len(), base, what.flags())
        };
        if region.is_null() {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { device, region, memory, view: None })
    }

    /// Registers a whole alias mapping. Peers use addresses from `base`.
    ///
    /// # Errors
    /// The errors of [`Self::new`].
    pub fn of_view(
        device: &'static Device,
        view: Arc<AliasMapping>,
        base: u64,
        what: RegistrationUse,
    ) -> io::Result<Self> {
        let len = view.memory().len();
        // SAFETY: the mapping exists for as long as `view` lives. `self` holds `view` longer than
        // the registration, since fields are dropped after `drop`.
        let region =
            unsafe { sys::ibv_reg_mr_iova(device.domain, view.as_ptr().cast(), len, base, what.flags()) };
        if region.is_null() {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { device, region, memory: Arc::clone(view.memory()), view: Some(view) })
    }

    /// Prefetches pages of the device: `len` bytes from `addr`, an address of the peers.
    ///
    /// # Errors
    /// The error of the device; `EOPNOTSUPP` without support.
    pub fn prefetch(&self, addr: u64, len: u64) -> io::Result<()> {
        let advice = sys::ib_uverbs_advise_mr_advice::IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE;
        let length = u32::try_from(len).unwrap_or(u32::MAX);
        let mut piece = sys::ibv_sge { addr, length, lkey: self.local_key() };
        // SAFETY: the domain lives as long as the process, the list outlives the call.
        let error = unsafe { sys::ibv_advise_mr(self.device.domain, advice, FLUSH, &raw mut piece, 1) };
        if error == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(error.abs())) }
    }

    /// The key for work that is posted by this process.
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
        // SAFETY: `self` owns it and drops it once. Windows that were bound to it are freed before;
        // otherwise the call fails and the registration stays.
        let error = unsafe { sys::ibv_dereg_mr(self.region) };
        if error != 0 {
            tracing::warn!(error = %io::Error::from_raw_os_error(error), "cannot deregister memory");
        }
    }
}
