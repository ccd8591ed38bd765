//! Where the cluster's directory is, and how to get to it.

use std::path::PathBuf;
use std::sync::Arc;

use aquifer_directory::etcd::{self, AddressError, EtcdAddress, TlsFiles};
use aquifer_directory::{Directory, DirectoryError, embedded};

use super::part::Part;
use crate::settings::DirectorySettings;
use crate::state::StateDir;

/// Why there is no such place.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// No etcd has this address.
    #[error(transparent)]
    Address(#[from] AddressError),
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
    /// An etcd.
    Etcd(Box<EtcdAddress>),
}

/// Where the cluster's directory is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Source {
    place: Place,
    tls: TlsFiles,
}

impl Source {
    /// What settings say.
    ///
    /// # Errors
    /// If that makes no sense.
    pub fn new(settings: &DirectorySettings) -> Result<Self, SourceError> {
        let DirectorySettings { address, ca, cert, key } = settings.clone();
        let place = parse(address.as_deref().unwrap_or("embedded"))?;
        let is_tls = matches!(&place, Place::Etcd(address) if address.tls);
        let tls = TlsFiles { ca, certificate: cert, key };
        if !is_tls && tls != TlsFiles::default() {
            return Err(SourceError::NoTls(address.unwrap_or_else(|| "embedded".to_owned())));
        }
        Ok(Self { place, tls })
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
            Place::Etcd(address) => Arc::new(etcd::connect(address, &self.tls)?),
        })
    }
}

fn parse(text: &str) -> Result<Place, SourceError> {
    if text == "embedded" {
        return Ok(Place::Embedded);
    }
    if text.starts_with("etcd://") || text.starts_with("etcds://") {
        return Ok(Place::Etcd(Box::new(text.parse()?)));
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

    #[test]
    fn places_are_told_apart() {
        assert_eq!(parse("embedded").unwrap(), Place::Embedded);
        assert_eq!(parse("unix:/run/x.sock").unwrap(), Place::Unix("/run/x.sock".into()));
        assert_eq!(parse("/run/x.sock").unwrap(), Place::Unix("/run/x.sock".into()));
        assert!(matches!(parse("etcd://h:1").unwrap(), Place::Etcd(address) if !address.tls));
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
