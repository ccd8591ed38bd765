//! Input of the ends of a fabric connection: handshakes, requests, answers and shared memory.

use std::cell::RefCell;
use std::io::{self, Read, Write};

use aquifer_fabric::control::ControlMemory;
use aquifer_fabric::handshake::hello::{self, Hello, Reply, Resume, Welcome};
use aquifer_fabric::handshake::secure;
use aquifer_fabric::handshake::{Refusal, RefusalCode};
use aquifer_fabric::key_table::PlacedTable;
use aquifer_fabric::keys::KeyGrant;
use aquifer_fabric::limits::ANNOUNCED_MAX;
use aquifer_fabric::shm::fuzz_target::{mailbox_seeds, use_mailbox};
use aquifer_fabric::shm::handshake::{self as shm, RegionRequest, ShmRegion, ShmReply, ShmUnits, ShmWelcome};
use aquifer_fabric::tcp::fuzz_target::{answer_seeds, handle_answers, request_seeds, serve_requests};
use aquifer_fabric::{
    Access, Admission, Host, Identity, Key, KeyTable, Limits, Memory, Mutation, Region, Scope, Tenant, Ticket,
};
use aquifer_mutation::Mutations;
use aquifer_secure_channel::{ClusterKey, MAGIC, RecordCipher, SecureError, VERSION};

use crate::Target;

pub(crate) const HELLO: Target = Target {
    name: "tcp-hello",
    run: parse_hello,
    seeds: hellos,
    with_mutation: |work| Mutation::AcceptOverlap.while_active(work),
};

pub(crate) const HANDSHAKE: Target = Target {
    name: "tcp-handshake",
    run: shake_hands,
    seeds: handshakes,
    with_mutation: |work| aquifer_secure_channel::Mutation::TrustHandshakeLength.while_active(work),
};

pub(crate) const REQUESTS: Target = Target {
    name: "tcp-requests",
    run: serve_requests,
    seeds: request_seeds,
    with_mutation: |work| Mutation::IgnoreRangeEnd.while_active(work),
};

pub(crate) const ANSWERS: Target = Target {
    name: "tcp-answers",
    run: handle_answers,
    seeds: answer_seeds,
    with_mutation: |work| Mutation::TrustMessageLength.while_active(work),
};

pub(crate) const SHM_HELLO: Target = Target {
    name: "shm-hello",
    run: parse_shm_hello,
    seeds: shm_hellos,
    with_mutation: |work| Mutation::TrustRegionCount.while_active(work),
};

pub(crate) const SHM_CONTROL: Target = Target {
    name: "shm-control",
    run: read_control,
    seeds: controls,
    with_mutation: |work| Mutation::TrustTableSizes.while_active(work),
};

pub(crate) const MAILBOX: Target = Target {
    name: "shm-mailbox",
    run: use_mailbox,
    seeds: mailbox_seeds,
    with_mutation: |work| Mutation::TrustSlotLength.while_active(work),
};

const WHO: Identity = Identity { host: Host(7), epoch: 1 << 40, tenant: Tenant(70) };

/// Bound of the bytes of a refusal's reason, and of the characters of one escaped byte.
const REASON_BYTES_MAX: usize = 256 * 10;

fn check_regions(regions: &[Region]) {
    assert!(regions.len() <= ANNOUNCED_MAX);
    let mut free_from = 1;
    for region in regions {
        assert!(region.base >= free_from && region.len > 0, "{region:?} overlaps");
        free_from = region.base.checked_add(region.len).expect("a region ends below 2^64");
    }
}

fn check_limits(limits: &Limits) {
    assert!(limits.fault().is_none(), "{limits:?}");
}

/// Parses a message of either end that follows the Noise handshake.
fn parse_hello(bytes: &[u8]) -> bool {
    if let Ok(hello) = hello::parse_hello(bytes) {
        let again = hello::encode_hello(&hello);
        assert_eq!(again.len(), bytes.len());
        assert_eq!(hello::parse_hello(&again), Ok(hello));
        assert!((1..4096).contains(&hello.who.host.0));
        return true;
    }
    match hello::parse_reply(bytes) {
        Ok(Reply::Welcome(welcome)) => {
            check_regions(&welcome.regions);
            check_limits(&welcome.limits);
            let reply = Reply::Welcome(welcome);
            let again = hello::encode_reply(&reply);
            assert_eq!(again.len(), bytes.len());
            assert_eq!(hello::parse_reply(&again), Ok(reply));
            true
        }
        Ok(Reply::Refusal(refusal)) => {
            assert!(refusal.reason.len() <= REASON_BYTES_MAX);
            assert!(!refusal.reason.chars().any(char::is_control));
            true
        }
        Err(_) => false,
    }
}

fn regions() -> Vec<Region> {
    vec![Region { base: 2 << 20, len: 100, key: Key(5) }, Region { base: 6 << 20, len: 1, key: Key(0) }]
}

fn refusal() -> Refusal {
    Refusal { code: RefusalCode::GoingAway, reason: "no, because".to_owned() }
}

fn hellos() -> Vec<(&'static str, Vec<u8>)> {
    let resume = Resume { session: [9; 16], answered: 12, received: 3, taken: 2 };
    let welcome =
        Welcome { session: [3; 16], done: 77, encrypt: false, limits: Limits::default(), regions: regions() };
    let hello = |encrypt, resume| hello::encode_hello(&Hello { who: WHO, encrypt, resume });
    vec![
        ("hello", hello(true, None)),
        ("resume", hello(false, Some(resume))),
        ("welcome", hello::encode_reply(&Reply::Welcome(welcome))),
        ("refusal", hello::encode_reply(&Reply::Refusal(refusal()))),
    ]
}

/// Most bytes that a handshake reads at once.
const HANDSHAKE_READ_MAX: usize = 4096;

/// Magic and version.
const PREAMBLE_BYTES: usize = 8;

/// A connection whose peer sends fixed bytes.
#[derive(Debug)]
struct FixedStream<'a>(&'a [u8]);

impl Read for FixedStream<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        assert!(out.len() <= HANDSHAKE_READ_MAX, "a handshake reads {} bytes at once", out.len());
        self.0.read(out)
    }
}

impl Write for FixedStream<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

const KEY: ClusterKey = ClusterKey([7; 32]);

thread_local! {
    static CIPHER: RefCell<RecordCipher> = RefCell::new(cipher());
}

/// The target's cipher of a connection.
fn cipher() -> RecordCipher {
    let (near, far) = std::os::unix::net::UnixStream::pair().expect("the system has descriptors");
    let responder = std::thread::spawn(|| secure::respond(far, &KEY));
    secure::initiate(near, &KEY).expect("both ends have the key");
    let channel = responder.join().expect("no thread panics");
    channel.expect("both ends have the key").into_parts().1
}

/// Runs handshakes with a peer that does not have the key, and decrypts what it sends.
///
/// Returns whether the bytes begin as a handshake does: no input has the key.
fn shake_hands(bytes: &[u8]) -> bool {
    let responded = secure::respond(FixedStream(bytes), &KEY);
    for admission in [Admission::Tickets(3), Admission::MembersAndTickets(3)] {
        let responded = secure::respond_to(FixedStream(bytes), &KEY, admission);
        assert!(responded.is_err(), "the peer has no secret of a ticket");
    }
    // A target presents no credential.
    let answer = bytes.get(PREAMBLE_BYTES + 1..).map(|frame| [&bytes[..PREAMBLE_BYTES], frame].concat());
    let initiated = secure::initiate(FixedStream(answer.as_deref().unwrap_or(bytes)), &KEY);
    assert!(responded.is_err() && initiated.is_err(), "the peer does not have the key");
    CIPHER.with_borrow_mut(|cipher| {
        let mut plain = Vec::new();
        if let Ok(used) = cipher.decrypt(bytes, &mut plain) {
            assert!(used == 0 && plain.is_empty(), "the peer does not have the key");
        }
    });
    matches!(responded, Err(SecureError::WrongKey))
}

fn handshakes() -> Vec<(&'static str, Vec<u8>)> {
    let with = |credential: &[u8], frame: &[u8]| {
        let length = u16::try_from(frame.len()).expect("it is short").to_le_bytes();
        [&MAGIC[..], &VERSION.to_le_bytes(), credential, &length, frame].concat()
    };
    let ticket = Ticket { tenant: WHO.tenant, host: WHO.host, epoch: 1, expiry_s: 2, service: 3 };
    let ticket = [&[1][..], &ticket.encode()].concat();
    vec![
        ("wrong-key", with(&[0], &[])),
        ("question", with(&[0], &[5; 48])),
        ("ticket", with(&ticket, &[5; 48])),
    ]
}

/// Parses a handshake message of shared memory.
fn parse_shm_hello(bytes: &[u8]) -> bool {
    if let Ok(who) = shm::parse_hello(bytes) {
        let again = shm::encode_hello(who);
        assert_eq!(again.len(), bytes.len());
        assert_eq!(shm::parse_hello(&again), Ok(who));
        return true;
    }
    if let Ok(request) = shm::parse_request(bytes) {
        let again = shm::encode_request(request);
        assert_eq!((again.len(), shm::parse_request(&again)), (bytes.len(), Ok(request)));
        return true;
    }
    if let Ok(region) = shm::parse_region(bytes) {
        let again = shm::encode_region(region.as_ref());
        assert_eq!((again.len(), shm::parse_region(&again)), (bytes.len(), Ok(region)));
        assert!(region.is_none_or(|region| region.len > 0 && region.base.checked_add(region.len).is_some()));
        return true;
    }
    match shm::parse_reply(bytes) {
        Ok(ShmReply::Welcome(welcome)) => {
            check_regions(&welcome.regions);
            check_limits(&welcome.limits);
            let announced = u32::from_le_bytes(bytes[20..24].try_into().expect("4 bytes"));
            assert_eq!(welcome.regions.len(), announced as usize);
            let reply = ShmReply::Welcome(welcome);
            let again = shm::encode_reply(&reply);
            assert_eq!(again.len(), bytes.len());
            assert_eq!(shm::parse_reply(&again), Ok(reply));
            true
        }
        Ok(ShmReply::Refusal(refusal)) => {
            assert!(refusal.reason.len() <= REASON_BYTES_MAX);
            true
        }
        Err(_) => false,
    }
}

fn shm_hellos() -> Vec<(&'static str, Vec<u8>)> {
    let welcome = ShmWelcome {
        slot: 3,
        limits: Limits::default(),
        control_len: 8192,
        mailbox_len: 4096,
        regions: regions(),
    };
    let units = ShmUnits { words_len: 4096, words_at: 64, units: 2, unit_bytes: 4096 };
    let region = ShmRegion {
        slot: 3,
        serial: 4,
        base: 1 << 62,
        len: 8192,
        memory_len: 4096,
        is_writable: true,
        units: Some(units),
    };
    vec![
        ("hello", shm::encode_hello(WHO)),
        ("request", shm::encode_request(RegionRequest { key: Key(5), addr: 2 << 20 })),
        ("region", shm::encode_region(Some(&region))),
        ("no-region", shm::encode_region(None)),
        ("welcome", shm::encode_reply(&ShmReply::Welcome(welcome))),
        ("refusal", shm::encode_reply(&ShmReply::Refusal(refusal()))),
    ]
}

/// Bytes of the largest control memory of the target below.
const CONTROL_BYTES: usize = 8192;
/// The parts of control memory that the input has, in this order: the head, the number of removals,
/// and the endpoints, keys and regions.
const CONTROL_PARTS: [std::ops::Range<usize>; 3] = [0..80, 128..136, 4096..CONTROL_BYTES];
const KEYS: usize = 4;

thread_local! {
    static CONTROL: Memory = Memory::create("fuzz-control", CONTROL_BYTES).expect("the system has memory");
}

/// Opens the control memory of a target, and looks up keys in it.
///
/// The input has the length that the target announces, 4 keys, and parts of the memory.
fn read_control(bytes: &[u8]) -> bool {
    let Some((len, rest)) = bytes.split_first_chunk::<8>() else { return false };
    let Some((keys, mut content)) = rest.split_first_chunk::<{ KEYS * 4 }>() else { return false };
    let mut initial = vec![0; CONTROL_BYTES];
    for part in CONTROL_PARTS {
        let (now, later) = content.split_at(content.len().min(part.len()));
        initial[part.start..part.start + now.len()].copy_from_slice(now);
        content = later;
    }
    let fd = CONTROL.with(|memory| {
        memory.write(0, &initial);
        memory.fd().try_clone_to_owned().expect("the system has descriptors")
    });
    let Ok(control) = ControlMemory::open(fd, u64::from_le_bytes(*len)) else { return false };
    assert_eq!(control.bytes(), u64::from_le_bytes(*len));
    for key in keys.chunks_exact(4).map(|key| u32::from_le_bytes(key.try_into().expect("4 bytes"))) {
        for slot in [key, key & !0x1_ffff, key | 0x1_ffff] {
            let _ = control.lookup(Key(slot));
        }
    }
    for slot in 0..control.endpoints() {
        let _ = (control.state(slot), control.process(slot), control.active(slot));
    }
    // An endpoint makes the same check with the regions of its welcome.
    for region in 0..control.regions() + 2 {
        let Some(table) = control.table(region) else { continue };
        let placed = PlacedTable::at(region, 4 << 20, &table);
        if placed.check(u64::MAX).is_ok() {
            assert!(table.data.start < table.data.end);
            let addr = (4 << 20) + table.data.start;
            let grant = CONTROL.with(|memory| placed.grant(memory, WHO, Key::of_run(0, 1), addr));
            assert!(grant.is_none_or(|grant| grant.len == 4096));
        }
    }
    true
}

fn controls() -> Vec<(&'static str, Vec<u8>)> {
    let with = |fill: &dyn Fn(&ControlMemory), keys: [Key; KEYS]| {
        let control = ControlMemory::create(2, 3, 5).expect("the system has memory");
        fill(&control);
        let fd = control.fd().try_clone_to_owned().expect("the system has descriptors");
        let memory = Memory::whole(fd).expect("it is sealed");
        let mut bytes = control.bytes().to_le_bytes().to_vec();
        bytes.extend(keys.iter().flat_map(|key| key.0.to_le_bytes()));
        for part in CONTROL_PARTS {
            let mut content = vec![0; part.end.min(memory.len()) - part.start];
            memory.read(part.start, &mut content);
            bytes.extend(content);
        }
        while bytes.last() == Some(&0) {
            bytes.pop();
        }
        bytes
    };
    let keys = [Key(5 << 17), Key(5 << 17 | 3), Key(6 << 17 | 7), Key(0)];
    let bind = |control: &ControlMemory| {
        control.open_slot(1, WHO);
        let scopes = [Scope::Anyone, Scope::Tenant(WHO.tenant), Scope::Host(WHO.host)];
        for (key, scope) in keys.into_iter().zip(scopes) {
            control.bind(key, &KeyGrant { base: 1 << 30, len: 4096, access: Access::ALL, scope, region: 1 });
        }
    };
    let publish = |control: &ControlMemory| {
        let table = KeyTable { entries_at: 4096, data: 2 << 20..4 << 20 };
        control.publish_region(1, 7, Some(&table));
    };
    vec![("keys", with(&bind, keys)), ("table", with(&publish, keys))]
}
