//! The client of a directory that another process serves.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::wire::{self, DirectoryRequest, DirectoryResponse};
use super::{frame, socket};
use crate::core::check;
use crate::model::{DirectoryEntry, Lease, LeaseId, Listing, Transaction, TransactionOutcome, WatchEvent};
use crate::{Directory, DirectoryError, Watch};

/// Longest wait of a call for its answer. A server with a working disk needs milliseconds.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// A directory behind a Unix socket.
///
/// Calls use one connection, one after another.
/// A call whose connection breaks returns [`DirectoryError::Unavailable`].
/// The call is not repeated, because it may have taken effect.
/// The next call connects again, so a client continues after a restart of the server.
#[derive(Debug)]
pub struct DirectoryClient {
    path: PathBuf,
    connection: Mutex<Option<UnixStream>>,
}

/// Connects to the directory that is served at `path`.
///
/// # Errors
/// [`DirectoryError::Unavailable`] if no server listens there; [`DirectoryError::Refused`].
pub fn connect(path: &Path) -> Result<DirectoryClient, DirectoryError> {
    let connection = Mutex::new(Some(open_connection(path)?));
    Ok(DirectoryClient { path: path.to_owned(), connection })
}

impl DirectoryClient {
    fn call(&self, request: &DirectoryRequest) -> Result<DirectoryResponse, DirectoryError> {
        let mut slot = self.connection.lock();
        // Without a pending request, a readable stream has ended.
        let mut stream = match slot.take().filter(|stream| !socket::is_readable(stream)) {
            Some(stream) => stream,
            None => open_connection(&self.path)?,
        };
        let response = send_request(&self.path, &mut stream, request)?;
        *slot = Some(stream);
        match response {
            DirectoryResponse::Error(error) => Err(error),
            response => Ok(response),
        }
    }
}

impl Directory for DirectoryClient {
    fn get(&self, key: &str) -> Result<Option<DirectoryEntry>, DirectoryError> {
        check::key(key)?;
        match self.call(&DirectoryRequest::Get(key.to_owned()))? {
            DirectoryResponse::Entry(entry) => Ok(entry),
            _ => Err(unexpected()),
        }
    }

    fn list(&self, prefix: &str) -> Result<Listing, DirectoryError> {
        check::prefix(prefix)?;
        match self.call(&DirectoryRequest::List(prefix.to_owned()))? {
            DirectoryResponse::Listing(listing) => Ok(listing),
            _ => Err(unexpected()),
        }
    }

    fn transaction(&self, transaction: &Transaction) -> Result<TransactionOutcome, DirectoryError> {
        check::transaction(transaction)?;
        match self.call(&DirectoryRequest::Transaction(transaction.clone()))? {
            DirectoryResponse::Outcome(outcome) => Ok(outcome),
            _ => Err(unexpected()),
        }
    }

    fn lease_grant(&self, ttl: Duration) -> Result<Lease, DirectoryError> {
        match self.call(&DirectoryRequest::Grant(ttl))? {
            DirectoryResponse::Lease(lease) => Ok(lease),
            _ => Err(unexpected()),
        }
    }

    fn lease_keep_alive(&self, id: LeaseId) -> Result<(), DirectoryError> {
        self.call(&DirectoryRequest::KeepAlive(id)).and_then(expect_done)
    }

    fn lease_revoke(&self, id: LeaseId) -> Result<(), DirectoryError> {
        self.call(&DirectoryRequest::Revoke(id)).and_then(expect_done)
    }

    fn watch(&self, prefix: &str, from_revision: u64) -> Result<Box<dyn Watch>, DirectoryError> {
        check::prefix(prefix)?;
        let mut stream = open_connection(&self.path)?;
        let request = DirectoryRequest::Watch { prefix: prefix.to_owned(), from_revision };
        match send_request(&self.path, &mut stream, &request)? {
            DirectoryResponse::Done => {
                Ok(Box::new(ClientWatch { path: self.path.clone(), stream, received: Vec::new() }))
            }
            DirectoryResponse::Error(error) => Err(error),
            _ => Err(unexpected()),
        }
    }
}

/// A watch, which has its own connection.
#[derive(Debug)]
struct ClientWatch {
    path: PathBuf,
    stream: UnixStream,
    received: Vec<u8>,
}

impl Watch for ClientWatch {
    fn next(&mut self, timeout: Duration) -> Result<Option<WatchEvent>, DirectoryError> {
        let end = Instant::now().checked_add(timeout);
        loop {
            let frame =
                frame::split_first(&mut self.received).map_err(|error| unavailable(&self.path, &error))?;
            if let Some(frame) = frame {
                return match DirectoryResponse::decode(&frame) {
                    Some(DirectoryResponse::Event(event)) => Ok(Some(event)),
                    Some(DirectoryResponse::Error(error)) => Err(error),
                    _ => Err(unexpected()),
                };
            }
            let remaining = end.map(|end| end.saturating_duration_since(Instant::now()));
            match socket::wait_readable([self.stream.as_fd()], remaining) {
                Ok([true]) => self.receive()?,
                Ok([false]) => return Ok(None),
                Err(error) => return Err(unavailable(&self.path, &error)),
            }
        }
    }
}

impl ClientWatch {
    fn receive(&mut self) -> Result<(), DirectoryError> {
        let mut chunk = [0; 16 << 10];
        match self.stream.read(&mut chunk) {
            Ok(0) => Err(unavailable(&self.path, &"the server closed the connection")),
            Ok(count) => {
                self.received.extend_from_slice(&chunk[..count]);
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(error) => Err(unavailable(&self.path, &error)),
        }
    }
}

fn open_connection(path: &Path) -> Result<UnixStream, DirectoryError> {
    let refused = |why: &dyn std::fmt::Display| DirectoryError::Refused {
        address: path.display().to_string(),
        why: why.to_string(),
    };
    let mut stream = UnixStream::connect(path).map_err(|error| unavailable(path, &error))?;
    // In a shared folder, another user may have created the socket.
    socket::check_peer(&stream).map_err(|why| refused(&why))?;
    stream.set_read_timeout(Some(ANSWER_TIMEOUT)).map_err(|error| unavailable(path, &error))?;
    stream.set_write_timeout(Some(ANSWER_TIMEOUT)).map_err(|error| unavailable(path, &error))?;
    // A server at its limit refuses and closes without reading: the write may fail although the
    // answer arrives.
    let written = frame::write(&mut stream, &wire::hello(None));
    let answer = match frame::read(&mut stream) {
        Ok(Some(answer)) => answer,
        Ok(None) => {
            written.map_err(|error| unavailable(path, &error))?;
            return Err(unavailable(path, &"the server closed the connection"));
        }
        Err(error) => return Err(unavailable(path, &error)),
    };
    wire::check_server_hello(&answer).map_err(|why| refused(&why))?;
    Ok(stream)
}

fn send_request(
    path: &Path,
    stream: &mut UnixStream,
    request: &DirectoryRequest,
) -> Result<DirectoryResponse, DirectoryError> {
    frame::write(stream, &request.encode()).map_err(|error| unavailable(path, &error))?;
    match frame::read(stream) {
        Ok(Some(answer)) => DirectoryResponse::decode(&answer).ok_or_else(unexpected),
        Ok(None) => Err(unavailable(path, &"the server closed the connection")),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            Err(unavailable(path, &format!("no answer within {} s", ANSWER_TIMEOUT.as_secs())))
        }
        Err(error) => Err(unavailable(path, &error)),
    }
}

fn expect_done(response: DirectoryResponse) -> Result<(), DirectoryError> {
    match response {
        DirectoryResponse::Done => Ok(()),
        _ => Err(unexpected()),
    }
}

fn unexpected() -> DirectoryError {
    DirectoryError::Protocol { why: "the answer does not match the request".to_owned() }
}

fn unavailable(path: &Path, cause: &dyn std::fmt::Display) -> DirectoryError {
    DirectoryError::Unavailable { address: path.display().to_string(), cause: cause.to_string() }
}
