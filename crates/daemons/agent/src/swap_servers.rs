//! Connections of the servers of swap devices on this host.
//!
//! [`aquifer_host::cluster_access`] describes the access that a server gets, and its reports.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_channel::socket::wait_readable;
use aquifer_channel::{receive_frame, send_frame, try_send_frame};
use aquifer_host::cluster_access::{ClusterAccess, SwapReport};
use aquifer_ipc::size::ByteSize;
use aquifer_ipc::{Frame, SetLimit};
use aquifer_report::RunStatistics;
use parking_lot::{Condvar, Mutex};

/// Maximum number of servers at a time.
const SWAP_SERVERS_MAX: usize = 1024;
/// Timeout of the servers' ends when the agent stops. A server frees its memory first.
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of the answer of a server.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time between two checks of a connection.
const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// The connections of the servers of swap devices.
#[derive(Debug, Default)]
pub(crate) struct SwapServers {
    servers: Mutex<Vec<Arc<SwapServer>>>,
}

/// The connection of one server.
#[derive(Debug)]
struct SwapServer {
    socket: OwnedFd,
    /// Locked while a request for a new limit awaits its answer.
    request: Mutex<()>,
    state: Mutex<ServerState>,
    changed: Condvar,
}

/// The state of a connection.
#[derive(Debug, Default)]
struct ServerState {
    /// The last report.
    report: Option<SwapReport>,
    is_closed: bool,
}

impl SwapServers {
    /// Answers a server's request, and returns when the server has closed the connection.
    pub(crate) fn serve(&self, socket: OwnedFd, access: &ClusterAccess) {
        let server = Arc::new(SwapServer::new(socket));
        let answer = self.admit(&server, access);
        if let Err(error) = send_frame(&server.socket, &answer, &[]) {
            tracing::debug!(%error, "a swap server closed its connection before the answer");
        }
        if matches!(answer, Frame::ClusterAccess(_)) {
            server.read();
        }
        server.close();
        self.servers.lock().retain(|other| !Arc::ptr_eq(other, &server));
    }

    fn admit(&self, server: &Arc<SwapServer>, access: &ClusterAccess) -> Frame {
        let mut servers = self.servers.lock();
        if servers.len() >= SWAP_SERVERS_MAX {
            return Frame::Refused(format!(
                "this agent already serves {SWAP_SERVERS_MAX} swap devices: end some runs first"
            ));
        }
        servers.push(Arc::clone(server));
        Frame::ClusterAccess(serde_json::to_string(access).expect("numbers and texts can be written"))
    }

    /// The last report of each server.
    pub(crate) fn reports(&self) -> Vec<SwapReport> {
        self.servers.lock().iter().filter_map(|server| server.state.lock().report.clone()).collect()
    }

    /// Changes the limit of the run that a process belongs to; `None` if there is no such run, or
    /// `is_visible` is false for its tenant.
    ///
    /// # Errors
    /// The reason why the limit is not changed, as a sentence.
    pub(crate) fn set_limit(
        &self,
        set: SetLimit,
        is_visible: impl Fn(u32) -> bool,
    ) -> Option<Result<RunStatistics, String>> {
        let cgroups = std::fs::read_to_string(format!("/proc/{}/cgroup", set.pid)).unwrap_or_default();
        let is_in = |name: &str| cgroups.lines().any(|line| line.rsplit('/').next() == Some(name));
        let has_run = |server: &&Arc<SwapServer>| {
            let state = server.state.lock();
            state.report.as_ref().is_some_and(|report| {
                is_visible(report.statistics.tenant) && (report.runner == set.pid || is_in(&report.cgroup))
            })
        };
        let server = self.servers.lock().iter().find(has_run).cloned()?;
        Some(server.set_limit(set))
    }

    /// Notifies all servers that the agent stops, and waits until they have ended.
    pub(crate) fn end(&self, reason: &str) {
        let servers = self.servers.lock().clone();
        for server in &servers {
            // Fails if the server has already ended.
            let _ = try_send_frame(&server.socket, &Frame::Ended(reason.to_owned()), &[]);
        }
        let deadline = Instant::now() + END_TIMEOUT;
        for server in servers {
            if !server.wait(deadline, |state| state.is_closed) {
                tracing::error!(timeout = ?END_TIMEOUT, "a swap server has not ended in time");
            }
        }
    }
}

impl SwapServer {
    fn new(socket: OwnedFd) -> Self {
        Self { socket, request: Mutex::default(), state: Mutex::default(), changed: Condvar::new() }
    }

    /// Reads the server's reports until it closes the connection.
    fn read(&self) {
        loop {
            if !wait_readable(&[&self.socket], READ_TIMEOUT).unwrap_or(true) {
                continue;
            }
            match receive_frame(&self.socket) {
                Ok((Frame::Statistics(json), _)) => match serde_json::from_str(&json) {
                    Ok(report) => self.update(|state| state.report = Some(report)),
                    Err(error) => tracing::warn!(%error, "a swap server's report cannot be parsed"),
                },
                Ok(_) => tracing::warn!("a swap server has sent an unexpected frame"),
                Err(_) => return,
            }
        }
    }

    fn close(&self) {
        self.update(|state| state.is_closed = true);
    }

    /// Sends a new limit, and waits until a report has it.
    fn set_limit(&self, set: SetLimit) -> Result<RunStatistics, String> {
        let Some(_one) = self.request.try_lock() else {
            return Err("another change of its limit is in progress: try again".to_owned());
        };
        if set.limit_max_bytes.is_some() {
            return Err("kernel swap holds the run at its limit: --max is for runs without --swap".into());
        }
        let least_bytes = self.state.lock().report.as_ref().map_or(0, |report| report.least_limit_bytes);
        if set.limit_bytes < least_bytes {
            return Err(format!(
                "a limit of {} is too small for this run and its device: give at least {}",
                ByteSize(set.limit_bytes),
                ByteSize(least_bytes)
            ));
        }
        try_send_frame(&self.socket, &Frame::SetLimit(set), &[])
            .map_err(|error| format!("cannot send the request to its swap server: {error}"))?;
        let has_limit = |state: &ServerState| {
            state.report.as_ref().is_some_and(|report| report.statistics.limit_bytes == set.limit_bytes)
        };
        self.wait(Instant::now() + ANSWER_TIMEOUT, |state| state.is_closed || has_limit(state));
        let state = self.state.lock();
        match &state.report {
            Some(report) if has_limit(&state) => Ok(report.statistics.clone()),
            _ if state.is_closed => Err("its swap server has ended".to_owned()),
            _ => Err(format!(
                "its swap server has not answered within {} s, and may still change it",
                ANSWER_TIMEOUT.as_secs()
            )),
        }
    }

    /// Waits until `is_done` returns true; false after the deadline.
    fn wait(&self, deadline: Instant, is_done: impl Fn(&ServerState) -> bool) -> bool {
        let remaining = deadline.saturating_duration_since(Instant::now());
        let mut state = self.state.lock();
        let _late = self.changed.wait_while_for(&mut state, |state| !is_done(state), remaining);
        is_done(&state)
    }

    fn update(&self, change: impl FnOnce(&mut ServerState)) {
        change(&mut self.state.lock());
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    fn report(limit_bytes: u64) -> Frame {
        let statistics = RunStatistics { limit_bytes, tenant: 7, ..RunStatistics::default() };
        let cgroup = "aquifer-setup-none".to_owned();
        let report = SwapReport { host: 3, runner: 99, cgroup, least_limit_bytes: 1, statistics };
        Frame::Statistics(serde_json::to_string(&report).unwrap())
    }

    /// Calls `body` with the servers, one of which is connected, and its end of the connection.
    fn with_server(body: impl FnOnce(&SwapServers, &OwnedFd)) {
        let servers = SwapServers::default();
        let (own, other) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| servers.serve(other, &ClusterAccess::new("{}", false, None)));
            assert!(matches!(receive_frame(&own).unwrap().0, Frame::ClusterAccess(_)));
            send_frame(&own, &report(1), &[]).unwrap();
            let server = servers.servers.lock()[0].clone();
            assert!(server.wait(Instant::now() + END_TIMEOUT, |state| state.report.is_some()));
            body(&servers, &own);
            drop(own);
        });
        assert!(servers.servers.lock().is_empty());
    }

    #[test]
    fn a_limit_is_set_when_the_server_reports_it() {
        let set = SetLimit { pid: 99, limit_bytes: 2, limit_max_bytes: None };
        with_server(|servers, own| {
            assert!(servers.set_limit(SetLimit { pid: 98, ..set }, |_| true).is_none(), "another process");
            assert!(servers.set_limit(set, |user| user != 7).is_none(), "another user");
            std::thread::scope(|scope| {
                let answer = scope.spawn(|| servers.set_limit(set, |user| user == 7));
                assert_eq!(receive_frame(own).unwrap().0, Frame::SetLimit(set));
                send_frame(own, &report(1), &[]).unwrap();
                send_frame(own, &report(2), &[]).unwrap();
                assert_eq!(answer.join().unwrap().unwrap().unwrap().limit_bytes, 2);
            });
            assert_eq!(servers.reports()[0].statistics.limit_bytes, 2);
        });
    }

    #[test]
    fn a_limit_below_the_least_is_refused() {
        with_server(|servers, _own| {
            let refused = servers
                .set_limit(SetLimit { pid: 99, limit_bytes: 0, limit_max_bytes: None }, |_| true)
                .unwrap();
            assert!(refused.is_err_and(|reason| reason.contains("too small")));
            let elastic = SetLimit { pid: 99, limit_bytes: 2, limit_max_bytes: Some(3) };
            let refused = servers.set_limit(elastic, |_| true).unwrap();
            assert!(refused.is_err_and(|reason| reason.contains("--max")), "swap cannot do that");
        });
    }
}
