//! Serves the faults of a program in which pages of a segment are missing.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use aquifer_arena::PageFaults;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{SegmentError, SegmentHost, SegmentKey};

/// Longest time in which a request to stop goes unnoticed.
const TICK: Duration = Duration::from_millis(20);

/// Pulls each page that a thread of the program touches, until `stop`, or until the segment has
/// moved on or the program has ended.
pub fn serve(host: &SegmentHost, segment: SegmentKey, faults: &PageFaults, stop: &AtomicBool) {
    let tick = Timespec::try_from(TICK).unwrap_or_default();
    let mut pages = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let ready = poll(&mut [PollFd::new(faults, PollFlags::IN)], Some(&tick));
        if ready.is_err() || faults.read(&mut pages).is_err() {
            return;
        }
        for page in pages.drain(..) {
            let served = match host.pull(segment, page) {
                Ok(()) => faults.resume(page),
                Err(error @ SegmentError::Lost { .. }) => {
                    tracing::error!(%error, "a program gets SIGBUS");
                    faults.poison(page)
                }
                // It was handed over: the mapping is gone, and with it those that waited.
                Err(_) => Ok(()),
            };
            if let Err(error) = served {
                tracing::debug!(%error, page, "a page of a segment is not where it was touched");
            }
        }
    }
}
