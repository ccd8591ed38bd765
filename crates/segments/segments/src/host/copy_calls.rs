//! Answers the calls of programs about copies of segments.

use std::os::fd::{AsFd, OwnedFd};

use aquifer_arena::calls::{Answer, Call};
use aquifer_channel::send_frame;

use super::copies::{Copies, Restoring};
use super::programs::{answer, answer_segment, failed, frame_of, next_call};
use super::{SegmentError, SegmentHost, SegmentKey};

/// Serves a connection for calls about segments of a tenant that no live host owns. `first` is the
/// call that was received already.
pub(super) fn serve_without_owner(host: &SegmentHost, socket: &OwnedFd, tenant: u32, first: Call) {
    let mut call = Some(first);
    while let Some(next) = call {
        let id = match &next {
            Call::Copies { id } | Call::SetCopies { id, .. } => *id,
            _ => {
                answer(socket, &Answer::Failed("this connection serves only calls about copies".into()));
                return;
            }
        };
        let segment = SegmentKey { tenant, id };
        let is_sent = match host.owns(segment) {
            true => answer(socket, &failed(&SegmentError::Exists(segment))),
            false => answer_call(host, socket, segment, "", next),
        };
        call = next_call(socket).filter(|_| is_sent).and_then(|(call, _)| call.ok());
    }
}

/// Answers a call about the copies of a segment. The caller has checked that the process may access
/// them. Returns false if the program has closed the connection.
pub(super) fn answer_call(
    host: &SegmentHost,
    socket: &OwnedFd,
    segment: SegmentKey,
    process: &str,
    call: Call,
) -> bool {
    let answered = match call {
        Call::Copies { .. } => host.copies(segment).map(|copies| answer_copies(socket, copies)),
        Call::SetCopies { revision, record, .. } => {
            host.set_copies(segment, revision, record.as_ref()).map(|()| answer(socket, &Answer::Done))
        }
        Call::Restore { .. } => match host.begin_restore(segment, process) {
            Ok(restoring) => Ok(answer_restoring(socket, &restoring)),
            // The last owner's host may have died a moment ago: the program retries.
            Err(SegmentError::Exists(_)) => Ok(answer(socket, &Answer::Nothing)),
            Err(SegmentError::NoCopies(_)) => Ok(answer(
                socket,
                &Answer::Copies { record: None, nodes: Vec::new(), nodes_here: Vec::new() },
            )),
            Err(error) => Err(error),
        },
        Call::Restored { is_repeated, .. } => {
            // An earlier process of the agent may have finished the restore.
            let again = is_repeated.then(|| host.shared.arrival_for(segment, process)).flatten();
            if again.is_some() {
                host.shared.arrivals.forget(segment);
            }
            match again.map_or_else(|| host.finish_restore(segment, process), Ok) {
                Ok(arrival) => Ok(answer_segment(socket, &arrival)),
                // The process must begin the restore again.
                Err(SegmentError::NotRestoring(_)) => Ok(answer(socket, &Answer::Nothing)),
                Err(error) => Err(error),
            }
        }
        _ => return answer(socket, &Answer::Failed("this call is not about copies".into())),
    };
    answered.unwrap_or_else(|error| answer(socket, &failed(&error)))
}

fn answer_copies(socket: &OwnedFd, copies: Copies) -> bool {
    let Copies { record, nodes, nodes_here, memory } = copies;
    let fds = Vec::from_iter(memory.as_ref().map(AsFd::as_fd));
    send_frame(socket, &frame_of(&Answer::Copies { record, nodes, nodes_here }), &fds).is_ok()
}

fn answer_restoring(socket: &OwnedFd, restoring: &Restoring) -> bool {
    let Restoring { address, data, record } = restoring;
    let answer = Answer::Restoring { address: *address, record: record.clone() };
    send_frame(socket, &frame_of(&answer), &[data.fd()]).is_ok()
}
