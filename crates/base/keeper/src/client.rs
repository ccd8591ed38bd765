//! A daemon's connection to the keeper.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_channel::socket::wait_readable;
use aquifer_channel::{
    HoldRefused, ReceiveError, RestoredItem, connect_with_timeout, receive_frame, send_frame,
};
use aquifer_ipc::{Frame, HeldItem, HeldKind, KeeperShare};
use parking_lot::Mutex;

use crate::store::KeeperStore;

/// Timeout of retries of a claim that the keeper refuses. The keeper notices within this time that
/// the last owner has ended, or takes the share from it.
pub const CLAIM_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of the keeper's answer to an item, so that a stopped keeper does not stop the daemon.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between attempts to claim a share.
const CLAIM_INTERVAL: Duration = Duration::from_millis(10);

/// Key of an item in its share.
type ItemKey = (HeldKind, u64);

/// Copies of all items that the keeper holds for this daemon.
type SentItems = BTreeMap<ItemKey, (HeldItem, Vec<Arc<OwnedFd>>)>;

#[derive(Debug)]
struct State {
    socket: OwnedFd,
    /// Items to send again if the keeper is restarted.
    items: SentItems,
    /// True from a failure to reconnect until a success; the failure is logged once.
    is_lost: bool,
    /// Number of *sync* frames that the keeper has not returned.
    unanswered: u32,
    /// True from a timeout of an answer until all answers have arrived.
    is_stalled: bool,
}

/// A daemon's connection to the keeper. While it exists, the daemon owns its share.
#[derive(Debug)]
pub struct KeeperClient {
    path: PathBuf,
    share: KeeperShare,
    state: Mutex<State>,
}

impl KeeperClient {
    /// Connects and claims a share. Returns the items that the last owner has left in it. Waits up
    /// to `stall_timeout` for a keeper that does not answer: a stopped keeper ends no program.
    ///
    /// # Errors
    /// If the keeper cannot be reached, or the share has another owner that is running.
    pub fn connect(
        path: &Path,
        share: KeeperShare,
        stall_timeout: Duration,
    ) -> io::Result<(Self, Vec<RestoredItem>)> {
        let begun = Instant::now();
        loop {
            let claimed = connect_with_timeout(path, ANSWER_TIMEOUT)
                .and_then(|socket| claim(&socket, share).map(|kept| (socket, kept)));
            match claimed {
                Ok((socket, kept)) => {
                    let state = State {
                        socket,
                        items: copy_items(&kept)?,
                        is_lost: false,
                        unanswered: 0,
                        is_stalled: false,
                    };
                    return Ok((Self { path: path.to_owned(), share, state: Mutex::new(state) }, kept));
                }
                Err(error) if begun.elapsed() >= claim_timeout(&error, stall_timeout) => return Err(error),
                Err(_) => std::thread::sleep(CLAIM_INTERVAL),
            }
        }
    }

    fn send(&self, state: &mut State, item: &HeldItem, fds: &[BorrowedFd<'_>]) {
        if send_frame(&state.socket, &Frame::Hold(item.clone()), fds).is_err() {
            self.reconnect(state);
        }
    }

    /// Waits until the keeper has handled all frames.
    ///
    /// # Errors
    /// If the keeper has refused the item `key`.
    fn synchronise(&self, state: &mut State, key: ItemKey) -> Result<(), HoldRefused> {
        // Do not wait for a keeper whose last answer is late.
        let timeout = if state.is_stalled { Duration::ZERO } else { ANSWER_TIMEOUT };
        match send_frame(&state.socket, &Frame::Sync, &[]) {
            Ok(()) => state.unanswered += 1,
            Err(_) => self.reconnect(state),
        }
        let mut outcome = Ok(());
        for (refused, reason) in self.receive_answers(state, timeout) {
            if refused == key {
                outcome = Err(HoldRefused(reason));
            } else {
                log_refusal(refused, &reason);
            }
        }
        outcome
    }

    /// Receives the answers that are due, until all have arrived or `timeout` has passed. Returns
    /// the refused items, which are removed.
    fn receive_answers(&self, state: &mut State, timeout: Duration) -> Vec<(ItemKey, String)> {
        let deadline = Instant::now() + timeout;
        let mut refused = Vec::new();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let wait = if state.unanswered > 0 && !state.is_lost { left } else { Duration::ZERO };
            if !wait_readable(&[&state.socket], wait).unwrap_or(true) {
                if wait.is_zero() {
                    // A zero timeout does not show whether the keeper is slow.
                    let is_late = state.unanswered > 0 && timeout > Duration::ZERO;
                    if is_late && !state.is_stalled {
                        tracing::error!(?timeout, "the keeper does not answer; not waiting for it");
                    }
                    state.is_stalled = state.unanswered > 0 && (state.is_stalled || is_late);
                    return refused;
                }
                // The time is up, or a signal has interrupted the call.
                continue;
            }
            match receive_frame(&state.socket) {
                Ok((Frame::HoldRefused { kind, id, reason }, _)) => {
                    state.items.remove(&(kind, id));
                    refused.push(((kind, id), reason));
                }
                Ok(_) => state.unanswered = state.unanswered.saturating_sub(1),
                Err(_) if left.is_zero() && timeout > Duration::ZERO => return refused,
                Err(_) => {
                    self.reconnect(state);
                    if state.is_lost {
                        return refused;
                    }
                }
            }
        }
    }

    /// If the keeper has closed the connection, connects to the next keeper and sends it all items.
    pub fn reconnect_if_closed(&self) {
        let mut state = self.state.lock();
        for (refused, reason) in self.receive_answers(&mut state, Duration::ZERO) {
            log_refusal(refused, &reason);
        }
    }

    fn reconnect(&self, state: &mut State) {
        let connected = connect_with_timeout(&self.path, ANSWER_TIMEOUT);
        match connected.and_then(|socket| claim(&socket, self.share).map(|_| socket)) {
            Ok(socket) => (state.socket, state.unanswered, state.is_stalled) = (socket, 0, false),
            Err(error) => {
                if !std::mem::replace(&mut state.is_lost, true) {
                    tracing::error!(
                        path = %self.path.display(),
                        %error,
                        "connection to the keeper lost; until a keeper runs again, nothing survives the \
                         end of this process"
                    );
                }
                return;
            }
        }
        if std::mem::take(&mut state.is_lost) {
            tracing::info!(path = %self.path.display(), "connected to the keeper again");
        }
        for (item, fds) in state.items.values() {
            let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            if let Err(error) = send_frame(&state.socket, &Frame::Hold(item.clone()), &fds) {
                tracing::error!(
                    kind = ?item.kind,
                    id = item.id,
                    %error,
                    "sending an item to the keeper failed"
                );
            }
        }
        if send_frame(&state.socket, &Frame::Sync, &[]).is_ok() {
            state.unanswered = 1;
        }
    }
}

impl KeeperStore for KeeperClient {
    fn hold(&self, item: &HeldItem, fds: &[BorrowedFd<'_>]) -> Result<(), HoldRefused> {
        let copies: io::Result<Vec<_>> = fds.iter().map(|fd| fd.try_clone_to_owned().map(Arc::new)).collect();
        match copies {
            Ok(copies) => self.hold_shared(item, copies),
            Err(error) => {
                // An item with only some of its descriptors would have another meaning.
                tracing::error!(
                    kind = ?item.kind,
                    id = item.id,
                    %error,
                    "no copy of an item: it is lost if the keeper is restarted"
                );
                let mut state = self.state.lock();
                self.send(&mut state, item, fds);
                self.synchronise(&mut state, (item.kind, item.id))
            }
        }
    }

    fn hold_shared(&self, item: &HeldItem, fds: Vec<Arc<OwnedFd>>) -> Result<(), HoldRefused> {
        let key = (item.kind, item.id);
        let mut state = self.state.lock();
        let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let is_new = state.items.insert(key, (item.clone(), fds.clone())).is_none();
        self.send(&mut state, item, &borrowed);
        // The keeper never refuses an item that replaces another.
        if is_new { self.synchronise(&mut state, key) } else { Ok(()) }
    }

    fn release(&self, kind: HeldKind, id: u64) {
        let mut state = self.state.lock();
        let removed = state.items.remove(&(kind, id));
        if removed.is_some() && send_frame(&state.socket, &Frame::Release(kind, id), &[]).is_err() {
            self.reconnect(&mut state);
        }
        drop(state);
        // The last close of a userfaultfd waits for the lock of its memory.
        drop(removed);
    }
}

/// Logs that the keeper has refused an item whose user has been served before.
fn log_refusal((kind, id): ItemKey, reason: &str) {
    tracing::error!(?kind, id, reason, "item not held: it is lost if this daemon dies");
}

/// The timeout of retries of a claim that has failed with `error`.
fn claim_timeout(error: &io::Error, stall_timeout: Duration) -> Duration {
    match error.kind() {
        // No keeper runs, or a keeper of another user.
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused | io::ErrorKind::PermissionDenied => {
            Duration::ZERO
        }
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => stall_timeout,
        _ => CLAIM_TIMEOUT,
    }
}

/// Claims a share, and receives the items in it.
fn claim(socket: &OwnedFd, share: KeeperShare) -> io::Result<Vec<RestoredItem>> {
    send_frame(socket, &Frame::Claim(share), &[])?;
    let mut kept = Vec::new();
    loop {
        let received = receive_frame(socket).map_err(|error| match error {
            ReceiveError::System(error) if error.kind() == io::ErrorKind::WouldBlock => {
                io::Error::new(io::ErrorKind::TimedOut, "the keeper does not answer; is it stopped?")
            }
            ReceiveError::System(error) => error,
            error => io::Error::other(error),
        });
        match received? {
            (Frame::Hold(item), fds) => kept.push(RestoredItem { item, fds }),
            (Frame::Sync, _) => return Ok(kept),
            (Frame::Refused(reason), _) => return Err(io::Error::other(reason)),
            _ => {
                return Err(io::Error::other(
                    "the keeper has answered with an unexpected frame; use a keeper of the same build",
                ));
            }
        }
    }
}

/// Copies restored items, to send them again.
fn copy_items(kept: &[RestoredItem]) -> io::Result<SentItems> {
    let mut items = SentItems::new();
    for RestoredItem { item, fds } in kept {
        let copies = fds.iter().map(|fd| fd.try_clone().map(Arc::new)).collect::<io::Result<_>>()?;
        items.insert((item.kind, item.id), (item.clone(), copies));
    }
    Ok(items)
}
