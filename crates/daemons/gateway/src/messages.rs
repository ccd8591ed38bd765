//! Messages between the daemon, its gateway and the relays: a record as JSON, followed by bytes of
//! a user. All of them are processes of one build.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use aquifer_ipc::{FRAME_BYTES_MAX, SOCKET_SECRET_BYTES};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Maximum number of descriptors in a message. A frame to a program and an introduction have fewer.
pub(crate) const DESCRIPTORS_MAX: usize = 12;
/// Longest record, in bytes.
const RECORD_BYTES_MAX: usize = 1024;
/// Length of the field with the length of the record, in bytes.
const LENGTH_BYTES: usize = 4;
/// Longest message, in bytes. A user's packet may have one byte more than a frame.
pub(crate) const MESSAGE_BYTES_MAX: usize = LENGTH_BYTES + RECORD_BYTES_MAX + FRAME_BYTES_MAX + 1;

/// A record, the bytes of a user behind it, and the descriptors.
pub(crate) type Message<T> = (T, Vec<u8>, Vec<OwnedFd>);

/// The socket at which a process has connected.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum ListenerKind {
    /// The daemon's own socket, for its user.
    Own,
    /// The socket of all users of the host.
    Shared,
    /// A socket for a child that has sent a connect-back request.
    #[serde(rename = "Knock")]
    ConnectBack {
        /// Sent to the child as a proof that the agent listens at the socket.
        secret: [u8; SOCKET_SECRET_BYTES],
        /// The user of the run, and the user of the child at its fork; `u32::MAX` if unknown.
        users: [u32; 2],
    },
}

/// From the daemon to its gateway.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Accepts connections at a listener, which is the message's descriptor.
    Listen { listener: u64, kind: ListenerKind },
    /// Closes a listener.
    Close { listener: u64 },
}

/// From the gateway to the daemon: a relay was started. The message's descriptor is the socket at
/// which the daemon receives its introductions.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct RelayStarted {
    pub uid: u32,
}

/// From the gateway to a relay: a connection of its user. The message's descriptor is the socket.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Connection {
    pub kind: ListenerKind,
    pub pid: u32,
}

/// From a relay to the daemon: a connection of its user, with its first packet behind the record.
/// The descriptors are a socket, the process if it lives, and the userfaultfd if there is one.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct IntroductionRecord {
    pub kind: ListenerKind,
    pub pid: u32,
    pub has_process: bool,
}

/// Sends a message.
pub(crate) fn send(
    socket: &OwnedFd,
    record: &impl Serialize,
    packet: &[u8],
    descriptors: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> io::Result<()> {
    let record = serde_json::to_vec(record).map_err(io::Error::other)?;
    let length = u32::try_from(record.len()).map_err(io::Error::other)?.to_le_bytes();
    let parts = [IoSlice::new(&length), IoSlice::new(&record), IoSlice::new(packet)];
    send_parts(socket, &parts, descriptors, flags)
}

/// Sends the parts of one packet.
pub(crate) fn send_parts(
    socket: &OwnedFd,
    parts: &[IoSlice<'_>],
    descriptors: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    loop {
        match sendmsg(socket, parts, &mut ancillary, flags | SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            sent => return sent.map(drop).map_err(io::Error::from),
        }
    }
}

/// Receives a message. Returns `None` at the end of the connection.
pub(crate) fn receive<T: DeserializeOwned>(
    socket: &OwnedFd,
    buffer: &mut [u8],
) -> io::Result<Option<Message<T>>> {
    let (len, descriptors) = receive_packet(socket, buffer, RecvFlags::empty())?;
    if len == 0 {
        return Ok(None);
    }
    let invalid = || io::Error::from(io::ErrorKind::InvalidData);
    let (length, rest) = buffer[..len].split_first_chunk::<LENGTH_BYTES>().ok_or_else(invalid)?;
    let length = usize::try_from(u32::from_le_bytes(*length)).map_err(io::Error::other)?;
    let (record, packet) = rest.split_at_checked(length).ok_or_else(invalid)?;
    let record = serde_json::from_slice(record).map_err(io::Error::other)?;
    Ok(Some((record, packet.to_vec(), descriptors)))
}

/// Receives a packet of a trusted process, with its descriptors.
pub(crate) fn receive_packet(
    socket: &OwnedFd,
    buffer: &mut [u8],
    flags: RecvFlags,
) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let flags = flags | RecvFlags::CMSG_CLOEXEC;
        match recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut ancillary, flags) {
            Err(Errno::INTR) => {}
            received => break received?,
        }
    };
    let mut descriptors = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    if received.flags.contains(rustix::net::ReturnFlags::CTRUNC) {
        return Err(io::Error::other("descriptors were cut: this process has too many open files"));
    }
    Ok((received.bytes, descriptors))
}
