//! A non-blocking socket, with its encryption and the unsent bytes.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use aquifer_secure_channel::RecordCipher;
use rustix::buffer::spare_capacity;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use smallvec::SmallVec;

use super::tls::TlsStream;

/// Most parts of a message in one system call (`IOV_MAX`).
const PARTS_MAX: usize = 1024;
/// Encrypted bytes of a peer that are received at a time.
const SEALED_BYTES: usize = 64 << 10;

/// Received bytes that are discarded at a time when a connection is closed.
const DRAIN_BUFFER_BYTES: usize = 64 << 10;
/// Most reads that discard received bytes when a connection is closed.
const DRAIN_READS_MAX: usize = 128;

/// The encryption of a connection.
#[derive(Debug)]
pub enum Security {
    /// No encryption.
    Plain,
    /// TLS, for clients.
    Tls(Box<TlsStream>),
    /// The cipher of the cluster's handshake, for other servers.
    Peer(Box<PeerCipher>),
}

/// The encryption of a connection with another server.
#[derive(Debug)]
pub struct PeerCipher {
    cipher: RecordCipher,
    received: Vec<u8>,
    to_send: Vec<u8>,
}

impl PeerCipher {
    /// The state after the handshake.
    pub fn new(cipher: RecordCipher) -> Self {
        Self { cipher, received: Vec::new(), to_send: Vec::new() }
    }

    fn receive(&mut self, socket: BorrowedFd<'_>, bytes: &mut Vec<u8>) -> io::Result<bool> {
        self.received.reserve(SEALED_BYTES);
        let received = rustix::io::retry_on_intr(|| {
            rustix::net::recv(socket, spare_capacity(&mut self.received), RecvFlags::empty())
        });
        match received {
            Ok((0, _)) => return Ok(false),
            Ok(_) => {}
            Err(Errno::AGAIN) => return Ok(true),
            Err(error) => return Err(error.into()),
        }
        let used = self.cipher.decrypt(&self.received, bytes).map_err(io::Error::other)?;
        self.received.drain(..used);
        Ok(true)
    }

    fn flush(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        let sent =
            rustix::io::retry_on_intr(|| rustix::net::send(socket, &self.to_send, SendFlags::NOSIGNAL));
        match sent {
            Ok(sent) => {
                self.to_send.drain(..sent);
                Ok(())
            }
            Err(Errno::AGAIN) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// A non-blocking socket.
#[derive(Debug)]
pub struct Stream {
    socket: OwnedFd,
    security: Security,
    /// Bytes that the socket did not accept.
    backlog: Vec<u8>,
    /// Bytes of the backlog that were sent since.
    backlog_sent: usize,
    /// Whether the other end sends no more bytes.
    pub is_ended: bool,
    /// Whether the connection has failed: unsent bytes are dropped.
    pub is_broken: bool,
    /// Whether decrypted bytes may remain for which there was no room.
    has_decrypted: bool,
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Stream {
    /// A stream on this socket.
    pub fn new(socket: OwnedFd, security: Security) -> Self {
        Self {
            socket,
            security,
            backlog: Vec::new(),
            backlog_sent: 0,
            is_ended: false,
            is_broken: false,
            has_decrypted: false,
        }
    }

    /// Receives bytes from the socket and appends them to `bytes`; returns their number. Bytes of
    /// clients fill at most the capacity.
    pub fn receive(&mut self, bytes: &mut Vec<u8>) -> u64 {
        let before = bytes.len();
        let received = match &mut self.security {
            Security::Plain => return self.receive_plain(bytes),
            Security::Tls(tls) => {
                let received = tls.receive(self.socket.as_fd(), bytes);
                // Decrypted bytes may remain for which there was no room. No event reports them.
                self.has_decrypted = bytes.len() == bytes.capacity();
                received
            }
            Security::Peer(peer) => peer.receive(self.socket.as_fd(), bytes),
        };
        match received {
            Ok(is_open) => self.is_ended |= !is_open,
            Err(_) => self.fail(),
        }
        (bytes.len() - before) as u64
    }

    fn receive_plain(&mut self, bytes: &mut Vec<u8>) -> u64 {
        let received = rustix::io::retry_on_intr(|| {
            rustix::net::recv(&self.socket, spare_capacity(bytes), RecvFlags::empty())
        });
        match received {
            Ok((received, _)) => {
                self.is_ended |= received == 0;
                received as u64
            }
            Err(Errno::AGAIN) => 0,
            Err(_) => {
                self.is_ended = true;
                bytes.clear();
                0
            }
        }
    }

    /// Sends parts; returns the number of sent bytes. Bytes that the socket does not accept are
    /// kept.
    pub fn send(&mut self, parts: &[&[u8]]) -> u64 {
        debug_assert!(!self.has_backlog());
        let len: usize = parts.iter().map(|part| part.len()).sum();
        if len == 0 || self.is_broken {
            return 0;
        }
        let sent = match &mut self.security {
            Security::Plain => {
                let sent = self.send_parts(parts);
                if sent < len && !self.is_broken {
                    self.backlog = rest_of(parts, sent);
                    self.backlog_sent = 0;
                }
                return sent as u64;
            }
            Security::Tls(tls) => tls.send(self.socket.as_fd(), parts),
            Security::Peer(peer) => {
                for part in parts {
                    peer.cipher.encrypt(part, &mut peer.to_send);
                }
                peer.flush(self.socket.as_fd())
            }
        };
        if sent.is_err() {
            self.fail();
        }
        len as u64
    }

    /// Sends the bytes that the socket did not accept before; returns the number of sent bytes.
    pub fn send_backlog(&mut self) -> u64 {
        let sent = match &mut self.security {
            Security::Plain => return self.send_plain_backlog(),
            Security::Tls(tls) => tls.flush(self.socket.as_fd()),
            Security::Peer(peer) => peer.flush(self.socket.as_fd()),
        };
        if sent.is_err() {
            self.fail();
        }
        0
    }

    fn send_plain_backlog(&mut self) -> u64 {
        if self.backlog.is_empty() {
            return 0;
        }
        let backlog = std::mem::take(&mut self.backlog);
        let sent = self.send_parts(&[&backlog[self.backlog_sent..]]);
        self.backlog_sent += sent;
        if self.backlog_sent < backlog.len() && !self.is_broken {
            self.backlog = backlog;
        }
        sent as u64
    }

    fn send_parts(&mut self, parts: &[&[u8]]) -> usize {
        let sent = if let [part] = parts {
            rustix::io::retry_on_intr(|| rustix::net::send(&self.socket, part, SendFlags::NOSIGNAL))
        } else {
            let slices: SmallVec<[IoSlice<'_>; 8]> =
                parts.iter().take(PARTS_MAX).map(|part| IoSlice::new(part)).collect();
            rustix::io::retry_on_intr(|| rustix::io::writev(&self.socket, &slices))
        };
        match sent {
            Ok(sent) => sent,
            Err(Errno::AGAIN) => 0,
            Err(_) => {
                self.fail();
                0
            }
        }
    }

    /// Shuts the socket down for sending, and discards received bytes.
    ///
    /// If received bytes were unread when the socket is closed, the kernel would reset the
    /// connection, and the other end would lose sent bytes that it has not received.
    pub fn end_sending(&mut self) {
        if self.is_broken || self.is_ended {
            return;
        }
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Write);
        let mut unread = vec![0; DRAIN_BUFFER_BYTES];
        for _ in 0..DRAIN_READS_MAX {
            match rustix::net::recv(&self.socket, &mut unread[..], RecvFlags::empty()) {
                Ok((_, 1..)) | Err(Errno::INTR) => {}
                Ok((_, 0)) | Err(_) => return,
            }
        }
    }

    fn fail(&mut self) {
        self.is_ended = true;
        self.is_broken = true;
    }

    /// Whether unsent bytes wait for the socket.
    pub fn has_backlog(&self) -> bool {
        if self.is_broken {
            return false;
        }
        match &self.security {
            Security::Plain => !self.backlog.is_empty(),
            Security::Tls(tls) => tls.has_backlog(),
            Security::Peer(peer) => !peer.to_send.is_empty(),
        }
    }

    /// The number of unsent bytes that wait for the socket; 0 for a connection with TLS.
    pub fn backlog_bytes(&self) -> usize {
        match &self.security {
            Security::Plain => self.backlog.len().saturating_sub(self.backlog_sent),
            Security::Tls(_) => 0,
            Security::Peer(peer) => peer.to_send.len(),
        }
    }

    /// Whether bytes can be received without an event of the socket.
    pub fn has_decrypted(&self) -> bool {
        self.has_decrypted && !self.is_ended
    }
}

/// The bytes of parts after the first `sent`.
fn rest_of(parts: &[&[u8]], mut sent: usize) -> Vec<u8> {
    let mut rest = Vec::new();
    for part in parts {
        let skipped = sent.min(part.len());
        sent -= skipped;
        rest.extend_from_slice(&part[skipped..]);
    }
    rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsent_bytes_remain() {
        let parts = [&b"abc"[..], b"", b"defg"];
        for sent in 0..=7 {
            assert_eq!(rest_of(&parts, sent), &b"abcdefg"[sent..]);
        }
    }
}
