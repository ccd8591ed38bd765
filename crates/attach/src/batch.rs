//! How a batch of pages leaves the program: into the antechamber, and on into staging. What the kernel does is behind [`Pages`], so that
//! it can be tested against a kernel that does its worst.
//!
//! A move says how many pages it has moved, and that is not always all that it has: since Linux 6.18, a move that had to wait for a page
//! that was being migrated moves on, forgets to count what it moves next, and then finds its own pages in the way. So nothing is
//! concluded from a count: both places are empty at first, and nobody but the worker fills them; what is there afterwards was moved.

/// The places of a batch and what can be done with them. Addresses are the program's; places count from 0. Errors are negative errnos,
/// 0 if there is none.
pub trait Pages {
    /// Which places of the antechamber are taken.
    fn occupied(&mut self, places: &mut [bool]);
    /// Move pages out of the program: how many were counted, and what ended it.
    fn take(&mut self, address: usize, place: usize, pages: usize) -> (usize, isize);
    /// Make a page that is shared since a fork the program's own.
    fn make_own(&mut self, address: usize) -> isize;
    /// Move pages on from the antechamber to the same places of staging: how many were counted, and what ended it.
    fn stage(&mut self, place: usize, pages: usize) -> (usize, isize);
    /// Drop all that is in staging.
    fn empty_staging(&mut self);
}

/// The addresses of a batch and what became of each.
pub trait Batch {
    /// How many.
    fn count(&self) -> usize;
    /// Where the page at a place of the batch is in the program.
    fn address(&self, place: usize) -> usize;
    /// Say what became of it: 0 if it is in staging, else an errno.
    fn set(&self, place: usize, status: u32);
    /// Whether it was moved.
    fn is_moved(&self, place: usize) -> bool;
}

/// A page could not be brought on into staging.
#[derive(Debug)]
pub struct Stuck;

const PAGE: usize = 4096;
/// Pages of a batch, at most.
pub const PLACES_MAX: usize = aquifer_ipc::BATCH_PAGES_MAX;
/// How often a move from the antechamber to staging is tried again: it can only be briefly contended.
const STAGE_RETRIES_MAX: u32 = 1_000_000;
const EXISTS: isize = -(libc::EEXIST as isize);
const AGAIN: isize = -(libc::EAGAIN as isize);
const BUSY: isize = -(libc::EBUSY as isize);

/// Take a batch out of the program and into staging, of which the agent has copied what was there.
pub fn obey(pages: &mut impl Pages, batch: &impl Batch) -> Result<(), Stuck> {
    clear(pages)?;
    take(pages, batch);
    stage(pages, batch.count(), |place| batch.is_moved(place))
}

/// Nothing is in the antechamber, but where somebody who looks at a program's memory from outside has looked there, too.
fn clear(pages: &mut impl Pages) -> Result<(), Stuck> {
    pages.empty_staging();
    let mut occupied = [false; PLACES_MAX];
    pages.occupied(&mut occupied);
    if occupied.contains(&true) {
        stage(pages, PLACES_MAX, |place| occupied[place])?;
        pages.empty_staging();
    }
    Ok(())
}

/// Move the pages out of the program into the antechamber. Neighbours go in one call.
fn take(pages: &mut impl Pages, batch: &impl Batch) {
    let mut at = 0;
    while at < batch.count() {
        let address = batch.address(at);
        let run = run(at, batch.count(), |other| batch.address(other) == address + (other - at) * PAGE);
        let (moved, mut error) = pages.take(address, at, run);
        (at..at + moved).for_each(|place| batch.set(place, 0));
        at += moved;
        if moved > 0 {
            // What stopped it shows when the rest is tried.
            continue;
        }
        if error == BUSY {
            error = pages.make_own(address);
            if error == 0 {
                error = pages.take(address, at, 1).1;
            }
        }
        // While an event is unread the kernel does not look what is there.
        if error == EXISTS || error == AGAIN && is_occupied(pages, at) {
            error = 0;
        }
        batch.set(at, u32::try_from(-error).unwrap_or(u32::MAX));
        at += 1;
    }
}

fn is_occupied(pages: &mut impl Pages, place: usize) -> bool {
    let mut occupied = [false; PLACES_MAX];
    pages.occupied(&mut occupied);
    occupied[place]
}

/// Move what was taken from the antechamber to staging, whose pages can be dropped without an event.
fn stage(pages: &mut impl Pages, count: usize, is_taken: impl Fn(usize) -> bool) -> Result<(), Stuck> {
    let mut retries = 0;
    let mut at = 0;
    while at < count {
        if !is_taken(at) {
            at += 1;
            continue;
        }
        let run = run(at, count, &is_taken);
        let (moved, error) = pages.stage(at, run);
        at += moved;
        match error {
            0 => {}
            EXISTS if moved == 0 => at += 1,
            _ if moved > 0 => {}
            AGAIN if retries < STAGE_RETRIES_MAX => retries += 1,
            _ => return Err(Stuck),
        }
    }
    Ok(())
}

/// How many places from `at` on belong together.
fn run(at: usize, count: usize, belongs: impl Fn(usize) -> bool) -> usize {
    1 + (at + 1..count).take_while(|other| belongs(*other)).count()
}
