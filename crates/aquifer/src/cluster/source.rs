//! Where the cluster's directory is, and how to get to it.

use std::path::PathBuf;
use std::sync::Arc;

use aquifer_directory::{Directory, DirectoryError, embedded};
#[cfg(feature = "etcd")]
use aquifer_directory_etcd::{self as etcd, AddressError, EtcdAddress, TlsFiles};

use super::part::Part;
use crate::settings::DirectorySettings;
use crate::state::StateDir;

/// Why there is no such place.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// No etcd has this address.
    #[cfg(feature = "etcd")]
    #[error(transparent)]
    Address(#[from] AddressError),
    /// An etcd, in a build without.
    #[cfg(not(feature = "etcd"))]
    #[error("this program was built without etcd, which {0} needs: build it with the cargo feature `etcd`")]
    NoEtcd(String),
    /// It is nothing that we know.
    #[error(
        "\"{0}\" is no directory: write embedded, unix:PATH, or etcd://HOST:PORT[,HOST:PORT...][/CLUSTER]"
    )]
    Unknown(String),
    /// Files without a use.
    #[error("certificates are for a directory at etcds://, and this one is at {0}")]
    NoTls(String),
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Place {
    /// The one in the cluster's folder.
    Embedded,
    /// One that is served elsewhere on this machine.
    Unix(PathBuf),
    /// An etcd, and the certificates for it.
    #[cfg(feature = "etcd")]
    Etcd(Box<EtcdAddress>, TlsFiles),
}

/// Where the cluster's directory is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Source {
    place: Place,
}

impl Source {
    /// What settings say.
    ///
    /// # Errors
    /// If that makes no sense.
    pub fn new(settings: &DirectorySettings) -> Result<Self, SourceError> {
        let place = parse(settings.address.as_deref().unwrap_or("embedded"), settings)?;
        let has_files = settings.ca.is_some() || settings.cert.is_some() || settings.key.is_some();
        if has_files && !place.is_tls() {
            return Err(SourceError::NoTls(
                settings.address.clone().unwrap_or_else(|| "embedded".to_owned()),
            ));
        }
        Ok(Self { place })
    }

    /// Whether it is a part of the cluster in the cluster's folder.
    pub fn is_own(&self) -> bool {
        self.place == Place::Embedded
    }

    /// Connect to it.
    ///
    /// # Errors
    /// The directory's.
    pub fn connect(&self, state: &StateDir) -> Result<Arc<dyn Directory>, DirectoryError> {
        Ok(match &self.place {
            Place::Embedded => Arc::new(embedded::connect(&state.socket(&Part::Directory.to_string()))?),
            Place::Unix(path) => Arc::new(embedded::connect(path)?),
            #[cfg(feature = "etcd")]
            Place::Etcd(address, tls) => Arc::new(etcd::connect(address, tls)?),
        })
    }
}

impl Place {
    fn is_tls(&self) -> bool {
        match self {
            Self::Embedded | Self::Unix(_) => false,
            #[cfg(feature = "etcd")]
            Self::Etcd(address, _) => address.uses_tls,
        }
    }
}

#[cfg(feature = "etcd")]
fn etcd_at(text: &str, settings: &DirectorySettings) -> Result<Place, SourceError> {
    let DirectorySettings { ca, cert, key, .. } = settings.clone();
    Ok(Place::Etcd(Box::new(text.parse()?), TlsFiles { ca, certificate: cert, key }))
}

#[cfg(not(feature = "etcd"))]
fn etcd_at(text: &str, _: &DirectorySettings) -> Result<Place, SourceError> {
    Err(SourceError::NoEtcd(text.to_owned()))
}

fn parse(text: &str, settings: &DirectorySettings) -> Result<Place, SourceError> {
    if text == "embedded" {
        return Ok(Place::Embedded);
    }
    if text.starts_with("etcd://") || text.starts_with("etcds://") {
        return etcd_at(text, settings);
    }
    match text.strip_prefix("unix:").unwrap_or(text) {
        // Parts run in another folder than the one in which this was typed.
        path if path.starts_with('/') => Ok(Place::Unix(path.into())),
        _ => Err(SourceError::Unknown(text.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Place, SourceError> {
        super::parse(text, &DirectorySettings::default())
    }

    #[test]
    fn places_are_told_apart() {
        assert_eq!(parse("embedded").unwrap(), Place::Embedded);
        assert_eq!(parse("unix:/run/x.sock").unwrap(), Place::Unix("/run/x.sock".into()));
        assert_eq!(parse("/run/x.sock").unwrap(), Place::Unix("/run/x.sock".into()));
        assert!(matches!(parse("etcd://h:1").unwrap(), Place::Etcd(address, _) if !address.uses_tls));
        for wrong in ["", "x.sock", "unix:x", "redis://h:1", "etcd"] {
            assert!(matches!(parse(wrong), Err(SourceError::Unknown(_))), "{wrong}");
        }
        assert!(matches!(parse("etcd://h"), Err(SourceError::Address(_))));
    }

    #[test]
    fn certificates_without_tls_are_a_mistake() {
        let settings = |address: &str| DirectorySettings {
            address: Some(address.to_owned()),
            ca: Some("/ca.pem".into()),
            ..Default::default()
        };
        assert!(matches!(Source::new(&settings("etcd://h:1")), Err(SourceError::NoTls(_))));
        assert!(Source::new(&settings("etcds://h:1")).is_ok());
        assert!(Source::new(&DirectorySettings::default()).unwrap().is_own());
    }
}
