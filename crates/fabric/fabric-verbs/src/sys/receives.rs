//! Receive queues that many queue pairs share.

use std::io;
use std::ptr;

use rdma_mummy_sys as sys;

use super::device::Device;
use super::queue_pair::LocalPiece;

/// A shared receive queue.
#[derive(Debug)]
pub(crate) struct SharedReceives(*mut sys::ibv_srq);

// SAFETY: libibverbs lets any thread use a queue.
unsafe impl Send for SharedReceives {}
// SAFETY: the same reason as for `Send`.
unsafe impl Sync for SharedReceives {}

impl SharedReceives {
    /// Creates a queue with room for `depth` slots.
    ///
    /// # Errors
    /// The error of the device.
    pub fn new(device: &'static Device, depth: usize) -> io::Result<Self> {
        let depth = u32::try_from(depth).unwrap_or(u32::MAX);
        let mut wanted = sys::ibv_srq_init_attr {
            srq_context: ptr::null_mut(),
            attr: sys::ibv_srq_attr { max_wr: depth, max_sge: 1, srq_limit: 0 },
        };
        // SAFETY: the domain lives as long as the process; `wanted` outlives the call.
        let queue = unsafe { sys::ibv_create_srq(device.domain, &raw mut wanted) };
        if queue.is_null() { Err(io::Error::last_os_error()) } else { Ok(Self(queue)) }
    }

    pub fn raw(&self) -> *mut sys::ibv_srq {
        self.0
    }

    /// Offers a slot for the next message of any peer.
    ///
    /// # Errors
    /// If the queue is full.
    ///
    /// # Safety
    /// The range must stay registered and unused until a message has arrived in it or the queue is
    /// gone.
    pub unsafe fn offer(&self, id: u64, piece: LocalPiece) -> io::Result<()> {
        let mut place = sys::ibv_sge { addr: piece.addr, length: piece.len, lkey: piece.key };
        let mut work =
            sys::ibv_recv_wr { wr_id: id, next: ptr::null_mut(), sg_list: &raw mut place, num_sge: 1 };
        let mut refused = ptr::null_mut();
        // SAFETY: the queue lives and the list outlives the call. The caller guarantees the rest.
        let error = unsafe { sys::ibv_post_srq_recv(self.0, &raw mut work, &raw mut refused) };
        if error == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(error.abs())) }
    }
}

impl Drop for SharedReceives {
    fn drop(&mut self) {
        // SAFETY: `self` owns it and drops it once, after the queue pairs that use it.
        let error = unsafe { sys::ibv_destroy_srq(self.0) };
        debug_assert_eq!(error, 0, "a shared receive queue is still in use");
    }
}
