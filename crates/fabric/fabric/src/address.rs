//! The address of a memory node: a provider and an address in its terms, as the directory records
//! them.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use crate::handshake::{Admission, ClusterKey, Credential, Refusal};
use crate::shm;
use crate::target::Identity;
use crate::target::{Target, TargetError};
use crate::tcp::{self, ConnectOptions};
use crate::work::{Endpoint, EndpointError};

/// A function that connects to the target at an address.
pub type ConnectFn = fn(SocketAddr, &Credential, Identity) -> Result<Box<dyn Endpoint>, EndpointError>;
/// Opens a target at an address of this machine. Returns the target and the address at which it
/// listens.
pub type ListenFn =
    fn(SocketAddr, &ClusterKey, Admission) -> Result<(Arc<dyn Target>, SocketAddr), TargetError>;

/// The provider for RDMA devices. It is a separate crate, which a program links and installs.
#[derive(Clone, Copy, Debug)]
pub struct VerbsProvider {
    /// Connects an initiator.
    pub connect: ConnectFn,
    /// Opens a target at the address of a device.
    pub listen: ListenFn,
}

static VERBS: OnceLock<VerbsProvider> = OnceLock::new();

impl VerbsProvider {
    /// Installs this as the provider for [`FabricAddress::Verbs`]. The first installed provider
    /// stays.
    pub fn install(self) {
        let _ = VERBS.set(self);
    }

    /// The installed provider.
    #[must_use]
    pub fn installed() -> Option<Self> {
        VERBS.get().copied()
    }
}

/// The error message of a program that has no provider for RDMA devices.
pub const WITHOUT_VERBS: &str =
    "this program was built without RDMA: build it with the cargo feature `verbs`";

/// A provider and an address in its terms.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FabricAddress {
    /// The path of a Unix socket on this machine.
    Shm(PathBuf),
    /// The address of a TCP listener on any machine.
    Tcp(SocketAddr),
    /// The address of an RDMA device on any machine.
    Verbs(SocketAddr),
}

/// Why an address cannot be parsed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FabricAddressError {
    /// The provider is unknown.
    #[error("unknown fabric \"{0}\": this program supports shm, tcp and verbs")]
    UnknownProvider(String),
    /// The address is not an IP address with a port.
    #[error("\"{0}\" is not an address such as 10.0.0.1:7400")]
    Malformed(String),
}

impl FabricAddress {
    /// Parses a provider and an address as [`Self::provider`] and [`Self::address`] return them.
    ///
    /// # Errors
    /// If this program does not know the provider or cannot parse the address.
    pub fn parse(provider: &str, address: &str) -> Result<Self, FabricAddressError> {
        match provider {
            "shm" => Ok(Self::Shm(address.into())),
            "tcp" | "verbs" => match address.parse() {
                Ok(address) if provider == "tcp" => Ok(Self::Tcp(address)),
                Ok(address) => Ok(Self::Verbs(address)),
                Err(_) => Err(FabricAddressError::Malformed(address.to_owned())),
            },
            _ => Err(FabricAddressError::UnknownProvider(provider.to_owned())),
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

    /// Replaces the address of a TCP listener or an RDMA device. A path stays as it is.
    #[must_use]
    pub fn at(self, address: SocketAddr) -> Self {
        match self {
            Self::Shm(path) => Self::Shm(path),
            Self::Tcp(_) => Self::Tcp(address),
            Self::Verbs(_) => Self::Verbs(address),
        }
    }

    /// Connects to the target. Over a network both ends need the cluster key, and `options` apply
    /// to TCP.
    ///
    /// # Errors
    /// The errors of the provider; or that the cluster key is missing.
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
                Some(verbs) => (verbs.connect)(*address, &Credential::Member(key.clone()), who),
                None => {
                    let (address, refusal) = (address.to_string(), Refusal::other(WITHOUT_VERBS));
                    Err(EndpointError::Refused { address, refusal })
                }
            },
            (Self::Tcp(address) | Self::Verbs(address), None) => Err(EndpointError::Refused {
                address: address.to_string(),
                refusal: Refusal::other("this host has no cluster key: give it one with --key FILE"),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_parse_as_written() {
        let address = "[::1]:7400".parse().unwrap();
        for reach in [
            FabricAddress::Shm("/run/x/node-1.sock".into()),
            FabricAddress::Tcp(address),
            FabricAddress::Verbs(address),
        ] {
            assert_eq!(FabricAddress::parse(reach.provider(), &reach.address()), Ok(reach));
        }
        assert!(FabricAddress::parse("tcp", "somewhere").unwrap_err().to_string().contains("somewhere"));
        assert!(FabricAddress::parse("pigeon", "x").unwrap_err().to_string().contains("pigeon"));
    }
}
