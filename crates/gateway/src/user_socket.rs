//! Receiving from a socket whose other end a user has, and closing it.
//!
//! Only a process with one thread may use these functions, and only a relay [`close`].

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};

use aquifer_arena::calls::Call;
use aquifer_ipc::{FRAME_BYTES_MAX, Frame};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, Shutdown, recvmsg, shutdown,
};

/// Longest wait for the last close of descriptors that a user has sent, in microseconds.
const CLOSE_US_MAX: i64 = 20_000;

/// The outcome of a look at a user's socket.
#[derive(Debug)]
pub(crate) enum Received {
    /// No packet is waiting.
    Nothing,
    /// A packet, with the userfaultfd that it carries.
    Packet(Vec<u8>, Option<OwnedFd>),
    /// The user has closed the connection.
    Closed,
    /// A packet with descriptors that it must not have. It is still in the queue.
    Refused,
    /// Descriptors of a packet, one of which is no userfaultfd. Closing it may wait for ever.
    Foreign(Vec<OwnedFd>),
}

/// Receives a packet, without waiting.
///
/// A descriptor is received only if it can be one that the daemon wants: closing one that was
/// received runs the `flush` of its file, and that of a file in FUSE waits for the user.
pub(crate) fn receive(socket: &OwnedFd, buffer: &mut [u8]) -> Received {
    let (len, has_descriptors) = match peek(socket, buffer) {
        Ok((0, false)) | Err(Some(_)) => return Received::Closed,
        Ok(peeked) => peeked,
        Err(None) => return Received::Nothing,
    };
    if !has_descriptors {
        // A shorter buffer cuts the packet, and the parser refuses what is too long.
        return match rustix::net::recv(socket, &mut *buffer, RecvFlags::DONTWAIT) {
            Ok((len, _)) => Received::Packet(buffer[..len].to_vec(), None),
            Err(_) => Received::Closed,
        };
    }
    if !may_carry_userfaultfd(&buffer[..len]) {
        return Received::Refused;
    }
    receive_userfaultfd(socket, buffer)
}

/// Whether a packet is one of those that bring a userfaultfd.
fn may_carry_userfaultfd(packet: &[u8]) -> bool {
    match Frame::parse(packet) {
        Ok(Frame::Hello(hello)) => !hello.is_child,
        Ok(Frame::SegmentCall(json)) => matches!(serde_json::from_str(&json), Ok(Call::Serve { .. })),
        _ => false,
    }
}

/// The length of the next packet, as far as the buffer has room, and whether descriptors come with
/// it. The packet stays in the queue.
///
/// # Errors
/// `None` if no packet is waiting, or the error of the socket.
fn peek(socket: &OwnedFd, buffer: &mut [u8]) -> Result<(usize, bool), Option<Errno>> {
    let mut none = RecvAncillaryBuffer::default();
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    match recvmsg(socket, &mut [io::IoSliceMut::new(buffer)], &mut none, flags) {
        // Without room for any, the kernel says that it has cut them.
        Ok(peeked) => Ok((peeked.bytes, peeked.flags.contains(ReturnFlags::CTRUNC))),
        Err(Errno::AGAIN | Errno::INTR) => Err(None),
        Err(error) => Err(Some(error)),
    }
}

/// Receives a packet with one descriptor.
fn receive_userfaultfd(socket: &OwnedFd, buffer: &mut [u8]) -> Received {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let Ok(peeked) = recvmsg(socket, &mut [io::IoSliceMut::new(buffer)], &mut ancillary, flags) else {
        return Received::Closed;
    };
    let mut descriptors = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            // The kernel rounds the room up to two.
            descriptors.extend(rights);
        }
    }
    if !descriptors.iter().all(is_userfaultfd) {
        return Received::Foreign(descriptors);
    }
    let is_cut = peeked.flags.contains(ReturnFlags::CTRUNC);
    match descriptors.pop() {
        Some(userfaultfd) if descriptors.is_empty() && !is_cut => {
            // What the kernel drops here is not the last reference.
            let _ = rustix::net::recv(socket, &mut [0; 1], RecvFlags::DONTWAIT);
            Received::Packet(buffer[..peeked.bytes].to_vec(), Some(userfaultfd))
        }
        _ => Received::Refused,
    }
}

/// Whether a descriptor is a non-blocking userfaultfd. Any other could make the daemon wait.
fn is_userfaultfd(descriptor: &OwnedFd) -> bool {
    std::fs::read_link(format!("/proc/self/fd/{}", descriptor.as_raw_fd()))
        .is_ok_and(|target| target.as_os_str() == "anon_inode:[userfaultfd]")
        && rustix::fs::fcntl_getfl(descriptor).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK))
}

/// Whether a socket that refuses descriptors has no packet in its queue.
///
/// A sender that the socket did not refuse may still be putting its packet there. A look at an
/// empty queue waits for it, and the next look sees the packet.
pub(crate) fn is_drained(socket: &OwnedFd) -> bool {
    let is_empty = || matches!(peek(socket, &mut [0; 1]), Err(None));
    is_empty() && is_empty()
}

/// Closes a user's socket, with the packets in its queue.
pub(crate) fn close(socket: OwnedFd) {
    // From now on nothing can be sent to it.
    let _was_closed = shutdown(&socket, Shutdown::Both);
    close_reference(socket);
}

/// Closes a reference to a user's socket, which may be the last one. If that waits, a signal
/// interrupts it: the kernel does not let a socket linger then.
pub(crate) fn close_reference(socket: OwnedFd) {
    set_alarm(CLOSE_US_MAX);
    drop(socket);
    set_alarm(0);
}

/// Sends SIGALRM to this process at an interval, in microseconds; 0 stops it.
fn set_alarm(interval_us: i64) {
    let interval = libc::timeval { tv_sec: 0, tv_usec: interval_us };
    let timer = libc::itimerval { it_interval: interval, it_value: interval };
    // SAFETY: the kernel reads the struct. It fails for no interval that is used here.
    unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut()) };
}

/// Lets SIGALRM interrupt system calls of this process, and do nothing else.
pub(crate) fn catch_alarm() {
    extern "C" fn ignore(_signal: libc::c_int) {}
    // SAFETY: an all-zero sigaction is a valid object; the handler does nothing, so it may run at
    // any moment. Without SA_RESTART a system call that waits ends.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = ignore as extern "C" fn(libc::c_int) as usize;
        libc::sigaction(libc::SIGALRM, &raw const action, std::ptr::null_mut());
    }
}

/// Room for the longest packet, and one byte that shows that a packet is longer.
pub(crate) const BUFFER_BYTES: usize = FRAME_BYTES_MAX + 1;
