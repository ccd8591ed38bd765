//! Completion queues: where devices tell the end of work.

use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr;

use rdma_mummy_sys as sys;

use super::device::Device;

/// CompletionQueue taken at a time.
const POLL_MAX: usize = 32;

/// What came of work, or of a receive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outcome {
    Done,
    /// The peer's device refused: the key does not open this.
    RemoteAccess,
    /// Not done: something before it failed.
    Flushed,
    /// The peer did not answer.
    Unanswered,
    /// Anything else; the device's number for it.
    Failed(u32),
}

/// The end of one piece of work.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WorkCompletion {
    pub id: u64,
    pub outcome: Outcome,
    /// The number of the queue pair.
    pub pair: u32,
    /// Of a message that came.
    pub bytes: u32,
}

/// A queue of completions, with a descriptor to wait for them.
#[derive(Debug)]
pub(crate) struct CompletionQueue {
    queue: *mut sys::ibv_cq,
    channel: *mut sys::ibv_comp_channel,
}

// SAFETY: libibverbs lets any thread use a queue and a channel.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

impl CompletionQueue {
    /// A queue in which so many completions may wait.
    ///
    /// # Errors
    /// What the device says.
    pub fn new(device: &'static Device, depth: usize) -> io::Result<Self> {
        let depth = i32::try_from(depth).unwrap_or(i32::MAX);
        // SAFETY: the device stays open.
        let channel = unsafe { sys::ibv_create_comp_channel(device.context) };
        if channel.is_null() {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: likewise; the channel is freed after the queue.
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

    /// Readable once something comes after [`Self::arm`].
    pub fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel and its descriptor live as long as `self`.
        unsafe {
            let fd: RawFd = (*self.channel).fd;
            BorrowedFd::borrow_raw(fd)
        }
    }

    /// Make the descriptor tell of the next completion. What is there already it does not tell: look once more.
    pub fn arm(&self) {
        // SAFETY: the queue lives.
        let error = unsafe { sys::ibv_req_notify_cq(self.queue, 0) };
        if error != 0 {
            tracing::warn!(error = %io::Error::from_raw_os_error(error), "a completion queue cannot be armed");
        }
    }

    /// The descriptor has told: it is quiet until it is armed again.
    pub fn disarm(&self) {
        let (mut queue, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the channel lives; both places outlive the call, which does not wait. Each event is acknowledged once.
        unsafe {
            while sys::ibv_get_cq_event(self.channel, &raw mut queue, &raw mut context) == 0 {
                sys::ibv_ack_cq_events(queue, 1);
            }
        }
    }

    /// Take what is there, at most so many; returns how many.
    pub fn poll(&self, out: &mut Vec<WorkCompletion>, max: usize) -> usize {
        // SAFETY: plain numbers, for which zero is a value.
        let mut found: [sys::ibv_wc; POLL_MAX] = unsafe { std::mem::zeroed() };
        let mut taken = 0;
        while taken < max {
            let room = POLL_MAX.min(max - taken);
            let wanted = i32::try_from(room).expect("a small number");
            // SAFETY: the queue lives, and `found` has room for so many.
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
        IBV_WC_SUCCESS => Outcome::Done,
        IBV_WC_REM_ACCESS_ERR => Outcome::RemoteAccess,
        IBV_WC_WR_FLUSH_ERR => Outcome::Flushed,
        IBV_WC_RETRY_EXC_ERR | IBV_WC_RNR_RETRY_EXC_ERR => Outcome::Unanswered,
        other => Outcome::Failed(other),
    };
    WorkCompletion { id: found.wr_id, outcome, pair: found.qp_num, bytes: found.byte_len }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: both are ours and dropped once, the queue first; queue pairs that use it are gone by then.
        unsafe {
            if !self.queue.is_null() {
                let error = sys::ibv_destroy_cq(self.queue);
                debug_assert_eq!(error, 0, "a completion queue is still in use");
            }
            sys::ibv_destroy_comp_channel(self.channel);
        }
    }
}
