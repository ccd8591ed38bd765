//! Connections on which servers ask each other, and operators ask servers. All is encrypted.

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
/// Longest time for connecting and for the handshake.
const CONNECT_TIME: Duration = Duration::from_secs(1);
/// Longest wait for an answer.
const ANSWER_TIME: Duration = Duration::from_secs(2);
/// An open connection that was not used for so long is closed, before the other end closes it.
const KEPT_TIME: Duration = Duration::from_secs(20);
/// After so long without an acknowledgement a connection has failed.
const USER_TIMEOUT_MS: u32 = 3000;
/// Longest wait for a question on an open connection.
pub const IDLE_TIME: Duration = Duration::from_secs(60);

/// Why a server cannot be asked.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// The connection failed.
    #[error("{address} cannot be reached: {source}")]
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
        /// Why.
        source: SecureError,
    },
    /// The server has refused the connection.
    #[error("{address} has refused the connection: {why}")]
    Refused {
        /// The address.
        address: SocketAddr,
        /// Why.
        why: String,
    },
}

/// A connection on which messages are exchanged.
#[derive(Debug)]
pub struct Channel {
    stream: TcpStream,
    cipher: RecordCipher,
    /// Encrypted bytes that have arrived.
    sealed: Vec<u8>,
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
    /// If the connection fails, or the message is malformed.
    pub fn receive<T: DeserializeOwned>(&mut self) -> io::Result<T> {
        let mut buffer = [0; 16 << 10];
        loop {
            if let Some(len) = self.plain.first_chunk::<4>() {
                let len = u32::from_le_bytes(*len) as usize;
                if len > MESSAGE_BYTES_MAX {
                    return Err(io::Error::other(format!("a message of {len} bytes")));
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

    /// Has calls wait for at most this time.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn set_patience(&self, time: Duration) -> io::Result<()> {
        self.stream.set_read_timeout(Some(time))?;
        self.stream.set_write_timeout(Some(time))
    }

    /// The connection for a worker, which exchanges frames on it.
    ///
    /// # Errors
    /// If the system refuses, or if more has arrived than the handshake.
    fn into_socket(self, encrypt: bool) -> io::Result<PeerSocket> {
        if !self.sealed.is_empty() || !self.plain.is_empty() {
            return Err(io::Error::other("frames before the end of the handshake"));
        }
        self.stream.set_nonblocking(true)?;
        Ok(PeerSocket { socket: self.stream.into(), cipher: encrypt.then_some(self.cipher) })
    }
}

/// What a server tells others of itself, and expects of them.
#[derive(Clone, Debug)]
pub struct Access {
    /// The cache.
    pub cache: String,
    /// The key that all servers hold.
    pub key: ClusterKey,
    /// Whether this end requires that forwarded requests are encrypted.
    pub encrypt: bool,
}

/// Has a connection fail soon whose other end has vanished.
fn watch(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(1))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(1))?;
    sockopt::set_tcp_keepcnt(stream, 3)?;
    Ok(sockopt::set_tcp_user_timeout(stream, USER_TIMEOUT_MS)?)
}

/// Connects with a server.
fn connect(address: SocketAddr, access: &Access, purpose: Purpose) -> Result<(Channel, bool), ChannelError> {
    let system = |source| ChannelError::System { address, source };
    let stream = connect_unpaced(address, CONNECT_TIME).map_err(system)?;
    watch(&stream).map_err(system)?;
    stream.set_read_timeout(Some(CONNECT_TIME)).map_err(system)?;
    stream.set_write_timeout(Some(CONNECT_TIME)).map_err(system)?;
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

/// A connection with a server for the requests of clients.
///
/// # Errors
/// If it cannot be reached, or refuses.
pub fn connect_for_requests(address: SocketAddr, access: &Access) -> Result<PeerSocket, ChannelError> {
    let (channel, encrypt) = connect(address, access, Purpose::Requests)?;
    channel.into_socket(encrypt).map_err(|source| ChannelError::System { address, source })
}

/// A connection that was accepted.
#[derive(Debug)]
pub enum Accepted {
    /// For the requests of clients.
    Requests(PeerSocket),
    /// For questions.
    Questions(Channel),
}

/// Runs the handshake of a connection that another server or an operator has begun.
///
/// # Errors
/// If it fails, or the other end is refused.
pub fn accept(stream: TcpStream, access: &Access) -> io::Result<Accepted> {
    stream.set_nonblocking(false)?;
    watch(&stream)?;
    stream.set_read_timeout(Some(CONNECT_TIME))?;
    stream.set_write_timeout(Some(CONNECT_TIME))?;
    let (stream, cipher) = respond(stream, &access.key).map_err(io::Error::other)?.into_parts();
    let mut channel = Channel::new(stream, cipher);
    let hello: Hello = channel.receive()?;
    let refusal = if hello.version != VERSION {
        Some(format!("it has version {} of the protocol, this server version {VERSION}", hello.version))
    } else if hello.cache != access.cache {
        Some(format!("it is of the cache \"{}\", this server of \"{}\"", hello.cache, access.cache))
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

/// Asks one server.
///
/// # Errors
/// If it cannot be reached.
pub fn ask_at(address: SocketAddr, access: &Access, ask: &Ask) -> Result<Answer, ChannelError> {
    let system = |source| ChannelError::System { address, source };
    let (mut channel, _) = connect(address, access, Purpose::Questions)?;
    channel.set_patience(IDLE_TIME).map_err(system)?;
    channel.send(ask).map_err(system)?;
    channel.receive().map_err(system)
}

/// Loses messages between servers, in tests.
pub trait Interference: fmt::Debug + Send + Sync {
    /// Whether this question is lost.
    fn loses_question(&self, ask: &Ask) -> bool;

    /// Whether the answer to this question is lost.
    fn loses_answer(&self, ask: &Ask) -> bool;
}

/// Open connections with other servers.
#[derive(Debug)]
pub struct Channels {
    access: Access,
    interference: Option<Arc<dyn Interference>>,
    free: Mutex<BTreeMap<Life, Vec<(Instant, Channel)>>>,
}

impl Channels {
    /// No connections.
    #[must_use]
    pub fn new(access: Access, interference: Option<Arc<dyn Interference>>) -> Self {
        Self { access, interference, free: Mutex::default() }
    }

    /// What this server tells others.
    #[must_use]
    pub fn access(&self) -> &Access {
        &self.access
    }

    /// Asks a server for what may last as long as a hand-over.
    ///
    /// # Errors
    /// If it does not answer.
    pub fn ask_for_long(&self, server: &ServerRecord, ask: &Ask) -> Result<Answer, ChannelError> {
        ask_at(server.address, &self.access, ask)
    }

    /// Asks a server. The question may have arrived even if there is no answer.
    ///
    /// # Errors
    /// If it does not answer.
    pub fn ask(&self, server: &ServerRecord, ask: &Ask) -> Result<Answer, ChannelError> {
        let system = |source| ChannelError::System { address: server.address, source };
        let lost = || Err(system(io::ErrorKind::TimedOut.into()));
        if self.interference.as_ref().is_some_and(|interference| interference.loses_question(ask)) {
            return lost();
        }
        let kept = self.free.lock().get_mut(&server.life()).and_then(Vec::pop);
        let mut channel = match kept.filter(|(used, _)| used.elapsed() < KEPT_TIME) {
            Some((_, channel)) => channel,
            None => {
                let (channel, _) = connect(server.address, &self.access, Purpose::Questions)?;
                channel.set_patience(ANSWER_TIME).map_err(system)?;
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

    /// Closes the connections with servers other than these.
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

    /// What both ends make of a connection.
    fn meet(
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
    fn messages_are_exchanged() {
        let (near, far) = (access(1, "a", false), access(1, "a", true));
        let (near, far) = meet(&near, &far, Purpose::Questions);
        let (mut near, encrypt) = near.unwrap();
        assert!(encrypt, "one end requires it");
        let Accepted::Questions(mut far) = far.unwrap() else { panic!() };
        // Longer than a record.
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
    fn others_are_refused() {
        let own = access(1, "a", false);
        let (near, far) = meet(&access(2, "a", false), &own, Purpose::Questions);
        assert!(matches!(near, Err(ChannelError::Handshake { .. })) && far.is_err());
        let (near, far) = meet(&access(1, "b", false), &own, Purpose::Requests);
        let text = near.unwrap_err().to_string();
        assert!(text.contains("\"b\"") && far.is_err(), "{text}");
    }
}
