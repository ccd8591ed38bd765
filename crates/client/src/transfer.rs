//! Reading and writing, cut to what the ring's data area holds.

use aquifer_ipc::ring::{DATA_BYTES, ExtentRequest, SLOTS, TransferRange};

use crate::error::Error;
use crate::session::{Extent, SECTION_BYTES, Session};

/// Several pieces are under way at once, so that one is copied here while another is on its way.
const PIECE_BYTES_MAX: u32 = DATA_BYTES / 4;

/// What is moved.
#[derive(Debug)]
pub(crate) enum Data<'a> {
    In(&'a [u8]),
    Out(&'a mut [u8]),
}

impl<'a> Data<'a> {
    fn split_at(self, len: usize) -> (Self, Self) {
        match self {
            Self::In(bytes) => {
                let (first, rest) = bytes.split_at(len);
                (Self::In(first), Self::In(rest))
            }
            Self::Out(bytes) => {
                let (first, rest): (&'a mut [u8], &'a mut [u8]) = bytes.split_at_mut(len);
                (Self::Out(first), Self::Out(rest))
            }
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::In(bytes) => bytes.len(),
            Self::Out(bytes) => bytes.len(),
        }
    }
}

/// A part of an extent, to be read or written.
#[derive(Debug)]
pub(crate) struct Job<'a> {
    pub extent: Extent,
    pub offset: u64,
    pub data: Data<'a>,
}

/// A piece that is under way.
#[derive(Debug)]
struct Flying<'a> {
    request: ExtentRequest,
    at: u32,
    /// Where what is read goes.
    out: Option<&'a mut [u8]>,
}

/// Do all of them; the first error is told in the end.
pub(crate) fn run_jobs<'a>(session: &mut Session, jobs: impl Iterator<Item = Job<'a>>) -> Result<(), Error> {
    let mut flying: Vec<Flying<'_>> = Vec::new();
    let mut used = 0;
    let mut failed = None;
    for job in jobs {
        let bytes = job.extent.bytes();
        let len = job.data.len();
        if job.offset.checked_add(len as u64).is_none_or(|end| end > bytes) {
            failed = failed.or(Some(Error::OutOfRange { offset: job.offset, len, bytes }));
            continue;
        }
        let mut offset = job.offset;
        for data in pieces(job.data, offset) {
            let len = u32::try_from(data.len()).unwrap_or(u32::MAX);
            if used + len > DATA_BYTES || flying.len() == SLOTS as usize {
                land(session, &mut flying, &mut failed)?;
                used = 0;
            }
            let within = u32::try_from(offset % SECTION_BYTES).unwrap_or(u32::MAX);
            let piece = TransferRange { offset: within, len, data: used };
            let name = job.extent.name_at(offset);
            flying.push(match data {
                Data::In(bytes) => {
                    session.check()?;
                    session.data().write_data(used, bytes);
                    Flying { request: ExtentRequest::Write(name, piece), at: used, out: None }
                }
                Data::Out(out) => {
                    Flying { request: ExtentRequest::Read(name, piece), at: used, out: Some(out) }
                }
            });
            // What comes next begins at a word, so that short copies go by words.
            used += len.next_multiple_of(8);
            offset += u64::from(len);
        }
    }
    land(session, &mut flying, &mut failed)?;
    failed.map_or(Ok(()), Err)
}

/// What is moved from or to this offset, each piece within a section.
fn pieces(data: Data<'_>, offset: u64) -> impl Iterator<Item = Data<'_>> {
    let mut left = Some(data);
    let mut offset = offset;
    std::iter::from_fn(move || {
        let data = left.take().filter(|data| data.len() > 0)?;
        let most = u64::from(PIECE_BYTES_MAX).min(SECTION_BYTES - offset % SECTION_BYTES);
        let len = usize::try_from(most).unwrap_or(usize::MAX).min(data.len());
        offset += len as u64;
        let (piece, rest) = data.split_at(len);
        left = Some(rest);
        Some(piece)
    })
}

/// Have what is under way done, and take what was read.
fn land(
    session: &mut Session,
    flying: &mut Vec<Flying<'_>>,
    failed: &mut Option<Error>,
) -> Result<(), Error> {
    let mut refused: Vec<usize> = Vec::new();
    let requests = flying.iter().map(|piece| piece.request);
    session.ask(requests, |number, answer| {
        if let Some(error) = Error::of(answer.status) {
            refused.push(number);
            failed.get_or_insert(error);
        }
    })?;
    for (number, piece) in flying.drain(..).enumerate() {
        if let Some(out) = piece.out.filter(|_| !refused.contains(&number)) {
            session.data().read_data(piece.at, out);
        }
    }
    Ok(())
}
