//! Where a node's memory is reached, as the directory names it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use crate::handshake::ClusterKey;
use crate::shm;
use crate::target::Identity;
use crate::target::{Target, TargetError};
use crate::tcp::{self, ConnectOptions};
use crate::work::{Endpoint, EndpointError};

/// Connects to the target at an address.
pub type ConnectFn = fn(SocketAddr, &ClusterKey, Identity) -> Result<Box<dyn Endpoint>, EndpointError>;
/// Opens a target at an address of this machine; returns it with the address where it listens.
pub type ListenFn = fn(SocketAddr, &ClusterKey) -> Result<(Arc<dyn Target>, SocketAddr), TargetError>;

/// The provider for RDMA devices. It is a crate of its own, which a program links and installs if it wants it.
#[derive(Clone, Copy, Debug)]
pub struct VerbsProvider {
    /// For initiators.
    pub connect: ConnectFn,
    /// For targets. The address is that of a device.
    pub listen: ListenFn,
}

static VERBS: OnceLock<VerbsProvider> = OnceLock::new();

impl VerbsProvider {
    /// Makes it the process' provider for [`FabricAddress::Verbs`]. The first one stays.
    pub fn install(self) {
        let _ = VERBS.set(self);
    }

    /// The one that was installed.
    #[must_use]
    pub fn installed() -> Option<Self> {
        VERBS.get().copied()
    }
}

/// What a program without that provider says.
pub const WITHOUT_VERBS: &str =
    "this program was built without RDMA: build it with the cargo feature `verbs`";

/// A provider and an address in its terms.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FabricAddress {
    /// A Unix socket of this machine.
    Shm(PathBuf),
    /// Any machine.
    Tcp(SocketAddr),
    /// A machine with an RDMA device, which has this address.
    Verbs(SocketAddr),
}

impl FabricAddress {
    /// Read what [`Self::provider`] and [`Self::address`] gave.
    ///
    /// # Errors
    /// A sentence, if this program knows no such provider or the address is none of its.
    pub fn parse(provider: &str, address: &str) -> Result<Self, String> {
        match provider {
            "shm" => Ok(Self::Shm(address.into())),
            "tcp" | "verbs" => match address.parse() {
                Ok(address) if provider == "tcp" => Ok(Self::Tcp(address)),
                Ok(address) => Ok(Self::Verbs(address)),
                Err(_) => Err(format!("\"{address}\" is not an address such as 10.0.0.1:7400")),
            },
            _ => Err(format!("this program knows no fabric \"{provider}\"")),
        }
    }

    /// The provider's name.
    #[must_use]
    pub fn provider(&self) -> &'static str {
        match self {
            Self::Shm(_) => "shm",
            Self::Tcp(_) => "tcp",
            Self::Verbs(_) => "verbs",
        }
    }

    /// The address in the provider's terms.
    #[must_use]
    pub fn address(&self) -> String {
        match self {
            Self::Shm(path) => path.display().to_string(),
            Self::Tcp(address) | Self::Verbs(address) => address.to_string(),
        }
    }

    /// The same, at another address.
    #[must_use]
    pub fn at(self, address: SocketAddr) -> Self {
        match self {
            Self::Shm(path) => Self::Shm(path),
            Self::Tcp(_) => Self::Tcp(address),
            Self::Verbs(_) => Self::Verbs(address),
        }
    }

    /// Connect. Over a network both ends need the cluster's key, and `options` count.
    ///
    /// # Errors
    /// What the provider says; or that there is no key.
    pub fn connect(
        &self,
        who: Identity,
        key: Option<&ClusterKey>,
        options: &ConnectOptions,
    ) -> Result<Box<dyn Endpoint>, EndpointError> {
        match (self, key) {
            (Self::Shm(path), _) => shm::connect(path, who),
            (Self::Tcp(address), Some(key)) => tcp::connect(*address, key, who, options.clone()),
            (Self::Verbs(address), Some(key)) => match VerbsProvider::installed() {
                Some(verbs) => (verbs.connect)(*address, key, who),
                None => {
                    let (address, reason) = (address.to_string(), WITHOUT_VERBS.to_owned());
                    Err(EndpointError::Refused { address, reason })
                }
            },
            (Self::Tcp(address) | Self::Verbs(address), None) => Err(EndpointError::Refused {
                address: address.to_string(),
                reason: "this host has no cluster key to prove itself with: give it --key FILE".into(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let address = "[::1]:7400".parse().unwrap();
        for reach in [
            FabricAddress::Shm("/run/x/node-1.sock".into()),
            FabricAddress::Tcp(address),
            FabricAddress::Verbs(address),
        ] {
            assert_eq!(FabricAddress::parse(reach.provider(), &reach.address()), Ok(reach));
        }
        assert!(FabricAddress::parse("tcp", "somewhere").unwrap_err().contains("somewhere"));
        assert!(FabricAddress::parse("pigeon", "x").unwrap_err().contains("pigeon"));
    }
}
