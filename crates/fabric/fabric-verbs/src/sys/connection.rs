//! Connections by librdmacm: listeners, initiators, and their queue pairs.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::ptr;

use rdma_mummy_sys as sys;
use rustix::net::addr::SocketAddrArg;

use super::completions::CompletionQueue;
use super::device::Device;
use super::queue_pair::QueuePair;
use super::receives::SharedReceives;

/// The private data that both ends send in librdmacm's messages. It detects another protocol on the
/// same port.
pub(crate) const MAGIC: [u8; 8] = *b"AQFVRB\x01\0";
/// Retries before a peer counts as gone. For receives that are not ready, 7 means no limit: lack of
/// room is reported in messages.
const RETRIES: u8 = 7;

/// The kind of a librdmacm event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CmEventKind {
    AddressResolved,
    RouteResolved,
    Established,
    Rejected,
    Disconnected,
    /// The connection failed with a system error number.
    Failed(i32),
    Other,
}

/// An event of a connection.
#[derive(Debug)]
pub(crate) struct CmEvent {
    pub kind: CmEventKind,
    /// The connection: its [`CmConnection::id`].
    pub of: usize,
    /// The connection to be accepted, and whether the initiator speaks this protocol.
    pub request: Option<(CmConnection, bool)>,
}

/// A channel of events.
#[derive(Debug)]
pub(crate) struct CmEvents(*mut sys::rdma_event_channel);

// SAFETY: librdmacm lets any thread use a channel.
unsafe impl Send for CmEvents {}
// SAFETY: the same reason as for `Send`.
unsafe impl Sync for CmEvents {}

impl CmEvents {
    pub fn new() -> io::Result<Self> {
        // SAFETY: no arguments.
        let channel = unsafe { sys::rdma_create_event_channel() };
        if channel.is_null() {
            return Err(io::Error::last_os_error());
        }
        let events = Self(channel);
        let flags = rustix::fs::fcntl_getfl(events.as_fd())?;
        rustix::fs::fcntl_setfl(events.as_fd(), flags | rustix::fs::OFlags::NONBLOCK)?;
        Ok(events)
    }

    /// The next event, if there is one.
    ///
    /// # Errors
    /// The error of the system.
    pub fn next(&self) -> io::Result<Option<CmEvent>> {
        let mut found = ptr::null_mut();
        // SAFETY: the channel lives, and the call does not block.
        if unsafe { sys::rdma_get_cm_event(self.0, &raw mut found) } != 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::WouldBlock { Ok(None) } else { Err(error) };
        }
        use sys::rdma_cm_event_type as kinds;
        // SAFETY: an event was returned. It and what it points to live until it is acknowledged,
        // once, below.
        unsafe {
            let event = &*found;
            let (kind, of, status) = (event.event, event.id, event.status);
            let request = (kind == kinds::RDMA_CM_EVENT_CONNECT_REQUEST).then(|| {
                let outgoing = event.param.conn;
                let len = usize::from(outgoing.private_data_len).min(MAGIC.len());
                let words = if outgoing.private_data.is_null() {
                    &[]
                } else {
                    std::slice::from_raw_parts(outgoing.private_data.cast::<u8>(), len)
                };
                (CmConnection { id: of, pair: None }, words == MAGIC)
            });
            sys::rdma_ack_cm_event(found);
            let kind = match kind {
                kinds::RDMA_CM_EVENT_ADDR_RESOLVED => CmEventKind::AddressResolved,
                kinds::RDMA_CM_EVENT_ROUTE_RESOLVED => CmEventKind::RouteResolved,
                kinds::RDMA_CM_EVENT_ESTABLISHED => CmEventKind::Established,
                kinds::RDMA_CM_EVENT_REJECTED => CmEventKind::Rejected,
                kinds::RDMA_CM_EVENT_DISCONNECTED | kinds::RDMA_CM_EVENT_DEVICE_REMOVAL => {
                    CmEventKind::Disconnected
                }
                kinds::RDMA_CM_EVENT_ADDR_ERROR
                | kinds::RDMA_CM_EVENT_ROUTE_ERROR
                | kinds::RDMA_CM_EVENT_CONNECT_ERROR
                | kinds::RDMA_CM_EVENT_UNREACHABLE => CmEventKind::Failed(status.abs()),
                _ => CmEventKind::Other,
            };
            Ok(Some(CmEvent { kind, of: of.addr(), request }))
        }
    }
}

impl AsFd for CmEvents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel and its descriptor live as long as `self`.
        unsafe {
            let fd: RawFd = (*self.0).fd;
            BorrowedFd::borrow_raw(fd)
        }
    }
}

impl Drop for CmEvents {
    fn drop(&mut self) {
        // SAFETY: `self` owns it and drops it once, after the connections that report here.
        unsafe { sys::rdma_destroy_event_channel(self.0) };
    }
}

/// One end of a connection, or a listener. Must be dropped before the [`CmEvents`] to which it
/// reports.
#[derive(Debug)]
pub(crate) struct CmConnection {
    id: *mut sys::rdma_cm_id,
    pair: Option<QueuePair>,
}

// SAFETY: librdmacm lets any thread use an id, one at a time.
unsafe impl Send for CmConnection {}
// SAFETY: methods of `&self` only read, or call functions that librdmacm locks.
unsafe impl Sync for CmConnection {}

fn ok(outcome: i32) -> io::Result<()> {
    if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Passes an address to a call of the system.
fn with_address(address: SocketAddr, call: impl FnOnce(*mut libc::sockaddr) -> i32) -> io::Result<()> {
    // SAFETY: the pointer is used only while the call lasts, and not written through.
    ok(unsafe { address.with_sockaddr(|pointer, _| call(pointer.cast::<libc::sockaddr>().cast_mut())) })
}

impl CmConnection {
    /// Creates an end that is not connected yet.
    ///
    /// # Errors
    /// The error of the system; `ENODEV` if there is no device.
    pub fn new(events: &CmEvents) -> io::Result<Self> {
        let mut id = ptr::null_mut();
        // SAFETY: the channel lives, and longer than the connection; `id` outlives the call.
        ok(unsafe {
            sys::rdma_create_id(events.0, &raw mut id, ptr::null_mut(), sys::rdma_port_space::RDMA_PS_TCP)
        })?;
        Ok(Self { id, pair: None })
    }

    /// The identifier by which [`CmEvent::of`] names this connection.
    pub fn id(&self) -> usize {
        self.id.addr()
    }

    /// Listens at an address of a device. Port 0 chooses a free port.
    ///
    /// # Errors
    /// The error of the system.
    pub fn listen(&self, address: SocketAddr, backlog: i32) -> io::Result<SocketAddr> {
        // SAFETY: the id lives.
        with_address(address, |pointer| unsafe { sys::rdma_bind_addr(self.id, pointer) })?;
        // SAFETY: the id lives.
        ok(unsafe { sys::rdma_listen(self.id, backlog) })?;
        // SAFETY: the id lives; an address of either family has its port at the same place.
        let port = u16::from_be(unsafe { (*self.id).route.addr.src_addr_union.src_sin.sin_port });
        Ok(SocketAddr::new(address.ip(), port))
    }

    /// Finds the device that reaches an address. [`CmEventKind::AddressResolved`] follows.
    ///
    /// # Errors
    /// The error of the system.
    pub fn resolve_address(&self, address: SocketAddr, timeout_ms: i32) -> io::Result<()> {
        let call = |pointer| {
            // SAFETY: the id lives.
            unsafe { sys::rdma_resolve_addr(self.id, ptr::null_mut(), pointer, timeout_ms) }
        };
        with_address(address, call)
    }

    /// Finds the route to the address. [`CmEventKind::RouteResolved`] follows.
    ///
    /// # Errors
    /// The error of the system.
    pub fn resolve_route(&self, timeout_ms: i32) -> io::Result<()> {
        // SAFETY: the id lives.
        ok(unsafe { sys::rdma_resolve_route(self.id, timeout_ms) })
    }

    /// The device of this connection.
    ///
    /// # Errors
    /// If there is no device yet, as for a listener on all addresses; or if the device cannot be
    /// queried.
    pub fn device(&self) -> io::Result<&'static Device> {
        // SAFETY: the id lives; librdmacm closes no context before the process ends.
        unsafe {
            let context = (*self.id).verbs;
            if context.is_null() { Err(io::ErrorKind::NotFound.into()) } else { Device::of(context) }
        }
    }

    /// Creates the queue pair, which opens no memory to the peer. It has receives of its own, or
    /// uses a shared queue.
    ///
    /// # Errors
    /// The error of the device.
    pub fn open_pair(
        &mut self,
        device: &'static Device,
        completions: &CompletionQueue,
        depth: usize,
        receives: usize,
        shared: Option<&SharedReceives>,
        inline_bytes: u32,
    ) -> io::Result<QueuePair> {
        let count = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
        let own_receives = if shared.is_some() { 0 } else { receives };
        let mut wanted = sys::ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: completions.raw(),
            recv_cq: completions.raw(),
            srq: shared.map_or(ptr::null_mut(), SharedReceives::raw),
            cap: sys::ibv_qp_cap {
                max_send_wr: count(depth),
                max_recv_wr: count(own_receives),
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: inline_bytes,
            },
            qp_type: sys::ibv_qp_type::IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: everything named here lives. The queue pair is destroyed with the connection, and
        // the caller keeps the queues for longer.
        ok(unsafe { sys::rdma_create_qp(self.id, device.domain, &raw mut wanted) })?;
        // SAFETY: it was just created, and lives as long as this connection.
        let pair = unsafe { QueuePair::new((*self.id).qp, wanted.cap.max_inline_data.min(inline_bytes)) };
        self.pair = Some(pair);
        Ok(pair)
    }

    /// Requests a connection. [`CmEventKind::Established`] follows.
    ///
    /// # Errors
    /// The error of the system.
    pub fn connect(&self, reads: u8) -> io::Result<()> {
        let mut wanted = parameters(0, reads);
        // SAFETY: the id has a queue pair; the parameters outlive the call.
        ok(unsafe { sys::rdma_connect(self.id, &raw mut wanted) })
    }

    /// Accepts a connection.
    ///
    /// # Errors
    /// The error of the system.
    pub fn accept(&self, reads: u8) -> io::Result<()> {
        let mut granted = parameters(reads, 0);
        // SAFETY: the id has a queue pair; the parameters outlive the call.
        ok(unsafe { sys::rdma_accept(self.id, &raw mut granted) })
    }

    /// Disconnects. Both ends receive an event. Does nothing if the connection is over.
    pub fn disconnect(&self) {
        // SAFETY: the id lives.
        let _over = unsafe { sys::rdma_disconnect(self.id) };
    }
}

fn parameters(served: u8, begun: u8) -> sys::rdma_conn_param {
    sys::rdma_conn_param {
        private_data: MAGIC.as_ptr().cast(),
        private_data_len: u8::try_from(MAGIC.len()).expect("8"),
        responder_resources: served,
        initiator_depth: begun,
        flow_control: 1,
        retry_count: RETRIES,
        rnr_retry_count: RETRIES,
        srq: 0,
        qp_num: 0,
    }
}

impl Drop for CmConnection {
    fn drop(&mut self) {
        // SAFETY: `self` owns the id and drops it once, its queue pair first. All its events are
        // acknowledged when they are read.
        unsafe {
            if self.pair.is_some() {
                sys::rdma_destroy_qp(self.id);
            }
            sys::rdma_destroy_id(self.id);
        }
    }
}
