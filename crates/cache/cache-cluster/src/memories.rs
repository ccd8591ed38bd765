//! Access to the memory of partitions that move: the source offers it, and the target READs it.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_cache::store::partition::Partition;
use aquifer_fabric::shm::{self, ShmOptions, ShmTarget};
use aquifer_fabric::tcp::{self, ConnectOptions, TcpOptions, TcpTarget};
use aquifer_fabric::{
    Access, Batch, ClusterKey, Endpoint, EndpointError, Host, Identity, Key, LocalKey, LocalSlice, Memory,
    RemoteAddr, Scope, Target, TargetError, Tenant, Verb,
};
use aquifer_ownership::Life;

use crate::copying::{CopyError, PIECE_BYTES, Piece, Source};
use crate::wire::Offer;

/// Largest number of READs that are posted at once, below the limit of an endpoint.
const POSTED_MAX: usize = 64;
/// Timeout of a batch of READs.
const READ_TIMEOUT: Duration = Duration::from_secs(2);
const _: () = assert!(PIECE_BYTES <= 2 << 20);

/// Targets of the fabric by which this server offers memory to others: over TCP, and over shared
/// memory if possible.
#[derive(Debug)]
pub struct Memories {
    tcp: TcpTarget,
    local: Option<ShmTarget>,
    socket: PathBuf,
    machine: String,
}

/// An offer of a partition's memory: the address and key of its region, for each target.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Offered {
    tcp: (u64, Key),
    local: Option<(u64, Key)>,
}

impl Memories {
    /// Serves READs over TCP on `listener`, to servers with the cluster key, and over shared memory
    /// at the path `socket`, to servers of this machine. If the path cannot be used, servers of
    /// this machine use TCP.
    ///
    /// # Errors
    /// If the TCP target cannot be started.
    pub fn listen(
        listener: TcpListener,
        socket: &Path,
        key: &ClusterKey,
        encrypt: bool,
    ) -> Result<Self, TargetError> {
        let options = TcpOptions { encrypt, ..TcpOptions::default() };
        let tcp = TcpTarget::listen_on(listener, key, options)?;
        let local = ShmTarget::listen(socket, ShmOptions::default())
            .inspect_err(|error| {
                let socket = socket.display();
                tracing::warn!(
                    %error,
                    %socket,
                    "cannot listen on the memory socket: servers of this machine will use TCP"
                );
            })
            .ok();
        Ok(Self { tcp, local, socket: socket.to_owned(), machine: machine() })
    }

    /// The TCP address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.tcp.address()
    }

    /// The machine's boot identity, and the path of the socket for servers of the same machine.
    /// Both are empty if this server has no such socket.
    #[must_use]
    pub fn local(&self) -> (String, String) {
        match self.local {
            Some(_) => (self.machine.clone(), self.socket.display().to_string()),
            None => (String::new(), String::new()),
        }
    }

    /// Offers the memory of a partition to one server.
    ///
    /// # Errors
    /// If the memory cannot be mapped or registered.
    pub fn offer(&self, partition: &Partition, to: Life) -> io::Result<Offered> {
        let map = || -> io::Result<Arc<Memory>> {
            Ok(Arc::new(Memory::from_fd(partition.descriptor()?, partition.layout().bytes())?))
        };
        let scope = Scope::Host(Host(to.host));
        let tcp = self.tcp.register(map()?, Access::READ, scope).map_err(io::Error::other)?;
        let local = match &self.local {
            Some(local) => {
                let region = local.register(map()?, Access::READ, scope).map_err(io::Error::other);
                let region = region.inspect_err(|_| self.withdraw_tcp(tcp.key))?;
                Some((region.base, region.key))
            }
            None => None,
        };
        Ok(Offered { tcp: (tcp.base, tcp.key), local })
    }

    /// Returns the message that describes an offer to the target.
    #[must_use]
    pub fn describe(&self, offered: &Offered, partition: &Partition, requests_per_s: f64) -> Offer {
        let (machine, socket) = self.local();
        let pair = |(base, key): (u64, Key)| (base, key.0);
        Offer {
            address: self.address(),
            machine,
            socket,
            region: pair(offered.tcp),
            local_region: offered.local.map_or((0, 0), pair),
            runs: partition.layout().runs,
            buckets: partition.layout().buckets_max(),
            bytes: partition.charged(),
            requests_per_s,
        }
    }

    /// Withdraws an offer. No READ is in flight when this returns, and none can begin.
    pub fn withdraw(&self, offered: &Offered) {
        self.withdraw_tcp(offered.tcp.1);
        if let (Some(local), Some((_, key))) = (&self.local, offered.local)
            && let Err(error) = local.deregister(key)
        {
            tracing::warn!(%error, "cannot withdraw the memory of a partition from the local socket");
        }
    }

    fn withdraw_tcp(&self, key: Key) {
        if let Err(error) = self.tcp.deregister(key) {
            tracing::warn!(%error, "cannot withdraw the memory of a partition from the TCP target");
        }
    }
}

/// Access to the memory of a partition on another server.
#[derive(Debug)]
pub struct RemoteMemory {
    endpoint: Box<dyn Endpoint>,
    local: LocalKey,
    remote: RemoteAddr,
    batch: Batch,
}

impl RemoteMemory {
    /// Connects to the offered memory, to copy it to `partition`. `own` is this server.
    ///
    /// # Errors
    /// If the connection fails, or if the partition's memory cannot be mapped or registered.
    pub fn connect(
        offer: &Offer,
        partition: &Partition,
        own: Life,
        key: &ClusterKey,
        encrypt: bool,
    ) -> io::Result<Self> {
        let identity = Identity { host: Host(own.host), epoch: own.epoch, tenant: Tenant(0) };
        let local = if offer.machine == machine() && !offer.socket.is_empty() {
            let connected = shm::connect(Path::new(&offer.socket), identity);
            connected
                .inspect_err(|error| {
                    tracing::debug!(%error, "cannot connect to the memory socket of a server: using TCP");
                })
                .ok()
        } else {
            None
        };
        let (mut endpoint, (addr, remote_key)) = match local {
            Some(endpoint) => (endpoint, offer.local_region),
            None => {
                let options = ConnectOptions { encrypt, ..ConnectOptions::default() };
                let endpoint =
                    tcp::connect(offer.address, key, identity, options).map_err(io::Error::other)?;
                (endpoint, offer.region)
            }
        };
        let memory = Arc::new(Memory::from_fd(partition.descriptor()?, partition.layout().bytes())?);
        let failed = |error: EndpointError| io::Error::other(error);
        let local = endpoint.register_local(memory).map_err(failed)?;
        let remote = RemoteAddr { addr, key: Key(remote_key) };
        Ok(Self { endpoint, local, remote, batch: Batch::new() })
    }

    /// Reads at most [`POSTED_MAX`] pieces; `None` if that fails.
    fn read_batch(&mut self, pieces: &[Piece]) -> Option<()> {
        for piece in pieces {
            let local = LocalSlice { key: self.local, offset: piece.to, len: piece.len };
            let remote = RemoteAddr { addr: self.remote.addr + piece.from, key: self.remote.key };
            self.batch.push(0, Verb::Read { local, remote });
        }
        self.batch.run(&mut *self.endpoint, Instant::now() + READ_TIMEOUT).ok()?;
        self.batch.failures().is_empty().then_some(())
    }
}

impl Source for RemoteMemory {
    fn read(&mut self, pieces: &[Piece]) -> Result<(), CopyError> {
        pieces.chunks(POSTED_MAX).try_for_each(|pieces| self.read_batch(pieces)).ok_or(CopyError::Lost)
    }
}

/// Returns the boot identity of this machine: unique among machines, until the next boot.
#[must_use]
pub fn machine() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}
