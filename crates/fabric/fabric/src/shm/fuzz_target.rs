//! The fuzz target for mailboxes.

use std::cell::RefCell;
use std::sync::Arc;

use super::mailbox::{Direction, MessageRing, mailbox_bytes};
use crate::Memory;
use crate::work::Limits;

const MESSAGE_BYTES_MAX: u32 = 40;
const LIMITS: Limits = Limits {
    queue_depth: 1,
    transfer_bytes_max: 1,
    message_bytes_max: MESSAGE_BYTES_MAX,
    receive_depth: 3,
    local_regions_max: 1,
};
/// Bytes of the input before the memory.
const HEAD_BYTES: usize = 8;

thread_local! {
    static MAILBOX: RefCell<Arc<Memory>> = RefCell::new(Arc::new(
        Memory::private("fuzz-mailbox", mailbox_bytes(&LIMITS)).expect("the system has memory"),
    ));
}

/// Receives and sends messages while the peer writes anything into the mailbox.
///
/// The input has 8 steps and the memory of the mailbox. A step below 128 receives a message, and
/// another sends a message of as many bytes above 128. Returns whether no step found damage.
///
/// # Panics
/// If a check fails.
#[must_use]
pub fn use_mailbox(bytes: &[u8]) -> bool {
    let Some((steps, content)) = bytes.split_first_chunk::<HEAD_BYTES>() else { return false };
    MAILBOX.with_borrow(|memory| {
        let mut initial = vec![0; memory.len()];
        let used = content.len().min(memory.len());
        initial[..used].copy_from_slice(&content[..used]);
        memory.write(0, &initial);
        let mut incoming = MessageRing::new(memory, &LIMITS, Direction::ToTarget);
        let mut outgoing = MessageRing::new(memory, &LIMITS, Direction::ToInitiator);
        let mut is_sound = true;
        for step in steps {
            match step.checked_sub(128) {
                None => {
                    let mut message = Vec::new();
                    let popped = incoming.pop(&mut message);
                    assert!(message.len() <= MESSAGE_BYTES_MAX as usize);
                    assert!(popped == Ok(true) || message.is_empty());
                    is_sound &= popped.is_ok();
                }
                Some(len) => {
                    let message = [5; MESSAGE_BYTES_MAX as usize];
                    let len = u32::from(len).min(MESSAGE_BYTES_MAX);
                    // SAFETY: the pointer is that of an array of at least `len` bytes.
                    is_sound &= unsafe { outgoing.put(1, message.as_ptr(), len) }.is_ok();
                }
            }
        }
        // The ring to the target comes first. Only its count of taken messages may have changed.
        let mut now = vec![0; memory.len()];
        memory.read(0, &mut now);
        let half = memory.len() / 2;
        assert!(now[8..half] == initial[8..half], "the reader has written into its ring");
        is_sound
    })
}

/// Mailboxes with messages.
#[must_use]
pub fn mailbox_seeds() -> Vec<(&'static str, Vec<u8>)> {
    let memory =
        Arc::new(Memory::private("fuzz-seed", mailbox_bytes(&LIMITS)).expect("the system has memory"));
    let mut peer = MessageRing::new(&memory, &LIMITS, Direction::ToTarget);
    let mut with = |steps: [u8; HEAD_BYTES], message: &[u8]| {
        let len = u32::try_from(message.len()).expect("the message is short");
        // SAFETY: the pointer and the length are those of a slice.
        let put = unsafe { peer.put(1, message.as_ptr(), len) };
        assert_eq!(put, Ok(true));
        let mut bytes = vec![0; memory.len()];
        memory.read(0, &mut bytes);
        while bytes.last() == Some(&0) {
            bytes.pop();
        }
        [&steps[..], &bytes].concat()
    };
    vec![
        ("one", with([0, 0, 133, 134, 0, 0, 0, 0], b"hello")),
        ("two", with([0, 128, 0, 168, 140, 150, 0, 0], &[3; MESSAGE_BYTES_MAX as usize])),
    ]
}
