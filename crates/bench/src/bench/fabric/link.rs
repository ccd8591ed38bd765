//! This process's end: the other process, an endpoint to it, and own memory to compare with.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use aquifer_fabric::{
    Completion, Endpoint, Host, Identity, LocalKey, LocalSlice, Memory, Region, RemoteAddr, Tenant, Work, shm,
};

use super::server::{self, REGION_BYTES};
use crate::bench::BenchError;
use crate::bench::support::other::Other;

/// Room for the largest batch.
const LOCAL_BYTES: usize = 1 << 20;

/// A connection to the other process.
#[derive(Debug)]
pub struct Link {
    endpoint: Box<dyn Endpoint>,
    region: Region,
    local: Arc<Memory>,
    key: LocalKey,
    /// Own shared memory, as large as the other's.
    pub bare: Arc<Memory>,
    done: Vec<Completion>,
    server: Option<Other>,
    /// Where the other process serves over TCP, and where it echoes.
    pub elsewhere: Option<(SocketAddr, SocketAddr)>,
}

/// What the other process says when it serves: two addresses.
fn parse_ready(line: &str) -> Option<(SocketAddr, SocketAddr)> {
    let mut words = line.split_ascii_whitespace();
    Some((words.next()?.parse().ok()?, words.next()?.parse().ok()?))
}

impl Link {
    /// Starts the other process and connects to it.
    ///
    /// # Errors
    /// If either fails.
    pub fn start() -> Result<Self, BenchError> {
        let (server, ready, path) = Other::start("fabric")?;
        let Some(elsewhere) = parse_ready(&ready) else {
            return Err(BenchError::Fabric {
                reason: format!("the other process said {ready:?}, which is no pair of addresses"),
            });
        };
        let mut link = Self::connect(&path)?;
        link.server = Some(server);
        link.elsewhere = Some(elsewhere);
        Ok(link)
    }

    /// Connects to whoever listens at `path`.
    ///
    /// # Errors
    /// If nobody does.
    pub fn connect(path: &Path) -> Result<Self, BenchError> {
        let failed = |reason: String| BenchError::Fabric { reason };
        let who = Identity { host: Host(1), epoch: 1, tenant: Tenant(0) };
        let endpoint = shm::connect(path, who).map_err(|error| failed(error.to_string()))?;
        Self::over(endpoint, REGION_BYTES)
    }

    /// With own memory of `bare_bytes` to compare with.
    ///
    /// # Errors
    /// If the other end lends nothing, or there is no memory.
    pub fn over(mut endpoint: Box<dyn Endpoint>, bare_bytes: usize) -> Result<Self, BenchError> {
        let failed = |reason: String| BenchError::Fabric { reason };
        let region = endpoint.regions().first().cloned();
        let region = region.ok_or_else(|| failed("the other process lends no memory".into()))?;
        let local = server::filled(LOCAL_BYTES)?;
        let key = endpoint.register_local(Arc::clone(&local)).map_err(|error| failed(error.to_string()))?;
        let bare = server::filled(bare_bytes)?;
        Ok(Self { endpoint, region, local, key, bare, done: Vec::new(), server: None, elsewhere: None })
    }

    /// The other process's number.
    pub fn server(&self) -> u32 {
        self.server.as_ref().map_or(0, Other::pid)
    }

    /// Own memory, where data arrives.
    pub fn local(&self) -> &Memory {
        &self.local
    }

    /// A range of own memory.
    pub fn slice(&self, offset: u64, len: u32) -> LocalSlice {
        LocalSlice { key: self.key, offset, len }
    }

    /// A place in the other's memory.
    pub fn remote(&self, offset: usize) -> RemoteAddr {
        RemoteAddr { addr: self.region.base + offset as u64, key: self.region.key }
    }

    #[cfg(feature = "verbs")]
    /// What the other end grants.
    pub fn limits(&self) -> aquifer_fabric::Limits {
        self.endpoint.limits()
    }

    /// Posts a batch and polls until all of it has ended; the outcome of the last.
    ///
    /// # Errors
    /// If one fails.
    #[inline]
    pub fn all(&mut self, batch: &[Work]) -> Result<u64, BenchError> {
        let mut last = 0;
        for completion in self.outcomes(batch)? {
            last = completion.outcome.map_err(|error| BenchError::Fabric { reason: error.to_string() })?;
        }
        Ok(last)
    }

    /// Posts a batch and polls until all of it has ended.
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

    /// Takes a message that has come, if any.
    pub fn receive(&mut self, message: &mut Vec<u8>) -> bool {
        self.endpoint.receive(message)
    }

    /// Whether the other process is gone.
    pub fn is_broken(&self) -> bool {
        self.endpoint.is_broken()
    }
}
