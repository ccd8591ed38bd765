//! A session with the agent: extents, and what is in them.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use aquifer_channel::paths::agent_socket;
use aquifer_channel::wakeup::{self, WakeupEvent};
use aquifer_channel::{ReceiveError, RingMapping, connect, receive_frame, send_frame};
use aquifer_ipc::Frame;
use aquifer_ipc::ring::{
    ExtentAnswer, ExtentName, ExtentRequest, ExtentStatus, SLOTS, STRETCH_SECTIONS_MAX, SessionRing,
};

use crate::error::Error;
use crate::statistics::Statistics;
use crate::transfer::{Data, Job, run_jobs};

/// Bytes of the smallest extent.
const MIN_EXTENT_BYTES: u64 = 4 << 10;
/// Larger extents are so many of these.
pub(crate) const SECTION_BYTES: u64 = MIN_EXTENT_BYTES << SECTION_CLASS;
const SECTION_CLASS: u8 = 9;
/// Bytes of the largest extent: 64 GiB.
pub const MAX_EXTENT_BYTES: u64 = SECTION_BYTES * STRETCH_SECTIONS_MAX as u64;
/// An answer is looked for so long before this thread sleeps.
const LOOK: Duration = Duration::from_micros(50);
/// How often an agent may be killed while a session is opened.
const OPEN_AGAIN_MAX: u32 = 8;
/// Who sleeps looks around now and then.
const SLEEP_MAX: Duration = Duration::from_secs(1);

/// Memory of the cluster. It holds what its last owner, of the same user, left there; else zeros.
///
/// To be copied, told to other programs of the same user, and used in any session of theirs; given back by the session that allocated it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Extent {
    /// Of the first section, if it is larger than one.
    name: ExtentName,
    /// How many sections it has; 1 if it is one or less.
    sections: u32,
}

/// How much an extent has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Size {
    class: u8,
    sections: u32,
}

impl Size {
    /// The smallest that has so many bytes.
    fn of(bytes: u64) -> Result<Self, Error> {
        if bytes == 0 || bytes > MAX_EXTENT_BYTES {
            return Err(Error::Size { bytes });
        }
        let class = (0..SECTION_CLASS).find(|class| MIN_EXTENT_BYTES << class >= bytes);
        let sections = u32::try_from(bytes.div_ceil(SECTION_BYTES)).map_err(|_| Error::Size { bytes })?;
        Ok(Self { class: class.unwrap_or(SECTION_CLASS), sections })
    }

    const fn request(self) -> ExtentRequest {
        if self.sections > 1 {
            ExtentRequest::AllocateStretch(self.sections)
        } else {
            ExtentRequest::Allocate(self.class)
        }
    }

    /// What was asked for by that.
    fn extent(self, answer: ExtentAnswer) -> Result<Extent, Error> {
        Error::of(answer.status).map_or(Ok(Extent { name: answer.extent, sections: self.sections }), Err)
    }
}

impl Extent {
    /// An extent by its address and key, as another program of the same user tells them. Whether it is one shows when it is used.
    ///
    /// # Errors
    /// If there is no extent of so many bytes.
    pub fn named(node: u16, addr: u64, key: u32, bytes: u64) -> Result<Self, Error> {
        let Size { class, sections } = Size::of(bytes)?;
        if addr.checked_add(bytes).is_none() {
            return Err(Error::Size { bytes });
        }
        let extent = Self { name: ExtentName { node, class, key, addr }, sections };
        if extent.bytes() == bytes { Ok(extent) } else { Err(Error::Size { bytes }) }
    }

    /// The memory node that it is on.
    #[must_use]
    pub const fn node(&self) -> u16 {
        self.name.node
    }

    /// Its address in the node's memory.
    #[must_use]
    pub const fn addr(&self) -> u64 {
        self.name.addr
    }

    /// Opens it to programs of its user.
    #[must_use]
    pub const fn key(&self) -> u32 {
        self.name.key
    }

    /// Its size: 4 KiB · 2^k up to 2 MiB, then multiples of 2 MiB.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        (MIN_EXTENT_BYTES << (self.name.class % 32)) * self.sections as u64
    }

    /// What the agent knows it by: each section of a larger one is an extent to it.
    fn names(&self) -> impl Iterator<Item = ExtentName> + use<> {
        let extent = *self;
        (0..self.sections).map(move |section| extent.name_at(u64::from(section) * SECTION_BYTES))
    }

    /// The bytes of each of those, and whether it is the first.
    fn parts(&self) -> impl Iterator<Item = (u64, bool)> + use<> {
        let bytes = self.bytes() / u64::from(self.sections.max(1));
        (0..self.sections).map(move |section| (bytes, section == 0))
    }

    /// What the agent knows that part by which has the byte at this offset.
    pub(crate) const fn name_at(&self, offset: u64) -> ExtentName {
        let ExtentName { node, class, key, addr } = self.name;
        // An agent that lies harms nobody but itself: it says what it is asked for.
        ExtentName { node, class, key, addr: addr.wrapping_add(offset / SECTION_BYTES * SECTION_BYTES) }
    }
}

/// Reading a part of an extent.
#[derive(Debug)]
pub struct ReadJob<'a> {
    /// Of which extent.
    pub extent: Extent,
    /// From this byte on.
    pub offset: u64,
    /// Into this.
    pub out: &'a mut [u8],
}

/// Writing a part of an extent.
#[derive(Clone, Copy, Debug)]
pub struct WriteJob<'a> {
    /// Of which extent.
    pub extent: Extent,
    /// From this byte on.
    pub offset: u64,
    /// This.
    pub bytes: &'a [u8],
}

/// A session with the agent of this host. One thread uses it at a time; a process may have several.
#[derive(Debug)]
pub struct Session {
    socket: OwnedFd,
    ring: SessionRing<RingMapping>,
    /// Requests made and answered.
    next: u32,
    statistics: Statistics,
    /// Why the session is over, if it is.
    end: Option<End>,
}

#[derive(Clone, Debug)]
enum End {
    Ended(String),
    AgentGone,
}

impl From<&End> for Error {
    fn from(end: &End) -> Self {
        match end {
            End::Ended(reason) => Self::Ended(reason.clone()),
            End::AgentGone => Self::AgentGone,
        }
    }
}

impl Session {
    /// Open a session with the agent that `AQUIFER_AGENT` names, or that of the user's own cluster.
    ///
    /// # Errors
    /// If there is none, or it refuses.
    pub fn open() -> Result<Self, Error> {
        Self::open_at(&agent_socket())
    }

    /// Open a session with the agent that listens at a path.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_at(path: &Path) -> Result<Self, Error> {
        let mut again = 0;
        let (socket, ring) = loop {
            let socket = connect(path).map_err(|source| Error::NoAgent { path: path.to_owned(), source })?;
            send_frame(&socket, &Frame::OpenSession, &[])?;
            match receive_frame(&socket) {
                Ok((Frame::SessionOpened, fds)) => break (socket, fds.into_iter().next()),
                Ok((Frame::Refused(reason) | Frame::Ended(reason), _)) => return Err(Error::Refused(reason)),
                Ok(_) => break (socket, None),
                // The agent was killed just now: the next one listens at the same place.
                Err(ReceiveError::Closed) if again < OPEN_AGAIN_MAX => again += 1,
                Err(error) => return Err(error.into()),
            }
        };
        let ring = ring.ok_or_else(|| Error::Refused("it sent no memory for a session".into()))?;
        let ring = SessionRing::open(RingMapping::new(&ring)?)?;
        Ok(Self { socket, ring, next: 0, statistics: Statistics::default(), end: None })
    }

    /// Take an extent of at least `bytes` bytes, 1 to [`MAX_EXTENT_BYTES`]: the next size of 4 KiB · 2^k up to 2 MiB, above that the next multiple of 2 MiB.
    /// It is all of one node.
    ///
    /// # Errors
    /// [`Error::Full`], [`Error::Quota`], [`Error::TooMany`], [`Error::Size`]; those of a session that is over.
    pub fn allocate(&mut self, bytes: u64) -> Result<Extent, Error> {
        let size = Size::of(bytes)?;
        let mut answer = None;
        self.ask(std::iter::once(size.request()), |_, given| answer = Some(given))?;
        let extent = size.extent(answer.unwrap_or(ExtentAnswer::without_extent(ExtentStatus::Failed)))?;
        self.statistics.taken(&extent);
        Ok(extent)
    }

    /// Take several of one size, all or none: faster than one by one.
    ///
    /// # Errors
    /// As [`Self::allocate`].
    pub fn allocate_many(&mut self, bytes: u64, count: usize) -> Result<Vec<Extent>, Error> {
        let size = Size::of(bytes)?;
        let mut extents = Vec::with_capacity(count.min(1 << 20));
        let mut refused = None;
        self.ask(std::iter::repeat_n(size.request(), count), |_, answer| match size.extent(answer) {
            Ok(extent) => extents.push(extent),
            Err(error) => refused = Some(error),
        })?;
        extents.iter().for_each(|extent| self.statistics.taken(extent));
        match refused {
            None => Ok(extents),
            Some(error) => {
                self.free_many(&extents)?;
                Err(error)
            }
        }
    }

    /// Give an extent back. Its data is gone.
    ///
    /// # Errors
    /// [`Error::NotYours`] if this session did not allocate it, or has given it back before.
    pub fn free(&mut self, extent: Extent) -> Result<(), Error> {
        self.free_many(&[extent])
    }

    /// Give several back: faster than one by one. The first error is told; the others are given back all the same.
    ///
    /// # Errors
    /// As [`Self::free`].
    pub fn free_many(&mut self, extents: &[Extent]) -> Result<(), Error> {
        let mut failed = None;
        let requests = extents.iter().flat_map(Extent::names).map(ExtentRequest::Free);
        let mut asked = extents.iter().flat_map(Extent::parts);
        let mut statistics = self.statistics;
        let outcome = self.ask(requests, |_, answer| {
            if let Some((bytes, is_first)) = asked.next() {
                statistics.given_back(&answer, bytes, is_first);
            }
            failed = failed.take().or(Error::of(answer.status));
        });
        (self.statistics.freed, self.statistics.bytes) = (statistics.freed, statistics.bytes);
        outcome?;
        failed.map_or(Ok(()), Err)
    }

    /// Read from `offset` of an extent.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::NotYours`], [`Error::OutOfRange`]; what `out` then holds is not to be used.
    pub fn read(&mut self, extent: &Extent, offset: u64, out: &mut [u8]) -> Result<(), Error> {
        self.read_many(&mut [ReadJob { extent: *extent, offset, out }])
    }

    /// Read several parts of any extents at once. The first error is told.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn read_many(&mut self, jobs: &mut [ReadJob<'_>]) -> Result<(), Error> {
        let bytes: usize = jobs.iter().map(|job| job.out.len()).sum();
        let jobs = jobs.iter_mut();
        let jobs = jobs.map(|job| Job { extent: job.extent, offset: job.offset, data: Data::Out(job.out) });
        run_jobs(self, jobs)?;
        self.statistics.read_bytes += bytes as u64;
        Ok(())
    }

    /// Write at `offset` of an extent. When this returns everybody who reads there sees it.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::NotYours`], [`Error::OutOfRange`]; what the extent then holds there is not known.
    pub fn write(&mut self, extent: &Extent, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.write_many(&[WriteJob { extent: *extent, offset, bytes }])
    }

    /// Write several parts of any extents at once, each node's in this order. The first error is told.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub fn write_many(&mut self, jobs: &[WriteJob<'_>]) -> Result<(), Error> {
        let bytes: usize = jobs.iter().map(|job| job.bytes.len()).sum();
        let jobs = jobs.iter();
        let jobs = jobs.map(|job| Job { extent: job.extent, offset: job.offset, data: Data::In(job.bytes) });
        run_jobs(self, jobs)?;
        self.statistics.written_bytes += bytes as u64;
        Ok(())
    }

    /// What it has, and has done.
    #[must_use]
    pub const fn statistics(&self) -> Statistics {
        self.statistics
    }

    /// The ring's data area, between requests.
    pub(crate) fn data(&self) -> &RingMapping {
        self.ring.words()
    }

    /// Make requests, wait for all answers, and hand those over with their numbers.
    pub(crate) fn ask(
        &mut self,
        mut requests: impl Iterator<Item = ExtentRequest>,
        mut heed: impl FnMut(usize, ExtentAnswer),
    ) -> Result<(), Error> {
        self.check()?;
        let (mut number, mut heeded) = (0, 0);
        let mut made = self.next;
        let mut pending = requests.next();
        while pending.is_some() || made != self.next {
            let before = made;
            while let Some(request) = pending.filter(|_| made.wrapping_sub(self.next) < SLOTS) {
                self.ring.put_request(made, &request);
                made = made.wrapping_add(1);
                number += 1;
                pending = requests.next();
            }
            if made != before && self.ring.publish_requests(made) {
                wakeup::notify(&self.socket);
            }
            let answered = self.await_answers(made)?;
            while self.next != answered {
                match self.ring.answer(self.next) {
                    Ok(answer) => heed(heeded, answer),
                    Err(broken) => return Err(self.over(End::Ended(broken.to_string()))),
                }
                heeded += 1;
                self.next = self.next.wrapping_add(1);
            }
        }
        debug_assert_eq!(number, heeded, "each request has one answer");
        self.statistics.requests += heeded as u64;
        Ok(())
    }

    /// How many are answered, at least one more than we know of `made`.
    fn await_answers(&mut self, made: u32) -> Result<u32, Error> {
        loop {
            let answered = self.ring.answered();
            if answered.wrapping_sub(self.next) > made.wrapping_sub(self.next) {
                return Err(self.over(End::Ended("its counters are impossible".into())));
            }
            if answered != self.next {
                return Ok(answered);
            }
            if wakeup::poll_until(LOOK, || self.ring.answered() != self.next)
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
                        // By an agent that took over, and could not know that this was heard.
                        Ok(Frame::SessionOpened) => continue,
                        _ => "it said something else".to_owned(),
                    };
                    return Err(self.over(End::Ended(reason)));
                }
                WakeupEvent::Closed => return Err(self.over(End::AgentGone)),
            }
        }
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        if !self.ring.words().is_own_process() {
            return Err(Error::Forked);
        }
        self.end.as_ref().map_or(Ok(()), |end| Err(end.into()))
    }

    fn over(&mut self, end: End) -> Error {
        let error = Error::from(&end);
        self.end = Some(end);
        error
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // A forked child may have the socket still, and shall not keep the session alive; nor end it, if this is the child.
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
        let size = |bytes| Size::of(bytes).ok().map(|size| (size.class, size.sections));
        assert_eq!(
            [size(0), size(1), size(4096), size(4097)],
            [None, Some((0, 1)), Some((0, 1)), Some((1, 1))]
        );
        assert_eq!([size(SECTION_BYTES), size(SECTION_BYTES + 1)], [Some((9, 1)), Some((9, 2))]);
        assert_eq!([size(MAX_EXTENT_BYTES), size(MAX_EXTENT_BYTES + 1)], [Some((9, 1 << 15)), None]);
        let named = |addr, bytes| Extent::named(1, addr, 1, bytes).map(|extent| extent.bytes()).ok();
        assert_eq!([named(0, 8192), named(0, 8193)], [Some(8192), None]);
        assert_eq!([named(0, 3 * SECTION_BYTES), named(0, 3 * SECTION_BYTES - 4096)], [Some(6 << 20), None]);
        assert_eq!(named(u64::MAX - 4096, SECTION_BYTES), None);
    }

    #[test]
    fn a_large_extent_is_its_sections() {
        let extent = Extent::named(1, 1 << 30, 7, 3 * SECTION_BYTES).expect("a size");
        let places: Vec<u64> = extent.names().map(|name| name.addr - (1 << 30)).collect();
        assert_eq!(places, [0, SECTION_BYTES, 2 * SECTION_BYTES]);
        let addr = |offset| extent.name_at(offset).addr - (1 << 30);
        assert_eq!([addr(SECTION_BYTES - 1), addr(SECTION_BYTES)], [0, SECTION_BYTES]);
    }

    #[test]
    fn where_nobody_listens_there_is_no_session() {
        let error = Session::open_at(Path::new("/nonexistent/agent.sock")).expect_err("nobody is there");
        assert!(error.to_string().contains("aquifer up"), "{error}");
    }
}
