//! Forked children that cannot reach the agent's socket, and knock: see
//! [`aquifer_ipc::knock_page`].

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use aquifer_channel::socket::listen_at_name;
use aquifer_ipc::{KNOCKS_MAX, SOCKET_NAME_BYTES, socket_address};
use aquifer_pager::PAGE_BYTES;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::thread::{ThreadNameSpaceType, move_into_thread_name_spaces};

use super::super::canary::new_nonce;
use super::super::thread_search::ThreadSearch;
use super::ProcessEdge;
use crate::kernel::PageFault;

impl ProcessEdge {
    /// Listens where the process is that knocks, and fills its page with the name of the socket.
    ///
    /// If that fails, the page is filled with zeros afterwards, like any other.
    pub(super) fn answer_knock(&mut self, fault: PageFault) {
        // A program that empties the pages again can knock without an end.
        if self.knocks == KNOCKS_MAX {
            return;
        }
        self.knocks += 1;
        match self.listen_for(fault.thread) {
            Ok(name) => {
                let mut page = [0; PAGE_BYTES];
                page[..name.len()].copy_from_slice(&name);
                self.uffd.copy_page(fault.page, &page);
            }
            Err(error) => {
                tracing::warn!(%error, pid = self.program.pid(), "cannot listen for a forked child");
            }
        }
    }

    /// Listens at one name in each network namespace where the thread may be.
    ///
    /// All that connects there has to prove the same as at any socket of the agent. So it does no
    /// harm if a namespace is another program's.
    fn listen_for(&self, thread: u32) -> io::Result<[u8; SOCKET_NAME_BYTES]> {
        let name = new_nonce()?;
        let service = self.run.service.upgrade().ok_or(io::ErrorKind::NotConnected)?;
        let serve = |listener| service.agent.serve_knock_socket(self.run.tenant(), listener);
        serve(listen_at_name(&socket_address(name))?);
        let mut seen = HashSet::from([network_of("self")]);
        for process in self.processes_with(thread) {
            if seen.insert(network_of(&process.to_string())) {
                match listen_where(process, name) {
                    Ok(listener) => serve(listener),
                    Err(error) => tracing::debug!(%error, process, "cannot listen where a process is"),
                }
            }
        }
        Ok(name)
    }

    /// Processes that may have a thread with this number in their own PID namespace.
    fn processes_with(&self, thread: u32) -> Vec<u32> {
        let programs = self.run.programs().iter().filter_map(|program| program.living_process()).collect();
        // Most are in the agent's PID namespace. The second knock is that of a child which is not.
        let search = ThreadSearch { programs, tenant: self.run.tenant(), is_wide: self.knocks > 1 };
        search.processes_with(thread)
    }
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
