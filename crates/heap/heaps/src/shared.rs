//! Programs of this machine: the agent opens a socket for each, and a thread of this process
//! answers the requests on it.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use aquifer_channel::descriptor_shares::{DescriptorShares, THREAD_DESCRIPTORS};
use aquifer_channel::passrights::refuse_descriptors;
use aquifer_channel::socket::{accept, listen_at, receive_soon, wait_readable};
use aquifer_channel::{receive_frame, send_frame};
use aquifer_fabric::Tenant;
use aquifer_ipc::Frame;
use aquifer_objects::service::{HeapService, MESSAGE_BYTES_MAX};
use parking_lot::Mutex;
use rustix::net::{SendFlags, send};

/// Largest number of programs of one user at a time.
const PROGRAMS_PER_TENANT_MAX: usize = 256;
/// Time for which a thread polls for the next request before it sleeps.
const SPIN_TIME: Duration = Duration::from_micros(100);
/// Longest sleep of a thread that waits for a request, between checks whether the heap is closed.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval at which a request to stop is polled, and pause after a failure to accept.
const TICK: Duration = Duration::from_millis(100);
/// Timeout of the agent's first frame, which names the user.
const OPEN_TIMEOUT: Duration = Duration::from_secs(2);

/// Accepts the connections of agents.
#[derive(Debug)]
pub(crate) struct SharedPrograms {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Programs {
    service: Arc<HeapService>,
    counts: Mutex<HashMap<u32, usize>>,
    descriptors: Arc<DescriptorShares>,
}

impl SharedPrograms {
    /// Listens at a socket for the agent, which has the same user id as this process.
    ///
    /// # Errors
    /// If the socket cannot be made.
    pub fn start(path: &Path, service: Arc<HeapService>) -> io::Result<Self> {
        let listener = listen_at(path, 0o600)?;
        let stop = Arc::new(AtomicBool::new(false));
        let programs = Arc::new(Programs {
            service,
            counts: Mutex::default(),
            descriptors: DescriptorShares::of_process(),
        });
        let stopped = Arc::clone(&stop);
        let accept_all = move || {
            while !stopped.load(Ordering::Relaxed) {
                if wait_readable(&[&listener], TICK).unwrap_or(false) {
                    accept_one(&listener, &programs);
                }
            }
        };
        let thread = std::thread::Builder::new().name("shared-heaps".into()).spawn(accept_all)?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for SharedPrograms {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn accept_one(listener: &OwnedFd, programs: &Arc<Programs>) {
    let socket = match accept(listener) {
        Ok((socket, peer)) if peer.uid == rustix::process::geteuid().as_raw() => socket,
        Ok((_, peer)) => return tracing::warn!(uid = peer.uid, "refused a connection of another user"),
        Err(error) => {
            tracing::warn!(%error, "cannot accept a connection");
            return std::thread::sleep(TICK);
        }
    };
    let programs = Arc::clone(programs);
    let serve = move || {
        if let Err(error) = programs.serve(&socket) {
            tracing::debug!(%error, "the connection to a program has ended");
        }
    };
    if let Err(error) = std::thread::Builder::new().name("shared-heap".into()).spawn(serve) {
        tracing::warn!(%error, "cannot start a thread for a program");
    }
}

impl Programs {
    /// Opens a heap, and answers the program's requests until it closes the connection.
    fn serve(&self, socket: &OwnedFd) -> io::Result<()> {
        if !wait_readable(&[socket], OPEN_TIMEOUT)? {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let Ok((Frame::OpenHeap(uid), _)) = receive_frame(socket) else {
            return Err(io::Error::other("the first frame is not that of an agent of this build"));
        };
        let _charge = match self.descriptors.charge(uid, THREAD_DESCRIPTORS) {
            Ok(charge) => charge,
            Err(error) => return send_frame(socket, &Frame::Refused(error.to_string()), &[]),
        };
        if !self.count_in(uid) {
            let reason = format!("{PROGRAMS_PER_TENANT_MAX} programs of the user already share the heap");
            return send_frame(socket, &Frame::Refused(reason), &[]);
        }
        // A program could otherwise send descriptors whose close blocks, while this process serves
        // other programs. A refused program uses the network.
        let is_safe = uid == rustix::process::geteuid().as_raw() || refuse_descriptors(socket);
        let result = if is_safe {
            self.serve_tenant(socket, uid)
        } else {
            let reason = "this kernel cannot refuse descriptors (SO_PASSRIGHTS, Linux 6.16)".to_owned();
            send_frame(socket, &Frame::Refused(reason), &[])
        };
        self.count_out(uid);
        result
    }

    fn serve_tenant(&self, socket: &OwnedFd, uid: u32) -> io::Result<()> {
        let share = match self.service.share(Tenant(uid)) {
            Ok(share) => share,
            Err(error) => return send_frame(socket, &Frame::Refused(error.to_string()), &[]),
        };
        let fds: Vec<BorrowedFd<'_>> = share.fds.iter().map(AsFd::as_fd).collect();
        send_frame(socket, &Frame::HeapOpened, &fds)?;
        let mut message = vec![0; MESSAGE_BYTES_MAX as usize];
        let mut answer = Vec::new();
        while !share.is_closed() {
            let len = match receive_soon(socket, &mut message, SPIN_TIME, WAIT_TIMEOUT)? {
                Some(0) => return Ok(()),
                Some(len) => len,
                None => continue,
            };
            answer.clear();
            self.service.answer(Tenant(uid), &message[..len], &mut answer);
            // Does not wait for a program that does not read its answers.
            send(socket, &answer, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
        }
        Ok(())
    }

    fn count_in(&self, uid: u32) -> bool {
        let mut counts = self.counts.lock();
        let count = counts.entry(uid).or_default();
        let has_room = *count < PROGRAMS_PER_TENANT_MAX;
        *count += usize::from(has_room);
        has_room
    }

    fn count_out(&self, uid: u32) {
        let mut counts = self.counts.lock();
        if let Some(count) = counts.get_mut(&uid) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&uid);
            }
        }
    }
}
