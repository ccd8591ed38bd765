//! The memory of partitions that move: offered by the source, and read by the target.

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

/// READs that are posted at once, fewer than an endpoint accepts.
const POSTED_MAX: usize = 64;
/// Longest wait for a READ.
const PATIENCE: Duration = Duration::from_secs(2);
const _: () = assert!(PIECE_BYTES <= 2 << 20);

/// The memory that this server offers.
#[derive(Debug)]
pub struct Memories {
    tcp: TcpTarget,
    local: Option<ShmTarget>,
    socket: PathBuf,
    machine: String,
}

/// The memory of a partition that is offered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Offered {
    tcp: (u64, Key),
    local: Option<(u64, Key)>,
}

impl Memories {
    /// Offers memory on a socket that listens, to servers with the key, and to those of this
    /// machine at a path.
    ///
    /// # Errors
    /// If the system refuses. Without the path, servers of this machine use TCP.
    pub fn listen(
        listener: TcpListener,
        socket: &Path,
        key: &ClusterKey,
        encrypt: bool,
    ) -> Result<Self, TargetError> {
        let options = TcpOptions { encrypt, ..TcpOptions::default() };
        let tcp = TcpTarget::listen_on(listener, key, options)?;
        let local = ShmTarget::listen(socket, ShmOptions::default())
            .inspect_err(|error| tracing::warn!(%error, "servers of this machine use TCP"))
            .ok();
        Ok(Self { tcp, local, socket: socket.to_owned(), machine: machine() })
    }

    /// The TCP address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.tcp.address()
    }

    /// The machine, and the socket for servers on the same one.
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
    /// If the system or the fabric refuses.
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

    /// Describes an offer.
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

    /// Ends an offer. No READ is in flight when this returns, and none will begin.
    pub fn withdraw(&self, offered: &Offered) {
        self.withdraw_tcp(offered.tcp.1);
        if let (Some(local), Some((_, key))) = (&self.local, offered.local)
            && let Err(error) = local.deregister(key)
        {
            tracing::warn!(%error, "the memory of a partition is still offered");
        }
    }

    fn withdraw_tcp(&self, key: Key) {
        if let Err(error) = self.tcp.deregister(key) {
            tracing::warn!(%error, "the memory of a partition is still offered");
        }
    }
}

/// The memory of a partition on another server.
#[derive(Debug)]
pub struct RemoteMemory {
    endpoint: Box<dyn Endpoint>,
    local: LocalKey,
    remote: RemoteAddr,
    batch: Batch,
}

impl RemoteMemory {
    /// Connects with the memory that was offered, to copy it to a partition.
    ///
    /// # Errors
    /// If it cannot be reached.
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
            connected.inspect_err(|error| tracing::debug!(%error, "the memory is read over TCP")).ok()
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

    fn read_some(&mut self, pieces: &[Piece]) -> Option<()> {
        for piece in pieces {
            let local = LocalSlice { key: self.local, offset: piece.to, len: piece.len };
            let remote = RemoteAddr { addr: self.remote.addr + piece.from, key: self.remote.key };
            self.batch.push(0, Verb::Read { local, remote });
        }
        self.batch.run(&mut *self.endpoint, Instant::now() + PATIENCE).ok()?;
        self.batch.failures().is_empty().then_some(())
    }
}

impl Source for RemoteMemory {
    fn read(&mut self, pieces: &[Piece]) -> Result<(), CopyError> {
        pieces.chunks(POSTED_MAX).try_for_each(|pieces| self.read_some(pieces)).ok_or(CopyError::Lost)
    }
}

/// What tells this machine from others, as long as it runs.
#[must_use]
pub fn machine() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}
