//! Golden bytes of `docs/formats/ipc.md`: the packet that wakes a session.
//! A changed packet needs a new version there (`aquifer_ipc::VERSION`).

use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, socketpair};

use crate::bell::{Heard, hear, ring};

#[test]
fn golden_stroke() {
    let (one, other) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .expect("there are descriptors");
    ring(&one);
    assert_eq!(hear(&other), Heard::Stroke);
    ring(&one);
    let mut bytes = [0xff; 8];
    let (length, _) = recv(&other, &mut bytes, RecvFlags::DONTWAIT).expect("it rang");
    assert_eq!(bytes[..length], [0]);
}
