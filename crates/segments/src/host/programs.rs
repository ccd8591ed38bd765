//! Serves the programs of this host: their requests, and the faults of their segments.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use aquifer_arena::PageFaults;
use aquifer_arena::calls::{Answer, Call, LISTED_MAX};
use aquifer_channel::socket::wait_readable;
use aquifer_channel::{ReceiveError, receive_frame, send_frame};
use aquifer_ipc::Frame;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};

use super::faults::{self, StopEvent};
use super::memory::PAGE_BYTES;
use super::shared::Arrival;
use super::{SegmentError, SegmentHost, SegmentKey};

/// Longest time for which the end of a process that waits for a segment goes unnoticed.
const RECEIVE_TICK: Duration = Duration::from_millis(200);
/// Interval of looks at a silent program.
const SILENCE_TICK: Duration = Duration::from_secs(3600);

/// Serves a connection of a program of a tenant, whose first request was received.
pub fn serve(host: &Arc<SegmentHost>, socket: &OwnedFd, tenant: u32, first: &str) {
    match parse(first) {
        Ok(Call::Open { process }) => match host.open_process(tenant, &process) {
            Ok(()) => {
                if answer(socket, &Answer::Done, &[]) {
                    Program { host, tenant, process: &process, served: HashMap::new() }.run(socket);
                }
                if let Err(error) = host.close_process(tenant, &process) {
                    tracing::warn!(process, %error, "a process that has ended keeps its name");
                }
            }
            Err(error) => drop(answer(socket, &failed(&error), &[])),
        },
        Ok(Call::Attend { process }) if host.has_process(tenant, &process) => {
            if answer(socket, &Answer::Done, &[]) {
                attend(host, socket, tenant, &process);
            }
        }
        Ok(_) => drop(answer(socket, &Answer::Failed("open the process first".into()), &[])),
        Err(refusal) => drop(answer(socket, &refusal, &[])),
    }
}

/// Serves a connection on which a process waits for segments.
fn attend(host: &SegmentHost, socket: &OwnedFd, tenant: u32, process: &str) {
    while let Some((call, _)) = next_call(socket) {
        let Ok(Call::Receive { timeout_ms }) = call else {
            let refusal = Answer::Failed("this connection is for receiving".into());
            if !answer(socket, &refusal, &[]) {
                return;
            }
            continue;
        };
        let Some(arrival) = receive(host, socket, tenant, process, timeout_ms) else {
            if !answer(socket, &Answer::Nothing, &[]) {
                return;
            }
            continue;
        };
        let segment = arrival.segment;
        if !answer_segment(socket, &arrival) {
            return host.return_arrival(segment, process);
        }
    }
}

/// Waits for a segment as long as the program waits.
fn receive(
    host: &SegmentHost,
    socket: &OwnedFd,
    tenant: u32,
    process: &str,
    mut timeout_ms: u64,
) -> Option<Arrival> {
    loop {
        let tick_ms = timeout_ms.min(u64::try_from(RECEIVE_TICK.as_millis()).unwrap_or(u64::MAX));
        let arrival = host.receive(tenant, process, Duration::from_millis(tick_ms));
        timeout_ms -= tick_ms;
        if arrival.is_some() || timeout_ms == 0 || has_hung_up(socket) {
            return arrival;
        }
    }
}

fn has_hung_up(socket: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::empty())];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
}

/// A process that is open.
struct Program<'a> {
    host: &'a Arc<SegmentHost>,
    tenant: u32,
    process: &'a str,
    /// Segments whose faults are served.
    served: HashMap<u64, ServedFaults>,
}

/// The threads that serve the faults of a segment. They end when this is dropped.
struct ServedFaults {
    faults: Arc<PageFaults>,
    stop: Arc<StopEvent>,
    threads: Vec<JoinHandle<()>>,
}

impl Drop for ServedFaults {
    fn drop(&mut self) {
        self.stop.request();
        for thread in self.threads.drain(..) {
            let ended = thread.join();
            debug_assert!(ended.is_ok(), "a thread that serves faults of segments panicked");
        }
    }
}

impl Program<'_> {
    fn run(&mut self, socket: &OwnedFd) {
        while let Some((call, fds)) = next_call(socket) {
            let is_sent = match call {
                Ok(Call::Allocate { id, bytes }) => {
                    match self.host.allocate(self.key(id), bytes, self.process) {
                        Ok(arrival) => answer_segment(socket, &arrival),
                        Err(error) => answer(socket, &failed(&error), &[]),
                    }
                }
                Ok(call) => {
                    let answered = self.answer(call, fds).unwrap_or_else(|error| failed(&error));
                    answer(socket, &answered, &[])
                }
                Err(refusal) => answer(socket, &refusal, &[]),
            };
            if !is_sent {
                return;
            }
        }
    }

    fn key(&self, id: u64) -> SegmentKey {
        SegmentKey { tenant: self.tenant, id }
    }

    /// The key of a segment that this process owns.
    fn own(&self, id: u64) -> Result<SegmentKey, SegmentError> {
        let key = self.key(id);
        if self.host.is_owned_by(key, self.process) { Ok(key) } else { Err(SegmentError::NotOwned(key)) }
    }

    fn answer(&mut self, call: Call, fds: Vec<OwnedFd>) -> Result<Answer, SegmentError> {
        match call {
            Call::Deallocate { id } => {
                let segment = self.own(id)?;
                self.served.remove(&id);
                self.host.deallocate(segment)?;
            }
            Call::Connect { id, process } => self.host.connect(self.own(id)?, &process)?,
            Call::Abort { id } => self.host.abort(self.own(id)?)?,
            Call::Transfer { id } => {
                match self.host.transfer(self.own(id)?) {
                    Err(error @ SegmentError::Declined(_)) => return Ok(Answer::Kept(error.to_string())),
                    outcome => outcome?,
                }
                self.served.remove(&id);
            }
            Call::Serve { id, pulls } => {
                let segment = self.own(id)?;
                let Some(uffd) = fds.into_iter().next() else {
                    return Ok(Answer::Failed("the request carries no userfaultfd".into()));
                };
                self.serve_faults(segment, uffd, pulls)?;
            }
            Call::Pull { id, offset, bytes } => self.pull(self.own(id)?, offset, bytes)?,
            Call::Close { id } => {
                self.host.pull_all(self.own(id)?)?;
                if let Some(served) = self.served.remove(&id) {
                    let _was_complete = served.faults.disarm();
                }
            }
            Call::List { above } => {
                let is_above = |id: u64| above.is_none_or(|above| id > above);
                let all = self.host.list(self.tenant).into_iter();
                return Ok(Answer::List(all.filter(|status| is_above(status.id)).take(LISTED_MAX).collect()));
            }
            Call::Open { .. } | Call::Attend { .. } | Call::Receive { .. } | Call::Allocate { .. } => {
                return Ok(Answer::Failed("this connection is not for that".into()));
            }
        }
        Ok(Answer::Done)
    }

    /// Serves the faults of a segment that was received and is partial.
    fn serve_faults(&mut self, segment: SegmentKey, uffd: OwnedFd, pulls: bool) -> Result<(), SegmentError> {
        let (address, bytes) = self.host.place(segment)?;
        let faults = Arc::new(PageFaults::new(uffd, address, bytes));
        let stop = Arc::new(StopEvent::new().map_err(SegmentError::Thread)?);
        let mut served = ServedFaults { faults: Arc::clone(&faults), stop, threads: Vec::new() };
        let (host, stop, of_thread) = (Arc::clone(self.host), Arc::clone(&served.stop), Arc::clone(&faults));
        served
            .threads
            .push(spawn("segment-faults", move || faults::serve(&host, segment, &of_thread, &stop))?);
        if pulls {
            let (host, stop) = (Arc::clone(self.host), Arc::clone(&served.stop));
            served.threads.push(spawn("segment-pull", move || pull_ahead(&host, segment, &faults, &stop))?);
        }
        self.served.insert(segment.id, served);
        Ok(())
    }

    /// Pulls pages, and has the program see them.
    fn pull(&self, segment: SegmentKey, offset: u64, bytes: u64) -> Result<(), SegmentError> {
        let (_, length) = self.host.place(segment)?;
        let end = offset.checked_add(bytes).filter(|end| *end <= length as u64);
        let end = end.ok_or(SegmentError::Range { segment, offset, bytes })?;
        let page_of = |offset: u64| u32::try_from(offset / PAGE_BYTES).unwrap_or(u32::MAX);
        for page in page_of(offset)..page_of(end.next_multiple_of(PAGE_BYTES)) {
            self.host.pull(segment, page)?;
            if let Some(served) = self.served.get(&segment.id) {
                // It may be mapped already.
                let _ = served.faults.resume(page);
            }
        }
        Ok(())
    }
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, SegmentError> {
    let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(run);
    spawned.map_err(SegmentError::Thread)
}

/// Pulls all pages ahead of the program; then its touches are plain again.
fn pull_ahead(host: &SegmentHost, segment: SegmentKey, faults: &PageFaults, stop: &StopEvent) {
    loop {
        if stop.is_requested() {
            return;
        }
        match host.pull_ahead(segment) {
            Ok(true) => {}
            Ok(false) => break,
            Err(SegmentError::NotOwned(_)) => return,
            // The page stays lost, and the program learns of it by SIGBUS if it touches it.
            Err(error) => return tracing::error!(%segment, %error, "cannot pull all pages"),
        }
    }
    if host.pull_all(segment).is_ok() {
        let _was_moved = faults.disarm();
    }
}

fn parse(json: &str) -> Result<Call, Answer> {
    serde_json::from_str(json).map_err(|error| Answer::Failed(format!("the request is not valid: {error}")))
}

fn failed(error: &SegmentError) -> Answer {
    Answer::Failed(error.to_string())
}

/// The next request; `None` if the program has closed the connection, or sends something else.
fn next_call(socket: &OwnedFd) -> Option<(Result<Call, Answer>, Vec<OwnedFd>)> {
    // A program may be silent for long.
    while !wait_readable(&[socket], SILENCE_TICK).ok()? {}
    match receive_frame(socket) {
        Ok((Frame::SegmentCall(json), fds)) => Some((parse(&json), fds)),
        Err(ReceiveError::Closed) => None,
        Ok(_) => None,
        Err(error) => {
            tracing::warn!(%error, "closed the connection of a program with segments");
            None
        }
    }
}

/// Answers a request. Returns false if the program has closed the connection.
fn answer(socket: &OwnedFd, answer: &Answer, fds: &[BorrowedFd<'_>]) -> bool {
    let json = serde_json::to_string(answer).unwrap_or_default();
    send_frame(socket, &Frame::SegmentAnswer(json), fds).is_ok()
}

fn answer_segment(socket: &OwnedFd, arrival: &Arrival) -> bool {
    let Arrival { segment, address, data, is_partial } = arrival;
    let found = Answer::Segment {
        id: segment.id,
        address: *address,
        bytes: data.len() as u64,
        is_partial: *is_partial,
    };
    // The program itself may not be allowed to have a userfaultfd.
    let open = || rustix::fs::open("/dev/userfaultfd", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).ok();
    let device = if *is_partial { open() } else { None };
    let fds: Vec<BorrowedFd<'_>> =
        std::iter::once(data.fd()).chain(device.as_ref().map(AsFd::as_fd)).collect();
    answer(socket, &found, &fds)
}
