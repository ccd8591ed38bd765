//! The target's end: it changes keys and fences; a thread of its own lets initiators in and binds windows for them. Their READs and WRITEs it never sees.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::Options;
use super::answered::{AnsweredMessages, VerbsPeer};
use super::remap::{LentRegion, RemapMethod, RemapRequest, Remappable};
use super::serve::VerbsServer;
use super::sys::device::Device;
use super::sys::registration::{Registration, RegistrationUse};
use aquifer_fabric::ClusterKey;
use aquifer_fabric::Memory;
use aquifer_fabric::control::ControlMemory;
use aquifer_fabric::key_table::KeyTable;
use aquifer_fabric::sessions::PeerSessions;
use aquifer_fabric::tables::TargetTables;
use aquifer_fabric::target::{Access, Host, Identity, Region, Scope, Target, TargetError, WindowSpec};
use aquifer_fabric::wake::WakeFd;
use aquifer_fabric::work::Key;

/// Memory offered over verbs.
pub struct VerbsTarget {
    shared: Arc<VerbsShared>,
    thread: Option<JoinHandle<()>>,
    address: SocketAddr,
}

/// What the thread is asked; it tells when it is done.
pub(super) enum ServerCommand {
    /// No window is bound for that key any more.
    Invalidate(Key, Sender<()>),
    /// No window is bound by a table's key in that range any more.
    Expel(Range<u64>, Sender<()>),
    /// Nothing of that host's is served any more.
    Fence(Host, u64, Sender<()>),
    /// Other pages lie under these addresses.
    Remap(RemapRequest, Sender<io::Result<()>>),
}

pub(super) struct VerbsShared {
    pub options: Options,
    pub key: ClusterKey,
    pub control: ControlMemory,
    pub device: &'static Device,
    pub state: Mutex<VerbsTargetState>,
    pub wake: WakeFd,
    pub stop: AtomicBool,
}

pub(super) struct VerbsTargetState {
    pub peers: PeerSessions<AnsweredMessages>,
    pub tables: TargetTables,
    /// By region number.
    pub regions: Vec<LentRegion>,
    pub commands: Vec<ServerCommand>,
    /// There is a thread that obeys them.
    pub is_served: bool,
}

impl VerbsTargetState {
    /// A session is over for good.
    pub fn release(&mut self, peer: &VerbsPeer) {
        self.peers.release(peer, |_| ());
    }

    /// Keep a region that was just put into the tables, and say if there is no_device.
    fn keep(&mut self, lent: io::Result<LentRegion>) -> Result<(), TargetError> {
        let (lent, outcome) = match lent {
            Ok(lent) => (lent, Ok(())),
            Err(source) => (
                LentRegion::Nothing,
                Err(TargetError::System {
                    what: "cannot register memory with the device (see ulimit -l)",
                    source,
                }),
            ),
        };
        // In either case: regions are known by their numbers.
        self.regions.push(lent);
        outcome
    }
}

impl VerbsShared {
    pub fn lock(&self) -> MutexGuard<'_, VerbsTargetState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Have the thread do something, and wait until it is done; nothing if there is no thread any more.
    fn command<T>(&self, make: impl FnOnce(Sender<T>) -> ServerCommand) -> Option<T> {
        let (done, is_done) = channel();
        let mut state = self.lock();
        // A thread that has ended serves nobody any more, which is as good.
        if !state.is_served {
            return None;
        }
        state.commands.push(make(done));
        drop(state);
        self.wake.wake();
        is_done.recv().ok()
    }
}

impl VerbsTarget {
    /// Offer memory at the address of an RDMA device, to whoever proves to have the cluster's key.
    ///
    /// # Errors
    /// If an option is out of bounds, the address is no device's or taken, or the system refuses.
    pub fn listen(address: SocketAddr, key: &ClusterKey, options: Options) -> Result<Self, TargetError> {
        let system = |what| move |source| TargetError::System { what, source };
        options.check()?;
        let (server, device, address) =
            VerbsServer::listen(address, &options).map_err(system("cannot listen over RDMA"))?;
        let control = ControlMemory::create(options.endpoints_max, options.regions_max + options.windows_max)
            .map_err(system("cannot create control memory"))?;
        let wake = WakeFd::new().map_err(system("cannot create an eventfd"))?;
        let secret = RandomState::new().hash_one(address);
        let state = VerbsTargetState {
            peers: PeerSessions::new(options.endpoints_max),
            tables: TargetTables::new(options.regions_max, options.windows_max, secret),
            regions: Vec::new(),
            commands: Vec::new(),
            is_served: true,
        };
        let shared = Arc::new(VerbsShared {
            key: key.clone(),
            control,
            device,
            state: Mutex::new(state),
            wake,
            stop: AtomicBool::new(false),
            options,
        });
        let thread = std::thread::Builder::new().name("fabric-verbs".into());
        let own = Arc::clone(&shared);
        let thread =
            thread.spawn(move || server.run(&own)).map_err(system("cannot start the target's thread"))?;
        Ok(Self { shared, thread: Some(thread), address })
    }

    /// As [`Target::register`], under addresses that may be given other pages of the memory by [`Self::remap`]. At first each has its own.
    ///
    /// # Errors
    /// As [`Target::register`].
    pub fn register_movable(
        &self,
        memory: Arc<Memory>,
        access: Access,
        scope: Scope,
    ) -> Result<Region, TargetError> {
        let mut state = self.shared.lock();
        let own = Arc::clone(&memory);
        let region = state.tables.register(&self.shared.control, own, access, scope, None, None)?;
        let made = Remappable::new(self.shared.device, memory, region.base).map(LentRegion::Remappable);
        state.keep(made)?;
        Ok(region)
    }

    /// Put the `len` bytes at `from` of a movable region's memory under the addresses from `addr` on (CoRM §3.5). KeyCache stay as they are; who reads or
    /// writes meanwhile finds the old pages or the new ones. What the old pages are used for next is the caller's to care for: work that was under way may
    /// still have reached them until this returns.
    ///
    /// # Errors
    /// If the range is not inside one movable region, or the numbers are not multiples of a page; if the device does not take the new pages: then its windows stay
    /// closed.
    pub fn remap(&self, addr: u64, from: u64, len: u64) -> Result<RemapMethod, TargetError> {
        let out_of_range = TargetError::OutOfRange { start: addr, end: addr.saturating_add(len) };
        let failed = |source| TargetError::System { what: "cannot remap memory", source };
        let mut state = self.shared.lock();
        let Some((region, base)) = state.tables.region_of(addr, len) else { return Err(out_of_range) };
        let Some(LentRegion::Remappable(remappable)) = state.regions.get_mut(region) else {
            return Err(out_of_range);
        };
        let (Ok(at), Ok(from), Ok(len)) =
            (usize::try_from(addr - base), usize::try_from(from), usize::try_from(len))
        else {
            return Err(out_of_range);
        };
        let order = RemapRequest { region, at, from, len };
        remappable.can_remap(&order).map_err(failed)?;
        if remappable.how().is_live() {
            remappable.remap_live(&order).map_err(failed)?;
            return Ok(remappable.how());
        }
        drop(state);
        let gone = || io::Error::other("the target's thread has ended");
        let moved = self.shared.command(|done| ServerCommand::Remap(order, done));
        moved.unwrap_or_else(|| Err(gone())).map_err(failed)?;
        match self.shared.lock().regions.get(region) {
            Some(LentRegion::Remappable(remappable)) => Ok(remappable.how()),
            _ => Err(out_of_range),
        }
    }

    /// Where it listens; if port 0 was asked for, which port it got.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for VerbsTarget {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.wake.wake();
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            debug_assert!(ended.is_ok(), "the target's thread panicked");
        }
    }
}

impl std::fmt::Debug for VerbsTarget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VerbsTarget").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Target for VerbsTarget {
    fn register_with(
        &self,
        memory: Arc<Memory>,
        access: Access,
        scope: Scope,
        table: Option<KeyTable>,
        key: Option<Key>,
    ) -> Result<Region, TargetError> {
        let mut state = self.shared.lock();
        let lent = Arc::clone(&memory);
        let region = state.tables.register(&self.shared.control, lent, access, scope, table, key)?;
        let whole = 0..memory.len();
        let device = self.shared.device;
        let made = Registration::new(device, memory, whole, region.base, RegistrationUse::Windows)
            .map(LentRegion::Fixed);
        state.keep(made)?;
        Ok(region)
    }

    fn bind(&self, window: &WindowSpec) -> Result<Key, TargetError> {
        self.shared.lock().tables.bind(&self.shared.control, window)
    }

    fn invalidate(&self, key: Key) -> Result<(), TargetError> {
        // Only one of several callers may clear the key, and so give its slot back.
        let state = self.shared.lock();
        if !self.shared.control.unbind(key) {
            return Err(TargetError::NoSuchKey(key));
        }
        drop(state);
        self.shared.command(|done| ServerCommand::Invalidate(key, done));
        self.shared.lock().tables.release_key(key);
        Ok(())
    }

    fn expel(&self, range: Range<u64>) {
        self.shared.command(|done| ServerCommand::Expel(range, done));
    }

    fn fence(&self, host: Host, epoch: u64) {
        self.shared.lock().tables.fence(host, epoch);
        self.shared.command(|done| ServerCommand::Fence(host, epoch, done));
    }

    fn receive(&self, out: &mut Vec<u8>) -> Option<Identity> {
        self.shared.lock().peers.receive(out, |_| ())
    }

    fn send(&self, to: Host, message: &[u8]) -> usize {
        let state = self.shared.lock();
        let taken = state.peers.send(to, message, &self.shared.options.limits, &state.tables, |_| ());
        drop(state);
        self.shared.wake.wake();
        taken
    }

    fn endpoints(&self) -> usize {
        self.shared.lock().peers.count()
    }
}
