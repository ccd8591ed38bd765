//! Fuzz targets for the bytes that the two ends of a connection receive.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use zerocopy::IntoBytes;

use super::counters::TenantTable;
use super::endpoint;
use super::rate::RateLimiter;
use super::regions::{RegionMapping, SharedRegions};
use super::reply::AnswerBuffer;
use super::session::TcpSession;
use super::target::{TcpPeerState, TcpShared, TcpTargetState};
use super::wire::{self, RequestHead};
use super::{Rate, TcpOptions};
use crate::control::ControlMemory;
use crate::handshake::ClusterKey;
use crate::handshake::hello::Resume;
use crate::key_table::{KeyTable, ROW_BYTES};
use crate::limits::Limits;
use crate::memory::u64_from;
use crate::registration::Registration;
use crate::sessions::PeerSessions;
use crate::tables::{RegisteredRegion, TargetTables};
use crate::target::{Access, Host, Identity, Scope, Tenant, WindowSpec};
use crate::wake::WakeFd;
use crate::work::Key;
use crate::{KeyEntry, Memory};

pub use endpoint::fuzz_target::{handle as handle_answers, seeds as answer_seeds};

const WHO: Identity = Identity { host: Host(1), epoch: 1, tenant: Tenant(7) };
/// Bytes of a region without a key table.
const PLAIN_BYTES: usize = 8192;
/// The bytes of that region that windows open: for all operations, and for READs.
const WINDOWS: [std::ops::Range<usize>; 2] = [1024..2048, 4096..4160];
/// Bytes of a region with a key table; its data is the second row.
const TABLE_REGION_BYTES: usize = 4 << 20;
const ENTRIES_AT: u64 = 4096;
const PAGE: usize = 4096;
/// Bytes of the input before the requests.
const HEAD_BYTES: usize = 4;

/// A target with two regions, of which keys open some parts.
struct Fixture {
    shared: Arc<TcpShared>,
    plain: Arc<Memory>,
    with_table: Arc<Memory>,
    /// Keys of the windows, and of the run.
    keys: [Key; 3],
    /// Addresses of the regions.
    bases: [u64; 2],
}

thread_local! {
    static FIXTURE: RefCell<Fixture> = RefCell::new(Fixture::new().expect("the system has memory"));
}

impl Fixture {
    fn new() -> Result<Self, Box<dyn std::error::Error>> {
        let options = TcpOptions {
            endpoints_max: 2,
            regions_max: 2,
            windows_max: 4,
            limits: Limits {
                queue_depth: 8,
                transfer_bytes_max: 2048,
                message_bytes_max: 64,
                receive_depth: 4,
                local_regions_max: 1,
            },
            ..TcpOptions::default()
        };
        let control = ControlMemory::create(2, 2, 4)?;
        let mut tables = TargetTables::new(2, 4, 0);
        let plain = Arc::new(Memory::create("fuzz-plain", PLAIN_BYTES)?);
        let with_table = Arc::new(Memory::create("fuzz-table", TABLE_REGION_BYTES)?);
        let table = KeyTable { entries_at: ENTRIES_AT, data: ROW_BYTES..2 * ROW_BYTES };
        let others = Scope::Host(Host(9));
        let mut bases = [0; 2];
        let regions = SharedRegions::new(2);
        for (index, (memory, table)) in [(&plain, None), (&with_table, Some(table))].into_iter().enumerate() {
            let new = Registration { table, ..Registration::plain(Arc::clone(memory), Access::ALL, others) };
            let (slot, region) = tables.register(&control, new)?;
            bases[index] = region.base;
            let RegisteredRegion { memory, table, .. } = &tables.regions[&slot];
            let mapping = RegionMapping { base: region.base, memory: memory.clone(), table: table.clone() };
            regions.insert(slot, mapping);
        }
        let mut bind = |range: &std::ops::Range<usize>, access, scope| {
            let range = bases[0] + u64_from(range.start)..bases[0] + u64_from(range.end);
            tables.bind(&control, &WindowSpec { range, access, scope })
        };
        let all = bind(&WINDOWS[0], Access::ALL, Scope::Anyone)?;
        let read = bind(&WINDOWS[1], Access::READ, Scope::Tenant(WHO.tenant))?;
        bind(&(0..PLAIN_BYTES), Access::ALL, others)?;
        let state = TcpTargetState {
            peers: PeerSessions::new(options.session_limits()),
            parked: HashMap::new(),
            tables,
            served: TenantTable::default(),
        };
        let shared = Arc::new(TcpShared {
            key: ClusterKey([0; 32]),
            control,
            regions,
            inbox: Arc::clone(state.peers.inbox()),
            state: Mutex::new(state),
            handles: Vec::new(),
            wake: WakeFd::new()?,
            stop: AtomicBool::new(false),
            limiter: Mutex::new(RateLimiter::new(Rate::default())),
            handshakes_in_progress: AtomicUsize::new(0),
            handler: OnceLock::new(),
            options,
        });
        Ok(Self { shared, plain, with_table, keys: [all, read, Key::of_run(0, 5)], bases })
    }

    /// The parts of both regions that are checked, and whether a key opens each for writing.
    fn parts(&self) -> [(&Memory, std::ops::Range<usize>, bool); 6] {
        let data = TABLE_REGION_BYTES / 2;
        [
            (&self.plain, 0..WINDOWS[0].start, false),
            (&self.plain, WINDOWS[0].clone(), true),
            (&self.plain, WINDOWS[0].end..WINDOWS[1].start, false),
            (&self.plain, WINDOWS[1].end..PLAIN_BYTES, false),
            (&self.with_table, data..data + PAGE, true),
            (&self.with_table, data + PAGE..data + 2 * PAGE, false),
        ]
    }

    /// Serves the input, with `paint` in all bytes that no key opens. Returns all answers, whether
    /// the protocol was violated, and the open memory afterwards.
    fn serve(&self, head: [u8; HEAD_BYTES], parts: &[&[u8]], paint: u8) -> (Vec<u8>, bool, Vec<u8>) {
        for (memory, range, is_open) in self.parts() {
            memory.write(range.start, &vec![if is_open { 1 } else { paint }; range.len()]);
        }
        self.plain.write(WINDOWS[1].start, &[2; 64]);
        let entry = self.with_table.atomic_u64(usize::try_from(ENTRIES_AT).expect("small") + 32 * 8);
        entry.store(KeyEntry::open(self.keys[2], WHO.tenant).0, std::sync::atomic::Ordering::SeqCst);
        let mut state = self.shared.lock();
        let peer = state.peers.begin(WHO, |_| TcpPeerState::default()).expect("there is room");
        drop(state);
        self.shared.control.open_slot(peer.slot, WHO);
        let mut session = TcpSession::new(&self.shared, &peer, peer.slot);
        let mut sent = Vec::new();
        for message in [&b"first"[..], b"second", b"third"] {
            assert!(peer.mailbox.post(message, 4));
        }
        while session.next_message(&mut sent) {}
        let mut answers = AnswerBuffer::default();
        let mut input = Vec::new();
        let mut is_violated = false;
        for part in parts {
            input.extend_from_slice(part);
            while !is_violated {
                let fed = session.feed(&input, &mut answers);
                sent.append(answers.bytes());
                match fed {
                    Ok(0) => break,
                    Ok(used) => drop(input.drain(..used)),
                    Err(_) => is_violated = true,
                }
            }
        }
        session.discard_partial();
        let [_, answered, received, taken] = head.map(u64::from);
        let resumed = session.resume(&Resume { session: [0; 16], answered, received, taken }, &mut answers);
        sent.append(answers.bytes());
        sent.push(resumed.into());
        self.shared.end_session(&session);
        while self.shared.inbox.receive(&mut sent).is_some() {}
        let mut open = Vec::new();
        for (memory, range, is_open) in self.parts() {
            let mut bytes = vec![0; range.len()];
            memory.read(range.start, &mut bytes);
            let is_painted = bytes.iter().all(|byte| *byte == paint);
            assert!(is_open || is_painted, "a request has changed memory that its key does not open");
            open.extend(bytes.into_iter().filter(|_| is_open));
        }
        (sent, is_violated, open)
    }
}

/// Serves requests of an initiator twice: at once, and in two parts with other bytes in the memory
/// that no key opens. The answers must be the same.
///
/// The first byte selects where the input is cut, and the next three from where the session is
/// resumed at the end. Returns whether all requests follow the protocol.
///
/// # Panics
/// If a check fails.
#[must_use]
pub fn serve_requests(bytes: &[u8]) -> bool {
    let Some((head, requests)) = bytes.split_first_chunk::<HEAD_BYTES>() else { return false };
    let (first, rest) = requests.split_at(usize::from(head[0]).min(requests.len()));
    FIXTURE.with_borrow(|fixture| {
        let whole = fixture.serve(*head, &[requests], 3);
        let in_parts = fixture.serve(*head, &[first, rest], 4);
        assert!(whole == in_parts, "the answers depend on memory that no key opens, or on the cut");
        !whole.1
    })
}

/// Requests of an initiator.
#[must_use]
pub fn request_seeds() -> Vec<(&'static str, Vec<u8>)> {
    FIXTURE.with_borrow(|fixture| {
        let Fixture { keys: [all, read, run], bases, .. } = fixture;
        let request = |kind, key: &Key, addr: u64, len: u32, value: u64, data: &[u8]| {
            let mut head = RequestHead::new(kind, len);
            head.addr = addr.into();
            head.key = key.0.into();
            head.value = value.into();
            [head.as_bytes(), data].concat()
        };
        let window = |number: usize| bases[0] + u64_from(WINDOWS[number].start);
        let data = bases[1] + ROW_BYTES;
        let none = Key(0);
        vec![
            (
                "read",
                [
                    &[40, 1, 0, 0],
                    &request(wire::READ, read, window(1), 64, 0, &[])[..],
                    &request(wire::READ, all, window(0) + 100, 20, 0, &[]),
                    &request(wire::READ, run, data, 64, 0, &[]),
                ]
                .concat(),
            ),
            (
                "write",
                [
                    &[50, 2, 3, 1],
                    &request(wire::WRITE, all, window(0) + 8, 13, 0, &[6; 16])[..],
                    &request(wire::WRITE, run, data + 64, 8, 0, &[7; 8]),
                ]
                .concat(),
            ),
            (
                "atomics",
                [
                    &[33, 0, 0, 0],
                    &request(wire::ADD, all, window(0), 0, 5, &[])[..],
                    &request(wire::SWAP, all, window(0) + 8, 0, 0x0101_0101_0101_0101, &[8; 8]),
                ]
                .concat(),
            ),
            (
                "messages",
                [
                    &[9, 0, 3, 2],
                    &request(wire::SEND, &none, 0, 5, 0, b"hello...")[..],
                    &request(wire::CREDIT, &none, 0, 2, 0, &[]),
                    &request(wire::BYE, &none, 0, 0, 0, &[]),
                ]
                .concat(),
            ),
        ]
    })
}
