//! The target's thread, which accepts endpoints and detects when they hang up.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::SocketFlags;

use super::handshake::{self, ShmRegion, ShmReply, ShmWelcome};
use super::mailbox::{Direction, MessageRing, mailbox_bytes};
use super::socket;
use super::target::{ShmPeer, ShmShared};
use crate::Memory;
use crate::handshake::{HANDSHAKE_TIMEOUT, PENDING_LIMIT, RefusalReason};
use crate::memory::u64_from;
use crate::target::{Identity, Sender};
use crate::unit_map::RegionMemory;

/// The interval at which the timeouts of unfinished handshakes are checked.
const TIMEOUT_CHECK_INTERVAL: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// The thread that accepts endpoints and detects when they hang up.
pub(super) struct ShmAcceptor {
    shared: Arc<ShmShared>,
    listener: OwnedFd,
    pending: Vec<(OwnedFd, Instant)>,
    connected: Vec<(usize, Arc<OwnedFd>)>,
}

impl ShmAcceptor {
    pub fn new(shared: Arc<ShmShared>, listener: OwnedFd) -> Self {
        Self { shared, listener, pending: Vec::new(), connected: Vec::new() }
    }

    pub fn run(mut self) {
        while !self.shared.stop.load(Ordering::SeqCst) {
            let ready = match self.wait() {
                Ok(ready) => ready,
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => {
                    tracing::error!(%error, "cannot poll the sockets of the shared-memory target; retrying");
                    std::thread::yield_now();
                    continue;
                }
            };
            let pending = self.pending.len();
            // From the back, because handling an index removes it.
            for &index in ready.iter().rev() {
                match index {
                    0 => self.accept(),
                    _ if index <= pending => self.handle_hello(index - 1),
                    _ => self.handle_connected(index - 1 - pending),
                }
            }
            self.pending.retain(|(_, since)| since.elapsed() < HANDSHAKE_TIMEOUT);
        }
    }

    /// Waits for events. Index 0 is the listener; the unfinished handshakes and then the connected
    /// endpoints follow.
    fn wait(&self) -> Result<Vec<usize>, rustix::io::Errno> {
        let mut polled = vec![PollFd::new(&self.shared.wake, PollFlags::IN)];
        // At the limit of unfinished handshakes, further connections wait in the backlog.
        let room = self.pending.len() < PENDING_LIMIT;
        let accepting = if room { PollFlags::IN } else { PollFlags::empty() };
        polled.push(PollFd::new(&self.listener, accepting));
        polled.extend(self.pending.iter().map(|(fd, _)| PollFd::new(fd, PollFlags::IN)));
        let events = PollFlags::IN | PollFlags::RDHUP;
        polled.extend(self.connected.iter().map(|(_, fd)| PollFd::new(&**fd, events)));
        let timeout = (!self.pending.is_empty()).then_some(&TIMEOUT_CHECK_INTERVAL);
        rustix::event::poll(&mut polled, timeout)?;
        let ready = polled[1..].iter().enumerate().filter(|(_, fd)| !fd.revents().is_empty());
        Ok(ready.map(|(index, _)| index).collect())
    }

    fn accept(&mut self) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match rustix::net::accept_with(&self.listener, flags) {
            Ok(socket) => self.pending.push((socket, Instant::now())),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection; retrying");
                // The process has no descriptors or memory left. Retrying at once would only
                // use the processor.
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }

    /// Handles the hello, or the hang-up, of an unfinished handshake.
    fn handle_hello(&mut self, index: usize) {
        let (socket, _) = self.pending.swap_remove(index);
        let Ok((bytes, _)) = socket::receive(&socket) else {
            return;
        };
        if bytes.is_empty() {
            return;
        }
        let refused = match self.check(&socket, &bytes) {
            Ok(who) => self.admit(socket, who).err(),
            Err(reason) => Some((socket, reason)),
        };
        if let Some((socket, reason)) = refused {
            tracing::info!(%reason, "an endpoint was refused");
            // The peer may have hung up already.
            let _ =
                socket::send(&socket, &handshake::encode_reply(&ShmReply::Refusal(reason.to_refusal())), &[]);
        }
    }

    /// The identity of the peer, or the reason to refuse it.
    fn check(&self, socket: &OwnedFd, hello: &[u8]) -> Result<Identity, RefusalReason> {
        let uid = socket::peer_uid(socket).map_err(RefusalReason::UnknownUser)?;
        let allowed = self.shared.options.peer_uid;
        if uid != allowed {
            return Err(RefusalReason::OtherUser { uid, allowed });
        }
        Ok(handshake::parse_hello(hello)?)
    }

    /// Fences all smaller epochs of the host: their operations in flight must not take effect
    /// later. A process that stalls in the middle of an access is killed.
    fn fence_earlier_epochs(&self, who: Identity) -> Result<(), RefusalReason> {
        let Some(epoch) = who.epoch.checked_sub(1) else { return Ok(()) };
        for fenced in self.shared.begin_fence(who.host, epoch) {
            if !self.shared.await_drained(&fenced, Some(HANDSHAKE_TIMEOUT)) {
                return Err(RefusalReason::StalledAccess(who.host));
            }
        }
        Ok(())
    }

    /// Assigns a slot, a mailbox and the regions.
    fn admit(&mut self, socket: OwnedFd, who: Identity) -> Result<(), (OwnedFd, RefusalReason)> {
        let ShmShared { options, control, .. } = &*self.shared;
        let mailbox = match Memory::create("aquifer-mailbox", mailbox_bytes(&options.limits)) {
            Ok(mailbox) => Arc::new(mailbox),
            Err(error) => return Err((socket, RefusalReason::NoMailbox(error))),
        };
        let refusal = self.shared.lock().tables.refusal(who);
        if let Some(reason) = refusal.or_else(|| self.fence_earlier_epochs(who).err()) {
            return Err((socket, reason));
        }
        let mut state = self.shared.lock();
        if let Some(reason) = state.tables.refusal(who) {
            return Err((socket, reason));
        }
        let (slot, endpoint) = match state.allocate(options, who) {
            Ok(allocated) => allocated,
            Err(reason) => return Err((socket, reason)),
        };
        let sender = Sender { who, endpoint };
        control.open_slot(slot, who);
        control.set_process(slot, socket::peer_pid(&socket));
        let welcome = ShmReply::Welcome(ShmWelcome {
            slot: u32::try_from(slot).unwrap_or(u32::MAX),
            limits: options.limits,
            control_len: control.bytes(),
            mailbox_len: u64_from(mailbox.len()),
            regions: state.tables.visible_regions(who),
        });
        let fds = [control.fd(), mailbox.fd()];
        if let Err(error) = socket::send(&socket, &handshake::encode_reply(&welcome), &fds) {
            control.free_slot(slot);
            state.free(slot, sender);
            return Err((socket, RefusalReason::WelcomeNotSent(error)));
        }
        let process = socket::peer_process(&socket).map(Arc::new);
        let socket = Arc::new(socket);
        state.peers[slot] = Some(ShmPeer {
            who,
            endpoint,
            socket: Arc::clone(&socket),
            process,
            outbox: MessageRing::new(&mailbox, &options.limits, Direction::ToInitiator),
        });
        state.inboxes.add(sender, MessageRing::new(&mailbox, &options.limits, Direction::ToTarget));
        drop(state);
        self.connected.push((slot, socket));
        Ok(())
    }

    /// Answers an endpoint's request for a region, or removes an endpoint that hung up.
    fn handle_connected(&mut self, index: usize) {
        let (slot, socket) = &self.connected[index];
        let is_answered = match socket::receive(socket) {
            Ok((bytes, _)) if bytes.is_empty() => false,
            Ok((bytes, _)) => answer(&self.shared, *slot, socket, &bytes),
            Err(error) => error.kind() == io::ErrorKind::WouldBlock,
        };
        if !is_answered {
            let _ = rustix::net::shutdown(&**socket, rustix::net::Shutdown::Both);
            self.remove_endpoint(index);
        }
    }

    /// Frees the slot of an endpoint that hung up. Its unread messages are kept.
    fn remove_endpoint(&mut self, index: usize) {
        let (slot, _) = self.connected.swap_remove(index);
        let mut state = self.shared.lock();
        self.shared.control.free_slot(slot);
        let Some(ShmPeer { who, endpoint, .. }) = state.peers[slot].take() else { return };
        state.free(slot, Sender { who, endpoint });
        state.inboxes.end(endpoint);
        drop(state);
        self.shared.control.wake_waiting();
    }
}

/// Answers a request for a region. Returns false if the endpoint violated the protocol or hung up.
fn answer(shared: &ShmShared, slot: usize, socket: &OwnedFd, bytes: &[u8]) -> bool {
    let request = match handshake::parse_request(bytes) {
        Ok(request) => request,
        Err(error) => {
            tracing::warn!(%error, "an endpoint violated the protocol; closing its connection");
            return false;
        }
    };
    // With the lock held, so that a region that was removed is not referred to.
    let state = shared.lock();
    let sent = match shared.region(&state, slot, request) {
        None => socket::send(socket, &handshake::encode_region(None), &[]),
        Some((region, memory)) => region_fds(&region, memory).and_then(|fds| {
            let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            socket::send(socket, &handshake::encode_region(Some(&region)), &fds)
        }),
    };
    if let Err(error) = &sent {
        tracing::warn!(%error, "cannot send the memory of a region; closing the connection");
    }
    sent.is_ok()
}

/// The descriptors of a region: its memory, and the words of its translation table, which endpoints
/// only read.
fn region_fds(region: &ShmRegion, memory: &RegionMemory) -> io::Result<Vec<OwnedFd>> {
    let bytes = &memory.memory;
    let mut fds =
        vec![if region.is_writable { bytes.fd().try_clone_to_owned()? } else { bytes.read_only_fd()? }];
    if let Some(map) = &memory.map {
        fds.push(map.words.read_only_fd()?);
    }
    Ok(fds)
}
