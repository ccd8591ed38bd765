//! Moves a batch of pages out of the program: first into the bounce buffer, then into a staging
//! buffer.
//!
//! The kernel's part is behind [`PageMover`], so that tests can use a model of the kernel that
//! fails at any step.
//!
//! A move reports how many pages it has moved, and it may have moved more. Since Linux 6.18 a move
//! that waits while the kernel migrates a page does not count the pages that it moves next, and
//! fails because it finds their destinations occupied. So both buffers are empty before a batch,
//! and only the worker moves pages there: if the destination of a page is occupied, the page has
//! moved.

use aquifer_ipc::BATCH_PAGES_MAX;
use aquifer_ipc::control::STATUS_MOVED;

/// Moves pages between the program, the bounce buffer and one staging buffer.
///
/// Addresses are those of the program. An index counts the pages of a batch, and of each buffer.
/// An error is a negative errno, or 0 if there is none.
pub trait PageMover {
    /// Sets `occupied[index]` to whether the bounce buffer has a page at `index`.
    fn find_occupied(&mut self, occupied: &mut [bool]);
    /// Moves pages from the program into the bounce buffer. Returns how many moves the kernel
    /// counted, and the error that ended the call.
    fn move_out(&mut self, address: usize, index: usize, pages: usize) -> (usize, isize);
    /// Gives the program a private copy of a page that it shares since a fork. Returns the error.
    fn make_private(&mut self, address: usize) -> isize;
    /// Moves pages from the bounce buffer to the same indices of the staging buffer. Returns how
    /// many moves the kernel counted, and the error that ended the call.
    fn stage(&mut self, index: usize, pages: usize) -> (usize, isize);
    /// Drops all pages of the staging buffer. Returns whether it is empty.
    fn empty_staging(&mut self) -> bool;
}

/// The addresses of the pages of a batch, and the status of each page.
pub trait PageBatch {
    /// Number of pages, at most [`BATCH_PAGES_MAX`].
    fn count(&self) -> usize;
    /// Address of a page in the program.
    fn address(&self, index: usize) -> usize;
    /// Stores the status of a page: [`STATUS_MOVED`], or the errno for which it was not moved.
    fn set_status(&self, index: usize, status: u32);
    /// Whether the status of a page is [`STATUS_MOVED`].
    fn is_moved(&self, index: usize) -> bool;
}

/// Error: a page could not be moved from the bounce buffer to the staging buffer, or the staging
/// buffer could not be emptied.
#[derive(Debug)]
pub struct StagingError;

const PAGE: usize = 4096;
/// Maximum number of retries of moves into the staging buffer that fail with EAGAIN or EBUSY. No
/// event can be unread there, so EAGAIN means that a page or a lock is briefly in use, and EBUSY
/// that another process reads the page.
const STAGE_RETRIES_MAX: u32 = 1_000_000;
/// Maximum number of these retries before a batch, when pages of other readers in the bounce buffer
/// are dropped. Such a reader may wait for the agent, which waits for this batch.
const EMPTY_RETRIES_MAX: u32 = 1000;
const EXISTS: isize = -(libc::EEXIST as isize);
const AGAIN: isize = -(libc::EAGAIN as isize);
const BUSY: isize = -(libc::EBUSY as isize);

/// Moves a batch out of the program into the staging buffer, and sets the status of each page.
///
/// The agent must have copied the earlier pages of the staging buffer. If the buffers cannot be
/// emptied now, no page is moved, and all have the status EBUSY.
///
/// # Errors
/// If a page can move neither to the staging buffer nor back. It is lost unless the program ends.
pub fn move_batch(mover: &mut impl PageMover, batch: &impl PageBatch) -> Result<(), StagingError> {
    if empty_buffers(mover).is_err() {
        (0..batch.count()).for_each(|index| batch.set_status(index, libc::EBUSY as u32));
        return Ok(());
    }
    move_out(mover, batch);
    stage(mover, batch.count(), STAGE_RETRIES_MAX, |index| batch.is_moved(index))
}

/// Drops all pages of both buffers.
///
/// The bounce buffer has a page if a debugger has read that address, or if the agent has identified
/// the process by it (`docs/formats/paging.md`). A drop there would raise an event, so the page is
/// moved to the staging buffer first.
fn empty_buffers(mover: &mut impl PageMover) -> Result<(), StagingError> {
    if !mover.empty_staging() {
        return Err(StagingError);
    }
    let mut occupied = [false; BATCH_PAGES_MAX];
    mover.find_occupied(&mut occupied);
    if occupied.contains(&true) {
        stage(mover, BATCH_PAGES_MAX, EMPTY_RETRIES_MAX, |index| occupied[index])?;
        if !mover.empty_staging() {
            return Err(StagingError);
        }
    }
    Ok(())
}

/// Moves the pages of a batch into the bounce buffer. Pages at consecutive addresses are moved by
/// one call.
fn move_out(mover: &mut impl PageMover, batch: &impl PageBatch) {
    let mut at = 0;
    while at < batch.count() {
        let address = batch.address(at);
        let is_consecutive = |other| batch.address(other) == address + (other - at) * PAGE;
        let pages = count_while(at, batch.count(), is_consecutive);
        let (moved, mut error) = mover.move_out(address, at, pages);
        (at..at + moved).for_each(|index| batch.set_status(index, STATUS_MOVED));
        at += moved;
        if moved > 0 {
            // The next call reports the error that ended this one.
            continue;
        }
        if error == BUSY {
            error = mover.make_private(address);
            if error == 0 {
                error = mover.move_out(address, at, 1).1;
            }
        }
        // While an event is unread the kernel returns EAGAIN before it checks the destination.
        if error == EXISTS || error == AGAIN && is_occupied(mover, at) {
            error = 0;
        }
        batch.set_status(at, u32::try_from(-error).unwrap_or(u32::MAX));
        at += 1;
    }
}

/// Whether the bounce buffer has a page at `index`.
fn is_occupied(mover: &mut impl PageMover, index: usize) -> bool {
    let mut occupied = [false; BATCH_PAGES_MAX];
    mover.find_occupied(&mut occupied);
    occupied[index]
}

/// Moves those of the first `count` pages of the bounce buffer for which `is_in_bounce_buffer`
/// returns true to the staging buffer. Pages there can be dropped without an event.
fn stage(
    mover: &mut impl PageMover,
    count: usize,
    retries_max: u32,
    is_in_bounce_buffer: impl Fn(usize) -> bool,
) -> Result<(), StagingError> {
    let mut retries = 0;
    let mut at = 0;
    while at < count {
        if !is_in_bounce_buffer(at) {
            at += 1;
            continue;
        }
        let pages = count_while(at, count, &is_in_bounce_buffer);
        let (moved, error) = mover.stage(at, pages);
        at += moved;
        match error {
            0 => {}
            // An earlier call has moved this page without counting it.
            EXISTS if moved == 0 => at += 1,
            // The next call reports the error that ended this one.
            _ if moved > 0 => {}
            AGAIN | BUSY if retries < retries_max => retries += 1,
            _ => return Err(StagingError),
        }
    }
    Ok(())
}

/// The number of consecutive indices from `at` on, below `count`, for which `belongs` returns true.
/// `at` counts without a call.
fn count_while(at: usize, count: usize, belongs: impl Fn(usize) -> bool) -> usize {
    1 + (at + 1..count).take_while(|other| belongs(*other)).count()
}
