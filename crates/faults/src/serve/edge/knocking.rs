//! Forked children that cannot reach the agent's socket, and knock: see
//! [`aquifer_ipc::knock_page`].

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use aquifer_channel::socket::listen_at_name;
use aquifer_ipc::{KNOCKS_MAX, SOCKET_NAME_BYTES, socket_address};
use aquifer_pager::PAGE_BYTES;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::thread::{ThreadNameSpaceType, move_into_thread_name_spaces};

use super::super::canary::new_nonce;
use super::super::priority::{USUAL, set_niceness};
use super::super::thread_search::ThreadSearch;
use super::super::{KnockName, KnockSocket};
use super::ProcessEdge;
use crate::kernel::PageFault;

/// Network namespaces, besides the agent's, in which it listens for one knock. The next knock is
/// for the next ones.
const NAMESPACES_MAX: usize = 16;
/// Longest search. It may wait for hostile processes of the run's user, which hold it up for ever.
const SEARCH_TIME_MAX: Duration = Duration::from_secs(5);

impl ProcessEdge {
    /// Listens where the process is that knocks, and fills its page with the name of the socket.
    ///
    /// If that fails, the page is filled with zeros afterwards, like any other.
    pub(super) fn answer_knock(&mut self, fault: PageFault) {
        // A program that empties the pages again can knock without an end. And a thread that is
        // interrupted by a signal reports its fault twice.
        let bit = 1 << (fault.page - self.canary().pages().start);
        if self.knocks == KNOCKS_MAX || self.answered_knocks & bit != 0 {
            return;
        }
        self.answered_knocks |= bit;
        self.knocks += 1;
        match self.listen_for(fault.thread) {
            Ok(KnockName { name, secret }) => {
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

    /// Listens at one name in each network namespace where the thread may be.
    ///
    /// Only hellos and requests for the device are served there, and they have to prove the same as
    /// at any socket of the agent. So it does no harm if a namespace is another program's.
    fn listen_for(&mut self, thread: u32) -> io::Result<KnockName> {
        let knock = KnockName { name: new_nonce()?, secret: new_nonce()? };
        let service = self.run.service.upgrade().ok_or(io::ErrorKind::NotConnected)?;
        let tenant = self.run.tenant();
        let user = self.program.user_at_fork.load(Relaxed);
        let serve =
            |listener| service.agent.serve_knock_socket(KnockSocket { tenant, user, knock, listener });
        serve(listen_at_name(&socket_address(knock.name))?);
        self.open_knocks.push(knock);
        // Most are in the agent's PID namespace. The second knock is that of a child which is not.
        let search = self.thread_search(self.knocks > 1);
        let skipped = (self.knocks - 1) * NAMESPACES_MAX;
        let listeners = service.knock_turns.turn(tenant, SEARCH_TIME_MAX, move || {
            listen_where_it_may_be(&search, thread, knock.name, skipped)
        });
        match listeners {
            Ok(listeners) => listeners.into_iter().for_each(serve),
            Err(error) => tracing::warn!(%error, "cannot look for a forked child in other namespaces"),
        }
        Ok(knock)
    }

    /// A search for a thread by its number in its own PID namespace.
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

    /// Stops listening for the process, which has attached its worker.
    pub(super) fn end_knocks(&mut self) {
        if let Some(service) = self.run.service.upgrade() {
            self.open_knocks.drain(..).for_each(|knock| service.agent.end_knock(&knock));
        }
    }
}

/// Listens at a name in the network namespaces, other than the agent's, of the processes that may
/// have this thread, from the one with the number `skipped` on.
fn listen_where_it_may_be(
    search: &ThreadSearch,
    thread: u32,
    name: [u8; SOCKET_NAME_BYTES],
    skipped: usize,
) -> Vec<OwnedFd> {
    // The monitor's thread is urgent, and a search takes long.
    set_niceness(USUAL);
    let mut seen = HashSet::from([network_of("self")]);
    let mut found = search.processes_with(thread);
    let first = skipped % found.len().max(1);
    found.rotate_left(first);
    let places = found.into_iter().filter(|process| seen.insert(network_of(&process.to_string())));
    let places = places.take(NAMESPACES_MAX);
    let listen = |process| {
        let failed = |error| tracing::debug!(%error, process, "cannot listen where a process is");
        listen_where(process, name).map_err(failed).ok()
    };
    places.filter_map(listen).collect()
}

/// The network namespace of a process, in `/proc`.
fn network_of(process: &str) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/{process}/ns/net")).ok()
}

/// Listens in the network namespace of a process. Needs CAP_SYS_ADMIN.
fn listen_where(process: u32, name: [u8; SOCKET_NAME_BYTES]) -> io::Result<OwnedFd> {
    let number = i32::try_from(process).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::NotFound)?;
    let pidfd = pidfd_open(number, PidfdFlags::empty())?;
    // A socket stays in the namespace of the thread that has made it.
    let listen = move || {
        move_into_thread_name_spaces(pidfd.as_fd(), ThreadNameSpaceType::NETWORK)?;
        listen_at_name(&socket_address(name))
    };
    let thread = std::thread::Builder::new().name("knock".into()).spawn(listen)?;
    thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread has panicked")))
}
