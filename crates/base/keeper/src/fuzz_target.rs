//! The fuzz target for frames from daemons to the keeper.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use aquifer_ipc::{FRAME_BYTES_MAX, Frame, HeldItem, HeldKind, KeeperShare};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};

use super::{DaemonConnection, KeeperServer};
use crate::exit_watcher::ExitWatcher;
use crate::orphans::OrphanWatch;

/// Connections of the input's daemons.
const DAEMONS: usize = 2;
const FRAMES_MAX: usize = 64;

fn connection(number: u64) -> (DaemonConnection, OwnedFd) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (socket, far) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .expect("the system has descriptors");
    let pid = u32::try_from(number).expect("a small number");
    (DaemonConnection { socket, number, pid, process: None, share: None }, far)
}

/// The numbers of all items of the shares.
fn items(keeper: &KeeperServer) -> Vec<(HeldKind, u64)> {
    keeper
        .shares
        .values()
        .flat_map(|share| share.items.iter().map(|(item, _)| (item.kind, item.id)))
        .collect()
}

/// Handles frames of two daemons. A daemon changes only items of its own share.
///
/// The input has frames, each with the number of the daemon as u8 and the length as u16. Returns
/// whether each packet is a frame.
///
/// # Panics
/// If a check fails.
#[must_use]
pub fn handle_frames(bytes: &[u8]) -> bool {
    let mut keeper = KeeperServer {
        grace: Duration::from_secs(1),
        items_max: super::ITEMS_MAX,
        connections: Vec::new(),
        last_number: 0,
        shares: BTreeMap::new(),
        exits: ExitWatcher::default(),
        next_accept: Instant::now(),
        next_owner_check: Instant::now(),
        orphans: OrphanWatch::new(),
    };
    let mut daemons: [_; DAEMONS] = std::array::from_fn(|at| connection(at as u64 + 1));
    let mut answer = vec![0; FRAME_BYTES_MAX + 1];
    let mut rest = bytes;
    let mut is_valid = true;
    for _ in 0..FRAMES_MAX {
        let Some(([daemon, low, high], later)) = rest.split_first_chunk::<3>() else { break };
        let length = usize::from(u16::from_le_bytes([*low, *high]));
        let (packet, later) = later.split_at(length.min(later.len()));
        rest = later;
        let (connection, far) = &mut daemons[usize::from(*daemon) % DAEMONS];
        if send(&*far, packet, SendFlags::NOSIGNAL).is_err() {
            break;
        }
        is_valid &= Frame::parse(packet).is_ok();
        let before = items(&keeper);
        let is_open = keeper.handle_frame(connection);
        let after = items(&keeper);
        let is_own = |item: &&(HeldKind, u64)| {
            item.0 == HeldKind::Orphan
                || (connection.share.is_some() && KeeperShare::of(item.0, item.1) == connection.share)
        };
        let changed = before.iter().filter(|item| !after.contains(item));
        let changed = changed.chain(after.iter().filter(|item| !before.contains(item)));
        for item in changed.collect::<Vec<_>>() {
            assert!(is_own(&item), "{item:?} is of another share than {:?}", connection.share);
        }
        while matches!(recv(&*far, answer.as_mut_slice(), RecvFlags::DONTWAIT), Ok((_, 1..))) {}
        if !is_open {
            break;
        }
    }
    let [(one, _), (other, _)] = &daemons;
    assert!(one.share.is_none() || one.share != other.share, "both own {:?}", one.share);
    is_valid
}

/// Frames of daemons.
#[must_use]
pub fn frame_seeds() -> Vec<(&'static str, Vec<u8>)> {
    let put = |frames: &[(u8, Frame)]| {
        let mut bytes = Vec::new();
        for (daemon, frame) in frames {
            let mut packet = Vec::new();
            frame.write(&mut packet);
            bytes.push(*daemon);
            bytes.extend(u16::try_from(packet.len()).expect("it is short").to_le_bytes());
            bytes.extend(packet);
        }
        bytes
    };
    let item = |kind, id| HeldItem { kind, id, pid: 0, uid: 1000, record: "{}".to_owned() };
    let hold = |kind, id| Frame::Hold(item(kind, id));
    let agent = [
        (0, Frame::Claim(KeeperShare::Agent)),
        (0, hold(HeldKind::Host, 0)),
        (0, hold(HeldKind::Program, 7)),
        (1, hold(HeldKind::Orphan, 5)),
        (0, Frame::Release(HeldKind::Program, 7)),
        (1, Frame::Sync),
    ];
    let nodes = [
        (0, Frame::Claim(KeeperShare::Node(2))),
        (1, Frame::Claim(KeeperShare::Node(3))),
        (0, hold(HeldKind::Node, 2)),
        (1, hold(HeldKind::Node, 3)),
        (1, Frame::WatchDaemon { pid: 7, name: "node-3".to_owned() }),
    ];
    vec![("agent", put(&agent)), ("nodes", put(&nodes))]
}
