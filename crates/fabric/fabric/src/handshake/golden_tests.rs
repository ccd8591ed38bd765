//! Golden bytes of `docs/formats/fabric-tcp.md`: the beginning of a connection.
//! A changed golden file or recorded flight needs a new version there ([`VERSION`]).

use std::io::{Cursor, Read, Write};
use std::os::unix::net::UnixStream;

use aquifer_secure_channel::{ClusterKey, MAGIC, VERSION};
use aquifer_tests_support::golden;

use super::hello::{Hello, Reply, Resume, Welcome, encode_hello, encode_reply, parse_hello, parse_reply};
use super::secure::{initiate, initiate_by, respond};
use super::{Credential, Refusal, RefusalCode, Ticket};
use crate::target::{Host, Identity, Region, Tenant};
use crate::work::{Key, Limits};

const KEY: ClusterKey = ClusterKey([0x5a; 32]);

#[test]
fn golden_hello_and_replies() {
    let mut golden = golden!("handshake");
    let who = Identity { host: Host(0x0102), epoch: 0x1112_1314_1516_1718, tenant: Tenant(0x2122_2324) };
    let resume = Resume {
        session: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
        answered: 0x3132_3334_3536_3738,
        received: 0x4142_4344_4546_4748,
        taken: 0x5152_5354_5556_5758,
    };
    let hellos = [
        ("hello", Hello { who, encrypt: false, resume: None }),
        ("hello of one that encrypts", Hello { who, encrypt: true, resume: None }),
        ("hello of one that resumes", Hello { who, encrypt: false, resume: Some(resume) }),
    ];
    for (name, hello) in hellos {
        let bytes = encode_hello(&hello);
        assert_eq!(parse_hello(&bytes), Ok(hello), "{name}");
        golden.bytes(name, &bytes);
    }
    let limits = Limits {
        queue_depth: 0x0102,
        transfer_bytes_max: 0x1112_1314,
        message_bytes_max: 0x2122,
        receive_depth: 0x0304,
        local_regions_max: 0x3132,
    };
    let regions = vec![
        Region { base: 0x0001_0203_0405_0607, len: 0x1112_1314, key: Key(0x2122_2324) },
        Region { base: 0x4142_4344_4546_4748, len: 1, key: Key(0) },
    ];
    let welcome =
        Welcome { session: resume.session, done: 0x6162_6364_6566_6768, encrypt: true, limits, regions };
    let lone = Welcome { encrypt: false, regions: Vec::new(), ..welcome.clone() };
    let replies = [
        ("welcome", Reply::Welcome(welcome)),
        ("welcome of a target without regions", Reply::Welcome(lone)),
        ("refusal", Reply::Refusal(Refusal { code: RefusalCode::Fenced, reason: "né".into() })),
    ];
    for (name, reply) in replies {
        let bytes = encode_reply(&reply);
        assert_eq!(parse_reply(&bytes), Ok(reply), "{name}");
        golden.bytes(name, &bytes);
    }
    golden.check();
}

#[test]
fn golden_tickets() {
    let mut golden = golden!("ticket");
    let ticket = Ticket {
        tenant: Tenant(0x2122_2324),
        host: Host(0x0102),
        epoch: 0x1112_1314_1516_1718,
        expiry_s: 0x3132_3334_3536_3738,
        service: 0x41,
    };
    assert_eq!(Ticket::parse(&ticket.encode()), Some(ticket));
    golden.bytes("ticket", &ticket.encode());
    golden.bytes("its secret", &ticket.secret(&KEY).0);
    let mut initiator = Recorded::new(Vec::new());
    assert!(initiate_by(&mut initiator, &Credential::Ticket(ticket, ticket.secret(&KEY))).is_err());
    golden.bytes("first flight without its Noise message", &initiator.1[..35]);
    assert_eq!(initiator.1.len(), 35 + 48);
    golden.check();
}

/// One end of a connection whose other end is a recording.
struct Recorded(Cursor<Vec<u8>>, Vec<u8>);

impl Recorded {
    fn new(bytes: Vec<u8>) -> Self {
        Self(Cursor::new(bytes), Vec::new())
    }
}

impl Read for &mut Recorded {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        self.0.read(out)
    }
}

impl Write for &mut Recorded {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.1.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A recorded first flight of an initiator with [`KEY`]: preamble, credential, length, Noise
/// message.
/// A target accepts it only with the same pattern, prologue and key.
const FIRST_FLIGHT: &str = concat!(
    "4151465443500300003000eb27c18632a8d3726e7cced38bfc11c8b41450ec7c",
    "b32f194ca20f430ceaa005a3fcefaf9e4f4aceb8ad5d88b6e40bd1",
);

#[test]
fn golden_first_flights() {
    let digits =
        |at: usize| u8::from_str_radix(&FIRST_FLIGHT[at..at + 2], 16).expect("the flight is hexadecimal");
    let flight: Vec<u8> = (0..FIRST_FLIGHT.len()).step_by(2).map(digits).collect();
    let mut target = Recorded::new(flight.clone());
    respond(&mut target, &KEY).expect("the recorded initiator has the key");
    // A flight is 8 bytes, a length, and a message of that length, which contains random bytes.
    assert_eq!(target.1[..8], *b"AQFTCP\x03\0");
    assert_eq!(target.1[8..10], 48_u16.to_le_bytes());
    // The initiator says that it is a member, too.
    assert_eq!(target.1.len() + 1, flight.len());
    assert_eq!(flight[..11], *b"AQFTCP\x03\0\0\x30\0");

    let mut initiator = Recorded::new(target.1);
    // The recorded answer is to another first flight: its proof fails here.
    assert!(initiate(&mut initiator, &KEY).is_err());
    assert_eq!(initiator.1[..11], flight[..11]);
    assert_eq!(initiator.1.len(), flight.len());

    let mut stranger = Recorded::new(flight);
    assert!(respond(&mut stranger, &ClusterKey([1; 32])).is_err());
    assert_eq!(stranger.1, b"AQFTCP\x03\0\0\0", "length 0 tells a stranger that its key is another");
    assert_eq!((MAGIC, VERSION), (*b"AQFTCP", 3));
}

#[test]
fn golden_sealed_record() {
    let (left, right) = UnixStream::pair().expect("there are descriptors");
    let target = std::thread::spawn(move || respond(right, &KEY).expect("the initiator has the key"));
    let mut initiator = initiate(left, &KEY).expect("the target has the key");
    let mut target = target.join().expect("the thread does not panic");
    initiator.send(b"hello").expect("the target is there");
    assert_eq!(target.receive().expect("the message was sent"), b"hello");
    let mut record = Vec::new();
    initiator.into_parts().1.encrypt(b"1234567", &mut record);
    assert_eq!(record[..2], 23_u16.to_le_bytes(), "7 bytes and a tag of 16");
    assert_eq!(record.len(), 25);
}
