//! Reads and writes, cut into pieces that fit into the ring's data area.

use aquifer_ipc::ring::{DATA_BYTES, RingRequest, SLOTS, TransferRange};

use crate::error::Error;
use crate::session::{Extent, SECTION_BYTES, Session};

/// Maximum size of a piece. Several pieces are in flight at once, so that one is copied here while
/// another is transferred.
const PIECE_BYTES_MAX: u32 = DATA_BYTES / 4;

/// The caller's bytes of a read or write.
#[derive(Debug)]
pub(crate) enum JobBuffer<'a> {
    Write(&'a [u8]),
    Read(&'a mut [u8]),
}

impl<'a> JobBuffer<'a> {
    fn split_at(self, len: usize) -> (Self, Self) {
        match self {
            Self::Write(bytes) => {
                let (first, rest) = bytes.split_at(len);
                (Self::Write(first), Self::Write(rest))
            }
            Self::Read(bytes) => {
                let (first, rest): (&'a mut [u8], &'a mut [u8]) = bytes.split_at_mut(len);
                (Self::Read(first), Self::Read(rest))
            }
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Write(bytes) => bytes.len(),
            Self::Read(bytes) => bytes.len(),
        }
    }
}

/// A read or write of a part of an extent.
#[derive(Debug)]
pub(crate) struct TransferJob<'a> {
    pub extent: Extent,
    pub offset: u64,
    pub buffer: JobBuffer<'a>,
}

/// A piece that has a place in the data area.
#[derive(Debug)]
struct PlacedPiece<'a> {
    request: RingRequest,
    /// Offset in the data area.
    at: u32,
    /// Destination of a read.
    out: Option<&'a mut [u8]>,
}

/// Carries out all jobs, and returns the first error at the end.
pub(crate) fn run_jobs<'a>(
    session: &mut Session,
    jobs: impl Iterator<Item = TransferJob<'a>>,
) -> Result<(), Error> {
    let mut placed: Vec<PlacedPiece<'_>> = Vec::new();
    let mut used = 0;
    let mut first_error = None;
    for job in jobs {
        let bytes = job.extent.bytes();
        let len = job.buffer.len();
        if job.offset.checked_add(len as u64).is_none_or(|end| end > bytes) {
            first_error = first_error.or(Some(Error::OutOfRange { offset: job.offset, len, bytes }));
            continue;
        }
        let mut offset = job.offset;
        for piece in pieces(job.buffer, offset) {
            let len = u32::try_from(piece.len()).unwrap_or(u32::MAX);
            if used + len > DATA_BYTES || placed.len() == SLOTS as usize {
                request_pieces(session, &mut placed, &mut first_error)?;
                used = 0;
            }
            let in_section = u32::try_from(offset % SECTION_BYTES).unwrap_or(u32::MAX);
            let range = TransferRange { offset: in_section, len, data: used };
            let name = job.extent.name_at(offset);
            placed.push(match piece {
                JobBuffer::Write(bytes) => {
                    session.check()?;
                    session.data().write_data(used, bytes);
                    PlacedPiece { request: RingRequest::Write(name, range), at: used, out: None }
                }
                JobBuffer::Read(out) => {
                    PlacedPiece { request: RingRequest::Read(name, range), at: used, out: Some(out) }
                }
            });
            // Each piece begins at an aligned word, so that short copies are copies of words.
            used += len.next_multiple_of(8);
            offset += u64::from(len);
        }
    }
    request_pieces(session, &mut placed, &mut first_error)?;
    first_error.map_or(Ok(()), Err)
}

/// Cuts a buffer for `offset` of an extent into pieces, each inside one section.
fn pieces(buffer: JobBuffer<'_>, offset: u64) -> impl Iterator<Item = JobBuffer<'_>> {
    let mut left = Some(buffer);
    let mut offset = offset;
    std::iter::from_fn(move || {
        let buffer = left.take().filter(|buffer| buffer.len() > 0)?;
        let most = u64::from(PIECE_BYTES_MAX).min(SECTION_BYTES - offset % SECTION_BYTES);
        let len = usize::try_from(most).unwrap_or(usize::MAX).min(buffer.len());
        offset += len as u64;
        let (piece, rest) = buffer.split_at(len);
        left = Some(rest);
        Some(piece)
    })
}

/// Requests all placed pieces, waits for the answers, and copies what was read.
fn request_pieces(
    session: &mut Session,
    placed: &mut Vec<PlacedPiece<'_>>,
    first_error: &mut Option<Error>,
) -> Result<(), Error> {
    let mut failed: Vec<usize> = Vec::new();
    let requests = placed.iter().map(|piece| piece.request);
    session.request(requests, |number, answer| {
        if let Some(error) = Error::of(answer.status) {
            failed.push(number);
            first_error.get_or_insert(error);
        }
    })?;
    for (number, piece) in placed.drain(..).enumerate() {
        if let Some(out) = piece.out.filter(|_| !failed.contains(&number)) {
            session.data().read_data(piece.at, out);
        }
    }
    Ok(())
}
