//! The owner's end: changes keys and fences. Threads of its own serve the initiators.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

use super::TcpOptions;
use super::acceptor::TcpAcceptor;
use super::counters::{SessionCounters, TenantTable};
use super::rate::RateLimiter;
use super::regions::{RegionMapping, SharedRegions};
use super::serve::{ServeHandle, ServeThread};
use super::session::TcpSession;
use super::stream::avoid_pacing;
use crate::control::{ControlMemory, FENCED};
use crate::handshake::hello::SessionId;
use crate::handshake::{ClusterKey, PARKED_TIMEOUT};
use crate::inbox::Inbox;
use crate::registration::Registration;
use crate::sessions::{self, PeerSessions};
use crate::tables::{RegisteredRegion, TargetTables};
use crate::target::{
    EndpointNumber, Host, MessageHandler, Region, Sender, Target, TargetError, Tenant, TenantCounters,
    WindowSpec,
};
use crate::wake::WakeFd;
use crate::work::Key;

/// Longest time for which a stopping target waits for an operation in flight.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// A target that offers memory over TCP.
pub struct TcpTarget {
    shared: Arc<TcpShared>,
    threads: Vec<JoinHandle<()>>,
    address: SocketAddr,
}

pub(super) struct TcpShared {
    pub options: TcpOptions,
    pub key: ClusterKey,
    pub control: ControlMemory,
    /// The regions, which every access reads without a lock.
    pub regions: SharedRegions,
    pub state: Mutex<TcpTargetState>,
    pub inbox: Arc<Inbox>,
    pub handles: Vec<ServeHandle>,
    pub wake: WakeFd,
    pub stop: AtomicBool,
    /// Rate limits for all threads together. Used only if a rate is configured.
    pub limiter: Mutex<RateLimiter>,
    /// Number of admitted initiators that are not yet with their serving thread.
    pub handshakes_in_progress: AtomicUsize,
    /// The handler of messages. Without one they are kept for [`Target::receive`].
    pub handler: OnceLock<Arc<dyn MessageHandler>>,
}

pub(super) struct TcpTargetState {
    pub peers: PeerSessions<TcpPeerState>,
    /// Sessions whose connection broke, which may be resumed.
    pub parked: HashMap<SessionId, (TcpSession, Instant)>,
    pub tables: TargetTables,
    /// Counters of removed sessions.
    pub served: TenantTable,
}

/// The provider's state of one session.
#[derive(Debug, Default)]
pub(super) struct TcpPeerState {
    /// Index of the serving thread.
    pub thread: usize,
    /// Set when the connection must be closed, because the initiator has opened another.
    pub is_stale: AtomicBool,
    /// Whether the serving thread was notified and has not read the notification yet.
    pub is_notified: AtomicBool,
    pub counters: SessionCounters,
}

/// A session as the target, the acceptor and the serving threads share it.
pub(super) type TcpPeer = sessions::PeerSession<TcpPeerState>;

impl TcpTarget {
    /// Offers memory at an address to initiators that hold the cluster key.
    ///
    /// # Errors
    /// If an option is out of bounds, the address is in use, or the system refuses.
    pub fn listen(address: SocketAddr, key: &ClusterKey, options: TcpOptions) -> Result<Self, TargetError> {
        let named = |error: io::Error| io::Error::new(error.kind(), format!("{address}: {error}"));
        let listener = TcpListener::bind(address)
            .map_err(|error| TargetError::System { what: "cannot listen", source: named(error) })?;
        Self::listen_on(listener, key, options)
    }

    /// Offers memory on a socket that already listens.
    ///
    /// # Errors
    /// The errors of [`TcpTarget::listen`].
    pub fn listen_on(
        listener: TcpListener,
        key: &ClusterKey,
        options: TcpOptions,
    ) -> Result<Self, TargetError> {
        let system = |what, source| TargetError::System { what, source };
        options.check()?;
        let address = listener.local_addr().map_err(|e| system("cannot listen", e))?;
        avoid_pacing(&listener);
        let control = ControlMemory::create(options.endpoints_max, options.regions_max, options.windows_max)
            .map_err(|e| system("cannot create control memory", e))?;
        let no_wake = |error| system("cannot create an eventfd", error);
        let wake = WakeFd::new().map_err(no_wake)?;
        let handles: Result<Vec<ServeHandle>, _> = (0..options.threads).map(|_| ServeHandle::new()).collect();
        let state = TcpTargetState {
            peers: PeerSessions::new(options.session_limits()),
            parked: HashMap::new(),
            served: TenantTable::default(),
            // The keys of each target are different. They need not be secret: only members of the
            // cluster connect.
            tables: TargetTables::new(
                options.regions_max,
                options.windows_max,
                RandomState::new().hash_one(address),
            ),
        };
        let shared = Arc::new(TcpShared {
            key: key.clone(),
            control,
            inbox: Arc::clone(state.peers.inbox()),
            regions: SharedRegions::new(options.regions_max),
            state: Mutex::new(state),
            handles: handles.map_err(no_wake)?,
            wake,
            stop: AtomicBool::new(false),
            limiter: Mutex::new(RateLimiter::new(options.rate)),
            handshakes_in_progress: AtomicUsize::new(0),
            handler: OnceLock::new(),
            options,
        });
        let mut target = Self { shared: Arc::clone(&shared), threads: Vec::new(), address };
        for number in 0..shared.options.threads {
            let thread =
                ServeThread::new(&shared, number).map_err(|e| system("cannot watch connections", e))?;
            target.spawn("fabric-serve", move || thread.run())?;
        }
        let acceptor = TcpAcceptor::new(shared, listener);
        target.spawn("fabric-accept", move || acceptor.run())?;
        Ok(target)
    }

    fn spawn(&mut self, name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), TargetError> {
        let thread = std::thread::Builder::new().name(name.into()).spawn(run);
        let what = "cannot start a thread of the target";
        self.threads.push(thread.map_err(|source| TargetError::System { what, source })?);
        Ok(())
    }

    /// Installs a handler that answers all further messages in the serving threads. Only the first
    /// call has an effect.
    ///
    /// [`Target::receive`] then returns no further message.
    pub fn answer_messages(&self, handler: Arc<dyn MessageHandler>) {
        let _ = self.shared.handler.set(handler);
    }

    /// The address at which the target listens, with the actual port if port 0 was requested.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for TcpTarget {
    fn drop(&mut self) {
        self.shared.control.set_dead();
        let state = self.shared.lock();
        self.shared.stop.store(true, Ordering::SeqCst);
        drop(state);
        self.shared.handles.iter().for_each(ServeHandle::wake);
        self.shared.wake.wake();
        for slot in 0..self.shared.control.endpoints() {
            self.shared.control.drain(slot, Some(DRAIN_TIMEOUT));
        }
        for thread in self.threads.drain(..) {
            let ended = thread.join();
            debug_assert!(ended.is_ok(), "a thread of the target panicked");
        }
        // Sessions and the shared state refer to each other.
        let parked = std::mem::take(&mut self.shared.lock().parked);
        drop(parked);
    }
}

impl std::fmt::Debug for TcpTarget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TcpTarget").field("address", &self.address).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for TcpShared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TcpShared").field("options", &self.options).finish_non_exhaustive()
    }
}

impl TcpShared {
    pub fn lock(&self) -> MutexGuard<'_, TcpTargetState> {
        self.state.lock()
    }

    fn register(&self, new: Registration) -> Result<Region, TargetError> {
        let mut state = self.lock();
        let (slot, region) = state.tables.register(&self.control, new)?;
        // No endpoint knows the key yet: the mapping is stored under the same lock.
        let RegisteredRegion { memory, table, .. } = &state.tables.regions[&slot];
        let mapping = RegionMapping { base: region.base, memory: memory.clone(), table: table.clone() };
        self.regions.insert(slot, mapping);
        Ok(region)
    }

    /// Implements [`Target::fence`].
    pub fn fence(&self, host: Host, epoch: u64) {
        let mut state = self.lock();
        state.tables.fence(host, epoch);
        let is_fenced = |peer: &TcpPeer| peer.who.host == host && peer.who.epoch <= epoch;
        let present = state.peers.of_host(host).filter(|peer| is_fenced(peer));
        let slots: Vec<usize> = present.map(|peer| peer.slot).collect();
        for &slot in &slots {
            self.control.set_state(slot, FENCED);
        }
        drop(state);
        for slot in slots {
            self.control.drain(slot, None);
        }
        self.end_parked_if(|session, _| is_fenced(&session.peer));
    }

    /// Ends a session, which then cannot be resumed.
    pub fn end_session(&self, session: &TcpSession) {
        let mut state = self.lock();
        state.release(&self.control, session);
    }

    /// Parks a session after its connection broke. It may be resumed unless its host is fenced.
    pub fn park(&self, mut session: TcpSession) {
        session.discard_partial();
        let mut state = self.lock();
        if state.tables.is_fenced(session.who) {
            state.release(&self.control, &session);
            return;
        }
        state.parked.insert(session.peer.id, (session, Instant::now()));
        drop(state);
        self.wake.wake();
    }

    /// Ends the sessions that were parked for longer than the timeout.
    pub fn end_expired(&self) {
        self.end_parked_if(|_, since| since.elapsed() >= PARKED_TIMEOUT);
    }

    fn end_parked_if(&self, mut is_over: impl FnMut(&TcpSession, Instant) -> bool) {
        let mut state = self.lock();
        let over = state.parked.extract_if(|_, (session, since)| is_over(session, *since));
        let over: Vec<TcpSession> = over.map(|(_, (session, _))| session).collect();
        over.iter().for_each(|session| state.release(&self.control, session));
    }
}

impl TcpTargetState {
    fn release(&mut self, control: &ControlMemory, session: &TcpSession) {
        control.free_slot(session.slot);
        let peer = &session.peer;
        if self.peers.release(peer) {
            self.served.add(peer.who.tenant, peer.own.counters.served());
        }
    }
}

impl Target for TcpTarget {
    fn register_as(&self, new: Registration) -> Result<Region, TargetError> {
        self.shared.register(new)
    }

    fn deregister(&self, region: Key) -> Result<(), TargetError> {
        let mut state = self.shared.lock();
        let removed = state.tables.begin_deregister(&self.shared.control, region)?;
        let unlinked = self.shared.regions.unlink(removed.slot);
        drop(state);
        self.shared.control.drain_all();
        // SAFETY: the lock was released, and all `active` words were seen even or changed.
        unsafe { unlinked.free() };
        self.shared.lock().tables.end_deregister(removed);
        Ok(())
    }

    fn bind(&self, window: &WindowSpec) -> Result<Key, TargetError> {
        self.shared.lock().tables.bind(&self.shared.control, window)
    }

    fn invalidate(&self, key: Key) -> Result<(), TargetError> {
        // Only one of several callers may clear the key and release its slot.
        self.shared.lock().tables.begin_invalidate(&self.shared.control, key)?;
        self.shared.control.drain_all();
        self.shared.lock().tables.end_invalidate(key);
        Ok(())
    }

    fn expel(&self, _range: Range<u64>) {
        // Resumed sessions repeat READs under this lock.
        drop(self.shared.lock());
        self.shared.control.drain_all();
    }

    fn fence(&self, host: Host, epoch: u64) {
        self.shared.fence(host, epoch);
    }

    fn receive(&self, out: &mut Vec<u8>) -> Option<Sender> {
        self.shared.inbox.receive(out)
    }

    fn wait(&self, timeout: Duration) {
        self.shared.inbox.wait(timeout);
    }

    fn reply(&self, to: EndpointNumber, message: &[u8]) -> bool {
        let TcpShared { handles, options, .. } = &*self.shared;
        let state = self.shared.lock();
        let peer = state.peers.reply(to, message, &options.limits, &state.tables);
        peer.inspect(|peer| handles[peer.own.thread].notify(peer)).is_some()
    }

    fn send(&self, to: Host, message: &[u8]) -> usize {
        let TcpShared { handles, options, .. } = &*self.shared;
        let state = self.shared.lock();
        state
            .peers
            .send(to, message, &options.limits, &state.tables, |peer| handles[peer.own.thread].notify(peer))
    }

    fn endpoints(&self) -> usize {
        self.shared.lock().peers.count()
    }

    fn tenant_counters(&self) -> Vec<(Tenant, TenantCounters)> {
        let state = self.shared.lock();
        let mut served = state.served.clone();
        state.peers.iter().for_each(|peer| served.add(peer.who.tenant, peer.own.counters.served()));
        served.into_vec()
    }
}

#[cfg(test)]
mod tests {
    use crate::target::Identity;
    use std::net::{Shutdown, TcpStream};

    use super::*;
    use crate::tcp::{ConnectOptions, connect};

    /// A relay of one connection to an address: its own address, and the sockets that cut it.
    fn wire(to: SocketAddr) -> (SocketAddr, JoinHandle<[TcpStream; 2]>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let ends = std::thread::spawn(move || {
            let (from, onward) = (listener.accept().unwrap().0, TcpStream::connect(to).unwrap());
            for (source, sink) in [(&from, &onward), (&onward, &from)] {
                let (mut source, mut sink) = (source.try_clone().unwrap(), sink.try_clone().unwrap());
                std::thread::spawn(move || std::io::copy(&mut source, &mut sink));
            }
            [from, onward]
        });
        (address, ends)
    }

    #[test]
    fn the_session_of_a_fenced_host_is_not_parked() {
        let key = ClusterKey([3; 32]);
        let target = TcpTarget::listen("127.0.0.1:0".parse().unwrap(), &key, TcpOptions::default()).unwrap();
        let parked = || target.shared.lock().parked.len();
        for (epoch, is_cut_first) in [(1, true), (2, false)] {
            let who = Identity { host: Host(7), epoch, tenant: Tenant(9) };
            let (address, ends) = wire(target.address());
            let endpoint = connect(address, &key, who, ConnectOptions::default()).unwrap();
            let ends = ends.join().unwrap();
            let cut = || ends.iter().for_each(|end| drop(end.shutdown(Shutdown::Both)));
            if is_cut_first {
                cut();
                while parked() == 0 {
                    std::thread::yield_now();
                }
            }
            target.fence(who.host, epoch);
            cut();
            loop {
                assert_eq!(parked(), 0, "the session of a fenced host is not parked");
                if target.endpoints() == 0 {
                    break;
                }
            }
            drop(endpoint);
        }
    }
}
