//! The thread that accepts connections and distributes them to the workers.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::buffer::spare_capacity;
use rustix::event::{EventfdFlags, epoll};
use rustix::io::Errno;
use rustix::net::sockopt;
use rustix::time::Timespec;

use super::dealing::WorkerHandle;
use super::listeners::{Listener, ListenerAddress};
use super::tls::TlsStream;
use super::{Common, Peer};
use crate::commands::Service;

/// The epoll data of the acceptor's waker.
const WAKER_DATA: u64 = u64::MAX;
const TOO_MANY: &[u8] = b"ERROR Too many open connections\r\n";
/// The time for which the acceptor waits after it could not accept a connection, as without free
/// descriptors.
const ACCEPT_RETRY_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// Wakes the acceptor.
#[derive(Clone, Debug)]
pub struct Waker(Arc<OwnedFd>);

impl Waker {
    /// Wakes the acceptor.
    pub fn wake(&self) {
        // The counter can only overflow if the acceptor has ended.
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }
}

/// A connection that was accepted.
#[derive(Debug)]
pub struct Accepted {
    /// The socket, non-blocking.
    pub socket: OwnedFd,
    /// The state of its encryption, if it is encrypted.
    pub tls: Option<TlsStream>,
    /// The other end.
    pub peer: Peer,
    /// The number of the listener that accepted the connection.
    pub listener: usize,
}

/// Accepts connections.
#[derive(Debug)]
pub struct Acceptor {
    epoll: OwnedFd,
    waker: Waker,
    listeners: Vec<Listener>,
    workers: Vec<Arc<WorkerHandle>>,
    next_worker: usize,
    common: Arc<Common>,
    service: Arc<Service>,
}

impl Acceptor {
    /// An acceptor for these sockets.
    ///
    /// # Errors
    /// If the system has no descriptors for it.
    pub fn new(
        listeners: Vec<Listener>,
        workers: Vec<Arc<WorkerHandle>>,
        common: Arc<Common>,
        service: Arc<Service>,
    ) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let waker = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &waker, epoll::EventData::new_u64(WAKER_DATA), epoll::EventFlags::IN)?;
        for (number, listener) in listeners.iter().enumerate() {
            epoll::add(&epoll, listener, epoll::EventData::new_u64(number as u64), epoll::EventFlags::IN)?;
        }
        Ok(Self { epoll, waker: Waker(Arc::new(waker)), listeners, workers, next_worker: 0, common, service })
    }

    /// Wakes this acceptor.
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// Accepts until the server stops. Frees expired items in between.
    pub fn run(mut self) {
        let mut events: Vec<epoll::Event> = Vec::with_capacity(16);
        let mut expired_s = 0;
        while !self.common.stops.load(Ordering::SeqCst) {
            events.clear();
            let second = Timespec { tv_sec: 1, tv_nsec: 0 };
            match epoll::wait(&self.epoll, spare_capacity(&mut events), Some(&second)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "epoll failed: the server accepts no more connections");
                    return;
                }
            }
            for event in &events {
                if let Ok(number) = usize::try_from(event.data.u64())
                    && number < self.listeners.len()
                {
                    self.accept(number);
                }
            }
            let now_s = self.common.clock.now_s();
            if now_s != expired_s {
                expired_s = now_s;
                self.common.store.expire(now_s);
                if self.common.idle_timeout_s != 0 {
                    self.workers.iter().for_each(|worker| worker.wake());
                }
            }
        }
    }

    fn accept(&mut self, number: usize) {
        loop {
            let (socket, address) = match self.listeners[number].accept() {
                Ok(Some(accepted)) => accepted,
                Ok(None) => {
                    tracing::error!("the process that accepts connections at the Unix socket has ended");
                    // The end of the process would be reported by each wait.
                    let _removed = epoll::delete(&self.epoll, &self.listeners[number]);
                    return;
                }
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(Errno::AGAIN) => return,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    let _ = rustix::event::poll(&mut [], Some(&ACCEPT_RETRY_INTERVAL));
                    return;
                }
            };
            let open = self.common.connections.fetch_add(1, Ordering::Relaxed) + 1;
            if open > self.common.connections_max as u64 {
                self.common.connections.fetch_sub(1, Ordering::Relaxed);
                self.common.connections_rejected.fetch_add(1, Ordering::Relaxed);
                // The client may not read it; the connection is closed in any case.
                let _ = rustix::io::write(&socket, TOO_MANY);
                continue;
            }
            self.common.connections_total.fetch_add(1, Ordering::Relaxed);
            let peer = match (self.listeners[number].address(), address) {
                (ListenerAddress::Unix(path), _) => Peer::Unix(path.clone()),
                (_, Some(address)) => Peer::Tcp(address),
                _ => Peer::Unix(PathBuf::new()),
            };
            if matches!(peer, Peer::Tcp(_)) {
                // Replies are sent whole, so that delaying them gains nothing.
                let options = sockopt::set_tcp_nodelay(&socket, true)
                    .and_then(|()| sockopt::set_socket_keepalive(&socket, true));
                if let Err(error) = options {
                    tracing::debug!(%error, "cannot set options of a connection");
                }
            }
            if self.service.verbosity.load(Ordering::Relaxed) > 0 {
                tracing::info!(?peer, "new connection");
            }
            let tls = match &self.common.tls {
                Some(settings) if self.listeners[number].is_encrypted() => match settings.accept() {
                    Ok(tls) => Some(tls),
                    Err(error) => {
                        tracing::warn!(%error, "cannot encrypt a connection");
                        self.common.connections.fetch_sub(1, Ordering::Relaxed);
                        continue;
                    }
                },
                _ => None,
            };
            let worker = &self.workers[self.next_worker];
            self.next_worker = (self.next_worker + 1) % self.workers.len();
            worker.deal(Accepted { socket, tls, peer, listener: number });
        }
    }
}
