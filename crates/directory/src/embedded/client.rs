//! The client's side of the socket.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::wire::{self, Request, Response};
use super::{frame, socket};
use crate::core::check;
use crate::model::{Entry, Event, Lease, LeaseId, Listing, Transaction, TransactionOutcome};
use crate::{Directory, DirectoryError, Watch};

/// How long an answer may take. The server needs milliseconds, unless its disk is in trouble.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// A directory that another process serves.
///
/// Calls are made one after another on one connection. A call whose connection breaks gets
/// [`DirectoryError::Unavailable`] and is never repeated, as it may have been carried out; the next
/// call connects anew, so that a client outlives a restart of the server.
#[derive(Debug)]
pub struct Client {
    path: PathBuf,
    connection: Mutex<Option<UnixStream>>,
}

/// Connect to the directory that is served at `path`.
///
/// # Errors
/// Nobody serves there; the server refuses.
pub fn connect(path: &Path) -> Result<Client, DirectoryError> {
    let connection = Mutex::new(Some(dial(path)?));
    Ok(Client { path: path.to_owned(), connection })
}

impl Client {
    fn call(&self, request: &Request) -> Result<Response, DirectoryError> {
        let mut slot = self.connection.lock().expect("no caller of the directory panics");
        // With no question open, something to read can only be the end of the connection.
        let mut stream = match slot.take().filter(|stream| !socket::is_readable(stream)) {
            Some(stream) => stream,
            None => dial(&self.path)?,
        };
        let response = ask(&self.path, &mut stream, request)?;
        *slot = Some(stream);
        match response {
            Response::Error(error) => Err(error),
            response => Ok(response),
        }
    }
}

impl Directory for Client {
    fn get(&self, key: &str) -> Result<Option<Entry>, DirectoryError> {
        check::key(key)?;
        match self.call(&Request::Get(key.to_owned()))? {
            Response::Entry(entry) => Ok(entry),
            _ => Err(unexpected()),
        }
    }

    fn list(&self, prefix: &str) -> Result<Listing, DirectoryError> {
        check::prefix(prefix)?;
        match self.call(&Request::List(prefix.to_owned()))? {
            Response::Listing(listing) => Ok(listing),
            _ => Err(unexpected()),
        }
    }

    fn transaction(&self, transaction: &Transaction) -> Result<TransactionOutcome, DirectoryError> {
        check::transaction(transaction)?;
        match self.call(&Request::Transaction(transaction.clone()))? {
            Response::Outcome(outcome) => Ok(outcome),
            _ => Err(unexpected()),
        }
    }

    fn lease_grant(&self, ttl: Duration) -> Result<Lease, DirectoryError> {
        match self.call(&Request::Grant(ttl))? {
            Response::Lease(lease) => Ok(lease),
            _ => Err(unexpected()),
        }
    }

    fn lease_keep_alive(&self, id: LeaseId) -> Result<(), DirectoryError> {
        self.call(&Request::KeepAlive(id)).and_then(done)
    }

    fn lease_revoke(&self, id: LeaseId) -> Result<(), DirectoryError> {
        self.call(&Request::Revoke(id)).and_then(done)
    }

    fn watch(&self, prefix: &str, from_revision: u64) -> Result<Box<dyn Watch>, DirectoryError> {
        check::prefix(prefix)?;
        let mut stream = dial(&self.path)?;
        let request = Request::Watch { prefix: prefix.to_owned(), from_revision };
        match ask(&self.path, &mut stream, &request)? {
            Response::Done => {
                Ok(Box::new(ClientWatch { path: self.path.clone(), stream, received: Vec::new() }))
            }
            Response::Error(error) => Err(error),
            _ => Err(unexpected()),
        }
    }
}

/// A watch on a connection of its own.
#[derive(Debug)]
struct ClientWatch {
    path: PathBuf,
    stream: UnixStream,
    received: Vec<u8>,
}

impl Watch for ClientWatch {
    fn next(&mut self, timeout: Duration) -> Result<Option<Event>, DirectoryError> {
        let end = Instant::now().checked_add(timeout);
        loop {
            let frame = frame::take(&mut self.received).map_err(|error| unavailable(&self.path, &error))?;
            if let Some(frame) = frame {
                return match Response::decode(&frame) {
                    Some(Response::Event(event)) => Ok(Some(event)),
                    Some(Response::Error(error)) => Err(error),
                    _ => Err(unexpected()),
                };
            }
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            match socket::wait_readable([self.stream.as_fd()], left) {
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
            Ok(0) => Err(unavailable(&self.path, &"it closed the watch")),
            Ok(count) => {
                self.received.extend_from_slice(&chunk[..count]);
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(error) => Err(unavailable(&self.path, &error)),
        }
    }
}

fn dial(path: &Path) -> Result<UnixStream, DirectoryError> {
    let address = || path.display().to_string();
    let refused = |why| DirectoryError::Refused { address: address(), why };
    let mut stream = UnixStream::connect(path).map_err(|error| unavailable(path, &error))?;
    // In a shared folder someone else could have put a socket of theirs there.
    socket::check_peer(&stream).map_err(refused)?;
    stream.set_read_timeout(Some(ANSWER_TIMEOUT)).map_err(|error| unavailable(path, &error))?;
    stream.set_write_timeout(Some(ANSWER_TIMEOUT)).map_err(|error| unavailable(path, &error))?;
    // A server at its limit says so and closes before it reads: the write may fail, the answer is there all the same.
    let written = frame::write(&mut stream, &wire::hello(None));
    let answer = match frame::read(&mut stream) {
        Ok(Some(answer)) => answer,
        Ok(None) => {
            written.map_err(|error| unavailable(path, &error))?;
            return Err(unavailable(path, &"it closed the connection"));
        }
        Err(error) => return Err(unavailable(path, &error)),
    };
    wire::check_server_hello(&answer).map_err(refused)?;
    Ok(stream)
}

fn ask(path: &Path, stream: &mut UnixStream, request: &Request) -> Result<Response, DirectoryError> {
    frame::write(stream, &request.encode()).map_err(|error| unavailable(path, &error))?;
    match frame::read(stream) {
        Ok(Some(answer)) => Response::decode(&answer).ok_or_else(unexpected),
        Ok(None) => Err(unavailable(path, &"it closed the connection")),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            Err(unavailable(path, &format!("no answer within {} s", ANSWER_TIMEOUT.as_secs())))
        }
        Err(error) => Err(unavailable(path, &error)),
    }
}

fn done(response: Response) -> Result<(), DirectoryError> {
    match response {
        Response::Done => Ok(()),
        _ => Err(unexpected()),
    }
}

fn unexpected() -> DirectoryError {
    DirectoryError::Protocol { why: "it does not fit the question".to_owned() }
}

fn unavailable(path: &Path, cause: &dyn std::fmt::Display) -> DirectoryError {
    DirectoryError::Unavailable { address: path.display().to_string(), cause: cause.to_string() }
}
