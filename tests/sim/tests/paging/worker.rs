//! The worker of a modelled process: moves pages to staging buffers, as the kernel lets it.

use std::cell::{RefCell, RefMut};
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;

use aquifer_faults::ProgramEnded;
use aquifer_ipc::BATCH_PAGES_MAX;
use aquifer_pager::{PAGE_BYTES, PageNumber};

use super::memory::{ModelFrame, index};
use super::world::PagingWorld;

const MOVED: u32 = 0;
const MISSING: u32 = libc::ENOENT.cast_unsigned();
const BUSY: u32 = libc::EBUSY.cast_unsigned();
/// An event is unread.
const CHANGING: u32 = libc::EAGAIN.cast_unsigned();

/// Completes the newest command of a process. The world runs meanwhile.
pub fn run(world: &Rc<RefCell<PagingWorld>>, process: usize) -> Result<(), ProgramEnded> {
    let (command, buffer, pages) = command(&world.borrow(), process);
    if let Some(pages) = pages {
        let side = Rc::clone(&world.borrow().processes[process].sender_side);
        side.staging.borrow_mut()[buffer].fill(None);
        for (position, page) in pages.into_iter().enumerate() {
            let (status, stamp) = move_page(world, process, page)?;
            side.staging.borrow_mut()[buffer][position] = stamp;
            let world = world.borrow();
            world.processes[process].control.control().batches[buffer].statuses[position]
                .store(status, Relaxed);
        }
    }
    world.borrow().processes[process].control.control().done.store(command, Relaxed);
    Ok(())
}

/// The number of the newest command, its buffer, and its pages; no pages if it is completed.
fn command(world: &PagingWorld, process: usize) -> (u32, usize, Option<Vec<PageNumber>>) {
    let control = world.processes[process].control.control();
    let command = control.command.load(Relaxed);
    let buffer = control.buffer.load(Relaxed) as usize;
    if control.done.load(Relaxed) == command {
        return (command, buffer, None);
    }
    let batch = &control.batches[buffer];
    let count = (batch.count.load(Relaxed) as usize).min(BATCH_PAGES_MAX);
    let addresses = batch.addresses[..count].iter().map(|address| address.load(Relaxed));
    (command, buffer, Some(addresses.map(|address| address / PAGE_BYTES as u64).collect()))
}

/// Runs the world for some steps. The agent survives.
fn run_world(world: &Rc<RefCell<PagingWorld>>) -> RefMut<'_, PagingWorld> {
    let mut world = world.borrow_mut();
    let steps_per_call = world.steps_per_call;
    world.run_others(steps_per_call);
    world
}

/// Moves one page out of the program. Returns the status and the bytes.
fn move_page(
    world: &Rc<RefCell<PagingWorld>>,
    number: usize,
    page: PageNumber,
) -> Result<(u32, Option<u64>), ProgramEnded> {
    let mut is_written = false;
    loop {
        let world = &mut *run_world(world);
        let process = &mut world.processes[number];
        if !process.is_alive {
            return Err(ProgramEnded);
        }
        let place = &mut process.pages[index(page)];
        if is_written && place.is_mapped {
            // The kernel refuses a write that would be a fault.
            let frame = if place.is_registered {
                place.frame.as_mut().filter(|frame| !frame.is_protected)
            } else {
                Some(place.frame.get_or_insert(ModelFrame::ZERO))
            };
            match frame {
                Some(frame) => frame.is_exclusive = true,
                None => world.counts.refused_writes += 1,
            }
        }
        let status = match place.frame {
            _ if process.changing > 0 => CHANGING,
            _ if !place.is_mapped || place.is_poisoned => BUSY,
            None => MISSING,
            Some(ModelFrame { is_pinned: true, .. }) => BUSY,
            Some(ModelFrame { is_exclusive: false, .. }) if is_written => BUSY,
            Some(ModelFrame { is_exclusive: false, .. }) => {
                process.unprotect(index(page), index(page) + 1);
                is_written = true;
                world.counts.privatised += 1;
                continue;
            }
            Some(ModelFrame { stamp, .. }) => {
                if place.is_kept {
                    world.failure = Some(format!("page {page:#x} of {number} left although it is pinned"));
                    return Err(ProgramEnded);
                }
                place.frame = None;
                trace!("{number} takes {} = {stamp}", index(page));
                return Ok((MOVED, Some(stamp)));
            }
        };
        if status == MISSING {
            world.counts.absent += 1;
        } else {
            world.counts.kept += 1;
        }
        return Ok((status, None));
    }
}
