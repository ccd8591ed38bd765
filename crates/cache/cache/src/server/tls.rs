//! TLS: certificates, and the state of a connection that is encrypted.

use std::fmt;
use std::io::{self, Read, Write};
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use rustls::crypto::ring::sign::any_supported_type;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{
    CertificateDer, PrivateKeyDer, PrivatePkcs1KeyDer, PrivatePkcs8KeyDer, PrivateSec1KeyDer,
};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection};

/// The files with the certificates of a server.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TlsFiles {
    /// The server's certificate chain, in PEM.
    pub chain: PathBuf,
    /// The server's private key, in PEM.
    pub key: PathBuf,
    /// Certificates of the authorities that sign those of clients, in PEM.
    pub client_ca: Option<PathBuf>,
    /// Whether a client must have a certificate. If not, a certificate that a client shows must be
    /// valid.
    pub requires_client: bool,
}

/// The certificates of a server, which can be reloaded while it runs.
pub struct TlsSettings {
    files: TlsFiles,
    config: Mutex<Arc<ServerConfig>>,
}

impl TlsSettings {
    /// Reads the certificates.
    ///
    /// # Errors
    /// If a file cannot be read, or has no usable certificate or key.
    pub fn read(files: TlsFiles) -> Result<Self, String> {
        let config = Mutex::new(read(&files)?);
        Ok(Self { files, config })
    }

    /// Whether clients must have certificates.
    #[must_use]
    pub fn requires_client_certificates(&self) -> bool {
        self.files.requires_client
    }

    /// Reloads the certificates, for connections that are accepted from now on.
    ///
    /// # Errors
    /// The errors of [`Self::read`]; the previous certificates stay in use then.
    pub fn refresh(&self) -> Result<(), String> {
        let config = read(&self.files)?;
        *self.config.lock() = config;
        Ok(())
    }

    /// Creates the state of a new connection.
    ///
    /// # Errors
    /// If `rustls` rejects the configuration.
    pub fn accept(&self) -> Result<TlsStream, rustls::Error> {
        let config = Arc::clone(&self.config.lock());
        let mut connection = ServerConnection::new(config)?;
        // Replies of one turn are bounded, and no more are written while some are unsent.
        connection.set_buffer_limit(None);
        Ok(TlsStream { connection })
    }
}

impl fmt::Debug for TlsSettings {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("TlsSettings").field("files", &self.files).finish_non_exhaustive()
    }
}

fn read(files: &TlsFiles) -> Result<Arc<ServerConfig>, String> {
    let chain = certificates(&files.chain)?;
    let key = private_key(&files.key)?;
    let builder = ServerConfig::builder();
    let builder = match &files.client_ca {
        None if files.requires_client => {
            return Err("clients must have certificates, but no file has those that sign them: set \
                ssl_ca_cert"
                .to_owned());
        }
        None => builder.with_no_client_auth(),
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for certificate in certificates(path)? {
                roots.add(certificate).map_err(|error| format!("{}: {error}", path.display()))?;
            }
            let verifier = WebPkiClientVerifier::builder(Arc::new(roots));
            let verifier = if files.requires_client { verifier } else { verifier.allow_unauthenticated() };
            let verifier = verifier.build().map_err(|error| format!("{}: {error}", path.display()))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let config = builder.with_single_cert(chain, key).map_err(|error| match error {
        rustls::Error::InconsistentKeys(_) => format!(
            "the private key of {} is not that of the certificate of {}",
            files.key.display(),
            files.chain.display()
        ),
        error => format!("the certificate of {} cannot be used: {error}", files.chain.display()),
    })?;
    Ok(Arc::new(config))
}

/// The first private key of a file in PEM. As in OpenSSL, the label may be that of another form of
/// key.
fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, String> {
    let labelled = PrivateKeyDer::from_pem_file(path)
        .map_err(|error| format!("no private key can be read from {}: {error}", path.display()))?;
    let Err(error) = any_supported_type(&labelled) else { return Ok(labelled) };
    let der = labelled.secret_der().to_vec();
    let forms: [PrivateKeyDer<'static>; 3] = [
        PrivatePkcs8KeyDer::from(der.clone()).into(),
        PrivatePkcs1KeyDer::from(der.clone()).into(),
        PrivateSec1KeyDer::from(der).into(),
    ];
    let usable = forms.into_iter().find(|form| any_supported_type(form).is_ok());
    usable.ok_or_else(|| format!("the private key of {} cannot be used: {error}", path.display()))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match read {
        Ok(certificates) if certificates.is_empty() => Err(format!("{} has no certificate", path.display())),
        Ok(certificates) => Ok(certificates),
        Err(error) => Err(format!("certificates cannot be read from {}: {error}", path.display())),
    }
}

/// The state of an encrypted connection.
pub struct TlsStream {
    connection: ServerConnection,
}

impl fmt::Debug for TlsStream {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("TlsStream").finish_non_exhaustive()
    }
}

/// A socket, as `rustls` reads and writes it.
struct Socket<'a>(BorrowedFd<'a>);

impl Read for Socket<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::io::retry_on_intr(|| rustix::io::read(self.0, &mut *buffer))?)
    }
}

impl Write for Socket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let flags = rustix::net::SendFlags::NOSIGNAL;
        Ok(rustix::io::retry_on_intr(|| rustix::net::send(self.0, bytes, flags))?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl TlsStream {
    /// Receives and decrypts bytes, and appends them to `bytes` up to its capacity. Returns whether
    /// the client may send more.
    ///
    /// # Errors
    /// If the connection is broken, or if the client violates the protocol.
    pub fn receive(&mut self, socket: BorrowedFd<'_>, bytes: &mut Vec<u8>) -> io::Result<bool> {
        let mut is_open = true;
        // Bytes that were decrypted before and had no room come first.
        self.append_decrypted(bytes, &mut is_open)?;
        if bytes.len() == bytes.capacity() {
            return Ok(is_open);
        }
        match self.connection.read_tls(&mut Socket(socket)) {
            Ok(0) => is_open = false,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(is_open),
            Err(error) => return Err(error),
        }
        let processed = self.connection.process_new_packets();
        // Sends records of the handshake, or the alert that ends the connection.
        self.flush(socket)?;
        processed.map_err(io::Error::other)?;
        self.append_decrypted(bytes, &mut is_open)?;
        Ok(is_open)
    }

    fn append_decrypted(&mut self, bytes: &mut Vec<u8>, is_open: &mut bool) -> io::Result<()> {
        loop {
            let len = bytes.len();
            if len == bytes.capacity() {
                return Ok(());
            }
            bytes.resize(bytes.capacity(), 0);
            let read = self.connection.reader().read(&mut bytes[len..]);
            bytes.truncate(len + read.as_ref().copied().unwrap_or(0));
            match read {
                Ok(0) => {
                    *is_open = false;
                    return Ok(());
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                // The client has closed its socket without a `close_notify` alert.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    *is_open = false;
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Encrypts bytes, and sends as many as the socket accepts.
    ///
    /// # Errors
    /// If the connection is broken.
    pub fn send(&mut self, socket: BorrowedFd<'_>, parts: &[&[u8]]) -> io::Result<()> {
        for part in parts {
            self.connection.writer().write_all(part)?;
        }
        self.flush(socket)
    }

    /// Sends encrypted bytes that were not sent yet.
    ///
    /// # Errors
    /// If the connection is broken.
    pub fn flush(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        while self.connection.wants_write() {
            match self.connection.write_tls(&mut Socket(socket)) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Whether encrypted bytes were not sent yet.
    pub fn has_backlog(&self) -> bool {
        self.connection.wants_write()
    }
}
