//! An HTTP server that answers `GET /metrics`, on its own thread.
//!
//! Metrics are collected for each request.
//! Clients are untrusted: bytes and header lines of a request, connections, and their time are
//! limited.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::fs;
use std::future::poll_fn;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::thread::JoinHandle;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::Bytes;
use hyper::header::{ACCEPT, ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus_client::registry::Registry;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::oneshot;
use tokio::task::AbortHandle;

use crate::address::MetricsAddress;
use crate::mutation::Mutation;
use crate::plain;

/// The path of the metrics.
const PATH: &str = "/metrics";
/// Content type of the metrics for collectors that accept OpenMetrics.
const OPENMETRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Content type of the metrics for other collectors.
const PLAIN_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";
/// Maximum number of connections. A further connection replaces the oldest, which is of a slow
/// client, because a request is answered within milliseconds.
pub const CONNECTIONS_MAX: usize = 16;
/// Maximum bytes of the head of a request, the least limit that the HTTP library allows.
pub const REQUEST_BYTES_MAX: usize = 8192;
/// Maximum number of header lines of a request.
pub const HEADERS_MAX: usize = 64;
/// Timeout of the arrival of a request's head.
pub const REQUEST_TIME: Duration = Duration::from_secs(3);
/// Timeout of a connection. Collectors wait for 10 s by default.
pub const CONNECTION_TIME: Duration = Duration::from_secs(10);
/// Pause after a failure to accept a connection, for example without free descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
const BACKLOG: i32 = 64;

/// Why metrics cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum MetricsError {
    /// The address cannot be used.
    #[error("cannot serve metrics at {address}: {source}; choose another address with --metrics")]
    Listen {
        /// The address.
        address: MetricsAddress,
        /// The cause.
        source: io::Error,
    },
    /// The thread cannot be started.
    #[error("cannot start the thread that serves metrics: {0}")]
    Thread(io::Error),
}

/// A socket that is bound and not served yet.
#[derive(Debug)]
pub struct MetricsListener {
    address: MetricsAddress,
    socket: Socket,
}

#[derive(Debug)]
enum Socket {
    Tcp(std::net::TcpListener),
    Unix(std::os::unix::net::UnixListener, SocketFile),
}

/// The file of a Unix socket. Dropping it removes the file, if it is still that of this socket.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    inode: u64,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if fs::symlink_metadata(&self.path).is_ok_and(|file| file.ino() == self.inode) {
            let _gone = fs::remove_file(&self.path);
        }
    }
}

impl MetricsListener {
    /// Binds the address. Replaces the file of a Unix socket without a listener, and no other file.
    ///
    /// # Errors
    /// [`MetricsError::Listen`] if the address is in use, or the system refuses.
    pub fn bind(address: &MetricsAddress) -> Result<Self, MetricsError> {
        let error = |source| MetricsError::Listen { address: address.clone(), source };
        Ok(match address {
            MetricsAddress::Tcp(port) => {
                let socket = std::net::TcpListener::bind(port).map_err(error)?;
                socket.set_nonblocking(true).map_err(error)?;
                let address = MetricsAddress::Tcp(socket.local_addr().map_err(error)?);
                Self { address, socket: Socket::Tcp(socket) }
            }
            MetricsAddress::Unix(path) => {
                let (socket, file) = listen_at(path).map_err(error)?;
                Self { address: address.clone(), socket: Socket::Unix(socket, file) }
            }
        })
    }

    /// The address; the system's choice if port 0 was requested.
    #[must_use]
    pub fn address(&self) -> &MetricsAddress {
        &self.address
    }
}

/// Listens at `path` with mode 0600.
fn listen_at(path: &Path) -> io::Result<(std::os::unix::net::UnixListener, SocketFile)> {
    remove_stale_socket(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket: OwnedFd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    // No client can connect before `listen`, so the mode is set in time.
    fs::set_permissions(path, PermissionsExt::from_mode(0o600))?;
    let file = SocketFile { path: path.to_owned(), inode: fs::symlink_metadata(path)?.ino() };
    rustix::net::listen(&socket, BACKLOG)?;
    Ok((socket.into(), file))
}

/// Removes the file of a Unix socket without a listener.
fn remove_stale_socket(path: &Path) -> io::Result<()> {
    let file = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        file => file?,
    };
    if !file.file_type().is_socket() {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "the file exists and is not a socket"));
    }
    match std::os::unix::net::UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        Err(error) => Err(error),
        Ok(_) => Err(io::Error::new(io::ErrorKind::AddrInUse, "another process listens there")),
    }
}

/// A running server. Dropping it stops the server.
#[derive(Debug)]
pub struct MetricsServer {
    address: MetricsAddress,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl MetricsServer {
    /// Serves the metrics of a registry.
    ///
    /// # Errors
    /// [`MetricsError::Thread`].
    pub fn start(listener: MetricsListener, registry: Registry) -> Result<Self, MetricsError> {
        let MetricsListener { address, socket } = listener;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(MetricsError::Thread)?;
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new()
            .name("metrics".into())
            .spawn(move || {
                runtime.spawn(serve(socket, Arc::new(registry)));
                // Returns an error, because the sender is dropped and never used.
                let _dropped = runtime.block_on(stopped);
            })
            .map_err(MetricsError::Thread)?;
        tracing::info!(%address, "serving metrics");
        Ok(Self { address, stop: Some(stop), thread: Some(thread) })
    }

    /// The address at which the server listens.
    #[must_use]
    pub fn address(&self) -> &MetricsAddress {
        &self.address
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        drop(self.stop.take());
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("metrics thread panicked");
        }
    }
}

async fn serve(socket: Socket, registry: Arc<Registry>) {
    let served = match socket {
        Socket::Tcp(listener) => match tokio::net::TcpListener::from_std(listener) {
            Ok(listener) => {
                accept(registry, move |cx| listener.poll_accept(cx).map_ok(|(stream, _)| stream)).await
            }
            Err(error) => Err(error),
        },
        Socket::Unix(listener, _name) => match tokio::net::UnixListener::from_std(listener) {
            Ok(listener) => {
                accept(registry, move |cx| listener.poll_accept(cx).map_ok(|(stream, _)| stream)).await
            }
            Err(error) => Err(error),
        },
    };
    let Err(error) = served;
    tracing::error!(%error, "metrics cannot be served");
}

/// Serves connections until the future is dropped.
async fn accept<S>(
    registry: Arc<Registry>,
    mut next: impl FnMut(&mut Context<'_>) -> Poll<io::Result<S>>,
) -> io::Result<Infallible>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    // The oldest is the first.
    let mut connections: VecDeque<AbortHandle> = VecDeque::with_capacity(CONNECTIONS_MAX);
    loop {
        match poll_fn(&mut next).await {
            Ok(stream) => {
                connections.retain(|connection| !connection.is_finished());
                if connections.len() == CONNECTIONS_MAX
                    && let Some(oldest) = connections.pop_front()
                {
                    tracing::debug!("closing the oldest metrics connection for a new one");
                    oldest.abort();
                }
                let registry = Arc::clone(&registry);
                let served = tokio::spawn(async move { serve_connection(stream, &registry).await });
                connections.push_back(served.abort_handle());
            }
            Err(error) => {
                tracing::debug!(%error, "accepting a metrics connection failed");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

pub(crate) async fn serve_connection(stream: impl AsyncRead + AsyncWrite + Unpin, registry: &Registry) {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_TIME)
        .keep_alive(false)
        .max_buf_size(REQUEST_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .serve_connection(
            TokioIo::new(stream),
            service_fn(async |request| Ok::<_, Infallible>(answer(&request, registry))),
        );
    match tokio::time::timeout(CONNECTION_TIME, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "a metrics connection failed"),
        Err(_) => tracing::debug!("a metrics connection timed out"),
    }
}

fn answer<B>(request: &Request<B>, registry: &Registry) -> Response<Full<Bytes>> {
    if request.uri().path() != PATH {
        return text_response(StatusCode::NOT_FOUND, "metrics are at /metrics\n");
    }
    // The HTTP library leaves out the text of an answer to HEAD.
    let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
    if !is_read && !Mutation::AnswerAnyMethod.is_active() {
        let mut response = text_response(StatusCode::METHOD_NOT_ALLOWED, "use GET or HEAD\n");
        response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return response;
    }
    let mut text = String::new();
    match prometheus_client::encoding::text::encode(&mut text, registry) {
        Ok(()) => {
            let (text, content) = match accepts_openmetrics(request) {
                true => (text, OPENMETRICS_TYPE),
                false => (plain::from_openmetrics(&text), PLAIN_TYPE),
            };
            let mut response = Response::new(Full::from(text));
            response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content));
            response
        }
        Err(error) => {
            tracing::error!(%error, "encoding metrics failed");
            text_response(StatusCode::INTERNAL_SERVER_ERROR, "encoding metrics failed\n")
        }
    }
}

/// Whether the client names OpenMetrics among what it accepts.
fn accepts_openmetrics<B>(request: &Request<B>) -> bool {
    let mut accepted = request.headers().get_all(ACCEPT).iter();
    accepted.any(|value| value.to_str().is_ok_and(|value| value.contains("application/openmetrics-text")))
}

fn text_response(status: StatusCode, text: &'static str) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(text));
    *response.status_mut() = status;
    response
}
