//! Certificates for the peers, and connections that they encrypt.

use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use aquifer_bench::BenchError;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, IpAddr, Ipv4Addr, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

/// An encrypted connection.
pub type TlsStream = StreamOwned<ClientConnection, TcpStream>;

/// A certificate of this machine that is trusted by the bench alone.
#[derive(Debug)]
pub struct Certificate {
    pub key: PathBuf,
    pub certificate: PathBuf,
}

impl Certificate {
    /// Creates a certificate in a folder.
    ///
    /// # Errors
    /// If openssl is not installed or fails.
    pub fn make(folder: &Path) -> Result<Self, BenchError> {
        let made = Self { key: folder.join("tls.key"), certificate: folder.join("tls.crt") };
        let mut command = Command::new("openssl");
        command.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]);
        command.args(["-subj", "/CN=bench", "-days", "2", "-addext", "subjectAltName=IP:127.0.0.1"]);
        command.args(["-addext", "basicConstraints=critical,CA:FALSE"]);
        command.arg("-keyout").arg(&made.key).arg("-out").arg(&made.certificate);
        let output = command.output().map_err(BenchError::io("start", Path::new("openssl")))?;
        if output.status.success() {
            return Ok(made);
        }
        let reason = String::from_utf8_lossy(&output.stderr).into_owned();
        Err(BenchError::Server { program: "openssl".into(), reason })
    }

    /// Encrypts a connection to a server with this certificate.
    ///
    /// # Errors
    /// If the certificate cannot be read.
    pub fn connect(&self, stream: TcpStream) -> Result<TlsStream, BenchError> {
        let failed = |error: &dyn std::fmt::Display| BenchError::Server {
            program: "TLS".into(),
            reason: error.to_string(),
        };
        let certificate = CertificateDer::from_pem_file(&self.certificate).map_err(|error| failed(&error))?;
        let mut roots = RootCertStore::empty();
        roots.add(certificate).map_err(|error| failed(&error))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| failed(&error))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = ServerName::IpAddress(IpAddr::V4(Ipv4Addr::from([127, 0, 0, 1])));
        let connection = ClientConnection::new(Arc::new(config), name).map_err(|error| failed(&error))?;
        Ok(StreamOwned::new(connection, stream))
    }
}
