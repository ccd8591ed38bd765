//! Location of the cluster's directory, and the connection to it.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use aquifer_directory::{Directory, DirectoryError, embedded};
#[cfg(feature = "etcd")]
use aquifer_directory_etcd::{self as etcd, AddressError, EtcdAddress, TlsFiles};

use super::daemon::Daemon;
use crate::settings::DirectorySettings;
use crate::state::StateDir;

/// Why the directory of the settings cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LocationError {
    /// The address of an etcd is not valid.
    #[cfg(feature = "etcd")]
    #[error(transparent)]
    Address(#[from] AddressError),
    /// The address of an etcd, in a build without the feature `etcd`.
    #[cfg(not(feature = "etcd"))]
    #[error("this build has no support for etcd, which {0} needs: build with the cargo feature `etcd`")]
    NoEtcd(String),
    /// The address has no known form.
    #[error(
        "\"{0}\" is not the address of a directory: write embedded, unix:PATH, or \
            etcd://HOST:PORT[,HOST:PORT...][/CLUSTER]"
    )]
    Unknown(String),
    /// Certificates for a directory that does not use TLS.
    #[error("certificates are for a directory at etcds://, but the directory is {0}")]
    NoTls(String),
}

/// Location of the cluster's directory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DirectoryLocation {
    /// The embedded directory of the cluster in the state folder.
    Embedded,
    /// The socket of another embedded directory on this machine.
    Unix(PathBuf),
    /// An etcd, and the certificates for it.
    #[cfg(feature = "etcd")]
    Etcd(Box<EtcdAddress>, TlsFiles),
}

impl DirectoryLocation {
    /// The location that settings name.
    ///
    /// # Errors
    /// If the address is not valid, or there are certificates for a location without TLS.
    pub fn new(settings: &DirectorySettings) -> Result<Self, LocationError> {
        let location = parse(settings.address.as_deref().unwrap_or("embedded"), settings)?;
        let has_files = settings.ca.is_some() || settings.cert.is_some() || settings.key.is_some();
        if has_files && !location.is_tls() {
            return Err(LocationError::NoTls(
                settings.address.clone().unwrap_or_else(|| "embedded".to_owned()),
            ));
        }
        Ok(location)
    }

    /// Whether the directory is a daemon of the cluster in the state folder.
    pub fn is_own(&self) -> bool {
        *self == Self::Embedded
    }

    /// Connects to the directory.
    ///
    /// # Errors
    /// Those of the directory.
    pub fn connect(&self, state: &StateDir) -> Result<Arc<dyn Directory>, DirectoryError> {
        Ok(match self {
            Self::Embedded => Arc::new(embedded::connect(&state.socket(&Daemon::Directory.to_string()))?),
            Self::Unix(path) => Arc::new(embedded::connect(path)?),
            #[cfg(feature = "etcd")]
            Self::Etcd(address, tls) => Arc::new(etcd::connect(address, tls)?),
        })
    }

    fn is_tls(&self) -> bool {
        match self {
            Self::Embedded | Self::Unix(_) => false,
            #[cfg(feature = "etcd")]
            Self::Etcd(address, _) => address.uses_tls,
        }
    }
}

impl fmt::Display for DirectoryLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Embedded => f.write_str("embedded"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            #[cfg(feature = "etcd")]
            Self::Etcd(address, _) => write!(f, "{address}"),
        }
    }
}

#[cfg(feature = "etcd")]
fn parse_etcd(text: &str, settings: &DirectorySettings) -> Result<DirectoryLocation, LocationError> {
    let DirectorySettings { ca, cert, key, .. } = settings.clone();
    Ok(DirectoryLocation::Etcd(Box::new(text.parse()?), TlsFiles { ca, certificate: cert, key }))
}

#[cfg(not(feature = "etcd"))]
fn parse_etcd(text: &str, _: &DirectorySettings) -> Result<DirectoryLocation, LocationError> {
    Err(LocationError::NoEtcd(text.to_owned()))
}

fn parse(text: &str, settings: &DirectorySettings) -> Result<DirectoryLocation, LocationError> {
    if text == "embedded" {
        return Ok(DirectoryLocation::Embedded);
    }
    if text.starts_with("etcd://") || text.starts_with("etcds://") {
        return parse_etcd(text, settings);
    }
    match text.strip_prefix("unix:").unwrap_or(text) {
        // Daemons have another working directory, so a relative path has no meaning for them.
        path if path.starts_with('/') => Ok(DirectoryLocation::Unix(path.into())),
        _ => Err(LocationError::Unknown(text.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<DirectoryLocation, LocationError> {
        super::parse(text, &DirectorySettings::default())
    }

    #[test]
    fn addresses_are_parsed() {
        assert_eq!(parse("embedded").unwrap(), DirectoryLocation::Embedded);
        assert_eq!(parse("unix:/run/x.sock").unwrap(), DirectoryLocation::Unix("/run/x.sock".into()));
        assert_eq!(parse("/run/x.sock").unwrap(), DirectoryLocation::Unix("/run/x.sock".into()));
        assert!(
            matches!(parse("etcd://h:1").unwrap(), DirectoryLocation::Etcd(address, _) if !address.uses_tls)
        );
        for wrong in ["", "x.sock", "unix:x", "redis://h:1", "etcd"] {
            assert!(matches!(parse(wrong), Err(LocationError::Unknown(_))), "{wrong}");
        }
        assert!(matches!(parse("etcd://h"), Err(LocationError::Address(_))));
    }

    #[test]
    fn certificates_without_tls_are_refused() {
        let settings = |address: &str| DirectorySettings {
            address: Some(address.to_owned()),
            ca: Some("/ca.pem".into()),
            ..Default::default()
        };
        assert!(matches!(DirectoryLocation::new(&settings("etcd://h:1")), Err(LocationError::NoTls(_))));
        assert!(DirectoryLocation::new(&settings("etcds://h:1")).is_ok());
        assert!(DirectoryLocation::new(&DirectorySettings::default()).unwrap().is_own());
    }
}
