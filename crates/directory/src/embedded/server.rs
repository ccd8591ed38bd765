//! The server's side of the socket: a thread per connection, a bound on connections, nothing served before the hello.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::EventfdFlags;

use super::wire::{self, Request, Response};
use super::{Embedded, frame, socket};
use crate::{Directory, DirectoryError, Watch};

/// The server's limits.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// Most connections at a time; one more is refused with a reason. Every watch has a connection of its own.
    pub connections_max: usize,
    /// How long the rest of a frame may take once it has begun, and how long a peer may leave an answer unread.
    pub stall_timeout: Duration,
}

impl Default for ServeOptions {
    fn default() -> Self {
        Self { connections_max: 512, stall_timeout: Duration::from_secs(5) }
    }
}

/// A running server. Dropping it stops it.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
    socket: PathBuf,
    acceptor: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    options: ServeOptions,
    stop: OwnedFd,
    connections: Mutex<Connections>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct Connections {
    next: u64,
    stopping: bool,
    open: HashMap<u64, UnixStream>,
}

/// Serve the directory in `file` at `socket` until `shutdown` becomes readable. `ready` is called once callers are served.
///
/// # Errors
/// The file cannot be used, or the socket cannot be had.
pub fn serve(
    file: &Path,
    socket: &Path,
    shutdown: BorrowedFd<'_>,
    ready: impl FnOnce(),
) -> Result<(), DirectoryError> {
    let server = Server::start(Embedded::open(file)?, socket, ServeOptions::default())?;
    ready();
    socket::wait_readable([shutdown], None).map_err(|error| unserved(socket, &error))?;
    drop(server);
    Ok(())
}

impl Server {
    /// Serve `directory` at `socket` (mode 0600, this user's processes only) in the background.
    ///
    /// # Errors
    /// The socket cannot be had: another server listens there, the path is too long for one, no rights.
    pub fn start(directory: Embedded, socket: &Path, options: ServeOptions) -> Result<Self, DirectoryError> {
        let listener = socket::listen(socket).map_err(|error| unserved(socket, &error))?;
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)
            .map_err(|error| unserved(socket, &io::Error::from(error)))?;
        let (connections, ended) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { options, stop, connections, ended });
        let for_thread = Arc::clone(&shared);
        let acceptor = std::thread::Builder::new()
            .name("directory".to_owned())
            .spawn(move || accept(&for_thread, &directory, &listener))
            .map_err(|error| unserved(socket, &error))?;
        Ok(Self { shared, socket: socket.to_owned(), acceptor: Some(acceptor) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A write of 8 bytes to an eventfd at zero does not fail.
        let _written = rustix::io::write(&self.shared.stop, &1_u64.to_ne_bytes());
        if let Some(acceptor) = self.acceptor.take() {
            let _panicked = acceptor.join();
        }
        let mut connections = self.shared.lock();
        connections.stopping = true;
        for stream in connections.open.values() {
            let _gone = stream.shutdown(std::net::Shutdown::Both);
        }
        while !connections.open.is_empty() {
            connections = self.shared.ended.wait(connections).expect("no connection's holder panics");
        }
        let _missing = std::fs::remove_file(&self.socket);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().expect("no connection's holder panics")
    }
}

fn accept(shared: &Arc<Shared>, directory: &Embedded, listener: &UnixListener) {
    // When descriptors run out, polling would return at once for ever: then wait for the stop alone, for a moment.
    let mut pause = false;
    loop {
        let waited = if pause {
            let timeout = Some(Duration::from_millis(100));
            socket::wait_readable([shared.stop.as_fd()], timeout).map(|[stop]| [stop, !stop])
        } else {
            socket::wait_readable([shared.stop.as_fd(), listener.as_fd()], None)
        };
        match waited {
            Ok([true, _]) | Err(_) => return,
            Ok([false, _]) => {}
        }
        match listener.accept() {
            Ok((stream, _)) => {
                pause = false;
                admit(shared, directory.clone(), stream);
            }
            Err(_) => pause = true,
        }
    }
}

/// Give the connection a thread of its own, or refuse it at the limit.
fn admit(shared: &Arc<Shared>, directory: Embedded, mut stream: UnixStream) {
    let Ok(copy) = stream.try_clone() else { return };
    if set_timeouts(&stream, shared.options.stall_timeout).is_err() {
        return;
    }
    let mut connections = shared.lock();
    let most = shared.options.connections_max;
    if connections.stopping || connections.open.len() >= most {
        drop(connections);
        let why = format!("it has {most} connections, which is its limit; try again when some have ended");
        let _gone = frame::write(&mut stream, &wire::hello(Some(&why)));
        return;
    }
    let id = connections.next;
    connections.next += 1;
    connections.open.insert(id, copy);
    drop(connections);

    let for_thread = Arc::clone(shared);
    let spawned = std::thread::Builder::new().name("directory-client".to_owned()).spawn(move || {
        // How a connection ends is the client's affair; it sees it.
        let _ended = converse(&directory, stream);
        // Before it is counted as ended: a stopped server has let go of its file.
        drop(directory);
        forget(&for_thread, id);
    });
    if spawned.is_err() {
        forget(shared, id);
    }
}

fn forget(shared: &Shared, id: u64) {
    shared.lock().open.remove(&id);
    shared.ended.notify_all();
}

fn set_timeouts(stream: &UnixStream, timeout: Duration) -> io::Result<()> {
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))
}

fn converse(directory: &Embedded, mut stream: UnixStream) -> io::Result<()> {
    if let Err(why) = socket::check_peer(&stream) {
        return frame::write(&mut stream, &wire::hello(Some(&why)));
    }
    let Some(hello) = frame::read(&mut stream)? else { return Ok(()) };
    if let Err(why) = wire::check_client_hello(&hello) {
        return frame::write(&mut stream, &wire::hello(Some(&why)));
    }
    frame::write(&mut stream, &wire::hello(Some("")))?;
    loop {
        // Between frames a client may be idle as long as it likes.
        socket::wait_readable([stream.as_fd()], None)?;
        let Some(body) = frame::read(&mut stream)? else { return Ok(()) };
        let Some(request) = Request::decode(&body) else {
            let why = "the directory does not understand the question".to_owned();
            return frame::write(&mut stream, &Response::Error(DirectoryError::Protocol { why }).encode());
        };
        if let Request::Watch { prefix, from_revision } = request {
            return watch(directory, stream, &prefix, from_revision);
        }
        let response = answer(directory, request).unwrap_or_else(Response::Error);
        frame::write(&mut stream, &response.encode())?;
    }
}

fn answer(directory: &Embedded, request: Request) -> Result<Response, DirectoryError> {
    Ok(match request {
        Request::Get(key) => Response::Entry(directory.get(&key)?),
        Request::List(prefix) => Response::Listing(directory.list(&prefix)?),
        Request::Transaction(transaction) => Response::Outcome(directory.transaction(&transaction)?),
        Request::Grant(ttl) => Response::Lease(directory.lease_grant(ttl)?),
        Request::KeepAlive(id) => directory.lease_keep_alive(id).map(|()| Response::Done)?,
        Request::Revoke(id) => directory.lease_revoke(id).map(|()| Response::Done)?,
        Request::Watch { .. } => unreachable!("a watch takes the whole connection"),
    })
}

/// Send events until the client closes its end. A thread writes, while this one waits for the end of the connection.
fn watch(directory: &Embedded, mut stream: UnixStream, prefix: &str, from_revision: u64) -> io::Result<()> {
    let mut events = match directory.engine_watch(prefix, from_revision) {
        Ok(events) => events,
        Err(error) => return frame::write(&mut stream, &Response::Error(error).encode()),
    };
    frame::write(&mut stream, &Response::Done.encode())?;
    let canceller = events.canceller();
    let cancelled = canceller.clone();
    let mut output = stream.try_clone()?;
    let pump = std::thread::Builder::new().name("directory-watch".to_owned()).spawn(move || {
        while !cancelled.is_cancelled() {
            let (response, last) = match events.next(Duration::MAX) {
                Ok(Some(event)) => (Response::Event(event), false),
                Ok(None) => continue,
                Err(error) => (Response::Error(error), true),
            };
            if frame::write(&mut output, &response.encode()).is_err() || last {
                break;
            }
        }
        // Wakes the thread that waits for the end.
        let _gone = output.shutdown(std::net::Shutdown::Both);
    })?;
    let waited = socket::wait_readable([stream.as_fd()], None);
    canceller.cancel();
    // The writer may be stuck in a full socket.
    let _gone = stream.shutdown(std::net::Shutdown::Both);
    let _panicked = pump.join();
    waited.map(|_| ())
}

fn unserved(socket: &Path, error: &io::Error) -> DirectoryError {
    DirectoryError::Unavailable {
        address: socket.display().to_string(),
        cause: format!("it cannot be served: {error}"),
    }
}
