//! The server of a directory: one thread for each connection, up to a limit of connections.
//!
//! No request is served before the hello.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustix::event::EventfdFlags;

use super::wire::{self, DirectoryRequest, DirectoryResponse};
use super::{EmbeddedDirectory, frame, socket};
use crate::{Directory, DirectoryError, Watch};

/// Limits of a server.
#[derive(Clone, Debug)]
pub struct DirectoryServerOptions {
    /// Most connections at a time; further ones are refused. Each watch has its own connection.
    pub connections_max: usize,
    /// Time for which the server waits for the next bytes of an incomplete frame, and for a client
    /// to read an answer.
    pub stall_timeout: Duration,
}

impl Default for DirectoryServerOptions {
    fn default() -> Self {
        Self { connections_max: 512, stall_timeout: Duration::from_secs(5) }
    }
}

/// A running server. Dropping it stops the server.
#[derive(Debug)]
pub struct DirectoryServer {
    shared: Arc<ServerShared>,
    directory: EmbeddedDirectory,
    /// The socket file that is deleted at the end.
    socket: Option<PathBuf>,
    acceptor: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct ServerShared {
    options: DirectoryServerOptions,
    stop: OwnedFd,
    connections: Mutex<OpenConnections>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct OpenConnections {
    next: u64,
    is_stopping: bool,
    open: HashMap<u64, UnixStream>,
}

impl DirectoryServer {
    /// Serves `directory` in the background, to processes of this user, at `socket` with mode 0600.
    ///
    /// # Errors
    /// [`DirectoryError::Unavailable`] if another server listens there, the path is too long, or
    /// the system refuses.
    pub fn start(
        directory: EmbeddedDirectory,
        socket: &Path,
        options: DirectoryServerOptions,
    ) -> Result<Self, DirectoryError> {
        let listener = socket::listen(socket).map_err(|error| cannot_serve(socket, &error))?;
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)
            .map_err(|error| cannot_serve(socket, &io::Error::from(error)))?;
        let (connections, ended) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(ServerShared { options, stop, connections, ended });
        let (for_thread, served) = (Arc::clone(&shared), directory.clone());
        let acceptor = std::thread::Builder::new()
            .name("directory".to_owned())
            .spawn(move || accept(&for_thread, &served, &listener))
            .map_err(|error| cannot_serve(socket, &error))?;
        Ok(Self { shared, directory, socket: Some(socket.to_owned()), acceptor: Some(acceptor) })
    }

    /// True while a client is connected or has a lease.
    ///
    /// # Errors
    /// [`DirectoryError::Storage`].
    pub fn is_used(&self) -> Result<bool, DirectoryError> {
        Ok(!self.shared.connections.lock().open.is_empty() || self.directory.engine.has_leases()?)
    }

    /// Keeps the socket's file at the end: it is deleted already, and another server may listen at
    /// that path.
    pub fn leave_socket_file(&mut self) {
        self.socket = None;
    }
}

impl Drop for DirectoryServer {
    fn drop(&mut self) {
        // A write to an eventfd fails only if its counter overflows.
        let _written = rustix::io::write(&self.shared.stop, &1_u64.to_ne_bytes());
        if let Some(acceptor) = self.acceptor.take() {
            let _panicked = acceptor.join();
        }
        let mut connections = self.shared.connections.lock();
        connections.is_stopping = true;
        for stream in connections.open.values() {
            let _gone = stream.shutdown(std::net::Shutdown::Both);
        }
        while !connections.open.is_empty() {
            self.shared.ended.wait(&mut connections);
        }
        if let Some(socket) = &self.socket {
            let _missing = std::fs::remove_file(socket);
        }
    }
}

/// Accepts connections until the server stops.
fn accept(shared: &Arc<ServerShared>, directory: &EmbeddedDirectory, listener: &UnixListener) {
    // Without free descriptors, `accept` fails and the listener stays readable: pause before the
    // next attempt.
    let mut is_paused = false;
    loop {
        let waited = if is_paused {
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
                is_paused = false;
                start_connection(shared, directory.clone(), stream);
            }
            Err(_) => is_paused = true,
        }
    }
}

/// Starts a thread for the connection, or refuses the connection at the limit.
fn start_connection(shared: &Arc<ServerShared>, directory: EmbeddedDirectory, mut stream: UnixStream) {
    let Ok(copy) = stream.try_clone() else { return };
    if set_timeouts(&stream, shared.options.stall_timeout).is_err() {
        return;
    }
    let mut connections = shared.connections.lock();
    let connections_max = shared.options.connections_max;
    if connections.is_stopping || connections.open.len() >= connections_max {
        drop(connections);
        let why =
            format!("it has reached its limit of {connections_max} connections; retry when some have ended");
        let _gone = frame::write(&mut stream, &wire::hello(Some(&why)));
        return;
    }
    let id = connections.next;
    connections.next += 1;
    connections.open.insert(id, copy);
    drop(connections);

    let for_thread = Arc::clone(shared);
    let spawned = std::thread::Builder::new().name("directory-client".to_owned()).spawn(move || {
        // The client detects the end of the connection.
        let _ended = serve_connection(&directory, stream);
        // Must precede the removal: a stopped server has closed its file.
        drop(directory);
        remove_connection(&for_thread, id);
    });
    if spawned.is_err() {
        remove_connection(shared, id);
    }
}

fn remove_connection(shared: &ServerShared, id: u64) {
    shared.connections.lock().open.remove(&id);
    shared.ended.notify_all();
}

fn set_timeouts(stream: &UnixStream, timeout: Duration) -> io::Result<()> {
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))
}

/// Serves the requests of one connection until it ends.
fn serve_connection(directory: &EmbeddedDirectory, mut stream: UnixStream) -> io::Result<()> {
    if let Err(why) = socket::check_peer(&stream) {
        return frame::write(&mut stream, &wire::hello(Some(&why.to_string())));
    }
    let Some(hello) = frame::read(&mut stream)? else { return Ok(()) };
    if let Err(why) = wire::check_client_hello(&hello) {
        return frame::write(&mut stream, &wire::hello(Some(&why.to_string())));
    }
    frame::write(&mut stream, &wire::hello(Some("")))?;
    loop {
        // Between frames a client may be idle for any time.
        socket::wait_readable([stream.as_fd()], None)?;
        let Some(body) = frame::read(&mut stream)? else { return Ok(()) };
        let Some(request) = DirectoryRequest::decode(&body) else {
            let why = "the request is not valid".to_owned();
            return frame::write(
                &mut stream,
                &DirectoryResponse::Error(DirectoryError::Protocol { why }).encode(),
            );
        };
        if let DirectoryRequest::Watch { prefix, from_revision } = request {
            return serve_watch(directory, stream, &prefix, from_revision);
        }
        let response = answer(directory, request).unwrap_or_else(DirectoryResponse::Error);
        frame::write(&mut stream, &response.encode())?;
    }
}

fn answer(
    directory: &EmbeddedDirectory,
    request: DirectoryRequest,
) -> Result<DirectoryResponse, DirectoryError> {
    Ok(match request {
        DirectoryRequest::Get(key) => DirectoryResponse::Entry(directory.get(&key)?),
        DirectoryRequest::List(prefix) => DirectoryResponse::Listing(directory.list(&prefix)?),
        DirectoryRequest::Transaction(transaction) => {
            DirectoryResponse::Outcome(directory.transaction(&transaction)?)
        }
        DirectoryRequest::Grant(ttl) => DirectoryResponse::Lease(directory.lease_grant(ttl)?),
        DirectoryRequest::KeepAlive(id) => {
            directory.lease_keep_alive(id).map(|()| DirectoryResponse::Done)?
        }
        DirectoryRequest::Revoke(id) => directory.lease_revoke(id).map(|()| DirectoryResponse::Done)?,
        DirectoryRequest::Watch { .. } => unreachable!("a watch is served before"),
    })
}

/// Sends events until the client closes the connection.
///
/// A second thread writes, and this one waits for the end of the connection.
fn serve_watch(
    directory: &EmbeddedDirectory,
    mut stream: UnixStream,
    prefix: &str,
    from_revision: u64,
) -> io::Result<()> {
    let mut events = match directory.engine_watch(prefix, from_revision) {
        Ok(events) => events,
        Err(error) => return frame::write(&mut stream, &DirectoryResponse::Error(error).encode()),
    };
    frame::write(&mut stream, &DirectoryResponse::Done.encode())?;
    let canceller = events.canceller();
    let cancelled = canceller.clone();
    let mut output = stream.try_clone()?;
    let writer = std::thread::Builder::new().name("directory-watch".to_owned()).spawn(move || {
        while !cancelled.is_cancelled() {
            let (response, is_last) = match events.next(Duration::MAX) {
                Ok(Some(event)) => (DirectoryResponse::Event(event), false),
                Ok(None) => continue,
                Err(error) => (DirectoryResponse::Error(error), true),
            };
            if frame::write(&mut output, &response.encode()).is_err() || is_last {
                break;
            }
        }
        // Wakes the thread that waits for the end of the connection.
        let _gone = output.shutdown(std::net::Shutdown::Both);
    })?;
    let waited = socket::wait_readable([stream.as_fd()], None);
    canceller.cancel();
    // The writer may be blocked by a full socket.
    let _gone = stream.shutdown(std::net::Shutdown::Both);
    let _panicked = writer.join();
    waited.map(|_| ())
}

fn cannot_serve(socket: &Path, error: &io::Error) -> DirectoryError {
    DirectoryError::Unavailable {
        address: socket.display().to_string(),
        cause: format!("the socket cannot be served: {error}"),
    }
}
