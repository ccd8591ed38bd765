//! How a program, and each child it forks, comes under the agent's care.

use core::mem::{offset_of, zeroed};
use core::ptr::{self, null_mut};
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use aquifer_ipc::{
    BATCH_PAGES_MAX, Frame, ProgramHello, RunToken, STAGING_BUFFERS, WorkerControl, control::CONTROL_BYTES,
};

use crate::children;
use crate::memory;
use crate::say;
use crate::uffd;
use crate::worker::{STACK_BYTES, Worker, start};

const PAGE: usize = 4096;
const ANTECHAMBER_BYTES: usize = BATCH_PAGES_MAX * PAGE;
const STAGING_BYTES: usize = STAGING_BUFFERS * BATCH_PAGES_MAX * PAGE;
const PATH_BYTES: usize = 108;
/// Agents that may die one after the other while a program says hello.
const HELLOS_MAX: u32 = 64;

/// What of a process is paged, and counts against its run's limit.
#[derive(Clone, Copy)]
pub enum Paged {
    /// All of its memory that can be.
    All,
    /// What is there, or will be, from one address up to another: whole pages.
    Only(usize, usize),
}

/// What a forked child needs to attach itself: it may allocate nothing, and another thread may have held any lock.
struct Origin {
    canary: AtomicUsize,
    only: [AtomicUsize; 2],
    token: [AtomicU64; 2],
    path_len: AtomicUsize,
    path: [AtomicU32; PATH_BYTES],
}

static ORIGIN: Origin = Origin {
    canary: AtomicUsize::new(0),
    only: [const { AtomicUsize::new(0) }; 2],
    token: [const { AtomicU64::new(0) }; 2],
    path_len: AtomicUsize::new(0),
    path: [const { AtomicU32::new(0) }; PATH_BYTES],
};
static CONTROL: AtomicPtr<WorkerControl> = AtomicPtr::new(null_mut());
/// Says 1 in a process that is attached. Its page is empty in each child that has a copy of the memory, however that was made.
static MARK: AtomicPtr<AtomicU32> = AtomicPtr::new(null_mut());

/// How often to look whether the agent has finished an eviction.
const PIN_INTERVAL_US: u32 = 50;

/// Pins the page at `address`, which the calling thread may write: it is never evicted. Returns when the page is resident.
fn pin(address: usize) {
    attach_if_forked();
    let control = CONTROL.load(Ordering::Acquire);
    if !control.is_null() {
        // SAFETY: once set it stays mapped for the life of the process; a child has just got its own.
        let control = unsafe { &*control };
        control.pin((address / PAGE) as u64);
        while control.are_pins_locked() {
            // SAFETY: waits only.
            unsafe {
                libc::usleep(PIN_INTERVAL_US);
            }
        }
        // A write, since the page may be write-protected.
        // SAFETY: the caller has a word there, and an atomic access that changes nothing disturbs no other.
        unsafe { AtomicU32::from_ptr((address & !3) as *mut u32) }.fetch_or(0, Ordering::Relaxed);
    }
}

/// Has the agent know that forked children may not get all memory.
pub fn report_fork_advice() {
    attach_if_forked();
    let control = CONTROL.load(Ordering::Acquire);
    if !control.is_null() {
        // SAFETY: once set it stays mapped for the life of the process; a child has just got its own.
        unsafe { &*control }.has_fork_advice.store(1, Ordering::Release);
    }
}

/// Attach this process to a run of the agent that listens at `path`, before it has a second thread. Ends it, with a sentence, if that cannot be.
pub fn attach_program(path: &[u8], token: RunToken, paged: Paged) {
    if path.len() >= PATH_BYTES {
        say::fail("the path of the agent's socket is too long", 0);
    }
    children::find_next();
    let canary = map_wiped_by_fork();
    remember(path, token, canary);
    if let Paged::Only(start, end) = paged {
        ORIGIN.only[0].store(start, Ordering::Relaxed);
        ORIGIN.only[1].store(end, Ordering::Relaxed);
    }
    attach(create_uffd(), 0);
    let mark = map_wiped_by_fork() as *mut AtomicU32;
    // SAFETY: a page of our own that stays mapped.
    unsafe { &*mark }.store(1, Ordering::Relaxed);
    MARK.store(mark, Ordering::Release);
    // SAFETY: registers a function that lives as long as the library, which is never unloaded. What is prepared is that a child that was
    // made behind libc's back is no parent without being known.
    unsafe {
        libc::pthread_atfork(Some(before_fork), None, Some(after_fork));
    }
}

/// A page that each child finds missing, whatever its parent did there.
fn map_wiped_by_fork() -> usize {
    let page = map(PAGE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1);
    advise(page, PAGE, libc::MADV_WIPEONFORK);
    page
}

/// Advises the kernel about a mapping of our own, which the agent does not page.
fn advise(address: usize, length: usize, advice: i32) {
    // SAFETY: the advice changes only what a forked child gets.
    unsafe {
        crate::raw::syscall(libc::SYS_madvise, [address, length, advice as usize, 0, 0, 0]);
    }
}

/// Attach this process if it is a child that has not been: one that libc did not make.
pub fn attach_if_forked() {
    // SAFETY: null, or mapped for the life of the process.
    if let Some(mark) = unsafe { MARK.load(Ordering::Acquire).as_ref() }
        && mark.load(Ordering::Relaxed) == 0
    {
        mark.store(1, Ordering::Relaxed);
        attach_child();
    }
}

unsafe extern "C" fn before_fork() {
    attach_if_forked();
}

/// In a forked child, before it goes on.
unsafe extern "C" fn after_fork() {
    attach_if_forked();
}

/// Attach under the number that the agent has written into the canary.
fn attach_child() {
    CONTROL.store(null_mut(), Ordering::Release);
    let canary = ORIGIN.canary.load(Ordering::Relaxed) as *const u64;
    // SAFETY: the page was mapped before the fork and belongs to the shim.
    let number = unsafe { ptr::read_volatile(canary) };
    attach(-1, number);
}

fn remember(path: &[u8], token: RunToken, canary: usize) {
    for (place, byte) in ORIGIN.path.iter().zip(path) {
        place.store(u32::from(*byte), Ordering::Relaxed);
    }
    ORIGIN.path_len.store(path.len(), Ordering::Relaxed);
    for (place, bytes) in ORIGIN.token.iter().zip(token.0.chunks_exact(8)) {
        place.store(u64::from_le_bytes(bytes.try_into().expect("8 bytes")), Ordering::Relaxed);
    }
    ORIGIN.canary.store(canary, Ordering::Relaxed);
}

fn token() -> RunToken {
    let mut bytes = [0; 16];
    for (part, word) in bytes.chunks_exact_mut(8).zip(&ORIGIN.token) {
        part.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
    }
    RunToken(bytes)
}

/// The common part: with a userfaultfd of our own (`paged >= 0`), or with the one that the agent got from the fork.
fn attach(paged: i32, number: u64) {
    let is_child = paged < 0;
    let staged = create_uffd();
    let result = uffd::enable(staged, uffd::STAGING);
    if result < 0 {
        say::fail("this kernel's userfaultfd cannot move pages: Linux 6.8 or newer is needed", -result);
    }
    let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let private_bytes = STACK_BYTES + ANTECHAMBER_BYTES + STAGING_BYTES;
    let private = map(private_bytes, anonymous, -1);
    let antechamber = private + STACK_BYTES;
    let staging = antechamber + ANTECHAMBER_BYTES;
    // A child makes its own instead of inheriting this.
    advise(private, private_bytes, libc::MADV_DONTFORK);
    let result = uffd::register(staged, staging, STAGING_BYTES);
    if result < 0 {
        say::fail("the staging area cannot be registered", -result);
    }
    let hello = ProgramHello {
        token: token(),
        is_child,
        child_number: number,
        bounce_buffer: antechamber as u64,
        staging: staging as u64,
        canary: ORIGIN.canary.load(Ordering::Relaxed) as u64,
        private_start: private as u64,
        private_end: (private + private_bytes) as u64,
        paged_start: ORIGIN.only[0].load(Ordering::Relaxed) as u64,
        paged_end: ORIGIN.only[1].load(Ordering::Relaxed) as u64,
    };
    let (socket, control_fd, child_paged) = say_hello(&hello, paged);
    let paged = if is_child { child_paged } else { paged };
    let control = map(CONTROL_BYTES, libc::MAP_SHARED, control_fd) as *mut WorkerControl;
    advise(control as usize, CONTROL_BYTES, libc::MADV_DONTFORK);
    // SAFETY: the mapping is CONTROL_BYTES long.
    if !unsafe { &*control }.is_valid() {
        say::fail("the agent is of another version: use parts of one build", 0);
    }
    uffd::close(control_fd);
    CONTROL.store(control, Ordering::Release);
    if memory::has_fork_advice() {
        report_fork_advice();
    }
    pin_self();
    start::start(private, Worker::new(socket, paged, staged, antechamber, staging, control));
    for fd in [socket, paged, staged] {
        uffd::close(fd);
    }
}

/// The kernel clears a word in a thread's control block when the thread ends, at a time when it cannot wait for a page.
pub fn pin_self() {
    // SAFETY: returns an address only.
    let block = unsafe { libc::pthread_self() } as usize;
    pin(block);
    pin(block + PAGE - 1);
}

fn map(bytes: usize, flags: i32, fd: i32) -> usize {
    // SAFETY: a fresh mapping at an address of the kernel's choice.
    let address = unsafe { libc::mmap(null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, fd, 0) };
    if address == libc::MAP_FAILED {
        say::fail("no memory", errno());
    }
    address as usize
}

/// The socket, the control memory's descriptor, and for a child its userfaultfd. An agent that dies before it has answered is not the last
/// one: the socket is kept open for the next.
fn say_hello(hello: &ProgramHello, paged: i32) -> (i32, i32, i32) {
    for _ in 0..HELLOS_MAX {
        let socket = connect();
        if send(socket, &Frame::Hello(*hello), paged)
            && let Some([control, child_paged]) =
                receive(socket, &Frame::Welcome, if hello.is_child { 2 } else { 1 })
        {
            return (socket, control, child_paged);
        }
        uffd::close(socket);
    }
    say::fail("the agent closes every connection", 0)
}

fn connect() -> i32 {
    // SAFETY: plain socket calls on a zeroed address of the right type.
    unsafe {
        let socket = libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0);
        let mut address: libc::sockaddr_un = zeroed();
        address.sun_family = libc::AF_UNIX as u16;
        let length = ORIGIN.path_len.load(Ordering::Relaxed);
        for (to, from) in address.sun_path.iter_mut().zip(&ORIGIN.path[..length]) {
            *to = from.load(Ordering::Relaxed) as libc::c_char;
        }
        let size = (offset_of!(libc::sockaddr_un, sun_path) + length + 1) as libc::socklen_t;
        if socket < 0 || libc::connect(socket, (&raw const address).cast(), size) < 0 {
            say::fail("the agent does not answer: is the cluster up?", errno());
        }
        check_owner(socket);
        socket
    }
}

/// End the program if a stranger listens: it would get all of the program's memory.
fn check_owner(socket: i32) {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to a struct of integers.
    let (result, own) = unsafe {
        let place = (&raw mut peer).cast();
        let result = libc::getsockopt(socket, libc::SOL_SOCKET, libc::SO_PEERCRED, place, &raw mut length);
        (result, libc::geteuid())
    };
    if result < 0 || peer.uid != 0 && peer.uid != own {
        say::fail("another user listens at the agent's socket, and gets no memory of this program", 0);
    }
}

/// Say something, with a descriptor if it is one; false if the agent has gone.
fn send(socket: i32, frame: &Frame, fd: i32) -> bool {
    let mut bytes = [0u8; 128];
    let length = frame.write_fixed(&mut bytes);
    // SAFETY: all pointers are to locals that outlive the call; the control buffer is large enough for one descriptor.
    unsafe {
        let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: length };
        let mut ancillary = [0u64; 8];
        let mut message: libc::msghdr = zeroed();
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        if fd >= 0 {
            message.msg_control = ancillary.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(4) as usize;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(4) as usize;
            ptr::write_unaligned(libc::CMSG_DATA(header).cast(), fd);
        }
        if libc::sendmsg(socket, &raw const message, libc::MSG_NOSIGNAL) >= 0 {
            return true;
        }
        if !is_gone(errno()) {
            say::fail("the agent cannot be told about this program", errno());
        }
        false
    }
}

fn is_gone(error: isize) -> bool {
    error == libc::EPIPE as isize || error == libc::ECONNRESET as isize
}

/// The descriptors, `wanted` of them, that come with the answer; `None` if the agent has gone.
fn receive(socket: i32, answer: &Frame, wanted: usize) -> Option<[i32; 2]> {
    let mut bytes = [0u8; 1024];
    let mut fds = [-1i32; 2];
    let mut count = 0;
    // SAFETY: as in `send_hello`; the control buffer has room for two descriptors.
    let length = unsafe {
        let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        let mut ancillary = [0u64; 8];
        let mut message: libc::msghdr = zeroed();
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = ancillary.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&ancillary);
        let length = loop {
            let length = libc::recvmsg(socket, &raw mut message, libc::MSG_CMSG_CLOEXEC);
            if length >= 0 || errno() != libc::EINTR as isize {
                break length;
            }
        };
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        if length > 0 && !header.is_null() && (*header).cmsg_type == libc::SCM_RIGHTS {
            count = (((*header).cmsg_len - libc::CMSG_LEN(0) as usize) / 4).min(2);
            let data: *const i32 = libc::CMSG_DATA(header).cast();
            for (at, fd) in fds.iter_mut().enumerate().take(count) {
                *fd = ptr::read_unaligned(data.add(at));
            }
        }
        length
    };
    if length == 0 || length < 0 && is_gone(errno()) {
        return None;
    }
    if length < 0 {
        say::fail("the agent cannot be heard", errno());
    }
    match Frame::parse(&bytes[..length as usize]) {
        Ok(frame) if frame == *answer && count == wanted => Some(fds),
        Ok(Frame::Refused(reason)) => say::fail(&reason, 0),
        Err(error) => say::fail_with(&error),
        Ok(_) => say::fail("the agent's answer makes no sense", 0),
    }
}

/// A userfaultfd: by this user's rights, else by the agent's.
fn create_uffd() -> i32 {
    let own = uffd::create();
    if own >= 0 {
        return own;
    }
    let fd = uffd::create_from(ask_device());
    if fd < 0 {
        say::fail("no userfaultfd can be had from the agent's device", -fd as isize);
    }
    fd
}

/// `/dev/userfaultfd`, as the agent may open it.
fn ask_device() -> i32 {
    for _ in 0..HELLOS_MAX {
        let socket = connect();
        let answer = if send(socket, &Frame::DeviceRequest(token()), -1) {
            receive(socket, &Frame::Device, 1)
        } else {
            None
        };
        uffd::close(socket);
        if let Some([device, _]) = answer {
            return device;
        }
    }
    say::fail("the agent closes every connection", 0)
}

fn errno() -> isize {
    // SAFETY: libc's errno is always there.
    unsafe { *libc::__errno_location() as isize }
}
