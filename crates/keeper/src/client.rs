//! A daemon's connection to the keeper.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use aquifer_channel::socket::wait_readable;
use aquifer_channel::{RestoredItem, connect, receive_frame, send_frame};
use aquifer_ipc::{Frame, HeldItem, HeldKind, KeeperShare};

/// How long to retry a claim: until the keeper has noticed that the last owner has ended.
const CLAIM_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between attempts to claim a share.
const CLAIM_INTERVAL: Duration = Duration::from_millis(10);

/// Copies of all items that the keeper holds for this daemon.
type SentItems = BTreeMap<(HeldKind, u64), (HeldItem, Vec<Arc<OwnedFd>>)>;

#[derive(Debug)]
struct State {
    socket: OwnedFd,
    /// Sent again if the keeper is restarted.
    items: SentItems,
    /// True from a failure to reconnect until a success; the failure is logged once.
    is_lost: bool,
}

/// A daemon's connection to the keeper. While it exists, the daemon owns its share.
#[derive(Debug)]
pub struct KeeperClient {
    path: PathBuf,
    share: KeeperShare,
    state: Mutex<State>,
}

impl KeeperClient {
    /// Connects and claims a share. Returns the items that the last owner has left in it.
    ///
    /// # Errors
    /// If the keeper cannot be reached, or the share has another owner that is running.
    pub fn connect(path: &Path, share: KeeperShare) -> io::Result<(Self, Vec<RestoredItem>)> {
        let deadline = Instant::now() + CLAIM_TIMEOUT;
        loop {
            let socket = connect(path)?;
            match claim(&socket, share) {
                Ok(kept) => {
                    let state = State { socket, items: copy_items(&kept)?, is_lost: false };
                    return Ok((Self { path: path.to_owned(), share, state: Mutex::new(state) }, kept));
                }
                Err(error) if Instant::now() >= deadline => return Err(error),
                Err(_) => std::thread::sleep(CLAIM_INTERVAL),
            }
        }
    }

    /// Stores an item and its descriptors in the keeper. Replaces an item of the same kind and
    /// number.
    pub fn hold(&self, item: &HeldItem, fds: &[BorrowedFd<'_>]) {
        let copies: io::Result<Vec<_>> = fds.iter().map(|fd| fd.try_clone_to_owned().map(Arc::new)).collect();
        match copies {
            Ok(copies) => self.hold_shared(item, copies),
            Err(error) => {
                // An item with some of its descriptors would be taken for another.
                tracing::error!(
                    kind = ?item.kind,
                    id = item.id,
                    %error,
                    "no copy of an item: it is lost if the keeper is restarted"
                );
                let mut state = self.lock();
                self.send(&mut state, item, fds);
            }
        }
    }

    /// The same with descriptors that this process uses itself, so that no copies are made.
    pub fn hold_shared(&self, item: &HeldItem, fds: Vec<Arc<OwnedFd>>) {
        let mut state = self.lock();
        let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        state.items.insert((item.kind, item.id), (item.clone(), fds.clone()));
        self.send(&mut state, item, &borrowed);
    }

    fn send(&self, state: &mut State, item: &HeldItem, fds: &[BorrowedFd<'_>]) {
        if send_frame(&state.socket, &Frame::Hold(item.clone()), fds).is_err() {
            self.reconnect(state);
        }
    }

    /// Removes an item from the keeper.
    pub fn release(&self, kind: HeldKind, id: u64) {
        let mut state = self.lock();
        if state.items.remove(&(kind, id)).is_some()
            && send_frame(&state.socket, &Frame::Release(kind, id), &[]).is_err()
        {
            self.reconnect(&mut state);
        }
    }

    /// If the keeper has closed the connection, connects to the next keeper and sends it all items.
    pub fn reconnect_if_closed(&self) {
        let mut state = self.lock();
        if wait_readable(&[&state.socket], Duration::ZERO).unwrap_or(true) {
            self.reconnect(&mut state);
        }
    }

    fn reconnect(&self, state: &mut State) {
        match connect(&self.path).and_then(|socket| claim(&socket, self.share).map(|_| socket)) {
            Ok(socket) => state.socket = socket,
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
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Claims a share, and receives the items in it.
fn claim(socket: &OwnedFd, share: KeeperShare) -> io::Result<Vec<RestoredItem>> {
    send_frame(socket, &Frame::Claim(share), &[])?;
    let mut kept = Vec::new();
    loop {
        match receive_frame(socket).map_err(io::Error::other)? {
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
