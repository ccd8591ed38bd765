//! The connections to the agent. If the agent ends, its next process takes the segments over, and
//! a thread connects again.
//!
//! Meanwhile this process works on. Touches of pages that are elsewhere wait, and so do calls. If
//! no agent answers for the grace time, other hosts may go on without this one: then this process
//! loses its segments, and a touch is SIGSEGV.
//!
//! The process keeps a reference to each userfaultfd that it has sent to its agent. With the last
//! reference, the kernel would give zeros for missing pages.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use aquifer_arena::calls::{Answer, Call, Tenure};
use aquifer_arena::{PageFaults, revoke};
use aquifer_channel::answer_deadline::{AfterSilence, AnswerDeadline};
use aquifer_channel::boot_time::BootInstant;
use aquifer_channel::receive_frame;
use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Error;
use super::connections::{Connections, Ends, ask, send};

/// Interval of attempts to connect, at which events of mappings are read as well.
const TICK: Duration = Duration::from_millis(20);

/// The connections of a process to its agent.
#[derive(Debug)]
pub(super) struct Link {
    agent: PathBuf,
    process: String,
    calls: Mutex<OwnedFd>,
    /// For waiting, meanwhile other calls can be made.
    arrivals: Mutex<OwnedFd>,
    state: Mutex<State>,
    has_changed: Condvar,
    held: Mutex<BTreeMap<u64, Held>>,
}

#[derive(Debug)]
struct State {
    /// How many times it was connected.
    connections: u64,
    /// How long this process may have its segments without an agent.
    grace: Duration,
    /// The ends of the latest connections.
    ends: Arc<Ends>,
    /// No agent has come in time.
    is_over: bool,
    /// The process wants no segments any more.
    is_closing: bool,
}

/// A segment that is mapped.
#[derive(Debug)]
struct Held {
    address: usize,
    bytes: usize,
    tenure: Tenure,
    armed: Option<Armed>,
}

/// A segment of which pages are elsewhere.
#[derive(Clone, Debug)]
struct Armed {
    faults: Arc<PageFaults>,
    pulls: bool,
}

/// Which connection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Line {
    Calls,
    Arrivals,
}

impl Link {
    /// Connects, and starts the thread that connects again.
    pub fn open(agent: &Path, process: &str) -> Result<Arc<Self>, Error> {
        let Connections { calls, arrivals, ends, grace, .. } =
            Connections::open(agent, process, Vec::new(), None)?;
        let ends = Arc::new(ends);
        let state =
            State { connections: 1, grace, ends: Arc::clone(&ends), is_over: false, is_closing: false };
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
        thread.spawn(move || watched.watch(ends)).map_err(Error::System)?;
        Ok(link)
    }

    /// The socket of the agent.
    pub fn agent(&self) -> &Path {
        &self.agent
    }

    /// Ends the connections, without waiting for calls or for an agent.
    pub fn close(&self) {
        let mut state = self.state.lock();
        state.is_closing = true;
        state.ends.shut_down();
        self.has_changed.notify_all();
    }

    /// Asks the agent. If that ends before it answers, asks the next one: `call` is told whether it
    /// is repeated.
    pub fn ask(&self, call: impl Fn(bool) -> Call) -> Result<(Answer, Vec<OwnedFd>), Error> {
        self.ask_and(Line::Calls, call, |answer, fds, _| Ok((answer, fds)))
    }

    /// As [`Self::ask`]; what is done with the answer, `then`, is done before another call on this
    /// line.
    pub fn ask_and<T>(
        &self,
        line: Line,
        call: impl Fn(bool) -> Call,
        then: impl FnOnce(Answer, Vec<OwnedFd>, &OwnedFd) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut is_repeated = false;
        loop {
            let connection = self.state.lock().connections;
            let socket = if line == Line::Calls { &self.calls } else { &self.arrivals }.lock();
            match ask(&socket, &call(is_repeated)) {
                Ok((answer, fds)) => return then(answer, fds, &socket),
                Err(error @ (Error::Agent(_) | Error::Gone(_))) => {
                    drop(socket);
                    if !self.await_next(connection) {
                        return Err(error);
                    }
                    is_repeated = true;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits for another connection. Returns false if there will be none.
    fn await_next(&self, connection: u64) -> bool {
        let must_wait =
            |state: &mut State| state.connections == connection && !state.is_over && !state.is_closing;
        let mut state = self.state.lock();
        self.has_changed.wait_while(&mut state, must_wait);
        !state.is_over && !state.is_closing
    }

    /// A segment is going to be mapped.
    ///
    /// # Errors
    /// If it is mapped already, perhaps by another thread, or was lost and not dropped yet.
    pub fn hold(&self, id: u64, address: usize, bytes: usize, tenure: Tenure) -> Result<(), Error> {
        match self.held.lock().entry(id) {
            Entry::Vacant(free) => {
                free.insert(Held { address, bytes, tenure, armed: None });
                Ok(())
            }
            Entry::Occupied(_) => {
                Err(Error::Failed(format!("drop segment {id}, which was lost, to receive it again")))
            }
        }
    }

    /// That of a segment that is mapped.
    pub fn tenure(&self, id: u64) -> Tenure {
        self.held.lock().get(&id).map(|held| held.tenure).unwrap_or_default()
    }

    /// It is mapped.
    ///
    /// # Errors
    /// If the process has lost its segments meanwhile.
    pub fn confirm(&self, id: u64) -> Result<(), Error> {
        let held = self.held.lock();
        if self.state.lock().is_over {
            held.get(&id).iter().for_each(|segment| segment.revoke());
            return Err(Error::Failed("no agent has come in time, and all segments are lost".into()));
        }
        Ok(())
    }

    /// Has the agent at the other end of `arrivals` serve the faults of a mapping.
    pub fn serve(&self, id: u64, uffd: OwnedFd, pulls: bool, arrivals: &OwnedFd) -> Result<(), Error> {
        let mut held = self.held.lock();
        let Some(segment) = held.get_mut(&id) else { return Err(Error::Answer) };
        let faults = Arc::new(PageFaults::new(uffd, segment.address, segment.bytes));
        // If the agent has ended, its next process is asked.
        let _is_sent = send(arrivals, &Call::Serve { id, pulls }, &[faults.as_fd()]);
        segment.armed = Some(Armed { faults, pulls });
        Ok(())
    }

    /// A segment is unmapped.
    pub fn release(&self, id: u64) {
        self.held.lock().remove(&id);
    }

    /// Connects again whenever the agent ends.
    fn watch(&self, mut ends: Arc<Ends>) {
        loop {
            let until = self.await_end(&ends);
            // Calls that wait for an answer learn of it, if only one has ended.
            ends.shut_down();
            let is_closing = self.state.lock().is_closing;
            match (is_closing, self.reconnect(until)) {
                (false, Some(next)) => ends = next,
                _ => return self.give_up(),
            }
        }
    }

    /// Waits until the agent has ended, or has not answered for the grace time. Returns the end of
    /// the grace time after its latest answer.
    fn await_end(&self, ends: &Ends) -> BootInstant {
        let mut deadline = AnswerDeadline::new(self.state.lock().grace, ends.asked);
        let pulse = &ends.pulse;
        loop {
            let mut ends = [
                PollFd::new(&ends.calls, PollFlags::RDHUP),
                PollFd::new(&ends.arrivals, PollFlags::RDHUP),
                PollFd::new(pulse, PollFlags::IN),
            ];
            let now = BootInstant::now();
            let until = deadline.wait_until(now);
            let left = Timespec::try_from(until.saturating_duration_since(now)).unwrap_or_default();
            let is_over = match poll(&mut ends, Some(&left)) {
                Err(rustix::io::Errno::INTR) => false,
                Err(_) => true,
                Ok(0) if BootInstant::now() < until => false,
                Ok(0) => match deadline.note_silence(BootInstant::now()) {
                    AfterSilence::GiveUp => true,
                    AfterSilence::Ask => send(pulse, &Call::KeepAlive, &[]).is_err(),
                },
                Ok(_) if ends.iter().all(|end| (end.revents() - PollFlags::IN).is_empty()) => {
                    deadline.note_answer();
                    receive_frame(pulse).is_err()
                }
                Ok(_) => true,
            };
            if is_over {
                return deadline.end();
            }
        }
    }

    /// The next connections; `None` if no agent has come in time, or the process wants
    /// no segments any more.
    fn reconnect(&self, until: BootInstant) -> Option<Arc<Ends>> {
        loop {
            let is_closing = self.state.lock().is_closing;
            if is_closing || BootInstant::now() >= until {
                return None;
            }
            // Whatever an answer has brought is mapped and held once the lines are free. The
            // connections have ended, so no further answer comes.
            drop((self.calls.lock(), self.arrivals.lock()));
            let held = self.held.lock().iter().map(|(id, held)| (*id, held.tenure)).collect();
            match Connections::open(&self.agent, &self.process, held, Some(until)) {
                Ok(next) => return self.install(next),
                Err(_) => self.read_events(),
            }
            // An agent that was told to stop has removed its socket, and with it all segments.
            if !self.agent.exists() {
                return None;
            }
            pause();
        }
    }

    /// Goes on with the next connections; `None` if the process wants no segments any more.
    fn install(&self, next: Connections) -> Option<Arc<Ends>> {
        let (mut calls, mut arrivals) = (self.calls.lock(), self.arrivals.lock());
        self.go_on(&next);
        (*calls, *arrivals) = (next.calls, next.arrivals);
        let mut state = self.state.lock();
        if state.is_closing {
            return None;
        }
        state.connections += 1;
        state.grace = next.grace;
        state.ends = Arc::new(next.ends);
        self.has_changed.notify_all();
        Some(Arc::clone(&state.ends))
    }

    /// Has the new agent serve the faults, and gives up what it does not have.
    fn go_on(&self, next: &Connections) {
        for (id, segment) in self.held.lock().iter() {
            match &segment.armed {
                _ if !next.still_held.contains(id) && !next.awaited.contains(id) => segment.revoke(),
                Some(Armed { faults, pulls }) => {
                    let serve = Call::Serve { id: *id, pulls: *pulls };
                    let _is_sent = send(&next.arrivals, &serve, &[faults.as_fd()]);
                }
                None => {}
            }
        }
    }

    /// A thread that moves a mapping waits until its event is read. Threads whose touches are read
    /// are woken by the next agent.
    fn read_events(&self) {
        let armed: Vec<_> = self.held.lock().values().filter_map(|held| held.armed.clone()).collect();
        let mut touches = Vec::new();
        for Armed { faults, .. } in armed {
            let _has_ended = faults.read(&mut touches);
        }
    }

    /// The process loses its segments.
    fn give_up(&self) {
        {
            let mut state = self.state.lock();
            state.is_over = true;
            self.has_changed.notify_all();
            if state.is_closing {
                return;
            }
        }
        self.held.lock().values().for_each(Held::revoke);
        while !self.state.lock().is_closing {
            self.read_events();
            pause();
        }
    }
}

impl Held {
    fn revoke(&self) {
        if let Some(Armed { faults, .. }) = &self.armed {
            // Threads that wait touch the page again, which is gone.
            let mut touches = Vec::new();
            let _has_ended = faults.read(&mut touches);
        }
        let revoked = revoke(self.address, self.bytes);
        if let Some(Armed { faults, .. }) = &self.armed {
            let _was_mapped = faults.wake_all();
        }
        if let Err(error) = revoked {
            // Nothing else is in the arena, so this does not happen; but it must not go on.
            eprintln!("aquifer: cannot take a segment from this process: {error}");
            std::process::abort();
        }
    }
}

/// Waits a moment.
pub(super) fn pause() {
    let tick = Timespec::try_from(TICK).unwrap_or_default();
    let _time = poll(&mut [], Some(&tick));
}
