//! Completion queues, by which devices report the end of work.

use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr;

use rdma_mummy_sys as sys;

use super::device::Device;

/// Number of completions taken from the device at a time.
const POLL_MAX: usize = 32;

/// The outcome of work or of a receive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WorkOutcome {
    Done,
    /// The peer's device refused: the key does not open the range.
    RemoteAccess,
    /// The work was not done, because earlier work failed.
    Flushed,
    /// The peer did not answer.
    Unanswered,
    /// Another failure, with the device's status number.
    Failed(u32),
}

/// The completion of one work request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WorkCompletion {
    pub id: u64,
    pub outcome: WorkOutcome,
    /// Number of the queue pair.
    pub pair: u32,
    /// Length of a received message.
    pub bytes: u32,
}

/// A completion queue, with a descriptor to wait for completions.
#[derive(Debug)]
pub(crate) struct CompletionQueue {
    queue: *mut sys::ibv_cq,
    channel: *mut sys::ibv_comp_channel,
}

// SAFETY: libibverbs lets any thread use a queue and a channel.
unsafe impl Send for CompletionQueue {}
// SAFETY: the same reason as for `Send`.
unsafe impl Sync for CompletionQueue {}

impl CompletionQueue {
    /// Creates a queue with room for `depth` completions.
    ///
    /// # Errors
    /// The error of the device.
    pub fn new(device: &'static Device, depth: usize) -> io::Result<Self> {
        let depth = i32::try_from(depth).unwrap_or(i32::MAX);
        // SAFETY: the device stays open.
        let channel = unsafe { sys::ibv_create_comp_channel(device.context) };
        if channel.is_null() {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the device stays open; the channel is freed after the queue.
        let queue = unsafe { sys::ibv_create_cq(device.context, depth, ptr::null_mut(), channel, 0) };
        let completions = Self { queue, channel };
        if queue.is_null() {
            return Err(io::Error::last_os_error());
        }
        let flags = rustix::fs::fcntl_getfl(completions.fd())?;
        rustix::fs::fcntl_setfl(completions.fd(), flags | rustix::fs::OFlags::NONBLOCK)?;
        Ok(completions)
    }

    pub fn raw(&self) -> *mut sys::ibv_cq {
        self.queue
    }

    /// A descriptor that is readable once a completion arrives after [`Self::arm`].
    pub fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel and its descriptor live as long as `self`.
        unsafe {
            let fd: RawFd = (*self.channel).fd;
            BorrowedFd::borrow_raw(fd)
        }
    }

    /// Makes the descriptor report the next completion. It does not report completions that are
    /// already there, so poll once more.
    pub fn arm(&self) {
        // SAFETY: the queue lives.
        let error = unsafe { sys::ibv_req_notify_cq(self.queue, 0) };
        if error != 0 {
            tracing::warn!(error = %io::Error::from_raw_os_error(error), "cannot arm a completion queue");
        }
    }

    /// Clears the descriptor until it is armed again.
    pub fn disarm(&self) {
        let (mut queue, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the channel lives. Both places outlive the call, which does not block. Each event
        // is acknowledged once.
        unsafe {
            while sys::ibv_get_cq_event(self.channel, &raw mut queue, &raw mut context) == 0 {
                sys::ibv_ack_cq_events(queue, 1);
            }
        }
    }

    /// Takes up to `max` completions. Returns their number.
    pub fn poll(&self, out: &mut Vec<WorkCompletion>, max: usize) -> usize {
        // SAFETY: plain numbers, for which zero is a value.
        let mut found: [sys::ibv_wc; POLL_MAX] = unsafe { std::mem::zeroed() };
        let mut taken = 0;
        while taken < max {
            let room = POLL_MAX.min(max - taken);
            let wanted = i32::try_from(room).expect("a small number");
            // SAFETY: the queue lives, and `found` has room for `wanted` completions.
            let count = unsafe { sys::ibv_poll_cq(self.queue, wanted, found.as_mut_ptr()) };
            let count = usize::try_from(count).unwrap_or(0);
            out.extend(found[..count].iter().map(ended));
            taken += count;
            if count < room {
                break;
            }
        }
        taken
    }
}

fn ended(found: &sys::ibv_wc) -> WorkCompletion {
    use sys::ibv_wc_status::{
        IBV_WC_REM_ACCESS_ERR, IBV_WC_RETRY_EXC_ERR, IBV_WC_RNR_RETRY_EXC_ERR, IBV_WC_SUCCESS,
        IBV_WC_WR_FLUSH_ERR,
    };
    let outcome = match found.status {
        IBV_WC_SUCCESS => WorkOutcome::Done,
        IBV_WC_REM_ACCESS_ERR => WorkOutcome::RemoteAccess,
        IBV_WC_WR_FLUSH_ERR => WorkOutcome::Flushed,
        IBV_WC_RETRY_EXC_ERR | IBV_WC_RNR_RETRY_EXC_ERR => WorkOutcome::Unanswered,
        other => WorkOutcome::Failed(other),
    };
    WorkCompletion { id: found.wr_id, outcome, pair: found.qp_num, bytes: found.byte_len }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: `self` owns both and drops them once, the queue first. Queue pairs that use it
        // are gone by then.
        unsafe {
            if !self.queue.is_null() {
                let error = sys::ibv_destroy_cq(self.queue);
                debug_assert_eq!(error, 0, "a completion queue is still in use");
            }
            sys::ibv_destroy_comp_channel(self.channel);
        }
    }
}
