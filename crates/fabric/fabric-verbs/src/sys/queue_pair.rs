//! Queue pairs, to which work is posted.

use std::io;
use std::ptr;

use rdma_mummy_sys as sys;

/// Number of work requests that are passed to the device at a time.
const POST_MAX: usize = 16;

/// A range of registered memory of this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LocalPiece {
    pub addr: u64,
    pub len: u32,
    pub key: u32,
}

/// A place in the peer's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RemotePlace {
    pub addr: u64,
    pub key: u32,
}

/// The parameters of a bind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WindowBind {
    pub window: *mut sys::ibv_mw,
    pub region: *mut sys::ibv_mr,
    pub key: u32,
    pub addr: u64,
    pub len: u64,
    pub access: aquifer_fabric::target::Access,
}

// SAFETY: libibverbs lets any thread name a window and a registration.
unsafe impl Send for WindowBind {}

#[derive(Clone, Copy, Debug)]
pub(crate) enum WorkKind {
    Read {
        local: LocalPiece,
        remote: RemotePlace,
    },
    Write {
        local: LocalPiece,
        remote: RemotePlace,
    },
    /// The value found is written to `result`, which has 8 bytes.
    CompareSwap {
        result: LocalPiece,
        remote: RemotePlace,
        expected: u64,
        desired: u64,
    },
    FetchAdd {
        result: LocalPiece,
        remote: RemotePlace,
        add: u64,
    },
    Send {
        local: LocalPiece,
    },
    Bind(WindowBind),
}

/// One work request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WorkRequest {
    pub id: u64,
    pub kind: WorkKind,
    /// Whether success produces a completion. Failure always does.
    pub signalled: bool,
    /// Whether the work starts only after all READs and atomics that were posted earlier.
    pub fenced: bool,
}

/// A queue pair. Must not be used after its connection, which owns it, is dropped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueuePair {
    pair: *mut sys::ibv_qp,
    /// Greatest length of WRITEs and messages that are copied into the work request.
    inline_bytes: u32,
}

// SAFETY: libibverbs lets any thread use a queue pair.
unsafe impl Send for QueuePair {}
// SAFETY: the same reason as for `Send`.
unsafe impl Sync for QueuePair {}

impl QueuePair {
    /// Wraps a queue pair.
    ///
    /// # Safety
    /// The queue pair must live for as long as this is used.
    pub unsafe fn new(pair: *mut sys::ibv_qp, inline_bytes: u32) -> Self {
        Self { pair, inline_bytes }
    }

    pub fn number(self) -> u32 {
        // SAFETY: the queue pair lives, as the caller of `new` guarantees.
        unsafe { (*self.pair).qp_num }
    }

    /// Posts work to the device, with one doorbell for each 16 requests.
    ///
    /// # Errors
    /// If the device does not accept all work. The number of accepted requests is unknown, so the
    /// queue pair is then unusable.
    ///
    /// # Safety
    /// Ranges and windows that the requests name must stay registered, and memory that is read must
    /// not be freed, until the work has ended.
    pub unsafe fn post(self, requests: &[WorkRequest]) -> io::Result<()> {
        for batch in requests.chunks(POST_MAX) {
            // SAFETY: plain numbers and pointers, for which zero is a value.
            let (mut works, mut pieces): ([sys::ibv_send_wr; POST_MAX], [sys::ibv_sge; POST_MAX]) =
                unsafe { std::mem::zeroed() };
            for (at, request) in batch.iter().enumerate() {
                self.fill(&mut works[at], &mut pieces[at], request);
            }
            for at in 1..batch.len() {
                works[at - 1].next = &raw mut works[at];
            }
            let mut refused = ptr::null_mut();
            // SAFETY: the pair lives. The list ends with a null pointer and outlives the call. The
            // caller guarantees the rest.
            let error = unsafe { sys::ibv_post_send(self.pair, works.as_mut_ptr(), &raw mut refused) };
            if error != 0 {
                return Err(io::Error::from_raw_os_error(error.abs()));
            }
        }
        Ok(())
    }

    fn fill(self, work: &mut sys::ibv_send_wr, piece: &mut sys::ibv_sge, request: &WorkRequest) {
        let mut flags = 0;
        if request.signalled {
            flags |= sys::ibv_send_flags::IBV_SEND_SIGNALED.0;
        }
        if request.fenced {
            flags |= sys::ibv_send_flags::IBV_SEND_FENCE.0;
        }
        work.wr_id = request.id;
        let local = match request.kind {
            WorkKind::Read { local, remote } => {
                work.opcode = sys::ibv_wr_opcode::IBV_WR_RDMA_READ;
                work.wr.rdma = sys::rdma_t { remote_addr: remote.addr, rkey: remote.key };
                Some(local)
            }
            WorkKind::Write { local, remote } => {
                work.opcode = sys::ibv_wr_opcode::IBV_WR_RDMA_WRITE;
                work.wr.rdma = sys::rdma_t { remote_addr: remote.addr, rkey: remote.key };
                flags |= self.inline_flag(local);
                Some(local)
            }
            WorkKind::CompareSwap { result, remote, expected, desired } => {
                work.opcode = sys::ibv_wr_opcode::IBV_WR_ATOMIC_CMP_AND_SWP;
                work.wr.atomic = sys::atomic_t {
                    remote_addr: remote.addr,
                    compare_add: expected,
                    swap: desired,
                    rkey: remote.key,
                };
                Some(result)
            }
            WorkKind::FetchAdd { result, remote, add } => {
                work.opcode = sys::ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD;
                work.wr.atomic =
                    sys::atomic_t { remote_addr: remote.addr, compare_add: add, swap: 0, rkey: remote.key };
                Some(result)
            }
            WorkKind::Send { local } => {
                work.opcode = sys::ibv_wr_opcode::IBV_WR_SEND;
                flags |= self.inline_flag(local);
                Some(local)
            }
            WorkKind::Bind(opening) => {
                work.opcode = sys::ibv_wr_opcode::IBV_WR_BIND_MW;
                work.bind_mw_tso_union.bind_mw = sys::bind_mw_t {
                    mw: opening.window,
                    rkey: opening.key,
                    bind_info: sys::ibv_mw_bind_info {
                        mr: opening.region,
                        addr: opening.addr,
                        length: opening.len,
                        mw_access_flags: access_flags(opening.access),
                    },
                };
                None
            }
        };
        work.send_flags = flags;
        if let Some(local) = local.filter(|local| local.len > 0) {
            *piece = sys::ibv_sge { addr: local.addr, length: local.len, lkey: local.key };
            work.sg_list = &raw mut *piece;
            work.num_sge = 1;
        }
    }

    fn inline_flag(self, local: LocalPiece) -> u32 {
        if local.len <= self.inline_bytes { sys::ibv_send_flags::IBV_SEND_INLINE.0 } else { 0 }
    }

    /// Offers a slot for the next message of the peer.
    ///
    /// # Errors
    /// If the device does not accept the slot.
    ///
    /// # Safety
    /// The range must stay registered and unused until a message has arrived in it or the pair is
    /// gone.
    pub unsafe fn receive(self, id: u64, piece: LocalPiece) -> io::Result<()> {
        let mut place = sys::ibv_sge { addr: piece.addr, length: piece.len, lkey: piece.key };
        let mut work =
            sys::ibv_recv_wr { wr_id: id, next: ptr::null_mut(), sg_list: &raw mut place, num_sge: 1 };
        let mut refused = ptr::null_mut();
        // SAFETY: the pair lives and the list outlives the call. The caller guarantees the rest.
        let error = unsafe { sys::ibv_post_recv(self.pair, &raw mut work, &raw mut refused) };
        if error == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(error.abs())) }
    }

    /// Stops the queue pair: the device serves the peer no more, and flushes posted work.
    pub fn stop(self) {
        // SAFETY: plain numbers, for which zero is a value.
        let mut state: sys::ibv_qp_attr = unsafe { std::mem::zeroed() };
        state.qp_state = sys::ibv_qp_state::IBV_QPS_ERR;
        let mask = i32::try_from(sys::ibv_qp_attr_mask::IBV_QP_STATE.0).expect("a low bit");
        // SAFETY: the pair lives, `state` outlives the call.
        let error = unsafe { sys::ibv_modify_qp(self.pair, &raw mut state, mask) };
        if error != 0 {
            tracing::warn!(error = %io::Error::from_raw_os_error(error), "cannot stop a queue pair");
        }
    }
}

fn access_flags(access: aquifer_fabric::target::Access) -> u32 {
    let flag = |is_set: bool, flag: sys::ibv_access_flags| if is_set { flag.0 } else { 0 };
    flag(access.read, sys::ibv_access_flags::IBV_ACCESS_REMOTE_READ)
        | flag(access.write, sys::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE)
        | flag(access.atomic, sys::ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC)
}
