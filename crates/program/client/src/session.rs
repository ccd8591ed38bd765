//! A session with the agent of this host.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use aquifer_channel::paths::agent_socket;
use aquifer_channel::wakeup::{self, WakeupEvent};
use aquifer_channel::{ReceiveError, RingMapping, receive_frame, send_frame};
use aquifer_ipc::Frame;
use aquifer_ipc::ring::{
    CorruptRing, ExtentName, RingAnswer, RingRequest, RingStatus, SLOTS, STRETCH_SECTIONS_MAX, SessionRing,
};

use crate::error::{Error, connect};
use crate::statistics::Statistics;
use crate::transfer::{JobBuffer, TransferJob, run_jobs};

/// Size of the smallest extent.
const MIN_EXTENT_BYTES: u64 = 4 << 10;
/// Size of a section. Larger extents are multiples of it.
pub(crate) const SECTION_BYTES: u64 = MIN_EXTENT_BYTES << SECTION_CLASS;
const SECTION_CLASS: u8 = 9;
/// Size of the largest extent: 64 GiB.
pub const MAX_EXTENT_BYTES: u64 = SECTION_BYTES * STRETCH_SECTIONS_MAX as u64;
/// Time for which the ring is polled for an answer before the thread sleeps.
const POLL_TIME: Duration = Duration::from_micros(50);
/// Retries of opening a session when the agent closes the connection.
const OPEN_RETRIES_MAX: u32 = 8;
/// Maximum time for which a thread sleeps before it checks the ring again.
const SLEEP_MAX: Duration = Duration::from_secs(1);

/// An extent of remote memory.
///
/// A new extent contains zeros, or what its last owner of the same user left there.
/// The value can be copied and passed to other programs of the same user, which can read and write
/// the extent in their sessions. Only the session that allocated the extent can free it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Extent {
    /// Name of the extent, or of its first section.
    name: ExtentName,
    /// Number of sections; 1 for an extent of at most one section.
    sections: u32,
}

/// Size of an extent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct ExtentSize {
    class: u8,
    sections: u32,
}

impl ExtentSize {
    /// The smallest size of at least `bytes`.
    fn of(bytes: u64) -> Result<Self, Error> {
        if bytes == 0 || bytes > MAX_EXTENT_BYTES {
            return Err(Error::Size { bytes });
        }
        let class = (0..SECTION_CLASS).find(|class| MIN_EXTENT_BYTES << class >= bytes);
        let sections = u32::try_from(bytes.div_ceil(SECTION_BYTES)).map_err(|_| Error::Size { bytes })?;
        Ok(Self { class: class.unwrap_or(SECTION_CLASS), sections })
    }

    const fn request(self) -> RingRequest {
        if self.sections > 1 {
            RingRequest::AllocateStretch(self.sections)
        } else {
            RingRequest::Allocate(self.class)
        }
    }

    /// Returns the extent of an answer to [`Self::request`].
    fn extent(self, answer: RingAnswer) -> Result<Extent, Error> {
        Error::of(answer.status).map_or(Ok(Extent { name: answer.extent, sections: self.sections }), Err)
    }
}

impl Extent {
    /// Makes an extent with these properties, which another program of the same user allocated.
    ///
    /// Reads and writes fail if it does not exist.
    ///
    /// # Errors
    /// [`Error::Size`] if no extent has this size.
    pub fn from_parts(node: u16, addr: u64, key: u32, bytes: u64) -> Result<Self, Error> {
        let ExtentSize { class, sections } = ExtentSize::of(bytes)?;
        if addr.checked_add(bytes).is_none() {
            return Err(Error::Size { bytes });
        }
        let extent = Self { name: ExtentName { node, class, key, addr }, sections };
        if extent.bytes() == bytes { Ok(extent) } else { Err(Error::Size { bytes }) }
    }

    /// The number of the extent's memory node.
    #[must_use]
    pub const fn node(&self) -> u16 {
        self.name.node
    }

    /// The address of the extent in the node's region.
    #[must_use]
    pub const fn addr(&self) -> u64 {
        self.name.addr
    }

    /// The key with which programs of the user access the extent.
    #[must_use]
    pub const fn key(&self) -> u32 {
        self.name.key
    }

    /// The size of the extent in bytes: 4 KiB · 2^k up to 2 MiB, or a multiple of 2 MiB.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        (MIN_EXTENT_BYTES << (self.name.class % 32)) * self.sections as u64
    }

    /// The names of the extent in requests to the agent: one for each section.
    fn names(&self) -> impl Iterator<Item = ExtentName> + use<> {
        let extent = *self;
        (0..self.sections).map(move |section| extent.name_at(u64::from(section) * SECTION_BYTES))
    }

    /// The size of each section of [`Self::names`], and whether it is the first one.
    fn parts(&self) -> impl Iterator<Item = (u64, bool)> + use<> {
        let bytes = self.bytes() / u64::from(self.sections.max(1));
        (0..self.sections).map(move |section| (bytes, section == 0))
    }

    /// The name of the section that has the byte at this offset.
    pub(crate) const fn name_at(&self, offset: u64) -> ExtentName {
        let ExtentName { node, class, key, addr } = self.name;
        // A wrong address from the agent can overflow. It harms only the agent, which checks it.
        ExtentName { node, class, key, addr: addr.wrapping_add(offset / SECTION_BYTES * SECTION_BYTES) }
    }
}

/// A read of a part of an extent.
#[derive(Debug)]
pub struct ReadJob<'a> {
    /// The extent.
    pub extent: Extent,
    /// First byte in the extent.
    pub offset: u64,
    /// Destination; its length is the number of bytes to read.
    pub out: &'a mut [u8],
}

/// A write of a part of an extent.
#[derive(Clone, Copy, Debug)]
pub struct WriteJob<'a> {
    /// The extent.
    pub extent: Extent,
    /// First byte in the extent.
    pub offset: u64,
    /// The bytes to write.
    pub bytes: &'a [u8],
}

/// A session with the agent of this host.
///
/// One thread uses it at a time. A process may have several sessions.
#[derive(Debug)]
pub struct Session {
    socket: OwnedFd,
    ring: SessionRing<RingMapping>,
    /// Number of requests that were sent and answered.
    next: u32,
    statistics: Statistics,
    /// The reason why the session has ended; `None` while it is open.
    end: Option<SessionEnd>,
}

/// The reason why a session has ended.
#[derive(Clone, Debug)]
enum SessionEnd {
    /// The agent ended the session, or wrote invalid values into the ring.
    Reason(String),
    /// The connection is closed: the keeper released it after the grace time.
    AgentGone,
}

impl From<&SessionEnd> for Error {
    fn from(end: &SessionEnd) -> Self {
        match end {
            SessionEnd::Reason(reason) => Self::SessionEnded(reason.clone()),
            SessionEnd::AgentGone => Self::AgentGone,
        }
    }
}

impl Session {
    /// Opens a session with the agent that `AQUIFER_AGENT` names, else with that in the state
    /// folder that `AQUIFER_STATE` names, else with that of the user's own cluster, else with that
    /// of all users.
    ///
    /// # Errors
    /// If no agent listens, or the agent refuses.
    pub fn open() -> Result<Self, Error> {
        Self::open_at(&agent_socket())
    }

    /// Opens a session with the agent that listens at a path.
    ///
    /// # Errors
    /// If no agent listens, or the agent refuses.
    pub fn open_at(path: &Path) -> Result<Self, Error> {
        let mut retries = 0;
        let (socket, ring) = loop {
            let socket = connect(path)?;
            send_frame(&socket, &Frame::OpenSession, &[])?;
            match receive_frame(&socket) {
                Ok((Frame::SessionOpened, fds)) => break (socket, fds.into_iter().next()),
                Ok((Frame::Refused(reason) | Frame::Ended(reason), _)) => return Err(Error::Refused(reason)),
                Ok(_) => break (socket, None),
                // The agent was killed. The next one listens at the same socket.
                Err(ReceiveError::Closed) if retries < OPEN_RETRIES_MAX => retries += 1,
                Err(error) => return Err(error.into()),
            }
        };
        let ring = ring.ok_or_else(|| Error::Refused("it sent no memory for the session".into()))?;
        let ring = SessionRing::open(RingMapping::new(&ring)?)?;
        Ok(Self { socket, ring, next: 0, statistics: Statistics::default(), end: None })
    }

    /// Allocates an extent of at least `bytes` bytes, 1 to [`MAX_EXTENT_BYTES`].
    ///
    /// The size is rounded up to 4 KiB · 2^k up to 2 MiB, above that to a multiple of 2 MiB.
    /// The extent is contiguous in the memory of one node.
    ///
    /// # Errors
    /// [`Error::PoolFull`], [`Error::QuotaExceeded`], [`Error::TooManyExtents`] or [`Error::Size`];
    /// or that the session has ended.
    pub fn allocate(&mut self, bytes: u64) -> Result<Extent, Error> {
        let size = ExtentSize::of(bytes)?;
        let mut answer = None;
        self.request(std::iter::once(size.request()), |_, received| answer = Some(received))?;
        let extent = size.extent(answer.unwrap_or(RingAnswer::without_extent(RingStatus::Failed)))?;
        self.statistics.count_allocation(&extent);
        Ok(extent)
    }

    /// Allocates `count` extents of one size, or none. Faster than one by one.
    ///
    /// # Errors
    /// The errors of [`Self::allocate`].
    pub fn allocate_many(&mut self, bytes: u64, count: usize) -> Result<Vec<Extent>, Error> {
        let size = ExtentSize::of(bytes)?;
        let mut extents = Vec::with_capacity(count.min(1 << 20));
        let mut failed = None;
        self.request(std::iter::repeat_n(size.request(), count), |_, answer| match size.extent(answer) {
            Ok(extent) => extents.push(extent),
            Err(error) => failed = Some(error),
        })?;
        extents.iter().for_each(|extent| self.statistics.count_allocation(extent));
        match failed {
            None => Ok(extents),
            Some(error) => {
                self.free_many(&extents)?;
                Err(error)
            }
        }
    }

    /// Frees an extent.
    ///
    /// # Errors
    /// [`Error::AccessDenied`] if this session did not allocate it, or has freed it before.
    pub fn free(&mut self, extent: Extent) -> Result<(), Error> {
        self.free_many(&[extent])
    }

    /// Frees several extents. Faster than one by one.
    ///
    /// # Errors
    /// The first error of [`Self::free`]. The other extents are freed nevertheless.
    pub fn free_many(&mut self, extents: &[Extent]) -> Result<(), Error> {
        let mut failed = None;
        let requests = extents.iter().flat_map(Extent::names).map(RingRequest::Free);
        let mut parts = extents.iter().flat_map(Extent::parts);
        let mut statistics = self.statistics;
        let outcome = self.request(requests, |_, answer| {
            if let Some((bytes, is_first)) = parts.next() {
                statistics.count_free(&answer, bytes, is_first);
            }
            failed = failed.take().or(Error::of(answer.status));
        });
        (self.statistics.freed, self.statistics.bytes) = (statistics.freed, statistics.bytes);
        outcome?;
        failed.map_or(Ok(()), Err)
    }

    /// Reads bytes from `offset` of an extent.
    ///
    /// # Errors
    /// [`Error::DataLost`], [`Error::AccessDenied`], [`Error::TooManyWrongKeys`] or
    /// [`Error::OutOfRange`]. The contents of `out` are then undefined.
    pub fn read(&mut self, extent: &Extent, offset: u64, out: &mut [u8]) -> Result<(), Error> {
        self.read_many(&mut [ReadJob { extent: *extent, offset, out }])
    }

    /// Reads several parts of any extents. Faster than one by one.
    ///
    /// # Errors
    /// The first error of [`Self::read`]. The other jobs are done nevertheless.
    pub fn read_many(&mut self, jobs: &mut [ReadJob<'_>]) -> Result<(), Error> {
        let bytes: usize = jobs.iter().map(|job| job.out.len()).sum();
        let jobs = jobs.iter_mut();
        let jobs = jobs.map(|job| TransferJob {
            extent: job.extent,
            offset: job.offset,
            buffer: JobBuffer::Read(job.out),
        });
        run_jobs(self, jobs)?;
        self.statistics.read_bytes += bytes as u64;
        Ok(())
    }

    /// Writes bytes at `offset` of an extent. Reads that begin after the return see them.
    ///
    /// # Errors
    /// [`Error::DataLost`], [`Error::AccessDenied`], [`Error::TooManyWrongKeys`] or
    /// [`Error::OutOfRange`]. The contents of the range are then undefined.
    pub fn write(&mut self, extent: &Extent, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.write_many(&[WriteJob { extent: *extent, offset, bytes }])
    }

    /// Writes several parts of any extents. Faster than one by one. Jobs of one node are done in
    /// order.
    ///
    /// # Errors
    /// The first error of [`Self::write`]. The other jobs are done nevertheless.
    pub fn write_many(&mut self, jobs: &[WriteJob<'_>]) -> Result<(), Error> {
        let bytes: usize = jobs.iter().map(|job| job.bytes.len()).sum();
        let jobs = jobs.iter();
        let jobs = jobs.map(|job| TransferJob {
            extent: job.extent,
            offset: job.offset,
            buffer: JobBuffer::Write(job.bytes),
        });
        run_jobs(self, jobs)?;
        self.statistics.written_bytes += bytes as u64;
        Ok(())
    }

    /// Statistics of the session.
    #[must_use]
    pub const fn statistics(&self) -> Statistics {
        self.statistics
    }

    /// The mapping of the ring. Its data area is free while no request is in flight.
    pub(crate) fn data(&self) -> &RingMapping {
        self.ring.words()
    }

    /// Sends requests, waits for all answers, and passes each answer with its index to `accept`.
    pub(crate) fn request(
        &mut self,
        mut requests: impl Iterator<Item = RingRequest>,
        mut accept: impl FnMut(usize, RingAnswer),
    ) -> Result<(), Error> {
        self.check()?;
        let (mut made_count, mut answered_count) = (0, 0);
        let mut made = self.next;
        let mut pending = requests.next();
        while pending.is_some() || made != self.next {
            let before = made;
            while let Some(request) = pending.filter(|_| made.wrapping_sub(self.next) < SLOTS) {
                self.ring.put_request(made, &request);
                made = made.wrapping_add(1);
                made_count += 1;
                pending = requests.next();
            }
            if made != before && self.ring.publish_requests(made) {
                wakeup::notify(&self.socket);
            }
            let answered = self.wait_for_answers(made)?;
            while self.next != answered {
                match self.ring.answer(self.next) {
                    Ok(answer) => accept(answered_count, answer),
                    Err(corrupt) => return Err(self.end_with(SessionEnd::Reason(corrupt.to_string()))),
                }
                answered_count += 1;
                self.next = self.next.wrapping_add(1);
            }
        }
        debug_assert_eq!(made_count, answered_count, "each request has one answer");
        self.statistics.requests += answered_count as u64;
        Ok(())
    }

    /// Waits until at least one more request below `made` is answered. Returns the number of
    /// answered requests.
    fn wait_for_answers(&mut self, made: u32) -> Result<u32, Error> {
        loop {
            let answered = self.ring.answered();
            if answered.wrapping_sub(self.next) > made.wrapping_sub(self.next) {
                return Err(self.end_with(SessionEnd::Reason(CorruptRing.to_string())));
            }
            if answered != self.next {
                return Ok(answered);
            }
            if wakeup::poll_until(POLL_TIME, || self.ring.answered() != self.next)
                || !self.ring.begin_program_sleep(self.next)
            {
                continue;
            }
            self.statistics.sleeps += 1;
            wakeup::wait(self.socket.as_fd(), None, SLEEP_MAX);
            match wakeup::receive(&self.socket) {
                WakeupEvent::Wakeup | WakeupEvent::Nothing => {}
                WakeupEvent::Packet(bytes) => {
                    let reason = match Frame::parse(&bytes) {
                        Ok(Frame::Ended(reason)) => reason,
                        // An agent that took over cannot know that the program has the ring.
                        Ok(Frame::SessionOpened) => continue,
                        _ => "it sent an unexpected message".to_owned(),
                    };
                    return Err(self.end_with(SessionEnd::Reason(reason)));
                }
                WakeupEvent::Closed => return Err(self.end_with(SessionEnd::AgentGone)),
            }
        }
    }

    /// Returns an error if the session has ended, or belongs to the parent process.
    pub(crate) fn check(&self) -> Result<(), Error> {
        if !self.ring.words().is_own_process() {
            return Err(Error::Forked);
        }
        self.end.as_ref().map_or(Ok(()), |end| Err(end.into()))
    }

    fn end_with(&mut self, end: SessionEnd) -> Error {
        let error = Error::from(&end);
        self.end = Some(end);
        error
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // A forked child can have the socket too. It must not keep the session alive, and must not
        // end it: therefore only the process that opened the session shuts down the connection.
        if self.ring.words().is_own_process() {
            let _gone = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_round_up() {
        let size = |bytes| ExtentSize::of(bytes).ok().map(|size| (size.class, size.sections));
        assert_eq!(
            [size(0), size(1), size(4096), size(4097)],
            [None, Some((0, 1)), Some((0, 1)), Some((1, 1))]
        );
        assert_eq!([size(SECTION_BYTES), size(SECTION_BYTES + 1)], [Some((9, 1)), Some((9, 2))]);
        assert_eq!([size(MAX_EXTENT_BYTES), size(MAX_EXTENT_BYTES + 1)], [Some((9, 1 << 15)), None]);
        let named = |addr, bytes| Extent::from_parts(1, addr, 1, bytes).map(|extent| extent.bytes()).ok();
        assert_eq!([named(0, 8192), named(0, 8193)], [Some(8192), None]);
        assert_eq!([named(0, 3 * SECTION_BYTES), named(0, 3 * SECTION_BYTES - 4096)], [Some(6 << 20), None]);
        assert_eq!(named(u64::MAX - 4096, SECTION_BYTES), None);
    }

    #[test]
    fn a_large_extent_is_its_sections() {
        let extent = Extent::from_parts(1, 1 << 30, 7, 3 * SECTION_BYTES).expect("a size");
        let places: Vec<u64> = extent.names().map(|name| name.addr - (1 << 30)).collect();
        assert_eq!(places, [0, SECTION_BYTES, 2 * SECTION_BYTES]);
        let addr = |offset| extent.name_at(offset).addr - (1 << 30);
        assert_eq!([addr(SECTION_BYTES - 1), addr(SECTION_BYTES)], [0, SECTION_BYTES]);
    }

    #[test]
    fn no_session_is_opened_where_no_agent_listens() {
        let error = Session::open_at(Path::new("/nonexistent/agent.sock")).expect_err("no agent listens");
        assert!(error.to_string().contains("aquifer up"), "{error}");
    }
}
