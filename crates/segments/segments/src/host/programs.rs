//! Serves the programs of this host: their calls, and the faults of their segments.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use aquifer_arena::calls::{Answer, Call, LISTED_MAX};
use aquifer_channel::peer::PeerCredentials;
use aquifer_channel::socket::wait_readable;
use aquifer_channel::{ReceiveError, receive_frame, send_frame, start_time, try_send_frame};
use aquifer_ipc::Frame;
use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};

use super::arrivals::{ProcessEvent, Waiter};
use super::memory::PAGE_BYTES;
use super::shared::Arrival;
use super::{SegmentError, SegmentHost, SegmentKey, copy_calls};

/// Timeout of one poll for the next call of an idle program. The poll is repeated without end.
const IDLE_POLL_TIMEOUT: Duration = Duration::from_secs(3600);

/// The identity of a process, which differs from that of a later process with the same id.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ProcessIdentity {
    /// The process id.
    pub pid: u32,
    /// The time at which the process started, in clock ticks since boot.
    pub started: u64,
}

impl ProcessIdentity {
    /// The identity of the process with an id; `None` if there is none, or this process cannot see
    /// it.
    #[must_use]
    pub fn of(pid: u32) -> Option<Self> {
        start_time(pid).map(|started| Self { pid, started })
    }

    /// Whether the process runs.
    #[must_use]
    pub fn is_running(self) -> bool {
        start_time(self.pid) == Some(self.started)
    }
}

/// Serves a connection of a program. `first` is the call that was received already.
pub fn serve(host: &Arc<SegmentHost>, socket: &Arc<OwnedFd>, peer: PeerCredentials, first: &str) {
    let (tenant, identity) = (peer.uid, ProcessIdentity::of(peer.pid));
    match parse(first) {
        Ok(Call::Open { .. }) if !host.is_member() => {
            let reason = "the host's lease may have ended: its agent cannot reach the directory";
            answer(socket, &Answer::Failed(reason.into()));
        }
        Ok(Call::Open { process, held }) => match host.open_process(tenant, &process, identity, &held) {
            Ok((held, awaited)) => {
                let grace_ms = u64::try_from(host.grace().as_millis()).unwrap_or(u64::MAX);
                if answer(socket, &Answer::Opened { held, awaited, grace_ms }) {
                    Program { host, tenant, process: &process }.run(socket);
                }
                host.end_restores(tenant, &process);
                if let Err(error) = host.close_process(tenant, &process) {
                    tracing::warn!(
                        process, %error,
                        "cannot remove the record of a process that has ended; its name stays in use"
                    );
                }
            }
            Err(error) => drop(answer(socket, &failed(&error))),
        },
        Ok(call @ Call::Copies { .. }) => copy_calls::serve_without_owner(host, socket, tenant, call),
        Ok(Call::Attend { process }) if host.has_process(tenant, &process) => {
            if answer(socket, &Answer::Done) {
                attend(host, socket, tenant, &process);
            }
        }
        Ok(Call::KeepAlive) => {
            // A process that gets no answer in time revokes its own access to the segments.
            while host.is_member()
                && answer(socket, &Answer::Done)
                && matches!(next_call(socket), Some((Ok(Call::KeepAlive), _)))
            {}
        }
        Ok(call) => {
            let answered = operate(host, tenant, call).unwrap_or_else(|error| failed(&error));
            answer(socket, &answered);
        }
        Err(reason) => drop(answer(socket, &Answer::Failed(reason))),
    }
}

/// Answers a call on a connection without an open process, such as that of `aquifer segment`.
fn operate(host: &SegmentHost, tenant: u32, call: Call) -> Result<Answer, SegmentError> {
    let own = rustix::process::geteuid().as_raw();
    let may_see = |user: u32| user == tenant || tenant == 0 || tenant == own;
    let checked = |user: u32, id: u64| {
        let key = SegmentKey { tenant: user, id };
        if may_see(user) { Ok(key) } else { Err(SegmentError::NotOwned(key)) }
    };
    Ok(match call {
        Call::Report { above } => {
            let all = host.list_all().into_iter().filter(|status| may_see(status.user));
            let after = all.filter(|status| above.is_none_or(|above| (status.user, status.id) > above));
            Answer::Report { segments: after.take(LISTED_MAX).collect(), totals: host.statistics().totals() }
        }
        Call::ReportCopies { above } => {
            // Other users are listed only if they have segments here.
            let here = host.list_all().into_iter().map(|status| status.user).filter(|user| may_see(*user));
            let users = here.chain([tenant]).collect();
            Answer::ReportCopies(host.list_copies(&users, above, LISTED_MAX)?)
        }
        Call::Move { user, id, process } => {
            host.request(checked(user, id)?, &process)?;
            Answer::Done
        }
        Call::Free { user, id } => {
            host.free(checked(user, id)?)?;
            Answer::Done
        }
        _ => Answer::Failed("this call needs an open process: send the call open first".into()),
    })
}

/// Serves a connection on which a process waits for segments.
fn attend(host: &SegmentHost, socket: &Arc<OwnedFd>, tenant: u32, process: &str) {
    while let Some((call, fds)) = next_call(socket) {
        let is_ok = match call {
            Ok(Call::Receive { timeout_ms, requests }) => {
                let socket = Arc::clone(socket);
                let waiter = Waiter { tenant, process: process.to_owned(), socket, requests };
                receive(host, &waiter, timeout_ms)
            }
            Ok(Call::Serve { id, pulls }) => {
                serve_faults(host, SegmentKey { tenant, id }, process, pulls, fds)
            }
            Ok(_) => answer(socket, &Answer::Failed("this connection serves only receive and serve".into())),
            Err(reason) => answer(socket, &Answer::Failed(reason)),
        };
        if !is_ok {
            return;
        }
    }
}

/// Answers with the next event for the process, or with [`Answer::Nothing`] after the timeout.
/// Returns false if the program has closed the connection.
fn receive(host: &SegmentHost, waiter: &Waiter, timeout_ms: u64) -> bool {
    let (arrivals, socket) = (&host.shared.arrivals, &waiter.socket);
    loop {
        let segment = match arrivals.next_or_wait(waiter.clone()) {
            Some(ProcessEvent::Arrived(segment)) => segment,
            Some(ProcessEvent::Asked(segment, process)) => {
                if host.is_owned_by(segment, &waiter.process) {
                    return answer(socket, &Answer::Asked { id: segment.id, process });
                }
                continue;
            }
            None => {
                // Meanwhile, the thread in which a segment arrives may send the answer.
                let _is_readable = wait_readable(&[socket], Duration::from_millis(timeout_ms));
                let is_unanswered = arrivals.cancel_wait(socket);
                return !is_unanswered || answer(socket, &Answer::Nothing);
            }
        };
        // The segment may have left again, or another process may own it by now.
        let Some(arrival) = host.shared.arrival_for(segment, &waiter.process) else { continue };
        let is_sent = answer_segment(socket, &arrival);
        if !is_sent {
            arrivals.put_back(segment, &waiter.process);
        }
        return is_sent;
    }
}

/// Serves the faults of a partial segment that the process has received. Returns false on failure:
/// then the connection is closed, and the program makes another one.
fn serve_faults(
    host: &SegmentHost,
    segment: SegmentKey,
    process: &str,
    pulls: bool,
    fds: Vec<OwnedFd>,
) -> bool {
    let Some(uffd) = fds.into_iter().next() else { return false };
    if !host.shared.may_serve(segment, process) {
        // The process does not own the segment any more.
        return true;
    }
    let served = host.shared.serve_faults(segment, uffd, pulls);
    served.inspect_err(|error| tracing::error!(%segment, %error, "cannot serve page faults")).is_ok()
}

/// The connection of an open process.
struct Program<'a> {
    host: &'a Arc<SegmentHost>,
    tenant: u32,
    process: &'a str,
}

impl Program<'_> {
    fn run(&self, socket: &OwnedFd) {
        while let Some((call, _)) = next_call(socket) {
            let is_sent = match call {
                Ok(Call::Allocate { id, bytes }) => {
                    match self.host.allocate(self.key(id), bytes, self.process) {
                        Ok(arrival) => answer_segment(socket, &arrival),
                        Err(error) => answer(socket, &failed(&error)),
                    }
                }
                Ok(call @ (Call::Copies { id } | Call::SetCopies { id, .. })) => match self.own(id) {
                    Ok(segment) => copy_calls::answer_call(self.host, socket, segment, self.process, call),
                    Err(error) => answer(socket, &failed(&error)),
                },
                Ok(call @ (Call::Restore { id } | Call::Restored { id, .. })) => {
                    copy_calls::answer_call(self.host, socket, self.key(id), self.process, call)
                }
                Ok(call) => {
                    let answered = self.answer(call).unwrap_or_else(|error| failed(&error));
                    answer(socket, &answered)
                }
                Err(reason) => answer(socket, &Answer::Failed(reason)),
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

    fn answer(&self, call: Call) -> Result<Answer, SegmentError> {
        match call {
            // An earlier process of the agent has deallocated the segment.
            Call::Deallocate { id, is_repeated: true } if self.host.is_gone(self.key(id))? => {}
            Call::Deallocate { id, .. } => {
                let segment = self.own(id)?;
                self.host.shared.end_faults(segment);
                self.host.deallocate(segment)?;
            }
            Call::Connect { id, process } => self.host.connect(self.own(id)?, &process)?,
            Call::GiveUp { id } => {
                let segment = self.own(id)?;
                self.host.shared.end_faults(segment);
                self.host.give_up(segment)?;
            }
            Call::Abort { id } => match self.own(id) {
                Ok(segment) => self.host.abort(segment)?,
                Err(_) => self.host.end_restore(self.key(id), self.process),
            },
            // The segment has arrived at the target, and may have returned to this process.
            Call::Transfer { id, tenure, is_repeated: true }
                if !self.host.is_tenure(self.key(id), self.process, tenure) => {}
            Call::Transfer { id, is_repeated, .. } => {
                let outcome = match self.own(id) {
                    Ok(segment) => self.host.transfer(segment),
                    // An earlier process of the agent has handed it over.
                    Err(_) if is_repeated => self.host.resume_transfer(self.key(id), self.process),
                    Err(error) => return Err(error),
                };
                match outcome {
                    Err(error @ SegmentError::Declined(_)) => return Ok(Answer::Kept(error.to_string())),
                    outcome => outcome?,
                }
            }
            Call::Pull { id, offset, bytes } => self.pull(self.own(id)?, offset, bytes)?,
            Call::Close { id } => {
                self.host.wait_until_armed(self.own(id)?)?;
                self.host.close(self.own(id)?)?;
            }
            Call::Discard { id } => self.host.discard(self.own(id)?)?,
            Call::List { above } => {
                let is_above = |id: u64| above.is_none_or(|above| id > above);
                let all = self.host.list(self.tenant).into_iter();
                return Ok(Answer::List(all.filter(|status| is_above(status.id)).take(LISTED_MAX).collect()));
            }
            Call::Open { .. }
            | Call::Attend { .. }
            | Call::Receive { .. }
            | Call::Serve { .. }
            | Call::KeepAlive
            | Call::Report { .. }
            | Call::ReportCopies { .. }
            | Call::Move { .. }
            | Call::Free { .. }
            | Call::Copies { .. }
            | Call::SetCopies { .. }
            | Call::Restore { .. }
            | Call::Restored { .. }
            | Call::Allocate { .. } => {
                return Ok(Answer::Failed(
                    "the connection of an open process does not serve this call".into(),
                ));
            }
        }
        Ok(Answer::Done)
    }

    /// Pulls the pages of a range.
    fn pull(&self, segment: SegmentKey, offset: u64, bytes: u64) -> Result<(), SegmentError> {
        let length = self.host.bytes(segment)?;
        let end = offset.checked_add(bytes).filter(|end| *end <= length);
        let end = end.ok_or(SegmentError::Range { segment, offset, bytes })?;
        self.host.wait_until_armed(segment)?;
        let page_of = |offset: u64| u32::try_from(offset / PAGE_BYTES).unwrap_or(u32::MAX);
        self.host.shared.pull_range(segment, page_of(offset)..page_of(end.next_multiple_of(PAGE_BYTES)))
    }
}

fn parse(json: &str) -> Result<Call, String> {
    serde_json::from_str(json).map_err(|error| format!("the request is not valid: {error}"))
}

pub(super) fn failed(error: &SegmentError) -> Answer {
    Answer::Failed(error.to_string())
}

/// Receives the next call. `None` if the program has closed the connection, or has sent a frame
/// that is not a call.
pub(super) fn next_call(socket: &OwnedFd) -> Option<(Result<Call, String>, Vec<OwnedFd>)> {
    while !wait_readable(&[socket], IDLE_POLL_TIMEOUT).ok()? {}
    match receive_frame(socket) {
        Ok((Frame::SegmentCall(json), fds)) => Some((parse(&json), fds)),
        Err(ReceiveError::Closed) => None,
        Ok(_) => None,
        Err(error) => {
            tracing::warn!(%error, "cannot receive a call of a program; closing its connection");
            None
        }
    }
}

/// Sends an answer to a program. Returns false if the program has closed the connection.
pub(super) fn answer(socket: &OwnedFd, answer: &Answer) -> bool {
    send_frame(socket, &frame_of(answer), &[]).is_ok()
}

/// Sends a segment to a program, without blocking. Returns false if the program has closed the
/// connection, or does not read its answers.
pub(super) fn answer_segment(socket: &OwnedFd, arrival: &Arrival) -> bool {
    let Arrival { segment, address, data, is_partial, tenure } = arrival;
    let found = Answer::Segment {
        id: segment.id,
        address: *address,
        bytes: data.len() as u64,
        is_partial: *is_partial,
        tenure: *tenure,
    };
    // The program itself may not have the permission to open a userfaultfd.
    let open = || rustix::fs::open("/dev/userfaultfd", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).ok();
    let device = if *is_partial { open() } else { None };
    let fds: Vec<BorrowedFd<'_>> =
        std::iter::once(data.fd()).chain(device.as_ref().map(AsFd::as_fd)).collect();
    try_send_frame(socket, &frame_of(&found), &fds).is_ok()
}

pub(super) fn frame_of(answer: &Answer) -> Frame {
    Frame::SegmentAnswer(serde_json::to_string(answer).unwrap_or_default())
}
