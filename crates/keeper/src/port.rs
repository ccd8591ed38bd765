//! A daemon's connection to the keeper.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use aquifer_channel::socket::wait_readable;
use aquifer_channel::{RestoredItem, connect, receive_frame, send_frame};
use aquifer_ipc::{Frame, HeldItem, HeldKind, KeeperShare};

/// How long a daemon that has just died may still be in the way.
const TAKE_PATIENCE: Duration = Duration::from_secs(5);
const TAKE_AGAIN: Duration = Duration::from_millis(10);

/// What was given to the keeper, kept so that a new one can be given it, too.
type Given = BTreeMap<(HeldKind, u64), (HeldItem, Vec<OwnedFd>)>;

#[derive(Debug)]
struct State {
    socket: OwnedFd,
    given: Given,
}

/// A daemon's connection to the keeper. It is the owner of a share for as long as this lives.
#[derive(Debug)]
pub struct KeeperPort {
    path: PathBuf,
    share: KeeperShare,
    state: Mutex<State>,
}

impl KeeperPort {
    /// Connect, and take what the owner of the share before this one has left.
    ///
    /// # Errors
    /// If there is no keeper: without one nothing outlives this process. If another owner lives.
    pub fn connect(path: &Path, share: KeeperShare) -> io::Result<(Self, Vec<RestoredItem>)> {
        let deadline = Instant::now() + TAKE_PATIENCE;
        loop {
            let socket = connect(path)?;
            match take(&socket, share) {
                Ok(kept) => {
                    let state = Mutex::new(State { socket, given: note(&kept)? });
                    return Ok((Self { path: path.to_owned(), share, state }, kept));
                }
                Err(error) if Instant::now() >= deadline => return Err(error),
                Err(_) => std::thread::sleep(TAKE_AGAIN),
            }
        }
    }

    /// Have the keeper hold something.
    pub fn keep(&self, item: &HeldItem, fds: &[BorrowedFd<'_>]) {
        let mut state = self.lock();
        let own = fds.iter().filter_map(|fd| fd.try_clone_to_owned().ok()).collect();
        state.given.insert((item.kind, item.id), (item.clone(), own));
        if send_frame(&state.socket, &Frame::Hold(item.clone()), fds).is_err() {
            self.give_all_again(&mut state);
        }
    }

    /// It is over.
    pub fn unkeep(&self, kind: HeldKind, id: u64) {
        let mut state = self.lock();
        if state.given.remove(&(kind, id)).is_some()
            && send_frame(&state.socket, &Frame::Release(kind, id), &[]).is_err()
        {
            self.give_all_again(&mut state);
        }
    }

    /// If the keeper has died and another is there, give it everything.
    pub fn refresh(&self) {
        let mut state = self.lock();
        if wait_readable(&[&state.socket], Duration::ZERO).unwrap_or(true) {
            self.give_all_again(&mut state);
        }
    }

    fn give_all_again(&self, state: &mut State) {
        let again = connect(&self.path).and_then(|socket| take(&socket, self.share).map(|_| socket));
        let Ok(socket) = again else {
            tracing::error!(
                "the keeper is gone: should this process die too, what it had there would be lost"
            );
            return;
        };
        state.socket = socket;
        for (put, fds) in state.given.values() {
            let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            if let Err(error) = send_frame(&state.socket, &Frame::Hold(put.clone()), &fds) {
                tracing::error!(%error, "the new keeper is gone too");
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn take(socket: &OwnedFd, share: KeeperShare) -> io::Result<Vec<RestoredItem>> {
    send_frame(socket, &Frame::Claim(share), &[])?;
    let mut kept = Vec::new();
    loop {
        match receive_frame(socket).map_err(io::Error::other)? {
            (Frame::Hold(item), fds) => kept.push(RestoredItem { item, fds }),
            (Frame::Sync, _) => return Ok(kept),
            (Frame::Refused(reason), _) => return Err(io::Error::other(reason)),
            _ => return Err(io::Error::other("the keeper answered something else")),
        }
    }
}

/// What came back counts as given. The pidfd that comes back with a program was not put with it.
fn note(kept: &[RestoredItem]) -> io::Result<Given> {
    let mut given = Given::new();
    for RestoredItem { item, fds } in kept {
        let has_pidfd = item.kind == HeldKind::Program && item.pid != 0;
        let own = &fds[..fds.len().saturating_sub(usize::from(has_pidfd))];
        let own = own.iter().map(OwnedFd::try_clone).collect::<io::Result<_>>()?;
        given.insert((item.kind, item.id), (item.clone(), own));
    }
    Ok(given)
}
