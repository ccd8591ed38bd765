//! The owner's end: changes keys and fences. A thread of its own accepts initiators and binds
//! windows. The devices execute READs and WRITEs without it.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use super::VerbsOptions;
use super::answered::{AnsweredMessages, VerbsPeer};
use super::remap::{LentRegion, RemapMethod, RemapRequest, Remappable};
use super::serve::VerbsServer;
use super::sys::device::Device;
use super::sys::registration::{Registration as DeviceRegistration, RegistrationUse};
use aquifer_fabric::ClusterKey;
use aquifer_fabric::Memory;
use aquifer_fabric::Registration;
use aquifer_fabric::control::ControlMemory;
use aquifer_fabric::inbox::Inbox;
use aquifer_fabric::sessions::{PeerSessions, SessionLimits};
use aquifer_fabric::tables::TargetTables;
use aquifer_fabric::target::{
    Access, EndpointNumber, Host, Region, Scope, Sender as MessageSender, Target, TargetError, WindowSpec,
};
use aquifer_fabric::wake::WakeFd;
use aquifer_fabric::work::Key;
use parking_lot::{Mutex, MutexGuard};

/// A target that offers memory over RDMA devices.
pub struct VerbsTarget {
    shared: Arc<VerbsShared>,
    thread: Option<JoinHandle<()>>,
    address: SocketAddr,
}

/// A command to the thread, which reports its end by the sender.
pub(super) enum ServerCommand {
    /// Close the windows of a key.
    Invalidate(Key, Sender<()>),
    /// Close the windows of key-table keys in a range.
    Expel(Range<u64>, Sender<()>),
    /// Close the sessions of a host up to an epoch.
    Fence(Host, u64, Sender<()>),
    /// Change the pages of a range.
    Remap(RemapRequest, Sender<io::Result<()>>),
}

pub(super) struct VerbsShared {
    pub options: VerbsOptions,
    pub key: ClusterKey,
    pub control: ControlMemory,
    pub device: &'static Device,
    pub state: Mutex<VerbsTargetState>,
    pub inbox: Arc<Inbox>,
    pub wake: WakeFd,
    pub stop: AtomicBool,
}

pub(super) struct VerbsTargetState {
    pub peers: PeerSessions<AnsweredMessages>,
    pub tables: TargetTables,
    /// The regions by slot.
    pub regions: BTreeMap<usize, LentRegion>,
    pub commands: Vec<ServerCommand>,
    /// Whether the thread runs and executes commands.
    pub is_served: bool,
}

impl VerbsTargetState {
    /// Ends a session, which then cannot be resumed.
    pub fn release(&mut self, peer: &VerbsPeer) {
        self.peers.release(peer);
    }

    /// Stores a region that was just added to the tables. Returns an error if the device did not
    /// accept its memory.
    fn keep(&mut self, slot: usize, lent: io::Result<LentRegion>) -> Result<(), TargetError> {
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
        // Stored in either case, because its slot is in use.
        self.regions.insert(slot, lent);
        outcome
    }
}

impl VerbsShared {
    pub fn lock(&self) -> MutexGuard<'_, VerbsTargetState> {
        self.state.lock()
    }

    /// Executes a command on the thread and waits for it. Returns `None` if the thread has ended.
    fn command<T>(&self, make: impl FnOnce(Sender<T>) -> ServerCommand) -> Option<T> {
        let (done, is_done) = channel();
        let mut state = self.lock();
        // A thread that has ended serves no sessions, so the command is done.
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
    /// Offers memory at the address of an RDMA device to initiators that hold the cluster key.
    ///
    /// # Errors
    /// If an option is out of bounds, the address is not that of a device or is in use, or the
    /// system refuses.
    pub fn listen(address: SocketAddr, key: &ClusterKey, options: VerbsOptions) -> Result<Self, TargetError> {
        let system = |what| move |source| TargetError::System { what, source };
        options.check()?;
        let (server, device, address) =
            VerbsServer::listen(address, &options).map_err(system("cannot listen over RDMA"))?;
        let control = ControlMemory::create(options.endpoints_max, options.regions_max, options.windows_max)
            .map_err(system("cannot create control memory"))?;
        let wake = WakeFd::new().map_err(system("cannot create an eventfd"))?;
        let secret = RandomState::new().hash_one(address);
        let state = VerbsTargetState {
            peers: PeerSessions::new(SessionLimits {
                endpoints_max: options.endpoints_max,
                endpoints_per_tenant_max: options.endpoints_max,
            }),
            tables: TargetTables::new(options.regions_max, options.windows_max, secret),
            regions: BTreeMap::new(),
            commands: Vec::new(),
            is_served: true,
        };
        let shared = Arc::new(VerbsShared {
            key: key.clone(),
            control,
            device,
            inbox: Arc::clone(state.peers.inbox()),
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

    /// Registers memory whose pages [`Self::remap`] can change. At first the pages are in the
    /// memory's own order.
    ///
    /// # Errors
    /// The errors of [`Target::register`].
    pub fn register_movable(
        &self,
        memory: Arc<Memory>,
        access: Access,
        scope: Scope,
    ) -> Result<Region, TargetError> {
        let mut state = self.shared.lock();
        let own = Registration::plain(Arc::clone(&memory), access, scope);
        let (slot, region) = state.tables.register(&self.shared.control, own)?;
        let made = Remappable::new(self.shared.device, memory, region.base).map(LentRegion::Remappable);
        state.keep(slot, made)?;
        Ok(region)
    }

    /// Maps the `len` bytes at `from` of a movable region's memory at the addresses from `addr`
    /// (CoRM §3.5).
    ///
    /// Keys do not change. A concurrent access sees the old pages or the new ones. Until this
    /// returns, operations in flight may still access the old pages, so the caller must not reuse
    /// them before.
    ///
    /// # Errors
    /// If the range is not inside one movable region, or a number is not a multiple of the page
    /// size. If the device does not accept the new pages; the region's windows then stay closed.
    pub fn remap(&self, addr: u64, from: u64, len: u64) -> Result<RemapMethod, TargetError> {
        let out_of_range = TargetError::OutOfRange { start: addr, end: addr.saturating_add(len) };
        let failed = |source| TargetError::System { what: "cannot remap memory", source };
        let mut state = self.shared.lock();
        let Some((region, base)) = state.tables.region_of(addr, len) else { return Err(out_of_range) };
        let Some(LentRegion::Remappable(remappable)) = state.regions.get_mut(&region) else {
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
        match self.shared.lock().regions.get(&region) {
            Some(LentRegion::Remappable(remappable)) => Ok(remappable.how()),
            _ => Err(out_of_range),
        }
    }

    /// The address at which the target listens, with the actual port if port 0 was requested.
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
    /// Registers memory without a translation table: a device translates addresses by its own
    /// tables (see [`VerbsTarget::register_movable`]).
    fn register_as(&self, new: Registration) -> Result<Region, TargetError> {
        if new.map.is_some() {
            let (what, provider) = ("translation tables", "the verbs provider");
            return Err(TargetError::Unsupported { what, provider });
        }
        new.check_is_in_memory("the verbs provider")?;
        let mut state = self.shared.lock();
        let memory = Arc::clone(&new.memory);
        let (slot, region) = state.tables.register(&self.shared.control, new)?;
        let (device, whole) = (self.shared.device, 0..memory.len());
        let made = DeviceRegistration::new(device, memory, whole, region.base, RegistrationUse::Windows)
            .map(LentRegion::Fixed);
        state.keep(slot, made)?;
        Ok(region)
    }

    fn deregister(&self, region: Key) -> Result<(), TargetError> {
        let removed = self.shared.lock().tables.begin_deregister(&self.shared.control, region)?;
        for key in removed.windows().chain([region]) {
            self.shared.command(|done| ServerCommand::Invalidate(key, done));
        }
        let Region { base, len, .. } = *removed.region();
        self.shared.command(|done| ServerCommand::Expel(base..base + len, done));
        let mut state = self.shared.lock();
        state.regions.remove(&removed.slot);
        state.tables.end_deregister(removed);
        Ok(())
    }

    fn bind(&self, window: &WindowSpec) -> Result<Key, TargetError> {
        self.shared.lock().tables.bind(&self.shared.control, window)
    }

    fn invalidate(&self, key: Key) -> Result<(), TargetError> {
        // Only one of several callers may clear the key and release its slot.
        self.shared.lock().tables.begin_invalidate(&self.shared.control, key)?;
        self.shared.command(|done| ServerCommand::Invalidate(key, done));
        self.shared.lock().tables.end_invalidate(key);
        Ok(())
    }

    fn expel(&self, range: Range<u64>) {
        self.shared.command(|done| ServerCommand::Expel(range, done));
    }

    fn fence(&self, host: Host, epoch: u64) {
        self.shared.lock().tables.fence(host, epoch);
        self.shared.command(|done| ServerCommand::Fence(host, epoch, done));
    }

    fn receive(&self, out: &mut Vec<u8>) -> Option<MessageSender> {
        self.shared.inbox.receive(out)
    }

    fn wait(&self, timeout: Duration) {
        self.shared.inbox.wait(timeout);
    }

    fn reply(&self, to: EndpointNumber, message: &[u8]) -> bool {
        let state = self.shared.lock();
        let is_posted = state.peers.reply(to, message, &self.shared.options.limits, &state.tables).is_some();
        drop(state);
        self.shared.wake.wake();
        is_posted
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
