//! Reading and writing, cut to what the ring's data area holds.

use aquifer_ipc::ring::{DATA_BYTES, Piece, Request, SLOTS};

use crate::error::Error;
use crate::session::{Extent, Session};

/// Several pieces are under way at once, so that one is copied here while another is on its way.
const PIECE_BYTES_MAX: u32 = DATA_BYTES / 4;

/// What is moved.
#[derive(Debug)]
pub(crate) enum Data<'a> {
    In(&'a [u8]),
    Out(&'a mut [u8]),
}

impl Data<'_> {
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
    request: Request,
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
        let mut offset = u32::try_from(job.offset).unwrap_or(u32::MAX);
        for data in pieces(job.data) {
            let len = u32::try_from(data.len()).unwrap_or(u32::MAX);
            if used + len > DATA_BYTES || flying.len() == SLOTS as usize {
                land(session, &mut flying, &mut failed)?;
                used = 0;
            }
            let piece = Piece { offset, len, data: used };
            let name = job.extent.name();
            flying.push(match data {
                Data::In(bytes) => {
                    session.check()?;
                    session.data().write_data(used, bytes);
                    Flying { request: Request::Write(name, piece), at: used, out: None }
                }
                Data::Out(out) => Flying { request: Request::Read(name, piece), at: used, out: Some(out) },
            });
            // What comes next begins at a word, so that short copies go by words.
            used += len.next_multiple_of(8);
            offset += len;
        }
    }
    land(session, &mut flying, &mut failed)?;
    failed.map_or(Ok(()), Err)
}

fn pieces(data: Data<'_>) -> Vec<Data<'_>> {
    let most = PIECE_BYTES_MAX as usize;
    match data {
        Data::In(bytes) => bytes.chunks(most).map(Data::In).collect(),
        Data::Out(bytes) => bytes.chunks_mut(most).map(Data::Out).collect(),
    }
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
