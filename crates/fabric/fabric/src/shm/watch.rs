//! The thread that watches the sockets of all endpoints of this process, so that posting work needs
//! no system call.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags};

use crate::wake::WakeFd;

/// The socket of a connection. Its hang-up means that the peer is gone.
#[derive(Debug)]
pub(super) struct PeerSocket {
    pub socket: OwnedFd,
    is_hung_up: AtomicBool,
}

impl PeerSocket {
    pub fn new(socket: OwnedFd) -> Arc<Self> {
        Arc::new(Self { socket, is_hung_up: AtomicBool::new(false) })
    }

    #[inline]
    pub fn is_hung_up(&self) -> bool {
        self.is_hung_up.load(Ordering::Relaxed)
    }

    /// Hangs up. The watching thread then closes the socket.
    pub fn hang_up(&self) {
        // Fails if the peer has hung up before.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }
}

struct SocketWatcher {
    sockets: Mutex<Vec<Arc<PeerSocket>>>,
    wake: WakeFd,
}

static WATCHER: OnceLock<Result<Arc<SocketWatcher>, i32>> = OnceLock::new();

/// Watches a socket until it hangs up.
pub(super) fn watch(peer_socket: &Arc<PeerSocket>) -> io::Result<()> {
    let watcher = WATCHER.get_or_init(|| start().map_err(|e| e.raw_os_error().unwrap_or(0)));
    let watcher = watcher.as_ref().map_err(|&errno| io::Error::from_raw_os_error(errno))?;
    watcher.sockets.lock().push(Arc::clone(peer_socket));
    watcher.wake.wake();
    Ok(())
}

fn start() -> io::Result<Arc<SocketWatcher>> {
    let wake = WakeFd::new()?;
    let watcher = Arc::new(SocketWatcher { sockets: Mutex::default(), wake });
    let thread_watcher = Arc::clone(&watcher);
    std::thread::Builder::new().name("fabric-watch".into()).spawn(move || run(&thread_watcher))?;
    Ok(watcher)
}

fn run(watcher: &SocketWatcher) {
    loop {
        let sockets = watcher.sockets.lock().clone();
        let mut polled = vec![PollFd::new(&watcher.wake, PollFlags::IN)];
        // The endpoint receives the target's messages itself.
        let events = PollFlags::RDHUP;
        polled.extend(sockets.iter().map(|peer_socket| PollFd::new(&peer_socket.socket, events)));
        match rustix::event::poll(&mut polled, None) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => {
                // The system has no memory left for the call.
                tracing::warn!(%error, "cannot poll the sockets of shared-memory endpoints; retrying");
                std::thread::yield_now();
                continue;
            }
        }
        if !polled[0].revents().is_empty() {
            watcher.wake.clear();
        }
        for (peer_socket, polled) in sockets.iter().zip(&polled[1..]) {
            if !polled.revents().is_empty() {
                peer_socket.is_hung_up.store(true, Ordering::SeqCst);
            }
        }
        let mut sockets = watcher.sockets.lock();
        sockets.retain(|peer_socket| !peer_socket.is_hung_up());
    }
}
