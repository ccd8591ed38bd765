//! The initiator's cache of device keys.
//!
//! A key of the fabric is the same for all initiators, but the key of a window is for one queue
//! pair. So an initiator requests each key once, and the target binds a window to the queue pair.
//! An access beyond the window is refused here: the device would refuse it, too, and break the
//! connection.

use std::collections::HashMap;

use super::messages::OpenedKey;
use aquifer_fabric::keys::{KeyId, Right, covers};
use aquifer_fabric::work::WorkError;

/// An entry of the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct CachedKey {
    opened: OpenedKey,
    /// Value of [`KeyCache::clock`] at the last use.
    used: u64,
    /// One more than the number of the last work that uses the key.
    busy_until: u64,
}

/// The keys for which windows are bound.
#[derive(Debug)]
pub(super) struct KeyCache {
    known: HashMap<KeyId, CachedKey>,
    /// The number of keys that the target permits, as far as is known.
    max: usize,
    clock: u64,
    asked: Option<KeyId>,
    /// Whether accesses are checked here. The target's device checks them in any case.
    checks: bool,
}

/// The next step for a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum KeyLookup {
    /// Use this device key.
    Open(u32),
    Refused(WorkError),
    /// Wait for the target's answer to a request for a key.
    Wait,
    /// Request the key.
    Ask,
    /// Notify the target that this other key is not used any more, then request the key.
    Replace(KeyId),
}

impl KeyCache {
    pub fn new(max: usize) -> Self {
        Self { known: HashMap::new(), max: max.max(1), clock: 0, asked: None, checks: true }
    }

    /// Stops checking accesses here, so that the device must refuse them.
    pub fn skip_checks(&mut self) {
        self.checks = false;
    }

    /// Whether accesses are checked here.
    pub fn checks(&self) -> bool {
        self.checks
    }

    /// Finds a key for work with the given number, which accesses `len` bytes at `addr`. Work
    /// with numbers below `done` has ended.
    pub fn look_up(
        &mut self,
        key_id: KeyId,
        right: Right,
        (addr, len): (u64, u64),
        number: u64,
        done: u64,
    ) -> KeyLookup {
        self.clock += 1;
        if let Some(known) = self.known.get_mut(&key_id) {
            let OpenedKey { addr: base, len: bytes, access, .. } = known.opened;
            if self.checks
                && let Err(error) = covers((base, bytes), access, right, addr, len)
            {
                return KeyLookup::Refused(error);
            }
            known.used = self.clock;
            known.busy_until = number + 1;
            return KeyLookup::Open(known.opened.device_key);
        }
        if self.asked.is_some() {
            return KeyLookup::Wait;
        }
        if self.known.len() < self.max {
            self.asked = Some(key_id);
            return KeyLookup::Ask;
        }
        let idle = self.known.iter().filter(|(_, known)| known.busy_until <= done);
        let Some((oldest, _)) = idle.min_by_key(|(_, known)| known.used) else { return KeyLookup::Wait };
        let oldest = *oldest;
        self.known.remove(&oldest);
        self.asked = Some(key_id);
        KeyLookup::Replace(oldest)
    }

    /// Handles the target's answer. Returns false if the target was not asked.
    pub fn handle_opened(&mut self, key_id: KeyId, opened: Option<OpenedKey>) -> bool {
        let was_asked = self.asked.take_if(|asked| *asked == key_id).is_some();
        if let Some(opened) = opened.filter(|_| was_asked) {
            self.clock += 1;
            self.known.insert(key_id, CachedKey { opened, used: self.clock, busy_until: 0 });
        }
        was_asked
    }

    /// Handles the target's answer that no more keys can be open. Returns false if the target was
    /// not asked, or no key is open at all.
    pub fn handle_full(&mut self, key_id: KeyId) -> bool {
        let was_asked = self.asked.take_if(|asked| *asked == key_id).is_some();
        self.max = self.known.len().max(1);
        was_asked && !self.known.is_empty()
    }

    /// Removes a key that the device refused: it may have been invalidated.
    pub fn forget(&mut self, key_id: KeyId) {
        self.known.remove(&key_id);
    }

    /// Removes all keys, since no window is bound to a new queue pair.
    pub fn clear(&mut self) {
        self.known.clear();
        self.asked = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer_fabric::target::Access;
    use aquifer_fabric::work::Key;

    fn key_id(key: u32) -> KeyId {
        KeyId::at(Key(key), 1000)
    }

    const WHOLE: (u64, u64) = (1000, 100);

    fn opened(device_key: u32) -> OpenedKey {
        OpenedKey { addr: 1000, len: 100, access: Access::READ, device_key }
    }

    fn known(keys: &mut KeyCache, key: Key, number: u64) {
        assert_eq!(keys.look_up(key_id(key.0), Right::Read, WHOLE, number, 0), KeyLookup::Ask);
        assert!(keys.handle_opened(key_id(key.0), Some(opened(key.0 + 1))));
        assert_eq!(keys.look_up(key_id(key.0), Right::Read, WHOLE, number, 0), KeyLookup::Open(key.0 + 1));
    }

    #[test]
    fn a_key_is_asked_for_once_and_checked() {
        let mut keys = KeyCache::new(4);
        assert_eq!(keys.look_up(key_id(7), Right::Read, WHOLE, 0, 0), KeyLookup::Ask);
        assert_eq!(keys.look_up(key_id(7), Right::Read, WHOLE, 0, 0), KeyLookup::Wait);
        assert_eq!(keys.look_up(key_id(8), Right::Read, WHOLE, 0, 0), KeyLookup::Wait, "one at a time");
        assert!(!keys.handle_opened(key_id(9), Some(opened(3))), "the key was not requested");
        assert!(keys.handle_opened(key_id(7), Some(opened(3))));
        assert_eq!(keys.look_up(key_id(7), Right::Read, WHOLE, 0, 0), KeyLookup::Open(3));
        let refused = KeyLookup::Refused(WorkError::RemoteAccess);
        assert_eq!(keys.look_up(key_id(7), Right::Write, WHOLE, 0, 0), refused);
        assert_eq!(keys.look_up(key_id(7), Right::Read, (1001, 100), 0, 0), refused);
        assert_eq!(keys.look_up(key_id(7), Right::Read, (u64::MAX, 2), 0, 0), refused);
        assert_eq!(keys.look_up(key_id(8), Right::Read, WHOLE, 0, 0), KeyLookup::Ask);
        assert!(keys.handle_opened(key_id(8), None));
        assert_eq!(
            keys.look_up(key_id(8), Right::Read, WHOLE, 0, 0),
            KeyLookup::Ask,
            "the key may be bound now"
        );
        keys.clear();
        assert_eq!(keys.look_up(key_id(7), Right::Read, WHOLE, 0, 0), KeyLookup::Ask);
    }

    #[test]
    fn the_least_recently_used_idle_key_is_replaced() {
        let mut keys = KeyCache::new(2);
        known(&mut keys, Key(1), 0);
        known(&mut keys, Key(2), 1);
        assert_eq!(keys.look_up(key_id(3), Right::Read, WHOLE, 2, 0), KeyLookup::Wait, "both are in use");
        assert_eq!(keys.look_up(key_id(3), Right::Read, WHOLE, 2, 2), KeyLookup::Replace(key_id(1)));
        assert!(keys.handle_opened(key_id(3), Some(opened(4))));
        assert_eq!(keys.look_up(key_id(2), Right::Read, WHOLE, 3, 2), KeyLookup::Open(3));
        assert_eq!(
            keys.look_up(key_id(1), Right::Read, WHOLE, 4, 3),
            KeyLookup::Replace(key_id(3)),
            "2 is still in use"
        );
    }

    #[test]
    fn a_target_may_permit_fewer_keys() {
        let mut keys = KeyCache::new(4);
        known(&mut keys, Key(1), 0);
        known(&mut keys, Key(2), 1);
        assert_eq!(keys.look_up(key_id(3), Right::Read, WHOLE, 2, 2), KeyLookup::Ask);
        assert!(!keys.handle_full(key_id(4)), "the key was not requested");
        assert!(keys.handle_full(key_id(3)));
        assert_eq!(keys.look_up(key_id(3), Right::Read, WHOLE, 2, 2), KeyLookup::Replace(key_id(1)));
        assert!(keys.handle_opened(key_id(3), Some(opened(4))));
        keys.clear();
        assert_eq!(keys.look_up(key_id(3), Right::Read, WHOLE, 3, 3), KeyLookup::Ask);
        assert!(!keys.handle_full(key_id(3)), "not even one");
    }
}
