//! Listening sockets.

use std::fmt;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};

use aquifer_fabric::tcp::avoid_pacing;
use rustix::io::Errno;
use rustix::net::sockopt;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketAddrUnix, SocketFlags,
    SocketType, recvmsg,
};

/// The address of a listening socket.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ListenerAddress {
    /// An IP address and port.
    Tcp(SocketAddr),
    /// The path of a Unix socket.
    Unix(PathBuf),
}

impl fmt::Display for ListenerAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(formatter, "tcp:{address}"),
            Self::Unix(path) => write!(formatter, "unix:{}", path.display()),
        }
    }
}

/// A listening socket.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    address: ListenerAddress,
    backlog: i32,
    is_encrypted: bool,
    /// Whether connections are received from another process, which has accepted them.
    is_relayed: bool,
}

impl Listener {
    /// Listens on an address. Port 0 is any free port.
    ///
    /// # Errors
    /// If the address is in use, not of this machine, or not permitted.
    pub fn tcp(address: SocketAddr, backlog: i32) -> io::Result<Self> {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
        sockopt::set_socket_reuseaddr(&socket, true)?;
        if address.is_ipv6() {
            sockopt::set_ipv6_v6only(&socket, true)?;
        }
        rustix::net::bind(&socket, &address)?;
        // Replies are short, and BBR would delay them until it has measured the path.
        avoid_pacing(&socket);
        rustix::net::listen(&socket, backlog)?;
        let bound = SocketAddr::try_from(rustix::net::getsockname(&socket)?)
            .map_err(|_| io::Error::other("the socket has another kind of address"))?;
        Ok(Self {
            socket,
            address: ListenerAddress::Tcp(bound),
            backlog,
            is_encrypted: true,
            is_relayed: false,
        })
    }

    /// Listens at a path, with these permissions. Replaces a socket that another server has left
    /// there.
    ///
    /// # Errors
    /// If a server listens there, or if the path cannot be used.
    pub fn unix(path: &Path, mode: u32, backlog: i32) -> io::Result<Self> {
        let address = SocketAddrUnix::new(path)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        if let Err(error) = rustix::net::bind(&socket, &address) {
            if error != Errno::ADDRINUSE || is_served(&address) {
                return Err(error.into());
            }
            if !std::fs::symlink_metadata(path)?.file_type().is_socket() {
                return Err(io::Error::new(
                    io::ErrorKind::AlreadyExists,
                    "the file exists and is not a socket",
                ));
            }
            std::fs::remove_file(path)?;
            rustix::net::bind(&socket, &address)?;
        }
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
        rustix::net::listen(&socket, backlog)?;
        Ok(Self {
            socket,
            address: ListenerAddress::Unix(path.to_owned()),
            backlog,
            is_encrypted: false,
            is_relayed: false,
        })
    }

    /// Uses a socket that is already listening.
    ///
    /// # Errors
    /// If the socket has no address, or cannot be made non-blocking.
    pub fn from_socket(socket: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        let bound = rustix::net::getsockname(&socket)?;
        let address = match SocketAddr::try_from(bound.clone()) {
            Ok(address) => ListenerAddress::Tcp(address),
            Err(_) => {
                let address = SocketAddrUnix::try_from(bound)?;
                let path = address.path_bytes().unwrap_or_default();
                ListenerAddress::Unix(PathBuf::from(String::from_utf8_lossy(path).into_owned()))
            }
        };
        let is_encrypted = matches!(address, ListenerAddress::Tcp(_));
        Ok(Self { socket, address, backlog: 0, is_encrypted, is_relayed: false })
    }

    /// Receives connections from another process in place of accepting them: each is a descriptor
    /// in a message at this socket, which must be non-blocking.
    #[must_use]
    pub fn relayed(self, socket: OwnedFd) -> Self {
        Self { socket, is_relayed: true, ..self }
    }

    /// Accepts a connection, or receives one that another process has accepted. The address is that
    /// of the client, over TCP. `None` if the other process has ended.
    ///
    /// # Errors
    /// `AGAIN` if nothing has arrived, or the error of the system.
    pub fn accept(&self) -> Result<Option<(OwnedFd, Option<SocketAddr>)>, Errno> {
        if self.is_relayed {
            return Ok(receive_socket(self.socket.as_fd())?.map(|socket| (socket, None)));
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (socket, address) = rustix::net::acceptfrom_with(&self.socket, flags)?;
        Ok(Some((socket, address.and_then(|address| SocketAddr::try_from(address).ok()))))
    }

    /// Disables encryption of connections, even if the server has certificates.
    #[must_use]
    pub fn without_tls(self) -> Self {
        Self { is_encrypted: false, ..self }
    }

    /// Whether connections are encrypted if the server has certificates.
    #[must_use]
    pub fn is_encrypted(&self) -> bool {
        self.is_encrypted
    }

    /// The address of the socket.
    #[must_use]
    pub fn address(&self) -> &ListenerAddress {
        &self.address
    }

    /// Most connections that wait to be accepted; 0 if another process has set the limit.
    #[must_use]
    pub fn backlog(&self) -> i32 {
        self.backlog
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Receives a descriptor at a socket; `None` if the other end was closed.
///
/// # Errors
/// `AGAIN` if nothing has arrived, or the error of the system.
pub fn receive_socket(socket: BorrowedFd<'_>) -> Result<Option<OwnedFd>, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut parts = [IoSliceMut::new(&mut byte)];
    let received = recvmsg(socket, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let descriptors = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    match descriptors.flatten().next() {
        Some(descriptor) => Ok(Some(descriptor)),
        None if received.bytes == 0 => Ok(None),
        // This process has no free descriptor.
        None => Err(Errno::MFILE),
    }
}

/// Whether a server accepts connections at a path. Any error other than `CONNREFUSED` counts as
/// yes.
fn is_served(address: &SocketAddrUnix) -> bool {
    let connect = || {
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None)?;
        rustix::net::connect(&socket, address)
    };
    connect() != Err(Errno::CONNREFUSED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_socket_without_a_listener_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cache.sock");
        std::fs::write(&path, b"of a user").unwrap();
        let error = Listener::unix(&path, 0o600, 8).unwrap_err();
        assert!(error.to_string().contains("is not a socket"), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), b"of a user");
        std::fs::remove_file(&path).unwrap();
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let listening = Listener::unix(&path, 0o600, 8).unwrap();
        assert!(Listener::unix(&path, 0o600, 8).is_err(), "a server listens there");
        drop(listening);
    }
}
