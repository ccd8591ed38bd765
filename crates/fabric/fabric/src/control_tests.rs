//! Tests of control memory, from within.

use proptest::prelude::*;

use super::*;

const WHO: Identity = Identity { host: Host(9), epoch: 3, tenant: Tenant(4) };

fn reopen(control: &ControlMemory) -> Result<ControlMemory, ControlError> {
    ControlMemory::open(control.fd().try_clone_to_owned().unwrap(), control.bytes())
}

#[test]
fn drain_waits_for_a_batch_until_its_slot_is_freed() {
    let control = ControlMemory::create(4, 2, 6).unwrap();
    control.open_slot(2, WHO);
    assert!(control.drain(2, None), "no batch is in flight");
    control.active(2).fetch_add(1, Ordering::SeqCst);
    assert!(!control.drain(2, Some(Duration::from_millis(1))), "a batch in flight delays it");
    let waiter = std::thread::scope(|scope| {
        let waiter = scope.spawn(|| control.drain(2, None));
        control.free_slot(2);
        waiter.join().unwrap()
    });
    assert!(waiter, "a freed slot does not");
    assert_eq!(control.state(2), FREE);
    assert_eq!(control.active(2).load(Ordering::SeqCst) & 1, 0);
}

#[test]
fn a_grant_survives_the_table() {
    let control = ControlMemory::create(1, 64, 6).unwrap();
    let peer = reopen(&control).unwrap();
    let key = Key((5 << 17) | 69);
    let scopes = [Scope::Anyone, Scope::Tenant(Tenant(u32::MAX)), Scope::Host(Host(4095))];
    for (scope, access) in scopes.into_iter().zip([Access::READ, Access::READ_WRITE, Access::ALL]) {
        let grant = KeyGrant { base: 1 << 50, len: u64::MAX, access, scope, region: 63 };
        control.bind(key, &grant);
        assert_eq!(peer.lookup(key), Some(grant));
        assert_eq!(peer.lookup(Key((4 << 17) | 69)), None);
        assert!(!control.unbind(Key((4 << 17) | 69)) && !control.unbind(Key(5 << 17 | 70)));
        assert!(control.unbind(key) && !control.unbind(key));
        assert_eq!(peer.lookup(key), None);
    }
}

#[test]
fn another_version_and_other_sizes_are_refused() {
    let control = ControlMemory::create(4, 2, 6).unwrap();
    let fd = || control.fd().try_clone_to_owned().unwrap();
    for len in [0, 1, control.bytes() - 1, control.bytes() + 1, 1 << 40, u64::MAX] {
        assert!(ControlMemory::open(fd(), len).is_err(), "{len} bytes");
    }
    assert!(reopen(&control).is_ok());
    control.u32(VERSION_AT).store(3, Ordering::SeqCst);
    assert!(
        reopen(&control).unwrap_err().to_string().contains("has version 3, this program knows version 2")
    );
}

proptest! {
    /// Any contents of the tables are looked up without a panic and without an access outside.
    #[test]
    fn any_control_memory_is_read_without_a_panic(
        words in proptest::collection::vec((0_usize..700, any::<u64>()), 0..40),
        keys in proptest::collection::vec(any::<u32>(), 0..40),
    ) {
        let control = ControlMemory::create(2, 3, 5).unwrap();
        let size = control.memory.len();
        for (word, value) in words {
            control.memory.atomic_u64(word * 8 % size).store(value, Ordering::Relaxed);
        }
        if let Ok(peer) = reopen(&control) {
            prop_assert_eq!((peer.endpoints, peer.keys, peer.regions), (2, 8, 3));
            for region in 0..5 {
                prop_assert!(region < 3 || peer.serial(region) == 0);
                let _ = (peer.table(region), peer.removals());
            }
        }
        for key in keys {
            for index in 0..10 {
                let grant = control.lookup(Key((key & !0xFF) | index));
                let checked = grant.map(|grant| grant.check(WHO, crate::keys::Right::Read, 1, 2));
                prop_assert!(checked.is_none() || index < 8);
            }
        }
    }
}
