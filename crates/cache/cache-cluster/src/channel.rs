//! Encrypted connections on which servers and operators send requests ([`Ask`]) to servers.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_cache::server::peers::PeerSocket;
use aquifer_fabric::handshake::secure::{initiate, respond};
use aquifer_fabric::tcp::connect_unpaced;
use aquifer_ownership::Life;
use aquifer_secure_channel::{ClusterKey, RecordCipher, SecureError};
use parking_lot::Mutex;
use rustix::net::sockopt;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::records::ServerRecord;
use crate::wire::{Answer, Ask, Hello, Purpose, VERSION, Welcome};

/// Longest message, in bytes.
const MESSAGE_BYTES_MAX: usize = 4 << 20;
/// Timeout of connecting, and of each read and write of the handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Timeout of a request to another server.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// Time without use after which a connection is not used again. Shorter than [`IDLE_TIMEOUT`],
/// after which the other end closes it.
const REUSE_AGE_MAX: Duration = Duration::from_secs(20);
/// Time in milliseconds without an acknowledgement after which TCP closes a connection.
const USER_TIMEOUT_MS: u32 = 3000;
/// Longest wait for the next request on an open connection.
pub const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

/// Why a request to a server failed.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// The connection failed.
    #[error("connection to {address} failed: {source}")]
    System {
        /// The address.
        address: SocketAddr,
        /// The error of the system.
        source: io::Error,
    },
    /// The handshake failed.
    #[error("{address} does not prove that it holds the cluster key: {source}")]
    Handshake {
        /// The address.
        address: SocketAddr,
        /// The error of the handshake.
        source: SecureError,
    },
    /// The server has refused the connection.
    #[error("{address} has refused the connection: {why}")]
    Refused {
        /// The address.
        address: SocketAddr,
        /// The reason that the server returned.
        why: String,
    },
}

/// A connection on which messages are exchanged.
#[derive(Debug)]
pub struct Channel {
    stream: TcpStream,
    cipher: RecordCipher,
    /// Received bytes that are not decrypted yet.
    sealed: Vec<u8>,
    /// Decrypted bytes of messages that are not complete yet.
    plain: Vec<u8>,
}

impl Channel {
    fn new(stream: TcpStream, cipher: RecordCipher) -> Self {
        Self { stream, cipher, sealed: Vec::new(), plain: Vec::new() }
    }

    /// Sends a message.
    ///
    /// # Errors
    /// If the connection fails.
    pub fn send(&mut self, message: &impl Serialize) -> io::Result<()> {
        let json = serde_json::to_vec(message)?;
        let len = u32::try_from(json.len()).map_err(io::Error::other)?;
        let mut sealed = Vec::new();
        self.cipher.encrypt(&[&len.to_le_bytes(), &json[..]].concat(), &mut sealed);
        self.stream.write_all(&sealed)
    }

    /// Receives a message.
    ///
    /// # Errors
    /// If the connection fails, or if the message is malformed or too long.
    pub fn receive<T: DeserializeOwned>(&mut self) -> io::Result<T> {
        let mut buffer = [0; 16 << 10];
        loop {
            if let Some(len) = self.plain.first_chunk::<4>() {
                let len = u32::from_le_bytes(*len) as usize;
                if len > MESSAGE_BYTES_MAX {
                    return Err(io::Error::other(format!(
                        "the peer sent a message of {len} bytes, above the limit of {MESSAGE_BYTES_MAX}"
                    )));
                }
                if let Some(json) = self.plain.get(4..4 + len) {
                    let message = serde_json::from_slice(json)?;
                    self.plain.drain(..4 + len);
                    return Ok(message);
                }
            }
            let received = self.stream.read(&mut buffer)?;
            if received == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.sealed.extend_from_slice(&buffer[..received]);
            let used = self.cipher.decrypt(&self.sealed, &mut self.plain).map_err(io::Error::other)?;
            self.sealed.drain(..used);
        }
    }

    /// Sets the timeout of each read and write.
    ///
    /// # Errors
    /// Errors of `setsockopt`.
    pub fn set_timeout(&self, timeout: Duration) -> io::Result<()> {
        self.stream.set_read_timeout(Some(timeout))?;
        self.stream.set_write_timeout(Some(timeout))
    }

    /// Converts the connection to a socket for a worker, which exchanges frames on it.
    ///
    /// # Errors
    /// Errors of the system, or if the peer has sent more than the handshake.
    fn into_socket(self, encrypt: bool) -> io::Result<PeerSocket> {
        if !self.sealed.is_empty() || !self.plain.is_empty() {
            return Err(io::Error::other("the peer sent frames before the end of the handshake"));
        }
        self.stream.set_nonblocking(true)?;
        Ok(PeerSocket { socket: self.stream.into(), cipher: encrypt.then_some(self.cipher) })
    }
}

/// Parameters of the handshake with other servers.
#[derive(Clone, Debug)]
pub struct Access {
    /// The name of the cache.
    pub cache: String,
    /// The key that all servers hold.
    pub key: ClusterKey,
    /// Whether this end requires that forwarded requests are encrypted.
    pub encrypt: bool,
}

/// Sets TCP options by which a connection fails within seconds if its peer vanishes.
fn set_failure_detection(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(1))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(1))?;
    sockopt::set_tcp_keepcnt(stream, 3)?;
    Ok(sockopt::set_tcp_user_timeout(stream, USER_TIMEOUT_MS)?)
}

/// Connects to a server. Returns the channel, and whether frames on it must be encrypted.
fn connect(address: SocketAddr, access: &Access, purpose: Purpose) -> Result<(Channel, bool), ChannelError> {
    let system = |source| ChannelError::System { address, source };
    let stream = connect_unpaced(address, CONNECT_TIMEOUT).map_err(system)?;
    set_failure_detection(&stream).map_err(system)?;
    stream.set_read_timeout(Some(CONNECT_TIMEOUT)).map_err(system)?;
    stream.set_write_timeout(Some(CONNECT_TIMEOUT)).map_err(system)?;
    let secured = initiate(stream, &access.key);
    let (stream, cipher) =
        secured.map_err(|source| ChannelError::Handshake { address, source })?.into_parts();
    let mut channel = Channel::new(stream, cipher);
    let hello = Hello { version: VERSION, cache: access.cache.clone(), purpose, encrypt: access.encrypt };
    channel.send(&hello).map_err(system)?;
    match channel.receive().map_err(system)? {
        Welcome::Accepted { encrypt } => Ok((channel, encrypt)),
        Welcome::Refused(why) => Err(ChannelError::Refused { address, why }),
    }
}

/// Connects to a server to forward requests of clients.
///
/// # Errors
/// If the connection or the handshake fails, or if the server refuses.
pub fn connect_for_requests(address: SocketAddr, access: &Access) -> Result<PeerSocket, ChannelError> {
    let (channel, encrypt) = connect(address, access, Purpose::Requests)?;
    channel.into_socket(encrypt).map_err(|source| ChannelError::System { address, source })
}

/// An accepted connection, by its purpose.
#[derive(Debug)]
pub enum Accepted {
    /// Connection for forwarded requests of clients.
    Requests(PeerSocket),
    /// Connection for requests to the server itself ([`Ask`]).
    Questions(Channel),
}

/// Runs the handshake of a connection of another server or of an operator.
///
/// # Errors
/// If the handshake fails, or if the peer has another version or another cache.
pub fn accept(stream: TcpStream, access: &Access) -> io::Result<Accepted> {
    stream.set_nonblocking(false)?;
    set_failure_detection(&stream)?;
    stream.set_read_timeout(Some(CONNECT_TIMEOUT))?;
    stream.set_write_timeout(Some(CONNECT_TIMEOUT))?;
    let (stream, cipher) = respond(stream, &access.key).map_err(io::Error::other)?.into_parts();
    let mut channel = Channel::new(stream, cipher);
    let hello: Hello = channel.receive()?;
    let refusal = if hello.version != VERSION {
        Some(format!(
            "the hello has version {} of the protocol, but the server has version {VERSION}",
            hello.version
        ))
    } else if hello.cache != access.cache {
        Some(format!(
            "the hello is for the cache \"{}\", but the server belongs to \"{}\"",
            hello.cache, access.cache
        ))
    } else {
        None
    };
    if let Some(why) = refusal {
        channel.send(&Welcome::Refused(why.clone()))?;
        return Err(io::Error::other(why));
    }
    let encrypt = hello.encrypt || access.encrypt;
    channel.send(&Welcome::Accepted { encrypt })?;
    match hello.purpose {
        Purpose::Requests => channel.into_socket(encrypt).map(Accepted::Requests),
        Purpose::Questions => Ok(Accepted::Questions(channel)),
    }
}

/// Sends a request to a server on a new connection, with a timeout of [`IDLE_TIMEOUT`].
///
/// # Errors
/// If the server cannot be reached, or does not answer.
pub fn ask_at(address: SocketAddr, access: &Access, ask: &Ask) -> Result<Answer, ChannelError> {
    let system = |source| ChannelError::System { address, source };
    let (mut channel, _) = connect(address, access, Purpose::Questions)?;
    channel.set_timeout(IDLE_TIMEOUT).map_err(system)?;
    channel.send(ask).map_err(system)?;
    channel.receive().map_err(system)
}

/// Fault injection for tests: decides which messages between servers are lost.
pub trait Interference: fmt::Debug + Send + Sync {
    /// Whether this request is lost.
    fn loses_question(&self, ask: &Ask) -> bool;

    /// Whether the answer to this request is lost.
    fn loses_answer(&self, ask: &Ask) -> bool;
}

/// A pool of open connections to other servers.
#[derive(Debug)]
pub struct Channels {
    access: Access,
    interference: Option<Arc<dyn Interference>>,
    free: Mutex<BTreeMap<Life, Vec<(Instant, Channel)>>>,
}

impl Channels {
    /// A pool without connections.
    #[must_use]
    pub fn new(access: Access, interference: Option<Arc<dyn Interference>>) -> Self {
        Self { access, interference, free: Mutex::default() }
    }

    /// The parameters of the handshake.
    #[must_use]
    pub fn access(&self) -> &Access {
        &self.access
    }

    /// Sends a request that may last as long as a hand-over. The timeout is [`IDLE_TIMEOUT`].
    ///
    /// # Errors
    /// If the server does not answer.
    pub fn ask_with_long_timeout(&self, server: &ServerRecord, ask: &Ask) -> Result<Answer, ChannelError> {
        ask_at(server.address, &self.access, ask)
    }

    /// Sends a request, and waits up to 2 s for the answer.
    ///
    /// # Errors
    /// If the server does not answer. The request may have been carried out.
    pub fn ask(&self, server: &ServerRecord, ask: &Ask) -> Result<Answer, ChannelError> {
        let system = |source| ChannelError::System { address: server.address, source };
        let lost = || Err(system(io::ErrorKind::TimedOut.into()));
        if self.interference.as_ref().is_some_and(|interference| interference.loses_question(ask)) {
            return lost();
        }
        let kept = self.free.lock().get_mut(&server.life()).and_then(Vec::pop);
        let mut channel = match kept.filter(|(used, _)| used.elapsed() < REUSE_AGE_MAX) {
            Some((_, channel)) => channel,
            None => {
                let (channel, _) = connect(server.address, &self.access, Purpose::Questions)?;
                channel.set_timeout(ANSWER_TIMEOUT).map_err(system)?;
                channel
            }
        };
        channel.send(ask).map_err(system)?;
        let answer = channel.receive().map_err(system)?;
        self.free.lock().entry(server.life()).or_default().push((Instant::now(), channel));
        if self.interference.as_ref().is_some_and(|interference| interference.loses_answer(ask)) {
            return lost();
        }
        Ok(answer)
    }

    /// Closes the connections to servers for which `is_alive` returns false.
    pub fn retain(&self, is_alive: impl Fn(Life) -> bool) {
        self.free.lock().retain(|life, _| is_alive(*life));
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn access(key: u8, cache: &str, encrypt: bool) -> Access {
        Access { cache: cache.to_owned(), key: ClusterKey([key; 32]), encrypt }
    }

    /// Connects two ends; returns the results of both.
    fn connect_pair(
        near: &Access,
        far: &Access,
        purpose: Purpose,
    ) -> (Result<(Channel, bool), ChannelError>, io::Result<Accepted>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::scope(|scope| {
            let accepted = scope.spawn(|| accept(listener.accept().unwrap().0, far));
            (connect(address, near, purpose), accepted.join().unwrap())
        })
    }

    #[test]
    fn long_messages_are_exchanged() {
        let (near, far) = (access(1, "a", false), access(1, "a", true));
        let (near, far) = connect_pair(&near, &far, Purpose::Questions);
        let (mut near, encrypt) = near.unwrap();
        assert!(encrypt, "one end requires it");
        let Accepted::Questions(mut far) = far.unwrap() else { panic!() };
        // Longer than an encrypted record.
        let long = Ask::GiveUp(
            crate::wire::Handover {
                partition: 1,
                generation: 2,
                attempt: 3,
                from: Life { host: 1, epoch: 1 },
                to: Life { host: 2, epoch: 2 },
            },
            "why ".repeat(50_000),
        );
        std::thread::scope(|scope| {
            scope.spawn(|| near.send(&long).unwrap());
            assert_eq!(far.receive::<Ask>().unwrap(), long);
        });
        far.send(&Answer::Done).unwrap();
        assert_eq!(near.receive::<Answer>().unwrap(), Answer::Done);
    }

    #[test]
    fn peers_with_another_key_or_cache_are_refused() {
        let own = access(1, "a", false);
        let (near, far) = connect_pair(&access(2, "a", false), &own, Purpose::Questions);
        assert!(matches!(near, Err(ChannelError::Handshake { .. })) && far.is_err());
        let (near, far) = connect_pair(&access(1, "b", false), &own, Purpose::Requests);
        let text = near.unwrap_err().to_string();
        assert!(text.contains("\"b\"") && far.is_err(), "{text}");
    }
}
