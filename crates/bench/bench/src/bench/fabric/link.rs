//! The measuring end: a serving process, an endpoint to it, and own memory for the comparison.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use aquifer_bench::BenchError;
use aquifer_bench::support::serving::ServingProcess;
use aquifer_fabric::{
    Completion, Endpoint, Host, Identity, LocalKey, LocalSlice, Memory, Region, RemoteAddr, Tenant, Work, shm,
};

use super::server;

/// Size of the own registered memory: enough for the largest batch.
const LOCAL_BYTES: usize = 1 << 20;

/// A connection to a serving process.
#[derive(Debug)]
pub struct Link {
    endpoint: Box<dyn Endpoint>,
    region: Region,
    local: Arc<Memory>,
    key: LocalKey,
    /// Own shared memory, for the bare counterparts of the operations.
    pub bare: Arc<Memory>,
    done: Vec<Completion>,
    server: Option<ServingProcess>,
    /// Addresses at which the serving process serves over TCP, and at which it echoes plain TCP.
    pub tcp_addresses: Option<(SocketAddr, SocketAddr)>,
}

/// Parses the two addresses that the serving process reports when it is ready.
fn parse_ready(line: &str) -> Option<(SocketAddr, SocketAddr)> {
    let mut words = line.split_ascii_whitespace();
    Some((words.next()?.parse().ok()?, words.next()?.parse().ok()?))
}

impl Link {
    /// Starts a serving process and connects to it. `bare_bytes` is the size of the own memory.
    ///
    /// # Errors
    /// If the process cannot be started, or the connection fails.
    pub fn start(bare_bytes: usize) -> Result<Self, BenchError> {
        let (server, ready, path) = ServingProcess::start("fabric")?;
        let Some(tcp_addresses) = parse_ready(&ready) else {
            return Err(BenchError::Fabric {
                reason: format!("the serving process reported {ready:?} instead of two addresses"),
            });
        };
        let mut link = Self::connect(&path, bare_bytes)?;
        link.server = Some(server);
        link.tcp_addresses = Some(tcp_addresses);
        Ok(link)
    }

    /// Connects over shared memory to the process that listens at `path`.
    ///
    /// # Errors
    /// If no process listens there.
    pub fn connect(path: &Path, bare_bytes: usize) -> Result<Self, BenchError> {
        let failed = |reason: String| BenchError::Fabric { reason };
        let who = Identity { host: Host(1), epoch: 1, tenant: Tenant(0) };
        let endpoint = shm::connect(path, who).map_err(|error| failed(error.to_string()))?;
        Self::new(endpoint, bare_bytes)
    }

    /// A link over an endpoint, with own memory of `bare_bytes`.
    ///
    /// # Errors
    /// If the other end lends no memory, or this machine has too little.
    pub fn new(mut endpoint: Box<dyn Endpoint>, bare_bytes: usize) -> Result<Self, BenchError> {
        let failed = |reason: String| BenchError::Fabric { reason };
        let region = endpoint.regions().first().cloned();
        let region = region.ok_or_else(|| failed("the other end lends no memory".into()))?;
        let local = server::filled(LOCAL_BYTES)?;
        let key = endpoint.register_local(Arc::clone(&local)).map_err(|error| failed(error.to_string()))?;
        let bare = server::filled(bare_bytes.max(4096))?;
        Ok(Self { endpoint, region, local, key, bare, done: Vec::new(), server: None, tcp_addresses: None })
    }

    /// Process number of the serving process.
    pub fn server(&self) -> u32 {
        self.server.as_ref().map_or(0, ServingProcess::pid)
    }

    /// Own registered memory, where data arrives.
    pub fn local(&self) -> &Memory {
        &self.local
    }

    /// A range of the own registered memory.
    pub fn slice(&self, offset: u64, len: u32) -> LocalSlice {
        LocalSlice { key: self.key, offset, len }
    }

    /// An address in the lent memory.
    pub fn remote(&self, offset: usize) -> RemoteAddr {
        RemoteAddr { addr: self.region.base + offset as u64, key: self.region.key }
    }

    #[cfg(feature = "verbs")]
    /// The limits that the other end grants.
    pub fn limits(&self) -> aquifer_fabric::Limits {
        self.endpoint.limits()
    }

    /// Posts a batch and polls until all operations have completed; returns the outcome of the last
    /// one.
    ///
    /// # Errors
    /// If an operation fails.
    #[inline]
    pub fn all(&mut self, batch: &[Work]) -> Result<u64, BenchError> {
        let mut last = 0;
        for completion in self.outcomes(batch)? {
            last = completion.outcome.map_err(|error| BenchError::Fabric { reason: error.to_string() })?;
        }
        Ok(last)
    }

    /// Posts a batch and polls until all operations have completed.
    ///
    /// # Errors
    /// If it cannot be posted.
    #[inline]
    pub fn outcomes(&mut self, batch: &[Work]) -> Result<&[Completion], BenchError> {
        let failed = |reason: String| BenchError::Fabric { reason };
        self.endpoint.post(batch).map_err(|error| failed(error.to_string()))?;
        self.done.clear();
        while self.done.len() < batch.len() {
            if self.endpoint.poll(&mut self.done, batch.len()) == 0 {
                self.endpoint.wait(Duration::from_secs(1));
            }
        }
        Ok(&self.done)
    }

    /// Receives a message, if there is one.
    pub fn receive(&mut self, message: &mut Vec<u8>) -> bool {
        self.endpoint.receive(message)
    }

    /// Whether the connection is broken.
    pub fn is_broken(&self) -> bool {
        self.endpoint.is_broken()
    }
}
