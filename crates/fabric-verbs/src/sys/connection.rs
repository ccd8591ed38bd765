//! Connections by librdmacm: who listens, who connects, and the queue pairs between them.

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

/// First bytes that both ends send, in librdmacm's own messages: another protocol at the same port is noticed.
pub(crate) const MAGIC: [u8; 8] = *b"AQFVRB\x01\0";
/// The peer is asked so often before it counts as gone. 7 receives-not-ready are endless: whoever has no room says so in words.
const RETRIES: u8 = 7;

/// What librdmacm tells.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CmEventKind {
    AddressResolved,
    RouteResolved,
    Established,
    Rejected,
    Disconnected,
    /// It failed, with a number of the system's.
    Failed(i32),
    Other,
}

/// Something happened to a connection.
#[derive(Debug)]
pub(crate) struct CmEvent {
    pub kind: CmEventKind,
    /// Which; see [`CmConnection::name`].
    pub of: usize,
    /// Somebody request to be let in, and speaks this protocol or not.
    pub request: Option<(CmConnection, bool)>,
}

/// Where events come from.
#[derive(Debug)]
pub(crate) struct CmEvents(*mut sys::rdma_event_channel);

// SAFETY: librdmacm lets any thread use a channel.
unsafe impl Send for CmEvents {}
// SAFETY: as above.
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
    /// What the system says.
    pub fn next(&self) -> io::Result<Option<CmEvent>> {
        let mut found = ptr::null_mut();
        // SAFETY: the channel lives, and does not wait.
        if unsafe { sys::rdma_get_cm_event(self.0, &raw mut found) } != 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::WouldBlock { Ok(None) } else { Err(error) };
        }
        use sys::rdma_cm_event_type as kinds;
        // SAFETY: an event was given; it and what it points to live until it is acknowledged, once, below.
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
        // SAFETY: it is ours and dropped once, after the connections that tell here.
        unsafe { sys::rdma_destroy_event_channel(self.0) };
    }
}

/// One end of a connection, or of what is to become one; or a listener. It goes before the [`CmEvents`] that it tells to.
#[derive(Debug)]
pub(crate) struct CmConnection {
    id: *mut sys::rdma_cm_id,
    pair: Option<QueuePair>,
}

// SAFETY: librdmacm lets any thread use an id, one at a time.
unsafe impl Send for CmConnection {}
// SAFETY: what `&self` gives is read-only, or locked by librdmacm.
unsafe impl Sync for CmConnection {}

fn ok(outcome: i32) -> io::Result<()> {
    if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Hand an address to the system.
fn with_address(address: SocketAddr, call: impl FnOnce(*mut libc::sockaddr) -> i32) -> io::Result<()> {
    // SAFETY: the pointer is used only while the call lasts, and not written through.
    ok(unsafe { address.with_sockaddr(|pointer, _| call(pointer.cast::<libc::sockaddr>().cast_mut())) })
}

impl CmConnection {
    /// Not connected to anything yet.
    ///
    /// # Errors
    /// What the system says; `ENODEV` where there is no device at all.
    pub fn new(events: &CmEvents) -> io::Result<Self> {
        let mut id = ptr::null_mut();
        // SAFETY: the channel lives, and longer than the connection; `id` outlives the call.
        ok(unsafe {
            sys::rdma_create_id(events.0, &raw mut id, ptr::null_mut(), sys::rdma_port_space::RDMA_PS_TCP)
        })?;
        Ok(Self { id, pair: None })
    }

    /// What [`CmEvent::of`] calls it.
    pub fn name(&self) -> usize {
        self.id.addr()
    }

    /// Listen at an address of a device; port 0 is any that is free.
    ///
    /// # Errors
    /// What the system says.
    pub fn listen(&self, address: SocketAddr, backlog: i32) -> io::Result<SocketAddr> {
        // SAFETY: the id lives.
        with_address(address, |pointer| unsafe { sys::rdma_bind_addr(self.id, pointer) })?;
        // SAFETY: the id lives.
        ok(unsafe { sys::rdma_listen(self.id, backlog) })?;
        // SAFETY: the id lives; an address of either family has its port at the same place.
        let port = u16::from_be(unsafe { (*self.id).route.addr.src_addr_union.src_sin.sin_port });
        Ok(SocketAddr::new(address.ip(), port))
    }

    /// Find out by which device an address is reached; [`CmEventKind::AddressResolved`] tells.
    ///
    /// # Errors
    /// What the system says.
    pub fn resolve_address(&self, address: SocketAddr, timeout_ms: i32) -> io::Result<()> {
        let call = |pointer| {
            // SAFETY: the id lives.
            unsafe { sys::rdma_resolve_addr(self.id, ptr::null_mut(), pointer, timeout_ms) }
        };
        with_address(address, call)
    }

    /// Find the way to it; [`CmEventKind::RouteResolved`] tells.
    ///
    /// # Errors
    /// What the system says.
    pub fn resolve_route(&self, timeout_ms: i32) -> io::Result<()> {
        // SAFETY: the id lives.
        ok(unsafe { sys::rdma_resolve_route(self.id, timeout_ms) })
    }

    /// The device that it goes over.
    ///
    /// # Errors
    /// If it has none yet, as a listener on all addresses; or if that cannot be asked.
    pub fn device(&self) -> io::Result<&'static Device> {
        // SAFETY: the id lives; librdmacm closes no context before the process ends.
        unsafe {
            let context = (*self.id).verbs;
            if context.is_null() { Err(io::ErrorKind::NotFound.into()) } else { Device::of(context) }
        }
    }

    /// Make its queue pair; the other end cannot reach any memory by it. Receives are its own, or come from a shared queue.
    ///
    /// # Errors
    /// What the device says.
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
        // SAFETY: all that is named lives: the queue pair goes with the connection, and the caller keeps its queues for longer.
        ok(unsafe { sys::rdma_create_qp(self.id, device.domain, &raw mut wanted) })?;
        // SAFETY: it was made just now, and goes with this connection.
        let pair = unsafe { QueuePair::new((*self.id).qp, wanted.cap.max_inline_data.min(inline_bytes)) };
        self.pair = Some(pair);
        Ok(pair)
    }

    /// Ask to be let in; [`CmEventKind::Established`] tells.
    ///
    /// # Errors
    /// What the system says.
    pub fn connect(&self, reads: u8) -> io::Result<()> {
        let mut wanted = parameters(0, reads);
        // SAFETY: the id has a queue pair; the parameters outlive the call.
        ok(unsafe { sys::rdma_connect(self.id, &raw mut wanted) })
    }

    /// Let it in.
    ///
    /// # Errors
    /// What the system says.
    pub fn accept(&self, reads: u8) -> io::Result<()> {
        let mut granted = parameters(reads, 0);
        // SAFETY: likewise.
        ok(unsafe { sys::rdma_accept(self.id, &raw mut granted) })
    }

    /// Send farewell; both ends are told. Nothing if it is over already.
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
        // SAFETY: the id is ours and dropped once, its queue pair first. All its events are acknowledged as they are read.
        unsafe {
            if self.pair.is_some() {
                sys::rdma_destroy_qp(self.id);
            }
            sys::rdma_destroy_id(self.id);
        }
    }
}
