//! RDMA devices and their capabilities.

use std::ffi::CStr;
use std::io;
use std::ptr;

use parking_lot::Mutex;
use rdma_mummy_sys as sys;

/// The capabilities that a device reports.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DeviceCaps {
    /// The device's name, such as `mlx5_0` or `rxe0`.
    pub name: String,
    /// Number of queue pairs.
    pub pairs: usize,
    /// Operations in flight of one queue pair.
    pub queue_depth: usize,
    /// Completions that fit into one queue.
    pub completions: usize,
    /// Receives that fit into one shared queue; 0 without support.
    pub shared_receives: usize,
    /// READs and atomics that one queue pair may have in flight as initiator.
    pub reads_begun: u8,
    /// READs and atomics that one queue pair serves concurrently as target.
    pub reads_served: u8,
    /// Greatest length of one registration, in bytes.
    pub registration_bytes: u64,
    /// Number of windows.
    pub windows: usize,
    /// Whether there are windows of type 2, which work requests bind to one queue pair.
    pub has_bound_windows: bool,
    /// Whether memory for READs, WRITEs and atomics of peers need not be pinned (on-demand paging).
    /// Its pages may then be changed.
    pub has_odp: bool,
    /// Whether compare-and-swap and fetch-and-add are atomic.
    pub has_atomics: bool,
}

impl DeviceCaps {
    /// The capabilities that a device lacks to lend memory. Borrowing needs none of them.
    #[must_use]
    pub fn lacks(&self) -> Vec<&'static str> {
        let needs = [
            (self.has_bound_windows, "windows of type 2"),
            (self.has_atomics, "atomics"),
            (self.shared_receives > 0, "shared receive queues"),
        ];
        needs.into_iter().filter(|(has, _)| !has).map(|(_, what)| what).collect()
    }
}

/// A device in use. librdmacm owns its context, this process its protection domain. Both stay until
/// the process ends.
#[derive(Debug)]
pub(crate) struct Device {
    pub context: *mut sys::ibv_context,
    pub domain: *mut sys::ibv_pd,
    pub caps: DeviceCaps,
}

// SAFETY: libibverbs lets any thread use a context and a protection domain; the fields never
// change.
unsafe impl Send for Device {}
// SAFETY: the same reason as for `Send`.
unsafe impl Sync for Device {}

static IN_USE: Mutex<Vec<&'static Device>> = Mutex::new(Vec::new());

impl Device {
    /// The device of a context that librdmacm has opened.
    ///
    /// # Safety
    /// The context must be open and stay open: librdmacm closes none before the process ends.
    ///
    /// # Errors
    /// If the device cannot be queried, or has no protection domain left.
    pub unsafe fn of(context: *mut sys::ibv_context) -> io::Result<&'static Self> {
        let mut in_use = IN_USE.lock();
        if let Some(device) = in_use.iter().find(|device| device.context == context) {
            return Ok(device);
        }
        // SAFETY: guaranteed by the caller.
        let caps = unsafe { caps_of(context)? };
        // SAFETY: guaranteed by the caller.
        let domain = unsafe { sys::ibv_alloc_pd(context) };
        if domain.is_null() {
            return Err(io::Error::last_os_error());
        }
        let device: &'static Self = Box::leak(Box::new(Self { context, domain, caps }));
        in_use.push(device);
        Ok(device)
    }
}

/// The capabilities of this machine's devices.
///
/// # Errors
/// The reason why there are no devices: no library, no modules, or no device.
pub fn devices() -> Result<Vec<DeviceCaps>, String> {
    let mut count = 0;
    // SAFETY: `count` outlives the call.
    let list = unsafe { sys::ibv_get_device_list(&raw mut count) };
    if list.is_null() {
        let error = io::Error::last_os_error();
        return Err(match error.raw_os_error() {
            Some(libc::EOPNOTSUPP) => {
                "libibverbs.so.1 is not installed (Debian: rdma-core, ibverbs-providers)".into()
            }
            Some(libc::ENOSYS) => {
                "this kernel has no InfiniBand verbs (modules ib_uverbs and rdma_ucm)".into()
            }
            _ => format!("libibverbs finds no devices: {error}"),
        });
    }
    let mut found = Vec::new();
    for at in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: the list has `count` devices and lives until it is freed below. Each opened
        // device is closed.
        unsafe {
            let device = *list.add(at);
            let context = sys::ibv_open_device(device);
            if !context.is_null() {
                found.extend(caps_of(context));
                sys::ibv_close_device(context);
            }
        }
    }
    // SAFETY: the list came from `ibv_get_device_list` and is freed once.
    unsafe { sys::ibv_free_device_list(list) };
    if found.is_empty() {
        return Err("there is no RDMA device (`rdma link` lists none)".into());
    }
    Ok(found)
}

fn number(value: i32) -> usize {
    usize::try_from(value).unwrap_or(0)
}

fn short(value: i32) -> u8 {
    u8::try_from(value.clamp(0, 255)).unwrap_or(0)
}

/// # Safety
/// The context must be open.
unsafe fn caps_of(context: *mut sys::ibv_context) -> io::Result<DeviceCaps> {
    // SAFETY: plain numbers, for which zero is a value.
    let mut found: sys::ibv_device_attr_ex = unsafe { std::mem::zeroed() };
    // SAFETY: the context is open, `found` outlives the call.
    let error = unsafe { sys::ibv_query_device_ex(context, ptr::null(), &raw mut found) };
    if error != 0 {
        return Err(io::Error::from_raw_os_error(error));
    }
    // SAFETY: an open context has a device, whose name has at most 64 bytes.
    let name = unsafe { CStr::from_ptr(sys::ibv_get_device_name((*context).device)) };
    let device = &found.orig_attr;
    let has = |flag: sys::ibv_device_cap_flags| device.device_cap_flags & flag.0 != 0;
    let odp = u64::from(sys::ibv_odp_general_caps::IBV_ODP_SUPPORT.0);
    let served = sys::ibv_odp_transport_cap_bits::IBV_ODP_SUPPORT_READ.0
        | sys::ibv_odp_transport_cap_bits::IBV_ODP_SUPPORT_WRITE.0
        | sys::ibv_odp_transport_cap_bits::IBV_ODP_SUPPORT_ATOMIC.0;
    Ok(DeviceCaps {
        name: name.to_string_lossy().into_owned(),
        pairs: number(device.max_qp),
        queue_depth: number(device.max_qp_wr),
        completions: number(device.max_cqe),
        shared_receives: if device.max_srq > 0 { number(device.max_srq_wr) } else { 0 },
        reads_begun: short(device.max_qp_init_rd_atom),
        reads_served: short(device.max_qp_rd_atom),
        registration_bytes: device.max_mr_size,
        windows: number(device.max_mw),
        has_bound_windows: has(sys::ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW_TYPE_2A)
            || has(sys::ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW_TYPE_2B),
        has_odp: found.odp_caps.general_caps & odp != 0
            && found.odp_caps.per_transport_caps.rc_odp_caps & served == served,
        has_atomics: device.atomic_cap != sys::ibv_atomic_cap::IBV_ATOMIC_NONE,
    })
}
