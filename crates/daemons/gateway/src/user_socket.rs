//! Operations on a socket whose other end a user has: receive and close.
//!
//! Only a process with one thread may use these functions, and only a relay [`close`].

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use aquifer_arena::calls::Call;
use aquifer_ipc::{FRAME_BYTES_MAX, Frame};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::sockopt::set_socket_passcred;
use rustix::net::{RecvFlags, Shutdown, shutdown};

/// Interval of the signals that interrupt the last close of a user's descriptors, in microseconds.
const CLOSE_US_MAX: i64 = 20_000;

/// The outcome of a receive from a user's socket.
#[derive(Debug)]
pub(crate) enum Received {
    /// No packet is waiting.
    Nothing,
    /// A packet, with the userfaultfd that it carries.
    Packet(Vec<u8>, Option<OwnedFd>),
    /// The user has closed the connection.
    Closed,
    /// A packet with forbidden descriptors, which is still in the queue.
    Refused,
    /// Descriptors of a packet, one of which is no userfaultfd, and whose close may wait for ever.
    Foreign(Vec<OwnedFd>),
}

/// Makes the kernel add the sending user to each packet. Sockets that are accepted at a listener
/// inherit the setting.
pub(crate) fn request_senders(socket: impl AsFd) {
    // Without the setting the sender is unknown, and no descriptor is received.
    let _is_set = set_socket_passcred(socket, true);
}

/// Receives a packet of a connection of user `uid`, without waiting.
///
/// A descriptor is received only if the daemon may need it, because the close of a received
/// descriptor runs the `flush` of its file, which waits for the user if the file is in FUSE. It is
/// received only from `uid` or root: a program of root may have become another user since, and a
/// descriptor that cannot be closed ends the relay.
///
/// `may_carry` is whether a frame may carry a userfaultfd.
pub(crate) fn receive(
    socket: &OwnedFd,
    uid: u32,
    may_carry: fn(&Frame) -> bool,
    buffer: &mut [u8],
) -> Received {
    let peeked = match peek(socket, buffer, 0) {
        Err(Errno::AGAIN | Errno::INTR) => return Received::Nothing,
        Ok(Peeked { len: 0, has_more_descriptors: false, .. }) | Err(_) => return Received::Closed,
        Ok(peeked) => peeked,
    };
    if !peeked.has_more_descriptors {
        // A shorter buffer cuts the packet, and the parser refuses a packet that is too long.
        return match rustix::net::recv(socket, &mut *buffer, RecvFlags::DONTWAIT) {
            Ok((len, _)) => Received::Packet(buffer[..len].to_vec(), None),
            Err(_) => Received::Closed,
        };
    }
    let is_of_user = peeked.sender.is_some_and(|sender| [0, uid].contains(&sender));
    if !is_of_user || !Frame::parse(&buffer[..peeked.len]).is_ok_and(|frame| may_carry(&frame)) {
        return Received::Refused;
    }
    receive_userfaultfd(socket, buffer)
}

/// Whether a frame is the first frame of a program, with the userfaultfd of its memory.
pub(crate) fn is_program_hello(frame: &Frame) -> bool {
    matches!(frame, Frame::Hello(hello) if !hello.is_child)
}

/// Whether a frame carries the userfaultfd of a segment, at a connection for segments.
pub(crate) fn is_serve_call(frame: &Frame) -> bool {
    matches!(
        frame,
        Frame::SegmentCall(json) if matches!(serde_json::from_str(json), Ok(Call::Serve { .. }))
    )
}

/// The result of a peek: a packet that stays in the queue.
struct Peeked {
    /// The length of the packet, as far as the buffer has room.
    len: usize,
    /// The real user of the process that has sent the packet, if the kernel has recorded it.
    sender: Option<u32>,
    /// The descriptors of the packet, up to the requested number.
    descriptors: Vec<OwnedFd>,
    has_more_descriptors: bool,
}

/// Size of the control message with the sender, and of a message with `descriptors` descriptors, in
/// bytes.
fn control_room(descriptors: usize) -> usize {
    let space = |bytes: usize| {
        let bytes = u32::try_from(bytes).expect("messages with few descriptors are small");
        // SAFETY: the function only calculates.
        unsafe { libc::CMSG_SPACE(bytes) as usize }
    };
    let of_descriptors = if descriptors == 0 { 0 } else { space(descriptors * size_of::<RawFd>()) };
    space(size_of::<libc::ucred>()) + of_descriptors
}

/// Peeks at the next packet, without waiting. Receives at most `descriptors_max` of its
/// descriptors, and one more if the kernel rounds the size up.
///
/// Calls libc, because the process number of a sender in another PID namespace is 0, which rustix
/// does not represent.
fn peek(socket: &OwnedFd, buffer: &mut [u8], descriptors_max: usize) -> Result<Peeked, Errno> {
    let mut control = [0u64; 16];
    let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: an all-zero header is a valid object. All pointers are to locals and to the buffer,
    // which outlive the call. The control messages that the kernel has written are within
    // `control`, and their lengths are checked by libc's macros; `read_unaligned` needs no more.
    // Each descriptor in them was created for this call.
    unsafe {
        let mut header: libc::msghdr = std::mem::zeroed();
        header.msg_iov = &raw mut part;
        header.msg_iovlen = 1;
        header.msg_control = control.as_mut_ptr().cast();
        header.msg_controllen = control_room(descriptors_max).min(size_of_val(&control));
        let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
        let received = libc::recvmsg(socket.as_raw_fd(), &raw mut header, flags);
        let len = usize::try_from(received)
            .map_err(|_| Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO))?;
        let (mut sender, mut descriptors) = (None, Vec::new());
        let mut message = libc::CMSG_FIRSTHDR(&raw const header);
        while !message.is_null() {
            let data = libc::CMSG_DATA(message);
            let data_bytes = (*message).cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize);
            match ((*message).cmsg_level, (*message).cmsg_type) {
                (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) if data_bytes >= size_of::<libc::ucred>() => {
                    sender = Some(data.cast::<libc::ucred>().read_unaligned().uid);
                }
                (libc::SOL_SOCKET, libc::SCM_RIGHTS) => {
                    let fds = data.cast::<RawFd>();
                    let count = data_bytes / size_of::<RawFd>();
                    descriptors.extend(
                        (0..count).map(|number| OwnedFd::from_raw_fd(fds.add(number).read_unaligned())),
                    );
                }
                _ => {}
            }
            message = libc::CMSG_NXTHDR(&raw const header, message);
        }
        // The kernel sets this flag if there was no room for all descriptors.
        let has_more_descriptors = header.msg_flags & libc::MSG_CTRUNC != 0;
        Ok(Peeked { len, sender, descriptors, has_more_descriptors })
    }
}

/// Receives a packet with one descriptor.
fn receive_userfaultfd(socket: &OwnedFd, buffer: &mut [u8]) -> Received {
    let Ok(peeked) = peek(socket, buffer, 1) else { return Received::Closed };
    let Peeked { len, mut descriptors, has_more_descriptors, .. } = peeked;
    if !descriptors.iter().all(is_userfaultfd) {
        return Received::Foreign(descriptors);
    }
    match descriptors.pop() {
        Some(userfaultfd) if descriptors.is_empty() && !has_more_descriptors => {
            // The kernel drops a reference to the descriptor, which is not the last one.
            let _ = rustix::net::recv(socket, &mut [0; 1], RecvFlags::DONTWAIT);
            Received::Packet(buffer[..len].to_vec(), Some(userfaultfd))
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
/// A sender that the socket did not refuse may still be adding its packet. The first peek at an
/// empty queue waits for the sender, and the second peek sees the packet.
pub(crate) fn is_drained(socket: &OwnedFd) -> bool {
    let is_empty = || matches!(peek(socket, &mut [0; 1], 0), Err(Errno::AGAIN | Errno::INTR));
    is_empty() && is_empty()
}

/// Closes a user's socket, with the packets in its queue.
pub(crate) fn close(socket: OwnedFd) {
    // No process can send to the socket any more.
    let _was_closed = shutdown(&socket, Shutdown::Both);
    close_reference(socket);
}

/// Closes a reference to a user's socket, which may be the last one. If the close waits, a signal
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

/// Installs an empty handler, so that SIGALRM only interrupts system calls of this process.
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

/// Size of the longest packet in bytes, plus one byte to detect a longer packet.
pub(crate) const BUFFER_BYTES: usize = FRAME_BYTES_MAX + 1;
