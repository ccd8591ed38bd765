//! The fuzz target for messages between the ends of a connection.

use aquifer_fabric::keys::{KeyId, Right};
use aquifer_fabric::target::Access;
use aquifer_fabric::work::Key;

use crate::key_cache::{KeyCache, KeyLookup};
use crate::messages::{InitiatorMessage, OpenedKey, TargetMessage};

const KEYS: usize = 3;
const NO_ACCESS: Access = Access { read: false, write: false, atomic: false };

/// Parses a message of each end, and handles that of the target.
///
/// The first byte selects the key that the initiator has requested. Returns whether an end sends
/// the rest as a message.
///
/// # Panics
/// If a check fails.
#[must_use]
pub fn parse(bytes: &[u8]) -> bool {
    let Some((asked, bytes)) = bytes.split_first() else { return false };
    let initiator = InitiatorMessage::parse(bytes);
    let mut again = Vec::new();
    if let Some(message) = initiator {
        message.write(&mut again);
        assert_eq!(InitiatorMessage::parse(&again), Some(message));
        assert!(again.len() <= bytes.len());
    }
    let target = TargetMessage::parse(bytes);
    if let Some(message) = target {
        message.write(&mut again);
        assert_eq!(TargetMessage::parse(&again), Some(message));
        assert!(again.len() <= bytes.len());
        handle(&message, KeyId::at(Key((*asked).into()), 0));
    }
    initiator.is_some() || target.is_some()
}

/// Handles a message at an initiator that has requested a key.
fn handle(message: &TargetMessage<'_>, asked: KeyId) {
    let mut cache = KeyCache::new(KEYS);
    assert_eq!(cache.look_up(asked, Right::Read, (0, 1), 0, 0), KeyLookup::Ask);
    match *message {
        TargetMessage::Opened(key_id, opened) => {
            assert_eq!(cache.handle_opened(key_id, opened), key_id == asked);
            let Some(OpenedKey { addr, len, access, device_key }) = opened else { return };
            assert!(access != NO_ACCESS, "a key without rights is open");
            if key_id != asked {
                return;
            }
            let inside = cache.look_up(asked, Right::Read, (addr, len), 1, 1);
            assert_eq!(inside == KeyLookup::Open(device_key), access.read);
            if let Some(longer) = len.checked_add(1) {
                let outside = cache.look_up(asked, Right::Read, (addr, longer), 2, 1);
                assert!(matches!(outside, KeyLookup::Refused(_)), "an access beyond the window");
            }
        }
        TargetMessage::Full(key_id) => {
            assert!(!cache.handle_full(key_id), "no key is open");
        }
        TargetMessage::Delivered(..) | TargetMessage::Message(..) => {}
    }
}

/// Messages of both ends.
#[must_use]
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let key_id = KeyId::at(Key(9), 0);
    let run = KeyId::at(Key::of_run(3, 5), 77 << 20);
    let opened = OpenedKey { addr: 7 << 40, len: 4096, access: Access::READ_WRITE, device_key: 0x1234_5678 };
    let mut bytes = Vec::new();
    let mut with_key = |write: &dyn Fn(&mut Vec<u8>)| {
        write(&mut bytes);
        [&[9], &bytes[..]].concat()
    };
    vec![
        ("ask", with_key(&|out| InitiatorMessage::Ask(key_id).write(out))),
        ("forget", with_key(&|out| InitiatorMessage::Forget(run).write(out))),
        ("message", with_key(&|out| InitiatorMessage::Message(3, b"hello").write(out))),
        ("taken", with_key(&|out| InitiatorMessage::Taken(u64::MAX).write(out))),
        ("opened", with_key(&|out| TargetMessage::Opened(key_id, Some(opened)).write(out))),
        ("refused", with_key(&|out| TargetMessage::Opened(key_id, None).write(out))),
        ("full", with_key(&|out| TargetMessage::Full(key_id).write(out))),
        ("delivered", with_key(&|out| TargetMessage::Delivered(4, true).write(out))),
    ]
}
