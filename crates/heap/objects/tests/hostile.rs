//! A hostile client: random requests with real, changed and invented pointers, and with any
//! lengths, while an honest client of another user works in the same service.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use aquifer_fabric::tcp::{TcpOptions, TcpTarget};
use aquifer_fabric::{Admission, ClusterKey, Limits, Memory, Target, Tenant};
use aquifer_objects::class::ClassId;
use aquifer_objects::header::ObjectNumber;
use aquifer_objects::pointer::Pointer;
use aquifer_objects::service::{
    HeapKeeper, HeapRecord, HeapService, HeapShare, MESSAGE_BYTES_MAX, OPERATOR, TICKET_SERVICE,
};
use aquifer_objects::wire::{Answer, Refused, Request, VERSION};

const HOSTILE: Tenant = Tenant(666);
const HONEST: Tenant = Tenant(1000);
const MEMORY_BYTES: u64 = 64 << 20;
const REQUESTS: u64 = 60_000;
/// Regions of a target, for four heaps.
const REGIONS_MAX: usize = 64;
/// The class of objects of 40,000 bytes.
const LARGE_CLASS: ClassId = ClassId(67);

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let word = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ word >> 31
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn short(&mut self, bound: u32) -> u32 {
        u32::try_from(self.below(bound.into())).expect("the bound is a u32")
    }

    fn chance(&mut self, of: u64) -> bool {
        self.below(of) == 0
    }
}

fn target() -> Arc<TcpTarget> {
    let limits = Limits { message_bytes_max: MESSAGE_BYTES_MAX, ..Limits::default() };
    let admission = Admission::Tickets(TICKET_SERVICE);
    let options = TcpOptions { limits, regions_max: REGIONS_MAX, admission, ..TcpOptions::default() };
    let key = ClusterKey([5; 32]);
    let address = "127.0.0.1:0".parse().expect("an address");
    Arc::new(TcpTarget::listen(address, &key, options).expect("there is a port"))
}

fn service() -> (Arc<TcpTarget>, HeapService) {
    let target = target();
    let service = HeapService::new(3, MEMORY_BYTES, None, None);
    service.open_through(&(Arc::clone(&target) as Arc<dyn Target>));
    (target, service)
}

/// A keeper that refuses heaps as long as it is full.
#[derive(Clone, Debug, Default)]
struct FullKeeper(Arc<AtomicBool>);

impl HeapKeeper for FullKeeper {
    fn hold(&self, _: &HeapRecord, _: [BorrowedFd<'_>; 3]) -> Result<(), String> {
        if self.0.load(Ordering::Relaxed) { Err("the keeper is full".to_owned()) } else { Ok(()) }
    }

    fn release(&self, _: u16) {}
}

/// A program can try to open a heap again and again.
#[test]
fn heaps_that_cannot_be_opened_use_nothing_up() {
    for is_by_device in [false, true] {
        let (target, device) = (target(), target());
        let keeper = FullKeeper::default();
        let service = HeapService::new(3, MEMORY_BYTES, None, Some(Box::new(keeper.clone())));
        if is_by_device {
            service.serve_by_devices(&(Arc::clone(&device) as Arc<dyn Target>), MEMORY_BYTES);
        }
        service.open_through(&(Arc::clone(&target) as Arc<dyn Target>));
        keeper.0.store(true, Ordering::Relaxed);
        for _ in 0..REGIONS_MAX {
            let refused = ask(&service, HOSTILE, &Request::Open);
            assert!(matches!(Answer::decode(&refused), Some(Answer::Refused(_))));
            service.maintain();
        }
        keeper.0.store(false, Ordering::Relaxed);
        ask(&service, HONEST, &Request::Open);
        let allocated = ask(&service, HONEST, &Request::Allocate { bytes: 100 });
        assert!(pointer_in(&allocated).is_some(), "{:?}", Answer::decode(&allocated));
    }
}

/// The answer to a request.
fn ask(service: &HeapService, tenant: Tenant, request: &Request<'_>) -> Vec<u8> {
    let (mut message, mut answer) = (Vec::new(), Vec::new());
    request.encode(&mut message);
    service.answer(tenant, &message, &mut answer);
    answer
}

fn pointer_in(answer: &[u8]) -> Option<Pointer> {
    match Answer::decode(answer)? {
        Answer::Pointer(pointer, _) | Answer::Bytes(pointer, ..) => Some(pointer),
        _ => None,
    }
}

/// A pointer that the client has received, mostly with one part changed, or an invented one.
fn some_pointer(random: &mut Random, known: &[Pointer]) -> Pointer {
    let number =
        |random: &mut Random| ObjectNumber::new(1 + random.below(1 << 44)).unwrap_or(ObjectNumber::FIRST);
    let mut pointer = match known {
        known if known.is_empty() || random.chance(8) => Pointer {
            node: 3,
            heap: 0,
            class: ClassId(u8::try_from(random.below(256)).expect("small")),
            address: random.below(1 << 48),
            number: number(random),
        },
        known => known[usize::try_from(random.below(known.len() as u64)).expect("an index")],
    };
    match random.below(12) {
        0 => pointer.address ^= 1 << random.below(48),
        1 => pointer.address = pointer.address.wrapping_add(8 * random.below(600)) & ((1 << 48) - 1),
        2 => pointer.class = ClassId(u8::try_from(random.below(256)).expect("small")),
        3 => pointer.number = number(random),
        4 => pointer.heap ^= 1,
        5 => pointer.node ^= 1,
        _ => {}
    }
    pointer
}

fn some_size(random: &mut Random) -> u32 {
    match random.below(8) {
        0 => u32::MAX - random.short(100),
        1 => random.short(70 << 20),
        2 if random.chance(2) => 40_000,
        2 => random.short(1 << 20),
        _ => random.short(3000),
    }
}

#[test]
fn random_requests_harm_no_other_user() {
    let (_target, service) = service();
    let mut random = Random(42);
    let mut honest: Vec<(Pointer, u64)> = Vec::new();
    for stamp in 0..500_u64 {
        let first = stamp.to_le_bytes().repeat(20);
        let created = ask(&service, HONEST, &Request::Open);
        assert!(matches!(Answer::decode(&created), Some(Answer::Opened(_))));
        let created = ask(&service, HONEST, &Request::Create { bytes: 160, first: &first });
        honest.push((pointer_in(&created).expect("there is room"), stamp));
    }
    let mut known: Vec<Pointer> = Vec::new();
    let bytes = vec![0xaa; 40_000];
    ask(&service, HOSTILE, &Request::Open);
    // Number of requests of each kind that were carried out.
    let mut done = [0; 16];
    for round in 0..REQUESTS {
        let pointer = some_pointer(&mut random, &known);
        let most = if random.chance(20) { 40_000 } else { 300 };
        let len = usize::try_from(random.below(most)).expect("small");
        let part = &bytes[..len];
        let kind = random.below(16);
        let request = match kind {
            0..3 => Request::Allocate { bytes: some_size(&mut random) },
            3 => Request::Create { bytes: some_size(&mut random), first: part },
            4 => Request::Root { bytes: some_size(&mut random) },
            5..7 => Request::Free(pointer),
            7 => Request::Read(pointer),
            8 => Request::Write(pointer, part),
            9 => Request::WriteAt { pointer, offset: some_size(&mut random) & !7, bytes: part },
            10 => Request::WriteIf { pointer, expected: random.below(3), bytes: part },
            11 => {
                // Sometimes two large objects of one class, or one object twice.
                let of_class: Vec<Pointer> =
                    known.iter().copied().filter(|known| known.class == LARGE_CLASS).collect();
                match random.chance(2) {
                    true => {
                        let (pointer, staged) =
                            (some_pointer(&mut random, &of_class), some_pointer(&mut random, &of_class));
                        Request::Replace { pointer, staged, bytes: random.short(45_000) }
                    }
                    false => {
                        let staged = some_pointer(&mut random, &known);
                        Request::Replace { pointer, staged, bytes: some_size(&mut random) }
                    }
                }
            }
            12 => Request::Correct(pointer),
            13 => Request::Release(pointer),
            14 => Request::Compact { tenant: HONEST.0 },
            _ => Request::SetLimit { tenant: HOSTILE.0, bytes: 1 << 40 },
        };
        let answer = ask(&service, HOSTILE, &request);
        let decoded = Answer::decode(&answer).expect("each request has a valid answer");
        if matches!(request, Request::Compact { .. } | Request::SetLimit { .. }) {
            assert_eq!(decoded, Answer::Refused(Refused::Invalid), "the client is no operator");
        }
        let is_done = matches!(decoded, Answer::Pointer(..) | Answer::Bytes(..));
        done[usize::try_from(kind).expect("small")] += u32::from(is_done);
        known.extend(pointer_in(&answer).filter(|_| known.len() < 2000));
        if known.len() >= 2000 && random.chance(4) {
            known.swap_remove(usize::try_from(random.below(2000)).expect("an index"));
        }
        if round % 100 == 0 {
            service.maintain();
        }
        // Random bytes in place of a message.
        if random.chance(50) {
            let mut message: Vec<u8> =
                (0..random.below(60)).map(|_| random.next().to_le_bytes()[0]).collect();
            message.get_mut(1).into_iter().for_each(|version| *version = VERSION);
            let mut answer = Vec::new();
            service.answer(HOSTILE, &message, &mut answer);
            assert!(Answer::decode(&answer).is_some(), "{message:x?}");
        }
    }
    assert!(done[..14].iter().all(|count| *count >= 20), "too little was carried out: {done:?}");
    let report = service.report(HOSTILE).expect("the client has a heap");
    assert!(report.held_bytes <= report.limit_bytes && report.limit_bytes <= MEMORY_BYTES / 2, "{report:?}");
    // The other user's objects are unchanged, and there is room for more.
    for (pointer, stamp) in &honest {
        let answer = ask(&service, HONEST, &Request::Read(*pointer));
        match Answer::decode(&answer) {
            Some(Answer::Bytes(_, _, bytes)) => assert_eq!(bytes[..160], stamp.to_le_bytes().repeat(20)),
            other => panic!("{pointer:?}: {other:?}"),
        }
        let stolen = ask(&service, HOSTILE, &Request::Read(*pointer));
        assert!(!stolen.windows(160).any(|part| part == stamp.to_le_bytes().repeat(20)), "{pointer:?}");
    }
    for _ in 0..1000 {
        assert!(pointer_in(&ask(&service, HONEST, &Request::Allocate { bytes: 1000 })).is_some());
    }
}

/// Makes the system fill every page of a heap that a program has mapped.
fn fill(share: &HeapShare) {
    for fd in &share.fds {
        let memory = Memory::whole_revocable_read_only(fd.try_clone().expect("a descriptor"))
            .expect("the descriptor is open");
        (0..memory.len())
            .step_by(4096)
            .for_each(|at| assert_eq!(memory.load_u64(at) & 1, 0, "no object is there"));
    }
}

/// Bytes of memory that the objects of a heap take, by the system's count.
fn allocated_bytes(share: &HeapShare) -> u64 {
    rustix::fs::fstat(&share.fds[0]).expect("the descriptor is open").st_blocks.cast_unsigned() * 512
}

#[test]
fn a_heap_that_reads_keep_filling_is_closed() {
    let (_target, service) = service();
    ask(&service, HONEST, &Request::Open);
    assert!(pointer_in(&ask(&service, HONEST, &Request::Allocate { bytes: 100 })).is_some());
    let share = service.share(HOSTILE).expect("there is a heap");
    let mut now = Instant::now();
    let mut maintain_next = || {
        now += Duration::from_secs(1);
        service.maintain_at(now);
    };
    // A heap that a program fills now and then stays open.
    for _ in 0..20 {
        // The kernel frees pages that were only read when other processes need memory.
        let fill_again = |_| {
            fill(&share);
            allocated_bytes(&share) >= MEMORY_BYTES
        };
        assert!((0..100).any(fill_again));
        maintain_next();
        assert!(service.memory_bytes().0 >= MEMORY_BYTES / 2, "what was filled counts, up to the limit");
        maintain_next();
        assert!(allocated_bytes(&share) < 1 << 20, "the memory is returned");
        assert!(service.memory_bytes().0 < 1 << 20);
        assert!(!share.is_closed());
    }
    let checks = (0..100).take_while(|_| {
        let is_open = !share.is_closed();
        if is_open {
            fill(&share);
            maintain_next();
        }
        is_open
    });
    assert_eq!(checks.count(), 10);
    assert_eq!(allocated_bytes(&share), 0);
    assert!(
        share.fds.iter().all(|fd| rustix::fs::fstat(fd).expect("the descriptor is open").st_size == 0),
        "no page can be read"
    );
    for request in [Request::Open, Request::Allocate { bytes: 100 }] {
        let answer = ask(&service, HOSTILE, &request);
        assert_eq!(Answer::decode(&answer), Some(Answer::Refused(Refused::Closed)));
    }
    assert!(service.share(HOSTILE).is_err());
    assert!(pointer_in(&ask(&service, HONEST, &Request::Allocate { bytes: 100 })).is_some());
    let limit = Request::SetLimit { tenant: HOSTILE.0, bytes: 1 << 20 };
    assert_eq!(Answer::decode(&ask(&service, OPERATOR, &limit)), Some(Answer::Done(0)));
    assert!(pointer_in(&ask(&service, HOSTILE, &Request::Allocate { bytes: 100 })).is_some());
}
