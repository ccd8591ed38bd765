//! The messages after the handshake: requests for keys, and the messages of users. They are parsed
//! as hostile.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use aquifer_fabric::keys::KeyId;
use aquifer_fabric::target::Access;
use aquifer_fabric::work::Key;

use super::mutation::Mutation;

/// Bytes of the head of a message.
pub(super) const HEAD_BYTES: usize = 32;

/// A message from the initiator to the target.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum InitiatorMessage<'a> {
    /// Requests a key.
    Ask(KeyId),
    /// Reports that a key is not used any more.
    Forget(KeyId),
    /// A message of the user with its number. The target answers it.
    Message(u64, &'a [u8]),
    /// The number of the target's messages that were taken since the session began.
    Taken(u64),
}

/// A message from the target to the initiator.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum TargetMessage<'a> {
    /// The range and rights of a key; `None` if the key is not for this initiator.
    Opened(KeyId, Option<OpenedKey>),
    /// The initiator must first forget another key, because no more can be open.
    Full(KeyId),
    /// Whether there was room for the message with this number.
    Delivered(u64, bool),
    /// A message of the user with its number.
    Message(u64, &'a [u8]),
}

/// The range that a key opens, and the device's key for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct OpenedKey {
    pub addr: u64,
    pub len: u64,
    pub access: Access,
    pub device_key: u32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Head {
    kind: u8,
    /// Rights: 1 READ, 2 WRITE, 4 atomics. In `DELIVERED`: whether there was room.
    flags: u8,
    reserved: U16,
    key: U32,
    device_key: U32,
    reserved2: U32,
    /// A message number or an address.
    number: U64,
    len: U64,
}

const ASK: u8 = 1;
const FORGET: u8 = 2;
const MESSAGE: u8 = 3;
const TAKEN: u8 = 4;
const OPENED: u8 = 5;
const DELIVERED: u8 = 6;
const FULL: u8 = 7;

fn put(out: &mut Vec<u8>, head: &Head, message: &[u8]) {
    out.clear();
    out.extend_from_slice(head.as_bytes());
    out.extend_from_slice(message);
}

fn head(kind: u8, key: Key, number: u64) -> Head {
    Head {
        kind,
        flags: 0,
        reserved: 0.into(),
        key: key.0.into(),
        device_key: 0.into(),
        reserved2: 0.into(),
        number: number.into(),
        len: 0.into(),
    }
}

impl<'a> InitiatorMessage<'a> {
    /// Encodes the message into `out`, which is replaced.
    pub fn write(&self, out: &mut Vec<u8>) {
        match *self {
            Self::Ask(key_id) => put(out, &head(ASK, key_id.key, key_id.start), &[]),
            Self::Forget(key_id) => put(out, &head(FORGET, key_id.key, key_id.start), &[]),
            Self::Message(number, bytes) => put(out, &head(MESSAGE, Key(0), number), bytes),
            Self::Taken(count) => put(out, &head(TAKEN, Key(0), count), &[]),
        }
    }

    /// Parses a message; `None` if an initiator sends no such message.
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        let (head, message) = Head::ref_from_prefix(bytes).ok()?;
        let key_id = KeyId::at(Key(head.key.get()), head.number.get());
        match head.kind {
            ASK => Some(Self::Ask(key_id)),
            FORGET => Some(Self::Forget(key_id)),
            MESSAGE => Some(Self::Message(head.number.get(), message)),
            TAKEN => Some(Self::Taken(head.number.get())),
            _ => None,
        }
    }
}

impl<'a> TargetMessage<'a> {
    /// Encodes the message into `out`, which is replaced.
    pub fn write(&self, out: &mut Vec<u8>) {
        match *self {
            Self::Opened(key_id, opened) => {
                let mut head = head(OPENED, key_id.key, opened.map_or(key_id.start, |opened| opened.addr));
                if let Some(OpenedKey { len, access, device_key, .. }) = opened {
                    head.len = len.into();
                    head.device_key = device_key.into();
                    head.flags =
                        u8::from(access.read) | u8::from(access.write) << 1 | u8::from(access.atomic) << 2;
                }
                put(out, &head, &[]);
            }
            Self::Full(key_id) => put(out, &head(FULL, key_id.key, key_id.start), &[]),
            Self::Delivered(number, had_room) => {
                let mut head = head(DELIVERED, Key(0), number);
                head.flags = had_room.into();
                put(out, &head, &[]);
            }
            Self::Message(number, bytes) => put(out, &head(MESSAGE, Key(0), number), bytes),
        }
    }

    /// Parses a message; `None` if a target sends no such message.
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        let (head, message) = Head::ref_from_prefix(bytes).ok()?;
        let key_id = KeyId::at(Key(head.key.get()), head.number.get());
        match head.kind {
            OPENED => {
                let access = Access {
                    read: head.flags & 1 != 0,
                    write: head.flags & 2 != 0,
                    atomic: head.flags & 4 != 0,
                };
                let opened = OpenedKey {
                    addr: head.number.get(),
                    len: head.len.get(),
                    access,
                    device_key: head.device_key.get(),
                };
                let is_open = access != Access { read: false, write: false, atomic: false }
                    || (opened.device_key != 0 && Mutation::OpenWithoutRights.is_active());
                Some(Self::Opened(key_id, is_open.then_some(opened)))
            }
            FULL => Some(Self::Full(key_id)),
            DELIVERED => Some(Self::Delivered(head.number.get(), head.flags != 0)),
            MESSAGE => Some(Self::Message(head.number.get(), message)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key_id(key: u32) -> KeyId {
        KeyId::at(Key(key), 0)
    }

    #[test]
    fn messages_parse_as_encoded() {
        let opened =
            OpenedKey { addr: 7 << 40, len: 4096, access: Access::READ_WRITE, device_key: 0x1234_5678 };
        let mut bytes = Vec::new();
        for request in [
            InitiatorMessage::Ask(key_id(9)),
            InitiatorMessage::Ask(KeyId::at(Key::of_run(3, 5), 77 << 20)),
            InitiatorMessage::Forget(key_id(8)),
            InitiatorMessage::Message(3, b"hello"),
            InitiatorMessage::Taken(u64::MAX),
        ] {
            request.write(&mut bytes);
            assert_eq!(InitiatorMessage::parse(&bytes), Some(request));
            assert_eq!(InitiatorMessage::parse(&bytes[..HEAD_BYTES - 1]), None);
        }
        for answer in [
            TargetMessage::Opened(key_id(9), Some(opened)),
            TargetMessage::Opened(key_id(9), None),
            TargetMessage::Full(key_id(3)),
            TargetMessage::Full(KeyId::at(Key::of_run(9, 5), 77 << 20)),
            TargetMessage::Delivered(4, true),
            TargetMessage::Delivered(4, false),
            TargetMessage::Message(1, b""),
        ] {
            answer.write(&mut bytes);
            assert_eq!(TargetMessage::parse(&bytes), Some(answer));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_parse_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = (InitiatorMessage::parse(&bytes), TargetMessage::parse(&bytes));
        }
    }
}
