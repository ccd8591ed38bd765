//! The shared-memory handshake with wrong, truncated, mutated and random bytes, in both directions.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aquifer_fabric::handshake::Refusal;
use aquifer_fabric::shm::handshake::{self, HandshakeError, RegionRequest, ShmRegion, ShmReply, ShmWelcome};
use aquifer_fabric::shm::{self, ShmOptions, ShmTarget};
use aquifer_fabric::{
    Access, EndpointError, Host, Identity, Key, Memory, Region, Registration, RemoteAddr, Scope, Target,
    TargetError, Tenant, UnitMap, Verb, WindowSpec, Work,
};
use proptest::prelude::*;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketType,
};

const WHO: Identity = Identity { host: Host(7), epoch: 1 << 40, tenant: Tenant(9) };

fn welcome() -> ShmWelcome {
    let region = |base| Region { base, len: 4096, key: Key(77) };
    ShmWelcome {
        slot: 3,
        limits: ShmOptions::default().limits,
        control_len: 8192,
        mailbox_len: 4096,
        regions: vec![region(1 << 21), region(1 << 22)],
    }
}

fn corpus() -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/handshake");
    let files = std::fs::read_dir(folder).unwrap().map(Result::unwrap);
    let mut corpus: Vec<_> = files
        .map(|file| (file.file_name().into_string().unwrap(), std::fs::read(file.path()).unwrap()))
        .collect();
    corpus.sort();
    assert!(corpus.len() >= 20, "the corpus is missing");
    corpus
}

#[test]
fn messages_parse_as_encoded() {
    assert_eq!(handshake::parse_hello(&handshake::encode_hello(WHO)), Ok(WHO));
    let replies = [ShmReply::Welcome(welcome()), ShmReply::Refusal(Refusal::other("go away"))];
    for reply in replies {
        assert_eq!(handshake::parse_reply(&handshake::encode_reply(&reply)), Ok(reply));
    }
    let long = ShmReply::Refusal(Refusal::other("é".repeat(300)));
    let cut = handshake::parse_reply(&handshake::encode_reply(&long));
    assert_eq!(cut, Ok(ShmReply::Refusal(Refusal::other("é".repeat(128)))));
}

/// The bytes are the format: this version must always write the same.
#[test]
fn the_corpus_parses_as_its_names_say() {
    for (name, bytes) in corpus() {
        let (hello, reply) = (handshake::parse_hello(&bytes), handshake::parse_reply(&bytes));
        let what = name.split_once('-').unwrap().0;
        assert_eq!(hello.is_ok(), what == "hello", "{name}: {hello:?}");
        assert_eq!(reply.is_ok(), what == "reply", "{name}: {reply:?}");
    }
    let hello = corpus().into_iter().find(|(name, _)| name == "hello-plain.bin").unwrap().1;
    assert_eq!(hello, handshake::encode_hello(WHO));
}

#[test]
fn every_cut_and_every_extension_is_refused() {
    let hello = handshake::encode_hello(WHO);
    let reply = handshake::encode_reply(&ShmReply::Welcome(welcome()));
    for len in 0..hello.len() {
        let cut = handshake::parse_hello(&hello[..len]);
        assert!(matches!(cut, Err(HandshakeError::Length { .. })), "{len} bytes: {cut:?}");
    }
    for len in 0..reply.len() {
        let cut = handshake::parse_reply(&reply[..len]);
        assert!(matches!(cut, Err(HandshakeError::Length { .. })), "{len} bytes: {cut:?}");
    }
    assert!(handshake::parse_hello(&[hello, vec![0]].concat()).is_err());
    assert!(handshake::parse_reply(&[reply, vec![0]].concat()).is_err());
}

proptest! {
    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        prop_assert!(handshake::parse_hello(&bytes).is_err());
        prop_assert!(handshake::parse_reply(&bytes).is_err());
    }

    #[test]
    fn mutated_messages_parse_to_something_sane_or_are_refused(
        pick in any::<prop::sample::Index>(),
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let corpus = corpus();
        let mut bytes = corpus[pick.index(corpus.len())].1.clone();
        for (place, value) in changes {
            if !bytes.is_empty() {
                let place = place.index(bytes.len());
                bytes[place] = value;
            }
        }
        if let Ok(who) = handshake::parse_hello(&bytes) {
            prop_assert!((1..=4095).contains(&who.host.0));
        }
        if let Ok(ShmReply::Welcome(welcome)) = handshake::parse_reply(&bytes) {
            prop_assert!(welcome.limits.queue_depth <= aquifer_fabric::limits::QUEUE_DEPTH_LIMIT);
            prop_assert!(welcome.regions.len() <= aquifer_fabric::limits::ANNOUNCED_MAX);
            let apart = |pair: &[Region]| pair[0].base + pair[0].len <= pair[1].base;
            prop_assert!(welcome.regions.windows(2).all(apart));
        }
    }
}

fn socket() -> OwnedFd {
    rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap()
}

/// Sends bytes to a target and returns its answer.
fn send(path: &Path, bytes: &[u8]) -> Vec<u8> {
    let socket = socket();
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    rustix::net::send(&socket, bytes, SendFlags::NOSIGNAL).unwrap();
    let mut answer = vec![0; 4096];
    let (len, _) = rustix::net::recv(&socket, &mut answer[..], RecvFlags::empty()).unwrap();
    answer.truncate(len);
    answer
}

fn node(options: ShmOptions) -> (tempfile::TempDir, PathBuf, ShmTarget) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("node");
    let target = ShmTarget::listen(&path, options).unwrap();
    (folder, path, target)
}

#[test]
fn a_target_refuses_wrong_bytes_with_a_reason_and_keeps_serving() {
    let (_folder, path, _target) = node(ShmOptions::default());
    let good = handshake::encode_hello(WHO);
    let with = |place: usize, value: u8| {
        let mut bytes = good.clone();
        bytes[place] = value;
        bytes
    };
    let strangers = [
        (with(8, 2), "speaks handshake version 2"),
        (with(0, b'X'), "does not begin as"),
        (with(10, 2), "kind 2 was not expected"),
        (with(17, 0x10), "host number is out of bounds"),
        (with(16, 0), "host number is out of bounds"),
        (good[..20].to_vec(), "has 20 bytes, it should have 32"),
        (good[..3].to_vec(), "has 3 bytes"),
        (vec![0xFF; 4096], "does not begin as"),
        (vec![b'A'; 60_000], "does not begin as"),
    ];
    for (bytes, expected) in strangers {
        match handshake::parse_reply(&send(&path, &bytes)) {
            Ok(ShmReply::Refusal(refusal)) => assert!(refusal.reason.contains(expected), "{refusal}"),
            other => panic!("{expected}: {other:?}"),
        }
    }
    // Peers that hang up at once or send nothing must not delay others.
    let silent: Vec<OwnedFd> = (0..aquifer_fabric::handshake::PENDING_LIMIT / 2)
        .map(|_| {
            let socket = socket();
            rustix::net::connect(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
            socket
        })
        .collect();
    assert!(shm::connect(&path, WHO).is_ok());
    drop(silent);
    assert!(shm::connect(&path, WHO).is_ok());
}

#[test]
fn another_user_is_refused() {
    let own = rustix::process::getuid().as_raw();
    let (_folder, path, _target) = node(ShmOptions { peer_uid: own + 1, ..ShmOptions::default() });
    match shm::connect(&path, WHO) {
        Err(EndpointError::Refused { refusal, .. }) => {
            assert_eq!(refusal.reason, format!("user {own} may not connect, only user {}", own + 1));
        }
        other => panic!("{other:?}"),
    }
    let mode = std::os::unix::fs::PermissionsExt::mode(&path.metadata().unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn a_path_is_taken_over_only_from_a_dead_target() {
    let (folder, path, target) = node(ShmOptions::default());
    let taken = ShmTarget::listen(&path, ShmOptions::default()).unwrap_err();
    assert!(matches!(&taken, TargetError::System { source, .. }
        if source.kind() == std::io::ErrorKind::AddrInUse && source.to_string().contains("node")));
    drop(target);
    assert!(!path.exists(), "a target that ends removes its socket");
    let abandoned = socket();
    rustix::net::bind(&abandoned, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    drop(abandoned);
    let target = ShmTarget::listen(&path, ShmOptions::default()).unwrap();
    assert!(shm::connect(&path, WHO).is_ok());
    drop(target);
    std::fs::write(&path, "precious").unwrap();
    assert!(ShmTarget::listen(&path, ShmOptions::default()).is_err());
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    let long = folder.path().join("x".repeat(200));
    assert!(ShmTarget::listen(&long, ShmOptions::default()).is_err());
    assert!(matches!(shm::connect(&long, WHO), Err(EndpointError::Unreachable { .. })));
}

#[test]
fn options_out_of_bounds_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let default = ShmOptions::default();
    let limits = default.limits;
    let faulty = [
        ShmOptions { endpoints_max: aquifer_fabric::limits::ENDPOINTS_LIMIT + 1, ..default.clone() },
        ShmOptions { endpoints_max: 0, ..default.clone() },
        ShmOptions { regions_max: aquifer_fabric::REGIONS_LIMIT + 1, ..default.clone() },
        ShmOptions { windows_max: usize::MAX, ..default.clone() },
        ShmOptions { limits: aquifer_fabric::Limits { receive_depth: 4097, ..limits }, ..default.clone() },
        ShmOptions { limits: aquifer_fabric::Limits { queue_depth: 0, ..limits }, ..default },
    ];
    for options in faulty {
        let refused = ShmTarget::listen(&folder.path().join("node"), options).unwrap_err();
        assert!(refused.to_string().contains("it must be between 1 and"), "{refused}");
    }
}

/// A target that answers one connection with these bytes and descriptors. Returns the endpoint's
/// error.
fn impostor(answer: &[u8], fds: &[BorrowedFd<'_>]) -> EndpointError {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("impostor");
    let listener = socket();
    rustix::net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let socket = rustix::net::accept(&listener).unwrap();
            let mut hello = [0; 100];
            let mut ancillary = rustix::net::RecvAncillaryBuffer::default();
            rustix::net::recvmsg(
                &socket,
                &mut [IoSliceMut::new(&mut hello)],
                &mut ancillary,
                RecvFlags::empty(),
            )
            .unwrap();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() {
                assert!(ancillary.push(SendAncillaryMessage::ScmRights(fds)));
            }
            if !answer.is_empty() {
                let message = [IoSlice::new(answer)];
                rustix::net::sendmsg(&socket, &message, &mut ancillary, SendFlags::NOSIGNAL).unwrap();
            }
        });
        shm::connect(&path, WHO).map(|_| ()).unwrap_err()
    })
}

#[test]
fn an_initiator_refuses_invalid_answers() {
    let memory = Memory::create("zeros", 1 << 20).unwrap();
    let open = rustix::fs::memfd_create("open", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&open, 1 << 20).unwrap();
    let good = handshake::encode_reply(&ShmReply::Welcome(welcome()));
    let mut newer = good.clone();
    newer[8] = 4;
    let (sealed, open) = (memory.fd(), open.as_fd());
    let cases: [(&[u8], Vec<BorrowedFd<'_>>, &str); 7] = [
        (&newer, vec![], "speaks handshake version 4"),
        (b"HTTP/1.1 400 Bad Request", vec![], "does not begin as"),
        (&good[..60], vec![], "has 60 bytes"),
        (&good, vec![], "came with 0 descriptors instead of 2"),
        (&good, vec![sealed; 3], "came with 3 descriptors"),
        (&good, vec![sealed; 2], "control memory has a wrong magic number"),
        (&good, vec![open; 2], "not sealed against shrinking"),
    ];
    for (answer, fds, expected) in cases {
        match impostor(answer, &fds) {
            EndpointError::Protocol { reason, .. } => {
                assert!(reason.contains(expected), "{reason}")
            }
            other => panic!("{expected}: {other}"),
        }
    }
    assert!(matches!(impostor(b"", &[]), EndpointError::Unreachable { .. }));
}

#[test]
fn scope_of_a_region_is_kept_in_what_is_announced() {
    let (_folder, path, target) = node(ShmOptions::default());
    let memory = std::sync::Arc::new(Memory::create("region", 4096).unwrap());
    target.register(memory, Access::READ, Scope::Host(Host(8))).unwrap();
    let endpoint = shm::connect(&path, WHO).unwrap();
    assert_eq!(endpoint.regions(), []);
    let admitted = shm::connect(&path, Identity { host: Host(8), ..WHO }).unwrap();
    assert_eq!(admitted.regions().len(), 1);
    drop(admitted);
    while target.endpoints() > 1 {
        std::thread::yield_now();
    }
    assert_eq!(target.endpoints(), 1);
}

/// A connection that has received its welcome.
fn connected(path: &Path) -> OwnedFd {
    let socket = socket();
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    rustix::net::send(&socket, &handshake::encode_hello(WHO), SendFlags::NOSIGNAL).unwrap();
    let (bytes, fds) = receive(&socket);
    assert!(matches!(handshake::parse_reply(&bytes), Ok(ShmReply::Welcome(_))));
    assert_eq!(fds.len(), 2);
    socket
}

/// Receives a message with its descriptors.
fn receive(socket: &OwnedFd) -> (Vec<u8>, Vec<OwnedFd>) {
    let mut bytes = vec![0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut ancillary = rustix::net::RecvAncillaryBuffer::new(&mut space);
    let received = rustix::net::recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    );
    bytes.truncate(received.unwrap().bytes);
    let rights = ancillary.drain().filter_map(|message| match message {
        rustix::net::RecvAncillaryMessage::ScmRights(fds) => Some(fds.collect::<Vec<_>>()),
        _ => None,
    });
    (bytes, rights.flatten().collect())
}

/// Requests the region in which a key opens an address.
fn request(socket: &OwnedFd, key: Key, addr: u64) -> (Option<ShmRegion>, Vec<OwnedFd>) {
    let request = handshake::encode_request(RegionRequest { key, addr });
    rustix::net::send(socket, &request, SendFlags::NOSIGNAL).unwrap();
    let (bytes, fds) = receive(socket);
    (handshake::parse_region(&bytes).unwrap(), fds)
}

#[test]
fn a_peer_cannot_map_read_only_memory_for_writing() {
    const BYTES: usize = 8192;
    let (_folder, path, target) = node(ShmOptions::default());
    let memory = Arc::new(Memory::create("region", BYTES).unwrap());
    let words = Arc::new(Memory::create("words", 4096).unwrap());
    let map = UnitMap { words, at: 0, units: 1, unit_bytes: 4096 };
    let all = Arc::clone(&memory);
    let region = target.register(all, Access::READ, Scope::Anyone).unwrap();
    let plain = Registration::plain(memory, Access::ALL, Scope::Anyone);
    let movable = target.register_as(Registration { map: Some(map), ..plain }).unwrap();
    let range = region.base..region.base + 64;
    let writes = WindowSpec { range, access: Access::READ_WRITE, scope: Scope::Anyone };
    let writes = target.bind(&writes).unwrap();
    let socket = connected(&path);

    let (announced, mut fds) = request(&socket, region.key, region.base);
    let announced = announced.unwrap();
    assert_eq!((announced.is_writable, announced.memory_len, fds.len()), (false, BYTES as u64, 1));
    let fd = fds.remove(0);
    let refused = Memory::from_fd(fd.try_clone().unwrap(), BYTES).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::PermissionDenied);
    assert!(Memory::from_fd_read_only(fd, BYTES).is_ok());

    let (announced, mut fds) = request(&socket, writes, region.base);
    assert!(announced.unwrap().is_writable && Memory::from_fd(fds.remove(0), BYTES).is_ok());
    let (announced, mut fds) = request(&socket, movable.key, movable.base);
    assert!(announced.unwrap().is_writable && fds.len() == 2);
    assert!(Memory::from_fd(fds.remove(1), 4096).is_err(), "only the owner writes the words");
    assert!(Memory::from_fd(fds.remove(0), BYTES).is_ok());

    for (key, addr) in [(Key(0), region.base), (Key(region.key.0 ^ 1 << 20), region.base), (Key(1 << 31), 0)]
    {
        assert_eq!(request(&socket, key, addr).0, None, "{key:?}");
    }
    target.deregister(region.key).unwrap();
    assert_eq!(request(&socket, region.key, region.base).0, None);
    assert_eq!(request(&socket, writes, region.base).0, None);
    assert_eq!(target.endpoints(), 1, "the connection stays");
    rustix::net::send(&socket, b"nonsense", SendFlags::NOSIGNAL).unwrap();
    while target.endpoints() > 0 {
        std::thread::yield_now();
    }
}

/// More regions than a target announces, and than an endpoint keeps mapped.
#[test]
fn thousands_of_regions_are_used_through_one_endpoint() {
    const REGIONS: usize = 1500;
    let options = ShmOptions { regions_max: REGIONS, ..ShmOptions::default() };
    let (_folder, path, target) = node(options);
    let memory = Arc::new(Memory::create("region", 4096).unwrap());
    let register = || target.register(Arc::clone(&memory), Access::ALL, Scope::Anyone).unwrap();
    let regions: Vec<Region> = (0..REGIONS).map(|_| register()).collect();
    let mut endpoint = shm::connect(&path, WHO).unwrap();
    assert_eq!(endpoint.regions(), &regions[..aquifer_fabric::limits::ANNOUNCED_MAX]);
    for (total, region) in (0..).zip(regions.iter().chain(regions.iter().rev())) {
        let remote = RemoteAddr { addr: region.base, key: region.key };
        let verb = Verb::FetchAdd { remote, add: 1 };
        endpoint.post(&[Work { id: 0, verb, signalled: true }]).unwrap();
        let mut done = Vec::new();
        assert_eq!(endpoint.poll(&mut done, 1), 1);
        assert_eq!(done[0].outcome, Ok(total));
    }
}
