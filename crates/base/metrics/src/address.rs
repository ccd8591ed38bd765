//! Addresses at which metrics are served.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

/// Prefix of the address of a Unix socket.
const UNIX_PREFIX: &str = "unix:";

/// An address that this machine alone can reach.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum MetricsAddress {
    /// A port of a loopback address, which all users of the machine can read.
    Tcp(SocketAddr),
    /// A Unix socket, which only the user of the daemon can read.
    Unix(PathBuf),
}

/// Why metrics cannot be served at an address.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MetricsAddressError {
    /// Other machines can reach the address.
    #[error(
        "{0} can be reached from other machines, and the metrics server has no authentication: \
         use an address of this machine, such as 127.0.0.1:7480, or unix:PATH, with a collector on \
         this machine, or a proxy with TLS and authentication in front of it"
    )]
    NotLocal(SocketAddr),
    /// The path of the socket is not absolute; a daemon may have any working folder.
    #[error("{0} does not begin with /: use the absolute path of the socket")]
    RelativePath(String),
    /// The text has neither form.
    #[error("\"{0}\" is neither an address of this machine, such as 127.0.0.1:7480, nor unix:PATH")]
    Invalid(String),
}

impl FromStr for MetricsAddress {
    type Err = MetricsAddressError;

    fn from_str(text: &str) -> Result<Self, MetricsAddressError> {
        if let Some(path) = text.strip_prefix(UNIX_PREFIX) {
            return match path.strip_prefix('/') {
                Some("") => Err(MetricsAddressError::Invalid(text.to_owned())),
                Some(_) => Ok(Self::Unix(path.into())),
                None => Err(MetricsAddressError::RelativePath(path.to_owned())),
            };
        }
        let address: SocketAddr = text.parse().map_err(|_| MetricsAddressError::Invalid(text.to_owned()))?;
        if address.ip().is_loopback() {
            Ok(Self::Tcp(address))
        } else {
            Err(MetricsAddressError::NotLocal(address))
        }
    }
}

impl fmt::Display for MetricsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "{address}"),
            Self::Unix(path) => write!(f, "{UNIX_PREFIX}{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_this_machine_are_parsed_and_displayed() {
        for text in ["127.0.0.1:7480", "127.9.8.7:0", "[::1]:80", "unix:/run/aquifer/node.metrics"] {
            let address: MetricsAddress = text.parse().expect(text);
            assert_eq!(address.to_string(), text);
        }
    }

    #[test]
    fn an_address_that_other_machines_reach_is_refused_with_advice() {
        for text in ["0.0.0.0:7480", "10.0.0.7:7480", "[::]:7480", "[2001:db8::1]:1", "[::ffff:127.0.0.1]:1"]
        {
            let why = text.parse::<MetricsAddress>().expect_err(text).to_string();
            assert!(why.contains("unix:PATH") && why.contains("TLS") && why.contains("127.0.0.1"), "{why}");
        }
    }

    #[test]
    fn invalid_addresses_are_refused() {
        for text in
            ["", "7480", "localhost:7480", "127.0.0.1", "127.0.0.1:70000", "unix:/", "http://127.0.0.1:1/"]
        {
            assert_eq!(text.parse::<MetricsAddress>(), Err(MetricsAddressError::Invalid(text.into())));
        }
        for path in ["", "metrics.sock", "./x"] {
            assert_eq!(
                format!("unix:{path}").parse::<MetricsAddress>(),
                Err(MetricsAddressError::RelativePath(path.into()))
            );
        }
    }
}
