//! Attaches a program, and each child that it forks, to the agent.

use core::mem::{offset_of, zeroed};
use core::ptr::{self, null_mut};
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use aquifer_ipc::{
    BATCH_PAGES_MAX, CANARY_BYTES, Frame, ProgramHello, RunToken, STAGING_BUFFERS, WorkerControl,
    control::CONTROL_BYTES,
};

use crate::children;
use crate::connect_back;
use crate::descriptors;
use crate::fatal;
use crate::hidden;
use crate::memory;
use crate::populate;
use crate::raw::close;
use crate::uffd;
use crate::worker::{STACK_BYTES, Worker, last_process, start};

const PAGE: usize = 4096;
const BOUNCE_BUFFER_BYTES: usize = BATCH_PAGES_MAX * PAGE;
/// Size of all staging buffers together.
const STAGING_BYTES: usize = STAGING_BUFFERS * BATCH_PAGES_MAX * PAGE;
/// Size of `sun_path` in a socket address.
const PATH_BYTES: usize = 108;
/// Maximum number of connections for one request. A restarted agent closes them, so this is the
/// number of agents that can die one after the other while a program attaches.
const CONNECTIONS_MAX: u32 = 64;

/// The memory of a process that is paged, and that counts against the limit of its run.
#[derive(Clone, Copy)]
pub enum Paged {
    /// All memory that can be paged.
    All,
    /// Present and future mappings from the first address up to the second one. Both are multiples
    /// of the page size.
    Only(usize, usize),
}

/// The kind of process that is attached.
#[derive(Clone, Copy)]
pub enum Attached {
    /// A program, by a userfaultfd that it opens.
    Program,
    /// A forked child with the agent's number for it. The agent has its userfaultfd from the fork
    /// event, and sends it.
    Child(u64),
}

/// The parameters by which a process is attached. Forked children inherit them.
///
/// The parameters are atomics in static memory, because a forked child must not allocate memory,
/// and another thread may have held a lock at the fork.
struct AttachParameters {
    /// Address of the canary.
    canary: AtomicUsize,
    /// The range of [`Paged::Only`], or zeros.
    only: [AtomicUsize; 2],
    /// The run's token.
    token: [AtomicU64; 2],
    path_len: AtomicUsize,
    /// Path of the agent's socket, a byte in each element.
    path: [AtomicU32; PATH_BYTES],
}

static PARAMETERS: AttachParameters = AttachParameters {
    canary: AtomicUsize::new(0),
    only: [const { AtomicUsize::new(0) }; 2],
    token: [const { AtomicU64::new(0) }; 2],
    path_len: AtomicUsize::new(0),
    path: [const { AtomicU32::new(0) }; PATH_BYTES],
};
/// The memory that the worker of this process shares with the agent.
static CONTROL: AtomicPtr<WorkerControl> = AtomicPtr::new(null_mut());
/// Pointer to a word that is 1 in an attached process. The word's page is empty in each child that
/// has a copy of the memory, however the child was created.
static IS_ATTACHED: AtomicPtr<AtomicU32> = AtomicPtr::new(null_mut());

/// Pinned bytes of a thread's control block (glibc's `struct pthread`): the whole block in glibc
/// 2.36, and in each version the words that the kernel writes.
const CONTROL_BLOCK_BYTES: usize = 2304;
/// Interval at which a thread that has pinned a page checks whether the agent has finished an
/// eviction.
const PIN_INTERVAL_US: u32 = 50;

/// Pins the page that contains `address`: the agent never evicts it. The page is resident then.
///
/// The calling thread must be able to write the word at `address`.
fn pin(address: usize) {
    attach_if_forked();
    let control = CONTROL.load(Ordering::Acquire);
    if !control.is_null() {
        // SAFETY: the mapping is never removed, and a child has mapped its own by now.
        let control = unsafe { &*control };
        control.pin((address / PAGE) as u64);
        while control.are_pins_locked() {
            // SAFETY: it only waits.
            unsafe {
                libc::usleep(PIN_INTERVAL_US);
            }
        }
        // The page may be missing, or write-protected since a fork.
        // SAFETY: the caller may write there, and the atomic access does not change the word.
        unsafe { AtomicU32::from_ptr((address & !3) as *mut u32) }.fetch_or(0, Ordering::Relaxed);
    }
}

/// Reports to the agent that forked children possibly do not inherit all memory.
pub fn report_fork_advice() {
    attach_if_forked();
    let control = CONTROL.load(Ordering::Acquire);
    if !control.is_null() {
        // SAFETY: the mapping is never removed, and a child has mapped its own by now.
        unsafe { &*control }.has_fork_advice.store(1, Ordering::Release);
    }
}

/// Attaches this process to a run of the agent that listens at `path`. On failure, ends the process
/// with a message.
///
/// Must be called before the process has a second thread.
pub fn attach_program(path: &[u8], token: RunToken, paged: Paged) {
    if path.len() >= PATH_BYTES {
        fatal::exit("the path of the agent's socket is too long", 0);
    }
    children::look_up_next_symbols();
    hidden::look_up_next_symbols();
    populate::look_up_next_symbol();
    let canary = map_wiped_on_fork(CANARY_BYTES);
    store_parameters(path, token, canary);
    if let Paged::Only(start, end) = paged {
        PARAMETERS.only[0].store(start, Ordering::Relaxed);
        PARAMETERS.only[1].store(end, Ordering::Relaxed);
    }
    attach(Attached::Program);
    let is_attached = map_wiped_on_fork(PAGE) as *mut AtomicU32;
    // SAFETY: a page of this library that is never unmapped.
    unsafe { &*is_attached }.store(1, Ordering::Relaxed);
    IS_ATTACHED.store(is_attached, Ordering::Release);
    // SAFETY: the functions live as long as the library, which is never unloaded.
    unsafe {
        libc::pthread_atfork(Some(before_fork), None, Some(after_fork_in_child));
    }
}

/// Maps memory that is empty in each forked child.
fn map_wiped_on_fork(bytes: usize) -> usize {
    let address = map(bytes, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1);
    advise(address, bytes, libc::MADV_WIPEONFORK);
    // The canary must stay missing until the agent fills it.
    advise(address, bytes, libc::MADV_DONTDUMP);
    address
}

/// Gives the kernel advice about a mapping of this library. The agent does not page the mapping.
pub fn advise(address: usize, length: usize, advice: i32) {
    // SAFETY: these kinds of advice change only core dumps and the memory of forked children.
    unsafe {
        crate::raw::syscall(libc::SYS_madvise, [address, length, advice as usize, 0, 0, 0]);
    }
}

/// Attaches this process if it is a forked child that is not attached yet. libc's `fork` calls this
/// in each child that it creates; other children call it later.
pub fn attach_if_forked() {
    // SAFETY: null, or a mapping that is never removed.
    if let Some(is_attached) = unsafe { IS_ATTACHED.load(Ordering::Acquire).as_ref() }
        && is_attached.load(Ordering::Relaxed) == 0
    {
        // Set first, because attaching pins pages, and `pin` calls this function.
        is_attached.store(1, Ordering::Relaxed);
        attach_child();
    }
}

/// Whether this process, or the one that it was forked from, was attached.
pub fn is_attached() -> bool {
    !IS_ATTACHED.load(Ordering::Acquire).is_null()
}

/// The number of this process's worker in its PID namespace; 0 if there is none.
pub fn worker_pid() -> u32 {
    attach_if_forked();
    // SAFETY: the mapping is never removed, and a child has mapped its own by now.
    let control = unsafe { CONTROL.load(Ordering::Acquire).as_ref() };
    control.map_or(0, |control| control.worker.load(Ordering::Acquire))
}

/// Runs in the parent before libc's `fork`. The parent may itself be a child that libc's `fork` did
/// not create. It must be attached first, so that the agent knows the parent of each child.
unsafe extern "C" fn before_fork() {
    attach_if_forked();
}

/// Runs in a child of libc's `fork` before `fork` returns.
unsafe extern "C" fn after_fork_in_child() {
    attach_if_forked();
}

/// Attaches a forked child under the number that the agent has written into its canary.
fn attach_child() {
    CONTROL.store(null_mut(), Ordering::Release);
    let canary = PARAMETERS.canary.load(Ordering::Relaxed) as *const u64;
    // SAFETY: this library has mapped the page before the fork.
    let number = unsafe { ptr::read_volatile(canary) };
    connect_back::begin();
    attach(Attached::Child(number));
}

fn store_parameters(path: &[u8], token: RunToken, canary: usize) {
    for (element, byte) in PARAMETERS.path.iter().zip(path) {
        element.store(u32::from(*byte), Ordering::Relaxed);
    }
    PARAMETERS.path_len.store(path.len(), Ordering::Relaxed);
    for (word, bytes) in PARAMETERS.token.iter().zip(token.0.chunks_exact(8)) {
        word.store(u64::from_le_bytes(bytes.try_into().expect("8 bytes")), Ordering::Relaxed);
    }
    PARAMETERS.canary.store(canary, Ordering::Relaxed);
}

fn stored_token() -> RunToken {
    let mut bytes = [0; 16];
    for (part, word) in bytes.chunks_exact_mut(8).zip(&PARAMETERS.token) {
        part.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
    }
    RunToken(bytes)
}

/// Attaches this process: maps the buffers, sends the hello, and starts the worker.
fn attach(attached: Attached) {
    let thread_word = last_process::thread_word();
    let limit = descriptors::Limit::raise();
    if descriptors::are_available(descriptors::NEEDED) {
        attach_here(attached, thread_word);
    } else {
        descriptors::attach_by_thread(attached, thread_word);
    }
    limit.restore();
}

/// Attaches the program to which this thread belongs, with descriptors of this thread.
///
/// `thread_word`: see [`last_process::thread_word`].
pub fn attach_here(attached: Attached, thread_word: *const AtomicU32) {
    let (is_child, number) = match attached {
        Attached::Program => (false, 0),
        Attached::Child(number) => (true, number),
    };
    let own_uffd = if is_child { -1 } else { create_uffd(false) };
    let staging_uffd = create_uffd(is_child);
    let result = uffd::enable(staging_uffd, uffd::STAGING_FEATURES);
    if result < 0 {
        fatal::exit("this kernel's userfaultfd cannot move pages: use Linux 6.8 or newer", -result);
    }
    let (hello, socket, control_fd, received_uffd) = exchange_hello(staging_uffd, own_uffd, number);
    let program_uffd = if is_child { received_uffd } else { own_uffd };
    let control = map(CONTROL_BYTES, libc::MAP_SHARED, control_fd) as *mut WorkerControl;
    advise(control as usize, CONTROL_BYTES, libc::MADV_DONTFORK);
    // SAFETY: the mapping has CONTROL_BYTES bytes.
    if !unsafe { &*control }.is_valid() {
        fatal::exit("the agent is of another version: use parts of one build", 0);
    }
    close(control_fd);
    CONTROL.store(control, Ordering::Release);
    if memory::has_fork_advice() {
        report_fork_advice();
    }
    pin_thread_control_block();
    let (bounce_buffer, staging) = (hello.bounce_buffer as usize, hello.staging as usize);
    let worker =
        Worker::new(socket, program_uffd, staging_uffd, bounce_buffer, staging, control, thread_word);
    start::start(hello.private_start as usize, worker);
    // The worker has its own copies.
    for fd in [socket, program_uffd, staging_uffd] {
        close(fd);
    }
}

/// Pins the word that the kernel clears when a new thread ends, at a time when it cannot resolve a
/// fault. `flags` are those of the thread's `clone`.
pub fn pin_cleared_word(flags: u64, word: usize) {
    let wanted = (libc::CLONE_VM | libc::CLONE_CHILD_CLEARTID) as u64;
    if flags & wanted == wanted && word != 0 {
        pin(word);
    }
}

/// Pins the control block of the calling thread, which may span two pages. The kernel clears a word
/// there when the thread ends, at a time when it cannot resolve a fault.
pub fn pin_thread_control_block() {
    // SAFETY: only returns an address.
    let block = unsafe { libc::pthread_self() } as usize;
    pin(block);
    pin(block + CONTROL_BLOCK_BYTES - 4);
}

pub fn map(bytes: usize, flags: i32, fd: i32) -> usize {
    // SAFETY: a new mapping, at an address that the kernel chooses.
    let address = unsafe { libc::mmap(null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, fd, 0) };
    if address == libc::MAP_FAILED {
        fatal::exit("memory for paging the program cannot be mapped", errno());
    }
    address as usize
}

/// Sends a hello to an agent and receives the answer. Returns the hello, the socket, the descriptor
/// of the control memory, and for a child its userfaultfd.
///
/// If the agent ends before it answers, the next agent gets a hello with other pages, because pages
/// that the last agent has filled prove nothing. The worker keeps the socket open.
fn exchange_hello(staging_uffd: i32, own_uffd: i32, number: u64) -> (ProgramHello, i32, i32, i32) {
    for attempt in 0..CONNECTIONS_MAX {
        if own_uffd >= 0 && attempt > 0 {
            PARAMETERS.canary.store(map_wiped_on_fork(CANARY_BYTES), Ordering::Relaxed);
        }
        let hello = map_private_memory(staging_uffd, own_uffd, number);
        let socket = connect(hello.is_child);
        if send(socket, &Frame::Hello(hello), own_uffd)
            && let Some([control, child_uffd]) =
                receive(socket, &Frame::Welcome, if hello.is_child { 2 } else { 1 })
        {
            return (hello, socket, control, child_uffd);
        }
        close(socket);
    }
    fatal::exit("the agent closes every connection", 0)
}

/// Maps the worker's stack and buffers. Returns a hello that names them.
fn map_private_memory(staging_uffd: i32, own_uffd: i32, number: u64) -> ProgramHello {
    let private_bytes = STACK_BYTES + BOUNCE_BUFFER_BYTES + STAGING_BYTES;
    let private = map(private_bytes, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1);
    let bounce_buffer = private + STACK_BYTES;
    let staging = bounce_buffer + BOUNCE_BUFFER_BYTES;
    // A forked child maps its own memory.
    advise(private, private_bytes, libc::MADV_DONTFORK);
    // Tools that read this memory would hold pages that the worker moves.
    advise(private, private_bytes, libc::MADV_DONTDUMP);
    let result = uffd::register(staging_uffd, staging, STAGING_BYTES);
    if result < 0 {
        fatal::exit("the staging buffers cannot be registered with a userfaultfd", -result);
    }
    ProgramHello {
        token: stored_token(),
        is_child: own_uffd < 0,
        child_number: number,
        bounce_buffer: bounce_buffer as u64,
        staging: staging as u64,
        canary: PARAMETERS.canary.load(Ordering::Relaxed) as u64,
        private_start: private as u64,
        private_end: (private + private_bytes) as u64,
        paged_start: PARAMETERS.only[0].load(Ordering::Relaxed) as u64,
        paged_end: PARAMETERS.only[1].load(Ordering::Relaxed) as u64,
    }
}

/// Connects to the agent. A forked child that cannot reach the agent's socket sends a connect-back
/// request.
fn connect(is_child: bool) -> i32 {
    let unreachable = match connect_by_path() {
        Ok(socket) => return socket,
        Err(unreachable) => unreachable,
    };
    if is_child {
        let canary = PARAMETERS.canary.load(Ordering::Relaxed);
        return connect_back::connect(canary)
            .unwrap_or_else(|errno| fatal::exit("connection to the agent failed", errno));
    }
    match unreachable {
        Unreachable::Failed(errno) => {
            fatal::exit("connection to the agent failed: is the cluster up?", errno)
        }
        Unreachable::OtherUser => fatal::exit(
            "another user listens at the agent's socket, and could read the memory of this program",
            0,
        ),
    }
}

/// Why the agent cannot be reached by its path.
enum Unreachable {
    /// A system call failed with this errno.
    Failed(isize),
    /// Neither root nor the program's own user listens there: the listener would get all memory of
    /// the program.
    OtherUser,
}

fn connect_by_path() -> Result<i32, Unreachable> {
    // SAFETY: socket calls with a zeroed address of the right type.
    unsafe {
        let socket = libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0);
        if socket < 0 {
            return Err(Unreachable::Failed(errno()));
        }
        let mut address: libc::sockaddr_un = zeroed();
        address.sun_family = libc::AF_UNIX as u16;
        let length = PARAMETERS.path_len.load(Ordering::Relaxed);
        for (to, from) in address.sun_path.iter_mut().zip(&PARAMETERS.path[..length]) {
            *to = from.load(Ordering::Relaxed) as libc::c_char;
        }
        let size = (offset_of!(libc::sockaddr_un, sun_path) + length + 1) as libc::socklen_t;
        let result = if libc::connect(socket, (&raw const address).cast(), size) < 0 {
            Err(Unreachable::Failed(errno()))
        } else if is_trusted(socket) {
            Ok(socket)
        } else {
            Err(Unreachable::OtherUser)
        };
        if result.is_err() {
            close(socket);
        }
        result
    }
}

/// Whether the program's own user or root listens.
fn is_trusted(socket: i32) -> bool {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to a struct of integers.
    let (result, own) = unsafe {
        let peer_at = (&raw mut peer).cast();
        let result = libc::getsockopt(socket, libc::SOL_SOCKET, libc::SO_PEERCRED, peer_at, &raw mut length);
        (result, libc::geteuid())
    };
    result >= 0 && (peer.uid == 0 || peer.uid == own)
}

/// Sends a frame, with the descriptor `fd` unless it is negative. Returns false if the agent has
/// closed the connection.
fn send(socket: i32, frame: &Frame, fd: i32) -> bool {
    let mut bytes = [0u8; 128];
    let length = frame.write_fixed(&mut bytes);
    // SAFETY: all pointers are to locals that outlive the call. The control buffer is large enough
    // for one descriptor.
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
        if !is_connection_closed(errno()) {
            fatal::exit("a request cannot be sent to the agent", errno());
        }
        false
    }
}

fn is_connection_closed(error: isize) -> bool {
    error == libc::EPIPE as isize || error == libc::ECONNRESET as isize
}

/// Receives an answer with `wanted` descriptors, at most 2, and returns the descriptors. Returns
/// `None` if the agent has closed the connection. Ends the program after any other answer.
fn receive(socket: i32, answer: &Frame, wanted: usize) -> Option<[i32; 2]> {
    let mut bytes = [0u8; 1024];
    let mut fds = [-1i32; 2];
    let mut count = 0;
    // SAFETY: all pointers are to locals that outlive the call. The control buffer is large enough
    // for two descriptors.
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
    if length == 0 || length < 0 && is_connection_closed(errno()) {
        return None;
    }
    if length < 0 {
        fatal::exit("no answer can be received from the agent", errno());
    }
    match Frame::parse(&bytes[..length as usize]) {
        Ok(frame) if frame == *answer && count == wanted => Some(fds),
        Ok(Frame::Refused(reason)) => fatal::exit(&reason, 0),
        Err(error) => fatal::exit_with(&error),
        Ok(_) => fatal::exit("unexpected answer of the agent: use parts of one build", 0),
    }
}

/// Opens a userfaultfd with the rights of this user, or else with those of the agent.
fn create_uffd(is_child: bool) -> i32 {
    let own = uffd::create();
    if own >= 0 {
        return own;
    }
    let fd = uffd::create_from(request_device(is_child));
    if fd < 0 {
        fatal::exit("a userfaultfd cannot be opened by the agent's /dev/userfaultfd", -fd as isize);
    }
    fd
}

/// Requests `/dev/userfaultfd` from the agent, opened with the agent's rights.
fn request_device(is_child: bool) -> i32 {
    for _ in 0..CONNECTIONS_MAX {
        let socket = connect(is_child);
        let answer = if send(socket, &Frame::DeviceRequest(stored_token()), -1) {
            receive(socket, &Frame::Device, 1)
        } else {
            None
        };
        close(socket);
        if let Some([device, _]) = answer {
            return device;
        }
    }
    fatal::exit("the agent closes every connection", 0)
}

fn errno() -> isize {
    // SAFETY: each thread has an errno.
    unsafe { *libc::__errno_location() as isize }
}
