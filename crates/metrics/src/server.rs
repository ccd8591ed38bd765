//! `GET /metrics`, and nothing else, on a thread of its own.
//!
//! Figures are gathered when somebody asks. Whoever asks may be hostile as far as this machine's users are: requests are bounded in bytes
//! and lines, conversations in number and time.

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
use hyper::header::{ALLOW, CONTENT_TYPE};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus_client::registry::Registry;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Semaphore, oneshot};

use crate::place::Place;

/// What is asked for.
const PATH: &str = "/metrics";
/// The text that Prometheus reads.
const TEXT: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Conversations at once; more wait in the socket's backlog.
pub const CONNECTIONS_MAX: usize = 16;
/// The longest head of a request, in bytes: the least that the HTTP library allows.
pub const REQUEST_BYTES_MAX: usize = 8192;
/// Lines in it.
pub const HEADERS_MAX: usize = 64;
/// A request must have come by then.
pub const REQUEST_TIME: Duration = Duration::from_secs(3);
/// A conversation is over by then, come what may. A scraper waits for 10 s as a rule.
pub const CONNECTION_TIME: Duration = Duration::from_secs(10);
/// When the system has no descriptor for another conversation.
const PAUSE: Duration = Duration::from_millis(100);
const BACKLOG: i32 = 64;

/// Why there are no figures.
#[derive(Debug, thiserror::Error)]
pub enum MetricsError {
    /// The place cannot be had.
    #[error("figures cannot be served at {place}: {source}. Choose another place with --metrics")]
    Listen {
        /// The place.
        place: Place,
        /// What the system said.
        source: io::Error,
    },
    /// No thread.
    #[error("there is no thread to serve figures: {0}")]
    Thread(io::Error),
}

/// A place where nobody is answered yet.
#[derive(Debug)]
pub struct Listener {
    place: Place,
    socket: Socket,
}

#[derive(Debug)]
enum Socket {
    Tcp(std::net::TcpListener),
    Unix(std::os::unix::net::UnixListener, Name),
}

/// A socket's name, removed when it is dropped, if it is still that of our socket.
#[derive(Debug)]
struct Name {
    path: PathBuf,
    inode: u64,
}

impl Drop for Name {
    fn drop(&mut self) {
        if fs::symlink_metadata(&self.path).is_ok_and(|file| file.ino() == self.inode) {
            let _gone = fs::remove_file(&self.path);
        }
    }
}

impl Listener {
    /// Take the place. A Unix socket that a dead process left is replaced, and nothing else is.
    ///
    /// # Errors
    /// If it is taken, or the system refuses.
    pub fn bind(place: &Place) -> Result<Self, MetricsError> {
        let error = |source| MetricsError::Listen { place: place.clone(), source };
        Ok(match place {
            Place::Tcp(address) => {
                let socket = std::net::TcpListener::bind(address).map_err(error)?;
                socket.set_nonblocking(true).map_err(error)?;
                let place = Place::Tcp(socket.local_addr().map_err(error)?);
                Self { place, socket: Socket::Tcp(socket) }
            }
            Place::Unix(path) => {
                let (socket, name) = listen_at(path).map_err(error)?;
                Self { place: place.clone(), socket: Socket::Unix(socket, name) }
            }
        })
    }

    /// Where it is; if port 0 was asked for, which port it got.
    #[must_use]
    pub fn place(&self) -> &Place {
        &self.place
    }
}

fn listen_at(path: &Path) -> io::Result<(std::os::unix::net::UnixListener, Name)> {
    make_way(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket: OwnedFd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    // Nobody can connect before it listens, so nobody slips in before this.
    fs::set_permissions(path, PermissionsExt::from_mode(0o600))?;
    let name = Name { path: path.to_owned(), inode: fs::symlink_metadata(path)?.ino() };
    rustix::net::listen(&socket, BACKLOG)?;
    Ok((socket.into(), name))
}

/// Remove a socket at which nobody listens any more.
fn make_way(path: &Path) -> io::Result<()> {
    let there = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        there => there?,
    };
    if !there.file_type().is_socket() {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "there is a file that is no socket"));
    }
    match std::os::unix::net::UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        Err(error) => Err(error),
        Ok(_) => Err(io::Error::new(io::ErrorKind::AddrInUse, "somebody listens there")),
    }
}

/// Answers whoever asks, until it is dropped.
#[derive(Debug)]
pub struct Server {
    place: Place,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Begin to answer with what is in the registry.
    ///
    /// # Errors
    /// If there is no thread, or the system refuses.
    pub fn start(listener: Listener, registry: Registry) -> Result<Self, MetricsError> {
        let Listener { place, socket } = listener;
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
                // An error is a sender that is gone, which says the same.
                let _either = runtime.block_on(stopped);
            })
            .map_err(MetricsError::Thread)?;
        tracing::info!(%place, "figures are served");
        Ok(Self { place, stop: Some(stop), thread: Some(thread) })
    }

    /// Where it answers.
    #[must_use]
    pub fn place(&self) -> &Place {
        &self.place
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that serves figures has panicked");
        }
    }
}

async fn serve(socket: Socket, registry: Arc<Registry>) {
    let ended = match socket {
        Socket::Tcp(listener) => match tokio::net::TcpListener::from_std(listener) {
            Ok(listener) => {
                accept(registry, move |cx| listener.poll_accept(cx).map_ok(|(stream, _)| stream)).await
            }
            Err(error) => error,
        },
        Socket::Unix(listener, _name) => match tokio::net::UnixListener::from_std(listener) {
            Ok(listener) => {
                accept(registry, move |cx| listener.poll_accept(cx).map_ok(|(stream, _)| stream)).await
            }
            Err(error) => error,
        },
    };
    tracing::error!(error = %ended, "figures are served no more");
}

/// Talk to whoever comes. It ends with the runtime, or with the reason why nobody is let in any more.
async fn accept<S>(
    registry: Arc<Registry>,
    mut next: impl FnMut(&mut Context<'_>) -> Poll<io::Result<S>>,
) -> io::Error
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let place = match Arc::clone(&places).acquire_owned().await {
            Ok(place) => place,
            Err(error) => return io::Error::other(error),
        };
        match poll_fn(&mut next).await {
            Ok(stream) => {
                let registry = Arc::clone(&registry);
                tokio::spawn(async move {
                    converse(stream, &registry).await;
                    drop(place);
                });
            }
            Err(error) => {
                tracing::debug!(%error, "a scraper could not be let in");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

async fn converse(stream: impl AsyncRead + AsyncWrite + Unpin, registry: &Registry) {
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
        Ok(Err(error)) => tracing::debug!(%error, "a scraper's conversation failed"),
        Err(_) => tracing::debug!("a scraper was too slow"),
    }
}

fn answer<B>(request: &Request<B>, registry: &Registry) -> Response<Full<Bytes>> {
    if request.uri().path() != PATH {
        return say(StatusCode::NOT_FOUND, "figures are at /metrics\n");
    }
    if request.method() != Method::GET {
        let mut response = say(StatusCode::METHOD_NOT_ALLOWED, "figures can be fetched: GET\n");
        response.headers_mut().insert(ALLOW, hyper::header::HeaderValue::from_static("GET"));
        return response;
    }
    let mut text = String::new();
    match prometheus_client::encoding::text::encode(&mut text, registry) {
        Ok(()) => {
            let mut response = Response::new(Full::from(text));
            response.headers_mut().insert(CONTENT_TYPE, hyper::header::HeaderValue::from_static(TEXT));
            response
        }
        Err(error) => {
            tracing::error!(%error, "the figures cannot be written");
            say(StatusCode::INTERNAL_SERVER_ERROR, "the figures cannot be written\n")
        }
    }
}

fn say(status: StatusCode, text: &'static str) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(text));
    *response.status_mut() = status;
    response
}
