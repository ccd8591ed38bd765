//! Golden bytes of `docs/formats/ipc.md`: the packet that wakes a session.
//! A changed packet needs a new version there (`aquifer_ipc::VERSION`).

use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, socketpair};

use crate::wakeup::{WakeupEvent, notify, receive};

#[test]
fn golden_wakeup() {
    let (one, other) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .expect("there are descriptors");
    notify(&one);
    assert_eq!(receive(&other), WakeupEvent::Wakeup);
    notify(&one);
    let mut bytes = [0xff; 8];
    let (length, _) = recv(&other, &mut bytes, RecvFlags::DONTWAIT).expect("a wakeup is waiting");
    assert_eq!(bytes[..length], [0]);
}
