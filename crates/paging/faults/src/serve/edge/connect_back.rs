//! Answers to connect-back requests of forked children that cannot reach the agent's socket: see
//! [`aquifer_ipc::connect_back_page`].

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use aquifer_channel::socket::listen_at_name;
use aquifer_ipc::{CONNECT_BACK_REQUESTS_MAX, SOCKET_NAME_BYTES, socket_address};
use aquifer_pager::PAGE_BYTES;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::thread::{ThreadNameSpaceType, move_into_thread_name_spaces};

use super::super::canary::new_nonce;
use super::super::priority::{USUAL, set_niceness};
use super::super::thread_search::ThreadSearch;
use super::super::{ConnectBackName, ConnectBackSocket};
use super::ProcessEdge;
use crate::kernel::PageFault;

/// Maximum number of network namespaces, besides the agent's, in which the agent listens for one
/// request. The next request is for the next namespaces.
const NAMESPACES_MAX: usize = 16;
/// Timeout of a search for the process, which hostile processes of the run's user can block for
/// ever.
const SEARCH_TIME_MAX: Duration = Duration::from_secs(5);

impl ProcessEdge {
    /// Listens in the network namespaces in which the requesting process may be, and fills its page
    /// with the name and the secret of the socket.
    ///
    /// If that fails, the monitor fills the page with zeros, as any other page.
    pub(super) fn answer_connect_back(&mut self, fault: PageFault) {
        // Each page is answered once: a program could empty the pages and send requests for ever,
        // and a thread that a signal interrupts reports its fault twice.
        let bit = 1 << (fault.page - self.canary().pages().start);
        if self.connect_back_requests == CONNECT_BACK_REQUESTS_MAX
            || self.answered_connect_back_pages & bit != 0
        {
            return;
        }
        self.answered_connect_back_pages |= bit;
        self.connect_back_requests += 1;
        match self.listen_for(fault.thread) {
            Ok(ConnectBackName { name, secret }) => {
                let mut page = [0; PAGE_BYTES];
                let (first, rest) = page.split_at_mut(name.len());
                first.copy_from_slice(&name);
                rest[..secret.len()].copy_from_slice(&secret);
                self.uffd.copy_page(fault.page, &page);
            }
            Err(error) => {
                tracing::warn!(%error, pid = self.program.pid(), "cannot listen for a forked child");
            }
        }
    }

    /// Listens at one name in each network namespace in which the thread may be.
    ///
    /// Only hellos and requests for the device are served there, with the same proofs as at any
    /// socket of the agent. So a socket in the namespace of another program is harmless.
    fn listen_for(&mut self, thread: u32) -> io::Result<ConnectBackName> {
        let connect_back = ConnectBackName { name: new_nonce()?, secret: new_nonce()? };
        let service = self.run.service.upgrade().ok_or(io::ErrorKind::NotConnected)?;
        let tenant = self.run.tenant();
        let user = self.program.user_at_fork.load(Relaxed);
        let serve = |listener| {
            let socket = ConnectBackSocket { tenant, user, connect_back, listener };
            service.agent.serve_connect_back_socket(socket);
        };
        serve(listen_at_name(&socket_address(connect_back.name))?);
        self.open_connect_backs.push(connect_back);
        // Most children are in the agent's PID namespace. A second request means that the child is
        // not.
        let search = self.thread_search(self.connect_back_requests > 1);
        let skipped = (self.connect_back_requests - 1) * NAMESPACES_MAX;
        let listeners = service.connect_back_turns.turn(tenant, SEARCH_TIME_MAX, move || {
            listen_where_it_may_be(&search, thread, connect_back.name, skipped)
        });
        match listeners {
            Ok(listeners) => listeners.into_iter().for_each(serve),
            Err(error) => tracing::warn!(%error, "cannot search for a forked child in other namespaces"),
        }
        Ok(connect_back)
    }

    /// Makes a search for a thread by its number in its own PID namespace.
    pub(super) fn thread_search(&self, is_wide: bool) -> ThreadSearch {
        let programs = self.run.programs();
        let is_parent = |id: u64| self.origin.is_some_and(|(parent, _)| parent == id);
        let parent = programs.iter().find(|program| is_parent(program.id));
        ThreadSearch {
            parent: parent.and_then(|parent| parent.living_process()),
            programs: programs.iter().filter_map(|program| program.living_process()).collect(),
            tenant: self.run.tenant(),
            is_wide,
        }
    }

    /// Closes the sockets of all connect-back requests, because the process has attached its
    /// worker.
    pub(super) fn end_connect_backs(&mut self) {
        if let Some(service) = self.run.service.upgrade() {
            self.open_connect_backs.drain(..).for_each(|name| service.agent.end_connect_back(&name));
        }
    }
}

/// Listens at a name in the network namespaces, other than the agent's, of the processes that may
/// have this thread. Begins with candidate number `skipped`.
fn listen_where_it_may_be(
    search: &ThreadSearch,
    thread: u32,
    name: [u8; SOCKET_NAME_BYTES],
    skipped: usize,
) -> Vec<OwnedFd> {
    // A search takes long, so it must not have the priority of the monitor's thread.
    set_niceness(USUAL);
    let mut seen = HashSet::from([network_of("self")]);
    let mut found = search.processes_with(thread);
    let first = skipped % found.len().max(1);
    found.rotate_left(first);
    let places = found.into_iter().filter(|process| seen.insert(network_of(&process.to_string())));
    let places = places.take(NAMESPACES_MAX);
    let listen = |process| {
        let failed = |error| tracing::debug!(%error, process, "cannot listen in a network namespace");
        listen_where(process, name).map_err(failed).ok()
    };
    places.filter_map(listen).collect()
}

/// Returns the link of a process's network namespace in `/proc`, which identifies it.
fn network_of(process: &str) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/{process}/ns/net")).ok()
}

/// Listens in the network namespace of a process. Needs CAP_SYS_ADMIN.
fn listen_where(process: u32, name: [u8; SOCKET_NAME_BYTES]) -> io::Result<OwnedFd> {
    let number = i32::try_from(process).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::NotFound)?;
    let pidfd = pidfd_open(number, PidfdFlags::empty())?;
    // A socket stays in the network namespace of the thread that creates it.
    let listen = move || {
        move_into_thread_name_spaces(pidfd.as_fd(), ThreadNameSpaceType::NETWORK)?;
        listen_at_name(&socket_address(name))
    };
    let thread = std::thread::Builder::new().name("connect-back".into()).spawn(listen)?;
    thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread has panicked")))
}
