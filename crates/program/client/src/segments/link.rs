//! The link of a process to its agent, which survives restarts of the agent: a thread detects the
//! end of the agent, and connects to the next one.
//!
//! Meanwhile this process continues. Touches of missing pages wait, and so do calls. If no agent
//! answers for the grace time, other hosts may consider this host dead. Then this process loses its
//! segments, and a touch raises SIGSEGV.
//!
//! The process keeps a reference to each userfaultfd that it has sent to its agent. Without any
//! reference, the kernel would map zeros for missing pages.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use aquifer_arena::calls::{Answer, Call, Tenure};
use aquifer_arena::{PageFaults, revoke};
use aquifer_channel::answer_deadline::{AnswerDeadline, TimeoutAction};
use aquifer_channel::boot_time::BootInstant;
use aquifer_channel::receive_frame;
use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Error;
use super::connections::{AgentEndWatch, Connections, ask, send};

/// Interval between attempts to connect, and between reads of the events of mappings meanwhile.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// The link of a process to its agent.
#[derive(Debug)]
pub(super) struct AgentLink {
    agent: PathBuf,
    process: String,
    calls: Mutex<OwnedFd>,
    /// The socket for [`Call::Receive`], which may wait for long. Other calls use `calls`.
    arrivals: Mutex<OwnedFd>,
    state: Mutex<LinkState>,
    has_changed: Condvar,
    held: Mutex<BTreeMap<u64, HeldSegment>>,
}

#[derive(Debug)]
struct LinkState {
    /// The number of times that the link was connected.
    connections: u64,
    /// The time for which this process may use its segments without an agent.
    grace: Duration,
    /// The end watch of the latest connections.
    end_watch: Arc<AgentEndWatch>,
    /// Whether the segments are lost, because no agent answered within the grace time.
    is_lost: bool,
    /// Whether the process has closed the link.
    is_closing: bool,
}

/// A segment that is mapped, or is about to be.
#[derive(Debug)]
struct HeldSegment {
    address: usize,
    bytes: usize,
    tenure: Tenure,
    armed: Option<ArmedMapping>,
}

/// The mapping of a segment with missing pages.
#[derive(Clone, Debug)]
struct ArmedMapping {
    faults: Arc<PageFaults>,
    pulls: bool,
}

/// One of the two sockets of a process to its agent.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum AgentSocket {
    /// The socket for calls with an immediate answer.
    Calls,
    /// The socket for [`Call::Receive`] and [`Call::Serve`].
    Arrivals,
}

impl AgentLink {
    /// Connects to the agent, and starts the thread that connects again when the agent ends.
    pub fn open(agent: &Path, process: &str) -> Result<Arc<Self>, Error> {
        let Connections { calls, arrivals, end_watch, grace, .. } =
            Connections::open(agent, process, Vec::new(), None)?;
        let end_watch = Arc::new(end_watch);
        let state = LinkState {
            connections: 1,
            grace,
            end_watch: Arc::clone(&end_watch),
            is_lost: false,
            is_closing: false,
        };
        let link = Arc::new(Self {
            agent: agent.to_owned(),
            process: process.to_owned(),
            calls: Mutex::new(calls),
            arrivals: Mutex::new(arrivals),
            state: Mutex::new(state),
            has_changed: Condvar::new(),
            held: Mutex::default(),
        });
        let watched = Arc::clone(&link);
        let thread = std::thread::Builder::new().name("aquifer-segments".into());
        thread.spawn(move || watched.keep_connected(end_watch)).map_err(Error::System)?;
        Ok(link)
    }

    /// The path of the agent's socket.
    pub fn agent(&self) -> &Path {
        &self.agent
    }

    /// Closes the connections, without waiting for calls or for an agent.
    pub fn close(&self) {
        let mut state = self.state.lock();
        state.is_closing = true;
        state.end_watch.shut_down();
        self.has_changed.notify_all();
    }

    /// Sends a call, and returns the answer. If the agent ends before it answers, retries at the
    /// next agent: the argument of `call` is whether this is a retry.
    pub fn ask(&self, call: impl Fn(bool) -> Call) -> Result<(Answer, Vec<OwnedFd>), Error> {
        self.ask_then(AgentSocket::Calls, call, |answer, fds, _| Ok((answer, fds)))
    }

    /// Sends a call like [`Self::ask`], and passes the answer to `then`. No other call is sent on
    /// the same socket before `then` returns.
    pub fn ask_then<T>(
        &self,
        socket: AgentSocket,
        call: impl Fn(bool) -> Call,
        then: impl FnOnce(Answer, Vec<OwnedFd>, &OwnedFd) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut is_repeated = false;
        loop {
            let connection = self.state.lock().connections;
            let locked = if socket == AgentSocket::Calls { &self.calls } else { &self.arrivals }.lock();
            match ask(&locked, &call(is_repeated)) {
                Ok((answer, fds)) => return then(answer, fds, &locked),
                Err(error @ (Error::Agent(_) | Error::Gone(_))) => {
                    drop(locked);
                    if !self.wait_for_reconnect(connection) {
                        return Err(error);
                    }
                    is_repeated = true;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits until the link is connected again after connection number `connection`. Returns false
    /// if the segments are lost, or the link is closed.
    fn wait_for_reconnect(&self, connection: u64) -> bool {
        let must_wait =
            |state: &mut LinkState| state.connections == connection && !state.is_lost && !state.is_closing;
        let mut state = self.state.lock();
        self.has_changed.wait_while(&mut state, must_wait);
        !state.is_lost && !state.is_closing
    }

    /// Records a segment before it is mapped, so that its loss revokes the mapping. Call
    /// [`Self::confirm`] once it is mapped.
    ///
    /// # Errors
    /// If the segment is mapped already, perhaps by another thread, or was lost and is not dropped
    /// yet.
    pub fn reserve(&self, id: u64, address: usize, bytes: usize, tenure: Tenure) -> Result<(), Error> {
        match self.held.lock().entry(id) {
            Entry::Vacant(free) => {
                free.insert(HeldSegment { address, bytes, tenure, armed: None });
                Ok(())
            }
            Entry::Occupied(_) => {
                Err(Error::Failed(format!("drop segment {id}, which was lost, to receive it again")))
            }
        }
    }

    /// Returns the tenure of segment `id`; the default if it is not mapped.
    pub fn tenure(&self, id: u64) -> Tenure {
        self.held.lock().get(&id).map(|held| held.tenure).unwrap_or_default()
    }

    /// Completes [`Self::reserve`]: the segment is mapped.
    ///
    /// # Errors
    /// If the process has lost its segments meanwhile. Then the mapping is revoked.
    pub fn confirm(&self, id: u64) -> Result<(), Error> {
        let held = self.held.lock();
        if self.state.lock().is_lost {
            held.get(&id).iter().for_each(|segment| segment.revoke());
            let reason = "no agent answered within the grace time, so all segments are lost";
            return Err(Error::Failed(reason.into()));
        }
        Ok(())
    }

    /// Sends the userfaultfd of a mapping to the agent at the other end of `arrivals`, which serves
    /// its faults.
    pub fn serve(&self, id: u64, uffd: OwnedFd, pulls: bool, arrivals: &OwnedFd) -> Result<(), Error> {
        let mut held = self.held.lock();
        let Some(segment) = held.get_mut(&id) else { return Err(Error::Answer) };
        let faults = Arc::new(PageFaults::new(uffd, segment.address, segment.bytes));
        // If the agent has ended, `resume_segments` sends it to the next one.
        let _is_sent = send(arrivals, &Call::Serve { id, pulls }, &[faults.as_fd()]);
        segment.armed = Some(ArmedMapping { faults, pulls });
        Ok(())
    }

    /// Removes the record of a segment that is unmapped.
    pub fn release(&self, id: u64) {
        self.held.lock().remove(&id);
    }

    /// Connects again whenever the agent ends. Returns when the segments are lost and the link is
    /// closed.
    fn keep_connected(&self, mut end_watch: Arc<AgentEndWatch>) {
        loop {
            let until = self.wait_for_agent_end(&end_watch);
            // If only one connection has ended, calls that wait on the other one must fail, too.
            end_watch.shut_down();
            let is_closing = self.state.lock().is_closing;
            match (is_closing, self.reconnect(until)) {
                (false, Some(next)) => end_watch = next,
                _ => return self.lose_segments(),
            }
        }
    }

    /// Waits until the agent has ended, or has not answered for the grace time. Returns the end of
    /// the grace time after its latest answer.
    fn wait_for_agent_end(&self, end_watch: &AgentEndWatch) -> BootInstant {
        let mut deadline = AnswerDeadline::new(self.state.lock().grace, end_watch.asked);
        let keep_alive = &end_watch.keep_alive;
        loop {
            let mut sockets = [
                PollFd::new(&end_watch.calls, PollFlags::RDHUP),
                PollFd::new(&end_watch.arrivals, PollFlags::RDHUP),
                PollFd::new(keep_alive, PollFlags::IN),
            ];
            let now = BootInstant::now();
            let until = deadline.wait_until(now);
            let left = Timespec::try_from(until.saturating_duration_since(now)).unwrap_or_default();
            let has_ended = match poll(&mut sockets, Some(&left)) {
                Err(rustix::io::Errno::INTR) => false,
                Err(_) => true,
                Ok(0) if BootInstant::now() < until => false,
                Ok(0) => match deadline.handle_timeout(BootInstant::now()) {
                    TimeoutAction::Expire => true,
                    TimeoutAction::Query => send(keep_alive, &Call::KeepAlive, &[]).is_err(),
                },
                Ok(_) if sockets.iter().all(|socket| (socket.revents() - PollFlags::IN).is_empty()) => {
                    deadline.handle_answer();
                    receive_frame(keep_alive).is_err()
                }
                Ok(_) => true,
            };
            if has_ended {
                return deadline.end();
            }
        }
    }

    /// Connects to the next agent. Returns `None` if no agent answers before `until`, or the link
    /// is closed.
    fn reconnect(&self, until: BootInstant) -> Option<Arc<AgentEndWatch>> {
        loop {
            let is_closing = self.state.lock().is_closing;
            if is_closing || BootInstant::now() >= until {
                return None;
            }
            // Once both locks were free, the segments of all answers are mapped and in `held`. The
            // connections have ended, so no further answer arrives.
            drop((self.calls.lock(), self.arrivals.lock()));
            let held = self.held.lock().iter().map(|(id, held)| (*id, held.tenure)).collect();
            match Connections::open(&self.agent, &self.process, held, Some(until)) {
                Ok(next) => return self.install(next),
                Err(_) => self.read_events(),
            }
            // An agent that was stopped on purpose has removed its socket, and freed all segments.
            if !self.agent.exists() {
                return None;
            }
            pause();
        }
    }

    /// Replaces the connections by the next ones. Returns `None` if the link is closed.
    fn install(&self, next: Connections) -> Option<Arc<AgentEndWatch>> {
        let (mut calls, mut arrivals) = (self.calls.lock(), self.arrivals.lock());
        self.resume_segments(&next);
        (*calls, *arrivals) = (next.calls, next.arrivals);
        let mut state = self.state.lock();
        if state.is_closing {
            return None;
        }
        state.connections += 1;
        state.grace = next.grace;
        state.end_watch = Arc::new(next.end_watch);
        self.has_changed.notify_all();
        Some(Arc::clone(&state.end_watch))
    }

    /// Sends the userfaultfds to the next agent, and revokes segments that this process does not
    /// own there.
    fn resume_segments(&self, next: &Connections) {
        for (id, segment) in self.held.lock().iter() {
            match &segment.armed {
                _ if !next.still_held.contains(id) && !next.awaited.contains(id) => segment.revoke(),
                Some(ArmedMapping { faults, pulls }) => {
                    let serve = Call::Serve { id: *id, pulls: *pulls };
                    let _is_sent = send(&next.arrivals, &serve, &[faults.as_fd()]);
                }
                None => {}
            }
        }
    }

    /// Reads the events of all armed mappings, because a thread that moves a mapping waits until
    /// its event is read. The next agent wakes the threads whose touches are read here.
    fn read_events(&self) {
        let armed: Vec<_> = self.held.lock().values().filter_map(|held| held.armed.clone()).collect();
        let mut touches = Vec::new();
        for ArmedMapping { faults, .. } in armed {
            let _has_ended = faults.read(&mut touches);
        }
    }

    /// Revokes all segments, because no agent answered within the grace time. Returns when the link
    /// is closed.
    fn lose_segments(&self) {
        {
            let mut state = self.state.lock();
            state.is_lost = true;
            self.has_changed.notify_all();
            if state.is_closing {
                return;
            }
        }
        self.held.lock().values().for_each(HeldSegment::revoke);
        while !self.state.lock().is_closing {
            self.read_events();
            pause();
        }
    }
}

impl HeldSegment {
    /// Revokes the program's access to the segment.
    fn revoke(&self) {
        if let Some(ArmedMapping { faults, .. }) = &self.armed {
            // A thread that moves the mapping waits until its event is read.
            let mut touches = Vec::new();
            let _has_ended = faults.read(&mut touches);
        }
        let revoked = revoke(self.address, self.bytes);
        if let Some(ArmedMapping { faults, .. }) = &self.armed {
            // Waiting threads touch their page again, and get SIGSEGV.
            let _was_mapped = faults.wake_all();
        }
        if let Err(error) = revoked {
            // Only a bug makes this fail. The process must not continue with the segment.
            eprintln!("aquifer: cannot revoke this process's access to a segment: {error}");
            std::process::abort();
        }
    }
}

/// Sleeps for [`RETRY_INTERVAL`].
pub(super) fn pause() {
    let interval = Timespec::try_from(RETRY_INTERVAL).unwrap_or_default();
    let _time = poll(&mut [], Some(&interval));
}
