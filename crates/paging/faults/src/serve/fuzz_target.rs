//! Fuzz targets for data that an agent reads from programs, the kernel and earlier agents.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::Relaxed;

use aquifer_ipc::control::{CONTROL_BYTES, CONTROL_MAGIC};
use aquifer_ipc::{BATCH_PAGES_MAX, HeldItem, HeldKind, RunToken, STAGING_BUFFERS};
use aquifer_pager::{Memory, PAGE_BYTES, PAGES_MAX};

use super::records::{HelloRecord, ProgramRecord, RunRecord, decode};
use super::stat;
use crate::areas::{Area, Areas};
use crate::journal::{Journal, PersistentRanges};
use crate::kernel::MoveOutcome;
use crate::maps::{self, PagingBounds};
use crate::worker::WorkerPort;

/// Offsets of the numbers of the newest command and of the newest completed one.
const COMMAND_AT: usize = 8;
const DONE_AT: usize = 12;
/// Offset and length of the records of batches in control memory.
const BATCHES_AT: usize = 40;
const BATCH_BYTES: usize = 776;

thread_local! {
    static PORT: RefCell<OwnedFd> = RefCell::new(
        WorkerPort::new().expect("there is memory").fd().try_clone_to_owned().expect("a descriptor"),
    );
    static JOURNAL: Memory = Memory::create("fuzz-journal", JOURNAL_BYTES).expect("the system has memory");
}

/// Reads control memory as an agent that takes over, and then as one that sends commands.
///
/// The input is the memory; zeros follow it. The newest command is always completed: an agent waits
/// for that. Returns whether the memory is of this version.
///
/// # Panics
/// If a check fails.
#[must_use]
pub fn read_worker_memory(bytes: &[u8]) -> bool {
    let mut content = vec![0; CONTROL_BYTES];
    let used = bytes.len().min(CONTROL_BYTES);
    content[..used].copy_from_slice(&bytes[..used]);
    content.copy_within(COMMAND_AT..COMMAND_AT + 4, DONE_AT);
    let fd = PORT.with_borrow(|fd| fd.try_clone()).expect("the system has descriptors");
    rustix::io::pwrite(&fd, &content, 0).expect("the memory is writable");
    let Ok(mut port) = WorkerPort::recover(fd) else { return false };
    let batches = port.batches(|| false).expect("the command is completed");
    assert_eq!(batches.len(), STAGING_BUFFERS);
    for batch in &batches {
        assert!(batch.len() <= BATCH_PAGES_MAX);
        let is_kept =
            |(page, outcome): &(u64, MoveOutcome)| *page < PAGES_MAX || *outcome == MoveOutcome::Kept;
        assert!(batch.iter().all(is_kept), "no page has such a number: {batch:?}");
    }
    port.lock_pins();
    port.unlock_pins();
    let _ = (port.process(), port.has_fork_advice(), port.is_last(), port.is_pinned(7));
    port.set_core(Some(1));
    port.begin_batch(0, &[1, 2, 3]);
    let mut outcomes = Vec::new();
    let command = u32::from_le_bytes(content[COMMAND_AT..][..4].try_into().expect("4 bytes"));
    let done = command.wrapping_add(1).to_le_bytes();
    rustix::io::pwrite(port.fd(), &done, DONE_AT as u64).expect("the memory is writable");
    assert!(port.finish_batch(0, 3, &mut outcomes) && outcomes.len() == 3);
    port.release_buffer(0);
    port.release_all();
    assert!(port.unfinished_batches().iter().all(Vec::is_empty));
    true
}

/// Control memory with batches and pins.
#[must_use]
pub fn worker_seeds() -> Vec<(&'static str, Vec<u8>)> {
    let mut memory = vec![0; BATCHES_AT + STAGING_BUFFERS * BATCH_BYTES + 40];
    let mut put = |at: usize, number: u32| memory[at..at + 4].copy_from_slice(&number.to_le_bytes());
    put(0, CONTROL_MAGIC);
    put(4, aquifer_ipc::control::CONTROL_VERSION);
    // A batch of two pages: one was moved, and one was absent.
    put(BATCHES_AT, 2);
    put(BATCHES_AT + 8, 0x5000);
    put(BATCHES_AT + 16, 0x7000);
    put(BATCHES_AT + 520 + 4, 2);
    let pins_at = BATCHES_AT + STAGING_BUFFERS * BATCH_BYTES;
    put(pins_at, 2);
    put(pins_at + 8, 7);
    put(pins_at + 16, 3);
    vec![("batch", memory)]
}

const JOURNAL_BYTES: usize = 20480;
/// The parts of a journal that the input has, in this order: the head, the heads of both copies,
/// the first messages, and the first ranges of both copies.
const JOURNAL_PARTS: [std::ops::Range<usize>; 8] = [
    0..64,
    4096..4096 + 64,
    12288..12288 + 64,
    64..64 + 4 * 32,
    4096 + 64..4096 + 128,
    4096 + 2048..4096 + 2112,
    12288 + 64..12288 + 128,
    12288 + 2048..12288 + 2112,
];
/// Maximum number of ranges in a journal, by `docs/formats/paging.md`.
const PENDING_UNMAPS_MAX: usize = 124;

fn open_journal() -> std::io::Result<(Journal, crate::journal::JournalContents)> {
    let fd = JOURNAL.with(|memory| memory.fd().try_clone_to_owned())?;
    Journal::recover(Memory::from_fd(fd, JOURNAL_BYTES)?)
}

/// Recovers a journal, and records that its first event was applied.
///
/// The input has parts of the journal. Returns whether it is a journal of this version.
///
/// # Panics
/// If a check fails.
#[must_use]
pub fn recover_journal(bytes: &[u8]) -> bool {
    let mut initial = vec![0; JOURNAL_BYTES];
    let mut rest = bytes;
    for part in JOURNAL_PARTS {
        let (now, later) = rest.split_at(rest.len().min(part.len()));
        initial[part.start..part.start + now.len()].copy_from_slice(now);
        rest = later;
    }
    JOURNAL.with(|memory| memory.write(0, &initial));
    let Ok((mut journal, contents)) = open_journal() else { return false };
    let positions: Vec<usize> = contents.unapplied.iter().map(|(position, _)| *position).collect();
    // The first event may be one that must be applied before events that were read earlier.
    let others = positions.get(1..).unwrap_or_default();
    assert!(others.is_sorted_by(|one, other| one < other) && positions.iter().max() < Some(&64));
    let pending_unmaps = contents.pending_unmaps.unwrap_or_default();
    assert!(pending_unmaps.len() <= PENDING_UNMAPS_MAX, "{} pending unmaps", pending_unmaps.len());
    let removed = contents.removed.unwrap_or_default();
    let sequence = journal.sequence();
    if positions.is_empty() || sequence == u64::MAX {
        return true;
    }
    journal.skip_event(0, PersistentRanges { pending_unmaps: &pending_unmaps, removed: &removed });
    let (again, contents) = open_journal().expect("its head is the same");
    assert_eq!(again.sequence(), sequence + 1);
    assert_eq!(contents.pending_unmaps, Some(pending_unmaps));
    let later: Vec<usize> = contents.unapplied.iter().map(|(position, _)| *position).collect();
    assert_eq!(later, positions[1..]);
    true
}

/// Journals with messages and ranges.
#[must_use]
pub fn journal_seeds() -> Vec<(&'static str, Vec<u8>)> {
    let journal = Journal::new().expect("the system has memory");
    let messages: [[u64; 4]; 3] =
        [[0x15, 4096, 8192, 0], [0x16, 4096, 12288, 0], [0x14, 4096, 40960, 2 * 4096]];
    for (at, word) in (64..).step_by(8).zip(messages.concat()) {
        journal.memory().atomic_u64(at).store(word, Relaxed);
    }
    let mut removed = Areas::default();
    removed.insert(Area { start: 1, end: 2 });
    let pending_unmaps = [Area { start: 7, end: 9 }, Area { start: 20, end: 30 }];
    journal.persist_ranges(PersistentRanges { pending_unmaps: &pending_unmaps, removed: &removed });
    // The number of the process that writes the seed must not be in it.
    journal.memory().atomic_u32(8).store(77, Relaxed);
    let mut bytes = Vec::new();
    for part in JOURNAL_PARTS {
        let mut content = vec![0; part.len()];
        journal.memory().read(part.start, &mut content);
        bytes.extend(content);
    }
    vec![("events", bytes)]
}

/// Parses a record of a run or of a program, which the keeper holds.
///
/// # Panics
/// If a check fails.
#[must_use]
pub fn parse_record(bytes: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(bytes) else { return false };
    let item = |record: String| HeldItem { kind: HeldKind::Run, id: 3, pid: 0, uid: 0, record };
    let held = item(text.to_owned());
    let run = decode::<RunRecord>(&held);
    if let Ok(record) = &run {
        assert_eq!(decode::<RunRecord>(&record.put(3)).ok().as_ref(), Some(record));
        if let Ok(token) = record.token() {
            assert_eq!(token.to_hex(), record.token);
        }
    }
    let program = decode::<ProgramRecord>(&held);
    if let Ok(record) = &program {
        assert_eq!(decode::<ProgramRecord>(&record.put(3, 4, 5)).ok().as_ref(), Some(record));
        let hello = record.hello(RunToken([1; 16]));
        assert_eq!(hello.is_some(), record.hello.is_some());
        assert!(record.canary(3).page <= u64::MAX / PAGE_BYTES as u64);
        let _ = maps::pageable_areas(MAPS, &record.bounds(), &[]);
    }
    run.is_ok() || program.is_ok()
}

/// Records of a run and of a program.
#[must_use]
pub fn record_seeds() -> Vec<(&'static str, Vec<u8>)> {
    let run = RunRecord {
        token: RunToken([0xbd; 16]).to_hex(),
        name: "sort".to_owned(),
        limit_bytes: 1 << 30,
        limit_max_bytes: None,
        tenant: 1000,
        copies: 2,
        outlives_owner: true,
        is_strict: true,
        wait_for_room_ms: None,
        owner_pid: Some(12),
    };
    let hello = HelloRecord { is_child: false, bounce_buffer: 0x1000, staging: 0x2000 };
    let program = ProgramRecord {
        run: 3,
        origin: Some((5, 6)),
        private: [0x4000, 0x9000, 0x3000],
        nonce: [6; 16],
        only: [0x10_0000, 0x20_0000],
        must_check_inheritance: true,
        hello: Some(hello),
    };
    vec![("run", run.put(1).record.into_bytes()), ("program", program.put(1, 2, 3).record.into_bytes())]
}

const MAPS: &[u8] = b"\
55d0c0000000-55d0c0021000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000100000 rw-p 00000000 00:00 0 
7f0000200000-7f0000201000 ---p 00000000 00:00 0 
7f0000201000-7f0000a01000 rw-p 00000000 00:00 0 
7f0005000000-7f0005100000 rw-p 00000000 00:00 0                          [anon:arena]
";
const SMAPS: &[u8] = b"\
7f0000000000-7f0000100000 rw-p 00000000 00:00 0 
Pss:                1024 kB
VmFlags: rd wr mr mw me ac sd um 
7f0000200000-7f0000300000 rw-p 00000000 00:00 0                          [anon: Pss:]
VmFlags: rd wr wf
";
const STAT: &[u8] = b"7 (a ) b (c) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 \
                      21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 5 37";

/// Parses a file of `/proc/PID`. A program chooses the names in it.
///
/// # Panics
/// If a check fails.
#[must_use]
pub fn parse_process_file(bytes: &[u8]) -> bool {
    let bounds = PagingBounds {
        shim_range: 0x7f00_0000_4000..0x7f00_0000_9000,
        canary: 0x7f00_0000_3000,
        paged_range: 0..0,
    };
    let areas = maps::pageable_areas(bytes, &bounds, &[1, 0x7_f000_0000]);
    for area in &areas {
        assert!(area.start < area.end && area.end <= PAGES_MAX, "{area:?} is no area of a program");
        let holds = |addr: u64| (area.start..area.end).contains(&(addr / PAGE_BYTES as u64));
        assert!(!holds(bounds.canary) && !holds(bounds.shim_range.start), "{area:?} is the shim's");
    }
    let registered = maps::registered_areas(bytes);
    assert!(registered.iter().chain(maps::inherited_areas(bytes).iter()).all(|area| area.end <= PAGES_MAX));
    let _ = maps::pss_pages(bytes, &(0..1 << 47));
    let core = stat::field(bytes, stat::PROCESSOR);
    !areas.is_empty() || registered.iter().next().is_some() || core.is_some()
}

/// Files of `/proc/PID`: `maps`, `smaps` and `stat`.
#[must_use]
pub fn process_file_seeds() -> Vec<(&'static str, Vec<u8>)> {
    vec![("maps", MAPS.to_vec()), ("smaps", SMAPS.to_vec()), ("stat", STAT.to_vec())]
}

/// Checks at compile time that the seeds have the layout of control memory.
const _: () = {
    assert!(size_of::<aquifer_ipc::control::BatchRecord>() == BATCH_BYTES);
    assert!(std::mem::offset_of!(aquifer_ipc::WorkerControl, batches) == BATCHES_AT);
    assert!(std::mem::offset_of!(aquifer_ipc::WorkerControl, command) == COMMAND_AT);
    assert!(std::mem::offset_of!(aquifer_ipc::WorkerControl, done) == DONE_AT);
};
