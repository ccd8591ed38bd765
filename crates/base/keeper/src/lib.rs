//! The keeper: a small process that holds descriptors and memory for the next agent or memory node.
//!
//! When the last reference to a userfaultfd closes, the kernel fills missing pages with zeros. The
//! keeper has a second reference, so when the agent dies, its programs wait at their next fault.
//! The next agent gets all descriptors and memory back and resumes the programs. If no agent
//! connects within the grace time, the keeper kills the programs, and closes each descriptor when
//! the memory is gone, so that no program reads zeros.
//!
//! For a node the keeper holds the memory that the node lends; for a service of heaps, the heaps;
//! for a cache server that has ended in order, its partitions. If no node or service of the same
//! number, or no server of the cache, connects within the grace time, the memory is freed.
//!
//! The keeper also logs the exit statuses of the daemons of a local cluster, because a killed
//! daemon cannot.
//!
//! - `share_items`: the items of one daemon.
//! - `exit_watcher`: logs the exit statuses of daemons.
//! - [`KeeperClient`]: a daemon's connection to the keeper.
//! - [`KeeperStore`]: the interface of a store of items for services.
//!
//! Format: `docs/formats/ipc.md`.

mod client;
mod exit_status;
mod exit_watcher;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod fuzz_target;
mod memory;
mod mutation;
mod orphans;
mod share_items;
mod store;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use aquifer_channel::exiting::is_exiting;
use aquifer_channel::peer::peer_pidfd;
use aquifer_channel::socket::{accept, listen_at, wait_readable};
use aquifer_channel::{ReceiveError, receive_frame, send_frame};
use aquifer_ipc::{Frame, FrameError, HeldItem, HeldKind, KeeperShare};

use self::exit_watcher::ExitWatcher;
use self::orphans::OrphanWatch;
use self::share_items::ShareItems;
pub use client::{CLAIM_TIMEOUT, KeeperClient};
pub use mutation::Mutation;
pub use store::KeeperStore;

/// Timeout of a poll, which is the longest delay of a request to stop or of a grace time's end.
const TICK: Duration = Duration::from_millis(100);
/// Most connections at once: those of the agent, its shadow, the next agent, nodes, services of
/// heaps, cache servers, `aquifer up` and its supervisor.
const CONNECTIONS_MAX: usize = 64;
/// Most frames of one connection that are handled before those of others. More frames than its
/// socket buffers, so that none of a daemon that has ended remain.
const FRAMES_MAX: usize = 4096;

/// Time after which the share of a killed daemon goes to the next daemon, although the killed one
/// has not ended. A hostile program can make the kernel wait in a thread of the daemon, so that
/// the connection stays open.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between checks whether the owners of the shares run.
const OWNER_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Pause after a failure to accept a connection.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// Default of [`KeeperOptions::items_max`].
pub const ITEMS_MAX: usize = 65_536;

/// Options of a keeper.
#[derive(Debug)]
pub struct KeeperOptions {
    /// The socket's path.
    pub socket: PathBuf,
    /// The time for which the items of a daemon that has ended are held.
    ///
    /// At most the agent's grace time, and at least that of a node.
    pub grace: Duration,
    /// A socket that already listens at `socket`.
    pub listener: Option<OwnedFd>,
    /// Most items in a share. The keeper refuses further ones, so that the daemon can refuse the
    /// program that needs them.
    pub items_max: usize,
    /// True when the socket's file was deleted: the keeper then ends as soon as it holds no item
    /// and no daemon is connected.
    pub when_unused: Arc<AtomicBool>,
}

/// A connection of a daemon.
#[derive(Debug)]
struct DaemonConnection {
    socket: OwnedFd,
    number: u64,
    pid: u32,
    /// The pidfd of the daemon; `None` if the daemon had ended.
    process: Option<Arc<OwnedFd>>,
    /// The share that the daemon owns.
    share: Option<KeeperShare>,
}

/// The daemon that owns a share.
#[derive(Debug)]
struct ShareOwner {
    /// Number of its connection.
    connection: u64,
    pid: u32,
    /// The pidfd of the daemon; `None` if the daemon had ended when it connected.
    process: Option<Arc<OwnedFd>>,
    /// The time at which the daemon was first found dead.
    dead_since: Option<Instant>,
}

/// The share of one daemon.
#[derive(Debug, Default)]
struct ShareState {
    /// The daemon, while it is connected.
    owner: Option<ShareOwner>,
    /// The time at which the items are released, if no daemon claims the share.
    deadline: Option<Instant>,
    /// Whether the programs were killed, and each item is released when its memory is gone.
    is_released: bool,
    items: ShareItems,
}

impl ShareOwner {
    /// Whether the daemon has ended or was killed. For a process in another PID namespace, whose
    /// number is 0 here, only the end of its connection shows that.
    fn is_dead(&self) -> bool {
        if self.pid == 0 {
            return false;
        }
        let has_ended = |pidfd: &Arc<OwnedFd>| wait_readable(&[pidfd], Duration::ZERO).unwrap_or(false);
        self.process.as_ref().is_none_or(has_ended) || is_exiting(self.pid)
    }

    /// Whether the daemon is dead, and its connection was kept open for too long.
    fn has_left(&mut self) -> bool {
        if !self.is_dead() {
            self.dead_since = None;
            return false;
        }
        self.dead_since.get_or_insert_with(Instant::now).elapsed() >= EXIT_TIMEOUT
    }
}

#[derive(Debug)]
struct KeeperServer {
    grace: Duration,
    items_max: usize,
    connections: Vec<DaemonConnection>,
    /// The number of the newest connection.
    last_number: u64,
    shares: BTreeMap<KeeperShare, ShareState>,
    exits: ExitWatcher,
    /// The time of the next attempt to accept a connection after a failure.
    next_accept: Instant,
    /// The time of the next check of the shares' owners.
    next_owner_check: Instant,
    orphans: OrphanWatch,
}

/// Holds items for daemons until `stop`.
///
/// # Errors
/// If the socket cannot be created or polled.
pub fn serve(options: &KeeperOptions, stop: &AtomicBool, ready: impl FnOnce()) -> io::Result<()> {
    let listener = match &options.listener {
        Some(listener) => listener.try_clone()?,
        None => listen_at(&options.socket, 0o600)?,
    };
    let mut keeper = KeeperServer {
        grace: options.grace,
        items_max: options.items_max,
        connections: Vec::new(),
        last_number: 0,
        shares: BTreeMap::new(),
        exits: ExitWatcher::default(),
        next_accept: Instant::now(),
        next_owner_check: Instant::now(),
        orphans: OrphanWatch::new(),
    };
    ready();
    let when_unused = || options.when_unused.load(Relaxed);
    while !stop.load(Relaxed) {
        if when_unused() && keeper.is_unused() {
            break;
        }
        keeper.poll_once(&listener)?;
    }
    keeper.end_programs(options.grace);
    if options.listener.is_none() && !when_unused() {
        let _ = std::fs::remove_file(&options.socket);
    }
    Ok(())
}

/// Accepts a connection. Returns it with the peer's process id, or `None` if the peer is of another
/// user.
fn accept_own_user(listener: &OwnedFd) -> io::Result<Option<(OwnedFd, u32)>> {
    let (socket, peer) = accept(listener)?;
    if peer.uid != rustix::process::geteuid().as_raw() {
        tracing::warn!(uid = peer.uid, pid = peer.pid, "refused a connection of another user");
        return Ok(None);
    }
    Ok(Some((socket, peer.pid)))
}

/// Answers a daemon. Returns false if the daemon has not ended and does not receive the answer.
/// What a daemon has sent before its end still counts.
fn answer(socket: &OwnedFd, frame: &Frame) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset};
    match send_frame(socket, frame, &[]) {
        Ok(()) => true,
        Err(error) => matches!(error.kind(), BrokenPipe | ConnectionReset),
    }
}

impl KeeperServer {
    /// Waits for input for at most a tick, handles it, and releases the shares that are due.
    fn poll_once(&mut self, listener: &OwnedFd) -> io::Result<()> {
        let mut fds = Vec::new();
        if Instant::now() >= self.next_accept && self.connections.len() < CONNECTIONS_MAX {
            fds.push(listener);
        }
        fds.extend(self.connections.iter().map(|connection| &connection.socket));
        fds.extend(self.exits.pidfds());
        if wait_readable(&fds, TICK)? {
            self.accept(listener);
            self.receive();
            self.exits.report_ended();
        }
        self.release_orphans();
        if Instant::now() >= self.next_owner_check {
            self.next_owner_check = Instant::now() + OWNER_CHECK_INTERVAL;
            self.expel_owners(ShareOwner::has_left);
        }
        for (share_id, share) in &mut self.shares {
            if share.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                share.deadline = None;
                share.is_released = true;
                share.items.kill_programs();
                tracing::warn!(
                    share = ?share_id,
                    grace = ?self.grace,
                    "releasing the items of a share: no daemon claimed it within the grace time"
                );
            }
            if share.is_released {
                share.items.release_ended();
            }
        }
        self.shares.retain(|_, share| share.owner.is_some() || !share.items.is_empty());
        Ok(())
    }

    /// Releases orphans whose memory is gone.
    fn release_orphans(&mut self) {
        if let Some(share) = self.shares.get_mut(&KeeperShare::Agent) {
            self.orphans.poll(&mut share.items);
        }
    }

    /// Takes shares from owners that have ended although their connections are open, for example in
    /// a stopped shadow.
    fn expel_owners(&mut self, has_left: impl Fn(&mut ShareOwner) -> bool) {
        let mut left = Vec::new();
        for (share_id, share) in &mut self.shares {
            if let Some(owner) = &mut share.owner
                && has_left(owner)
            {
                left.push((*share_id, owner.connection));
            }
        }
        for (share_id, connection) in left {
            self.remove_owner(share_id, connection);
        }
    }

    /// True if no daemon is connected and no item is held.
    fn is_unused(&self) -> bool {
        self.connections.is_empty() && self.shares.is_empty()
    }

    /// Kills the programs of daemons that are not connected, and waits for their ends for at most
    /// `timeout`. A running daemon has descriptors of its own.
    fn end_programs(&mut self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        self.expel_owners(|owner| owner.is_dead());
        let is_released = |share: &&mut ShareState| share.owner.is_none();
        self.shares.values_mut().filter(is_released).for_each(|share| share.items.kill_programs());
        loop {
            self.release_orphans();
            self.shares.values_mut().filter(is_released).for_each(|share| share.items.release_ended());
            let is_done = self.shares.values_mut().filter(is_released).all(|share| share.items.is_empty());
            if is_done || Instant::now() >= deadline {
                return;
            }
            std::thread::sleep(TICK);
        }
    }

    /// Accepts a connection, if there is one. After a failure, the next attempt is made after a
    /// pause, because the listener stays readable.
    fn accept(&mut self, listener: &OwnedFd) {
        if Instant::now() < self.next_accept || self.connections.len() >= CONNECTIONS_MAX {
            return;
        }
        let is_readable = wait_readable(&[listener], Duration::ZERO).unwrap_or(false);
        match is_readable.then(|| accept_own_user(listener)) {
            Some(Ok(Some((socket, pid)))) => {
                self.last_number += 1;
                let number = self.last_number;
                let process = peer_pidfd(&socket).ok().map(Arc::new);
                self.connections.push(DaemonConnection { socket, number, pid, process, share: None });
            }
            Some(Err(error)) => {
                tracing::warn!(%error, pause = ?ACCEPT_PAUSE, "cannot accept a connection; pausing");
                self.next_accept = Instant::now() + ACCEPT_PAUSE;
            }
            Some(Ok(None)) | None => {}
        }
    }

    /// Handles the frames of all connections, and removes closed connections.
    ///
    /// All frames of an older connection come first, so that what a daemon has sent before its end
    /// precedes the claim of the next one.
    fn receive(&mut self) {
        for mut connection in std::mem::take(&mut self.connections) {
            let is_open = (0..FRAMES_MAX).all(|_| {
                let is_silent = !wait_readable(&[&connection.socket], Duration::ZERO).unwrap_or(true);
                is_silent || self.handle_frame(&mut connection)
            });
            if is_open {
                self.connections.push(connection);
            } else if let Some(share) = connection.share {
                self.remove_owner(share, connection.number);
            }
        }
    }

    /// Handles one frame. Returns false if the connection is closed.
    fn handle_frame(&mut self, connection: &mut DaemonConnection) -> bool {
        let DaemonConnection { socket, pid, share, .. } = &*connection;
        // The next daemon has received the items of one that has ended, and decides on them.
        let is_replaced = |share: &KeeperShare| {
            let owner = self.shares.get(share).and_then(|share| share.owner.as_ref());
            owner.is_some_and(|owner| owner.connection != connection.number)
        };
        let is_owner = |of: Option<KeeperShare>| of.is_some_and(|of| Some(of) == *share && !is_replaced(&of));
        match receive_frame(socket) {
            Ok((Frame::Hold(item), fds))
                if is_owner(KeeperShare::of(item.kind, item.id))
                    || item.kind == HeldKind::Orphan
                    || Mutation::SkipOwner.is_active() =>
            {
                let (kind, id, uid) = (item.kind, item.id, item.uid);
                if let Err(limit) = self.store(item, fds) {
                    tracing::warn!(?kind, id, uid, limit, "refused an item: the keeper is full");
                    let reason = format!(
                        "the keeper holds {limit} items, which is its limit: end some programs or sessions \
                         first"
                    );
                    return answer(socket, &Frame::HoldRefused { kind, id, reason });
                }
            }
            Ok((Frame::Release(kind, id), _)) if is_owner(KeeperShare::of(kind, id)) => {
                if let Some(share) = share.and_then(|share| self.shares.get_mut(&share)) {
                    share.items.remove(kind, id);
                }
            }
            Ok((Frame::Claim(wanted), _)) if share.is_none_or(|share| share == wanted) => {
                return self.transfer(connection, wanted);
            }
            Ok((Frame::WatchDaemon { pid, name }, fds)) => {
                if let Some(pidfd) = fds.into_iter().next() {
                    self.exits.watch(name, pid, pidfd);
                }
            }
            Ok((Frame::Sync, _)) => return answer(socket, &Frame::Sync),
            Err(ReceiveError::System(error)) if error.kind() == io::ErrorKind::WouldBlock => {}
            Ok((frame, _)) => {
                tracing::warn!(pid, ?frame, "ignored a frame that is not for a keeper or not from the owner");
            }
            Err(ReceiveError::Frame(error @ FrameError::OtherVersion(_))) => {
                tracing::warn!(pid, %error, "refused a daemon of another version");
                // The daemon waits for an answer. The send fails if the daemon has gone.
                let _ = send_frame(socket, &Frame::Refused(error.to_string()), &[]);
                return false;
            }
            Err(ReceiveError::Frame(error)) => {
                tracing::warn!(pid, %error, "ignored a malformed frame");
            }
            Err(_) => return false,
        }
        true
    }

    /// Stores an item.
    ///
    /// # Errors
    /// The limit of items, if the share has that many.
    fn store(&mut self, item: HeldItem, fds: Vec<OwnedFd>) -> Result<(), usize> {
        let Some(share) = KeeperShare::of(item.kind, item.id) else { return Ok(()) };
        self.shares.entry(share).or_default().items.store(item, fds, self.items_max)
    }

    /// Makes a connection the owner of a share and sends it the items, unless another process owns
    /// the share. Returns false if the connection is closed.
    fn transfer(&mut self, connection: &mut DaemonConnection, share_id: KeeperShare) -> bool {
        let share = self.shares.entry(share_id).or_default();
        if let Some(owner) = &mut share.owner
            && owner.pid != connection.pid
            && !owner.has_left()
        {
            let owner = owner.pid;
            let reason = match share_id {
                KeeperShare::Agent => format!("an agent is already running as process {owner}"),
                KeeperShare::Node(id) => format!("node {id} is already running as process {owner}"),
                KeeperShare::Heaps(id) => {
                    format!("the heaps on node {id} are already served by process {owner}")
                }
                KeeperShare::Cache(_) => {
                    format!("another server of the cache starts or ends, as process {owner}")
                }
            };
            return send_frame(&connection.socket, &Frame::Refused(reason), &[]).is_ok();
        }
        for (item, fds) in share.items.iter() {
            if let Err(error) = send_frame(&connection.socket, &Frame::Hold(item.clone()), &fds) {
                tracing::error!(
                    share = ?share_id,
                    pid = connection.pid,
                    %error,
                    "transfer failed: the claiming daemon has closed the connection"
                );
                return false;
            }
        }
        let DaemonConnection { number, pid, ref process, .. } = *connection;
        let process = process.clone();
        share.owner = Some(ShareOwner { connection: number, pid, process, dead_since: None });
        share.deadline = None;
        share.is_released = false;
        connection.share = Some(share_id);
        send_frame(&connection.socket, &Frame::Sync, &[]).is_ok()
    }

    /// Starts the grace time of a share whose owner's connection, with this number, was closed.
    fn remove_owner(&mut self, share_id: KeeperShare, number: u64) {
        // The owner may have another connection by now.
        let is_owner =
            |share: &&mut ShareState| share.owner.as_ref().is_some_and(|owner| owner.connection == number);
        let Some(share) = self.shares.get_mut(&share_id).filter(is_owner) else { return };
        share.owner = None;
        if share.items.is_empty() {
            return;
        }
        let grace = self.grace;
        match share_id {
            KeeperShare::Agent => {
                let programs = share.items.program_count();
                tracing::warn!(
                    programs,
                    ?grace,
                    "the agent has ended; holding its programs for the next one"
                );
            }
            KeeperShare::Node(node) => {
                tracing::warn!(node, ?grace, "a memory node has ended; holding its memory for the next one");
            }
            KeeperShare::Heaps(node) => {
                tracing::warn!(node, ?grace, "a service of heaps has ended; holding them for the next one");
            }
            KeeperShare::Cache(_) => {
                tracing::info!(?grace, "a cache server has ended; holding its partitions for the next one");
            }
        }
        share.deadline = Some(Instant::now() + grace);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_in_another_pid_name_space_is_not_taken_for_dead() {
        let owner = |pid| ShareOwner { connection: 1, pid, process: None, dead_since: None };
        assert!(!owner(0).is_dead());
        assert!(owner(u32::MAX).is_dead());
    }
}
