//! Golden bytes of `docs/formats/fabric-shm.md`: handshake, control memory, mailbox, keys.
//! A changed golden file needs a new version there: of the handshake ([`handshake::VERSION`]) or
//! of control memory.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use aquifer_tests_support::golden;

use super::handshake::{self, RegionRequest, ShmRegion, ShmReply, ShmUnits, ShmWelcome};
use super::mailbox::{Direction, MessageRing, mailbox_bytes};
use crate::control::{ControlMemory, FENCED, FREE, OPEN};
use crate::handshake::{Refusal, RefusalCode};
use crate::key_table::KeyTable;
use crate::keys::{KeyGrant, split};
use crate::target::{Access, Host, Identity, Region, Scope, Tenant};
use crate::work::{Key, Limits};
use crate::{KeyEntry, Memory};

const WHO: Identity =
    Identity { host: Host(0x0102), epoch: 0x1112_1314_1516_1718, tenant: Tenant(0x2122_2324) };
const LIMITS: Limits = Limits {
    queue_depth: 0x0102,
    transfer_bytes_max: 0x1112_1314,
    message_bytes_max: 0x2122,
    receive_depth: 0x0304,
    local_regions_max: 0x3132,
};

#[test]
fn golden_handshake() {
    let mut golden = golden!("shm-handshake");
    let hello = handshake::encode_hello(WHO);
    assert_eq!(handshake::parse_hello(&hello), Ok(WHO));
    golden.bytes("hello", &hello);
    let regions = vec![
        Region { base: 0x0001_0203_0405_0607, len: 0x1112_1314, key: Key(0x2122_2324) },
        Region { base: 0x4142_4344_4546_4748, len: 1, key: Key(0) },
    ];
    let welcome = ShmWelcome {
        slot: 0x4142_4344,
        limits: LIMITS,
        control_len: 0x5152_5354_5556_5758,
        mailbox_len: 0x6162_6364_6566_6768,
        regions,
    };
    let lone = ShmWelcome { regions: Vec::new(), ..welcome.clone() };
    let replies = [
        ("welcome", ShmReply::Welcome(welcome)),
        ("welcome of a target without regions", ShmReply::Welcome(lone)),
        ("refusal", ShmReply::Refusal(Refusal { code: RefusalCode::Fenced, reason: "né".into() })),
    ];
    let request = RegionRequest { key: Key(0x0102_0304), addr: 0x1112_1314_1516_1718 };
    let bytes = handshake::encode_request(request);
    assert_eq!(handshake::parse_request(&bytes), Ok(request));
    golden.bytes("request for a region", &bytes);
    let units = ShmUnits {
        words_len: 0x5152_5354,
        words_at: 0x6162_6364,
        units: 0x7172_7374,
        unit_bytes: 0x8182_8384,
    };
    let movable = ShmRegion {
        slot: 0x0102,
        serial: 0x1112_1314_1516_1718,
        base: 0x2122_2324_2526_2728,
        len: 0x3132_3334,
        memory_len: 0x4142_4344,
        is_writable: true,
        units: Some(units),
    };
    let fixed = ShmRegion { memory_len: movable.len, is_writable: false, units: None, ..movable };
    for (name, region) in
        [("movable region", Some(&movable)), ("fixed region", Some(&fixed)), ("no region", None)]
    {
        let bytes = handshake::encode_region(region);
        assert_eq!(handshake::parse_region(&bytes), Ok(region.copied()), "{name}");
        golden.bytes(name, &bytes);
    }
    for (name, reply) in replies {
        let bytes = handshake::encode_reply(&reply);
        assert_eq!(handshake::parse_reply(&bytes), Ok(reply), "{name}");
        golden.bytes(name, &bytes);
    }
    golden.check();
}

fn bytes_of(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    memory.read(0, &mut bytes);
    bytes
}

#[test]
fn golden_control_memory() {
    let mut golden = golden!("shm-control");
    let control = ControlMemory::create(3, 2, 3).expect("there is memory");
    control.open_slot(0, WHO);
    control.set_process(0, 0x3132_3334);
    control.active(0).store(0x4142_4344_4546_4748, Relaxed);
    control.open_slot(2, WHO);
    control.set_state(2, FENCED);
    control.next_stamp();
    let table = KeyTable { entries_at: 0x5152_5354, data: 0x6162_6364..0x7172_7374 };
    control.publish_region(0, 0x8182_8384_8586_8788, Some(&table));
    control.publish_region(1, 0x9192_9394, None);
    control.remove_region(1);
    let scopes = [Scope::Anyone, Scope::Tenant(Tenant(0x2122_2324)), Scope::Host(Host(0x0102))];
    let accesses = [
        Access { read: true, write: false, atomic: false },
        Access { read: false, write: true, atomic: false },
        Access { read: false, write: false, atomic: true },
    ];
    let mut bound = Vec::new();
    for (slot, (scope, access)) in (1..).zip(scopes.into_iter().zip(accesses)) {
        let key = Key(0x0304 << 17 | slot);
        let grant =
            KeyGrant { base: 0x0102_0304_0506_0708, len: 0x1112_1314_1516_1718, access, scope, region: 0x3f };
        control.bind(key, &grant);
        bound.push((key, grant));
    }

    let fd = control.fd().try_clone_to_owned().expect("there are descriptors");
    let length = usize::try_from(control.bytes()).expect("control memory is small");
    let bytes = bytes_of(&Memory::from_fd(fd, length).expect("the descriptor is a memfd"));
    golden.memory(&bytes);
    golden.text("bytes", &length.to_string());
    golden.text("states", &format!("free {FREE}, open {OPEN}, fenced {FENCED}"));

    // A copy of the bytes must parse.
    let copy = Memory::create("copy", length).expect("there is memory");
    copy.write(0, &bytes);
    let fd = copy.fd().try_clone_to_owned().expect("there are descriptors");
    let opened = ControlMemory::open(fd, control.bytes()).expect("the copy is control memory");
    assert!(opened.is_alive() && opened.endpoints() == 3);
    assert_eq!((opened.state(0), opened.state(1), opened.state(2)), (OPEN, FREE, FENCED));
    assert_eq!((opened.process(0), opened.next_stamp()), (0x3132_3334, 1));
    assert_eq!((opened.table(0), opened.table(1)), (Some(table), None));
    assert_eq!((opened.serial(0), opened.serial(1)), (0x8182_8384_8586_8788, 0));
    assert_eq!((opened.regions(), opened.removals()), (2, 1));
    for (key, grant) in bound {
        assert_eq!(opened.lookup(key), Some(grant));
        assert_eq!(split(key), ((key.0 & 0x1ffff) as usize, 0x0304));
    }
    control.set_dead();
    assert!(!control.is_alive());
    golden.check();
}

#[test]
fn golden_mailbox() {
    let mut golden = golden!("shm-mailbox");
    let limits = Limits { message_bytes_max: 100, receive_depth: 3, ..LIMITS };
    let memory = Arc::new(Memory::create("mailbox", mailbox_bytes(&limits)).expect("there is memory"));
    let mut bytes = Vec::new();
    for (direction, stamp) in [(Direction::ToTarget, 0x0102_0304), (Direction::ToInitiator, 0x1112_1314)] {
        let mut sender = MessageRing::new(&memory, &limits, direction);
        let mut receiver = MessageRing::new(&memory, &limits, direction);
        for text in [&b"first message"[..], b"second"] {
            let length = u32::try_from(text.len()).expect("the text is short");
            // SAFETY: the pointer and the length are those of a slice.
            assert_eq!(unsafe { sender.put(stamp, text.as_ptr(), length) }, Ok(true));
        }
        assert_eq!(receiver.oldest_stamp(), Ok(Some(stamp)));
        let mut message = Vec::new();
        assert_eq!(receiver.pop(&mut message), Ok(true));
        assert_eq!(message, b"first message");
        bytes = bytes_of(&memory);
    }
    golden.memory(&bytes);
    golden.text("bytes", &bytes.len().to_string());
    golden.check();
}

#[test]
fn golden_keys_of_tables() {
    let mut golden = golden!("key-table");
    for class in [0, 5, 9] {
        let key = Key::of_run(class, 0xffff_ffff);
        assert_eq!((key.class(), key.is_table_key()), (Some(class), true));
        golden.bytes(&format!("key of class {class}"), &key.0.to_le_bytes());
        let bytes = 4096 << class;
        assert_eq!(key.run((1 << 40) + 2 * bytes - 1), Some((1 << 40) + bytes..(1 << 40) + 2 * bytes));
    }
    let key = Key::of_run(3, 0x0102_0304);
    let entries = [
        ("entry", KeyEntry::open(key, Tenant(0x2122_2324))),
        ("entry without a key", KeyEntry::closed(Tenant(0x2122_2324))),
        ("entry of user 0", KeyEntry::open(key, Tenant(0))),
        ("entry without an owner", KeyEntry::default()),
    ];
    for (name, entry) in entries {
        golden.bytes(name, &entry.0.to_le_bytes());
    }
    assert_eq!(entries[0].1.key(), key);
    assert!(entries[0].1.is_owned_by(Tenant(0x2122_2324)) && entries[3].1.is_unowned());
    golden.text("entries of a row", &crate::key_table::ROW_ENTRIES.to_string());
    golden.text("bytes of a row's data", &crate::key_table::ROW_BYTES.to_string());
    golden.check();
}
