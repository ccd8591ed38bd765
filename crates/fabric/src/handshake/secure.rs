//! Authentication and encryption of a connection. Both ends prove by a Noise handshake that they
//! hold the cluster key, or the secret of a ticket, and get fresh keys for this connection. With
//! encryption, all later bytes are encrypted by these keys.

use std::io::{self, Read, Write};

use snow::{Builder, HandshakeState, TransportState};

use super::ticket::{Admission, Credential, KIND_MEMBER, KIND_TICKET, TICKET_BYTES, Ticket};
use crate::mutation::Mutation;

/// The first bytes of a connection in both directions.
pub const MAGIC: [u8; 6] = *b"AQFTCP";
/// The version of the protocol.
pub const VERSION: u16 = 3;
/// Bound of the bytes of one encrypted record or handshake message.
const RECORD_BYTES_MAX: usize = 65_535;
/// Bytes that encryption adds to a record.
const TAG_BYTES: usize = 16;
/// Bound of the plain bytes in one record.
const PLAIN_BYTES_MAX: usize = RECORD_BYTES_MAX - TAG_BYTES;
/// Bound of the bytes of a handshake message, far above what any needs.
const HANDSHAKE_BYTES_MAX: usize = 4096;
const PATTERN: &str = "Noise_NNpsk0_25519_AESGCM_BLAKE2s";

/// The cluster key: a host that holds it may lend and borrow memory.
#[derive(Clone, PartialEq, Eq)]
pub struct ClusterKey(pub [u8; 32]);

impl std::fmt::Debug for ClusterKey {
    /// Omits the key, so that it stays out of logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ClusterKey(..)")
    }
}

impl ClusterKey {
    /// Generates a random key.
    ///
    /// # Errors
    /// If the system gives no random bytes.
    pub fn generate() -> io::Result<Self> {
        let mut key = [0; 32];
        rustix::rand::getrandom(&mut key, rustix::rand::GetRandomFlags::empty())?;
        Ok(Self(key))
    }
}

/// Why the handshake failed.
#[derive(Debug, thiserror::Error)]
pub enum SecureError {
    /// The connection failed.
    #[error("{0}")]
    System(#[from] io::Error),
    /// The peer speaks another protocol.
    #[error("it does not begin as this protocol does")]
    Magic,
    /// The peer speaks another version.
    #[error("it speaks version {0} of the protocol, this program speaks version {VERSION}")]
    Version(u16),
    /// The peer presents something that is not known.
    #[error("it presents a credential of kind {0}, which is not known")]
    Credential(u8),
    /// The peer's proof is wrong: it does not hold this cluster's key, or the secret of a ticket
    /// that is admitted.
    #[error("it does not hold this cluster's key or an accepted ticket")]
    WrongKey,
    /// The message is too long for a handshake.
    #[error("a message of {0} bytes is too long for a handshake")]
    TooLong(usize),
}

impl From<snow::Error> for SecureError {
    fn from(_: snow::Error) -> Self {
        Self::WrongKey
    }
}

/// The state of the Noise handshake. The credential is in the prologue, so that both ends prove by
/// the same one.
fn noise(psk: &[u8; 32], presented: &[u8], initiator: bool) -> Result<HandshakeState, SecureError> {
    let parameters = PATTERN.parse().expect("the pattern is a constant");
    let prologue = [&MAGIC, presented].concat();
    let builder = Builder::new(parameters).psk(0, psk)?.prologue(&prologue)?;
    Ok(if initiator { builder.build_initiator()? } else { builder.build_responder()? })
}

/// A connection whose peer is authenticated. Handshake messages on it are encrypted.
#[derive(Debug)]
pub struct SecureChannel<S> {
    stream: S,
    cipher: RecordCipher,
}

/// Runs the initiator's part of the Noise handshake as a member of the cluster.
///
/// # Errors
/// If the connection fails or the peer cannot prove that it holds the key.
pub fn initiate<S: Read + Write>(stream: S, key: &ClusterKey) -> Result<SecureChannel<S>, SecureError> {
    initiate_by(stream, &Credential::Member(key.clone()))
}

/// Runs the initiator's part of the Noise handshake.
///
/// # Errors
/// If the connection fails, or the peer does not admit the credential or cannot derive its secret.
pub fn initiate_by<S: Read + Write>(
    mut stream: S,
    credential: &Credential,
) -> Result<SecureChannel<S>, SecureError> {
    let presented = credential.presented();
    let mut noise = noise(credential.psk(), &presented, true)?;
    let mut buffer = [0; HANDSHAKE_BYTES_MAX];
    let len = noise.write_message(&[], &mut buffer)?;
    let mut first = preamble().to_vec();
    first.extend_from_slice(&presented);
    frame(&mut first, &buffer[..len]);
    stream.write_all(&first)?;
    read_preamble(&mut stream)?;
    let answer = read_frame(&mut stream)?;
    noise.read_message(&answer, &mut buffer)?;
    Ok(SecureChannel { stream, cipher: RecordCipher(Box::new(noise.into_transport_mode()?)) })
}

/// Runs the target's part of the Noise handshake with a member of the cluster.
///
/// # Errors
/// If the connection fails or the peer cannot prove that it holds the key. A peer of another
/// version has got this version's preamble by then; a peer with a wrong key has got an empty
/// answer.
pub fn respond<S: Read + Write>(stream: S, key: &ClusterKey) -> Result<SecureChannel<S>, SecureError> {
    respond_to(stream, key, Admission::Members).map(|(channel, _)| channel)
}

/// Runs the target's part of the Noise handshake. Also returns the ticket of a peer that has one;
/// whether it has expired is not checked.
///
/// # Errors
/// The errors of [`respond`]. A peer that is not admitted gets the answer to a wrong key.
pub fn respond_to<S: Read + Write>(
    mut stream: S,
    key: &ClusterKey,
    admission: Admission,
) -> Result<(SecureChannel<S>, Option<Ticket>), SecureError> {
    let mut buffer = [0; HANDSHAKE_BYTES_MAX];
    let theirs = read_preamble(&mut stream);
    stream.write_all(&preamble())?;
    theirs?;
    let presented = read_credential(&mut stream, key)?;
    let question = read_frame(&mut stream)?;
    let begun = presented.filter(|credential| admits(admission, credential)).map(|credential| {
        let mut noise = noise(credential.psk(), &credential.presented(), false)?;
        noise.read_message(&question, &mut buffer)?;
        Ok((noise, credential))
    });
    let (mut noise, credential) = match begun.unwrap_or(Err(SecureError::WrongKey)) {
        Ok(begun) => begun,
        Err(error) => {
            // An empty answer says that the keys differ.
            stream.write_all(&0_u16.to_le_bytes())?;
            return Err(error);
        }
    };
    let len = noise.write_message(&[], &mut buffer)?;
    let mut answer = Vec::new();
    frame(&mut answer, &buffer[..len]);
    stream.write_all(&answer)?;
    let ticket = match credential {
        Credential::Member(_) => None,
        Credential::Ticket(ticket, _) => Some(ticket),
    };
    let cipher = RecordCipher(Box::new(noise.into_transport_mode()?));
    Ok((SecureChannel { stream, cipher }, ticket))
}

fn admits(admission: Admission, credential: &Credential) -> bool {
    match credential {
        Credential::Member(_) => admission.has_members(),
        Credential::Ticket(ticket, _) => admission.has_service(ticket.service),
    }
}

/// Reads what a peer presents, and derives what it must prove; `None` if it is no credential.
fn read_credential(stream: &mut impl Read, key: &ClusterKey) -> Result<Option<Credential>, SecureError> {
    let mut kind = [0];
    stream.read_exact(&mut kind)?;
    match kind[0] {
        KIND_MEMBER => Ok(Some(Credential::Member(key.clone()))),
        KIND_TICKET => {
            let mut bytes = [0; TICKET_BYTES];
            stream.read_exact(&mut bytes)?;
            Ok(Ticket::parse(&bytes).map(|ticket| Credential::Ticket(ticket, ticket.secret(key))))
        }
        kind => Err(SecureError::Credential(kind)),
    }
}

impl<S: Read + Write> SecureChannel<S> {
    /// Sends an encrypted message.
    ///
    /// # Errors
    /// If the connection fails.
    pub fn send(&mut self, message: &[u8]) -> Result<(), SecureError> {
        let mut record = Vec::new();
        self.cipher.encrypt(message, &mut record);
        Ok(self.stream.write_all(&record)?)
    }

    /// Receives an encrypted message.
    ///
    /// # Errors
    /// If the connection fails, or the message does not decrypt.
    pub fn receive(&mut self) -> Result<Vec<u8>, SecureError> {
        let record = read_frame(&mut self.stream)?;
        let mut message = vec![0; record.len()];
        let len = self.cipher.0.read_message(&record, &mut message)?;
        message.truncate(len);
        Ok(message)
    }

    /// The connection and its cipher.
    pub fn into_parts(self) -> (S, RecordCipher) {
        (self.stream, self.cipher)
    }
}

fn preamble() -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes[..6].copy_from_slice(&MAGIC);
    bytes[6..].copy_from_slice(&VERSION.to_le_bytes());
    bytes
}

fn read_preamble(stream: &mut impl Read) -> Result<(), SecureError> {
    let mut bytes = [0; 8];
    stream.read_exact(&mut bytes)?;
    if bytes[..6] != MAGIC {
        return Err(SecureError::Magic);
    }
    match u16::from_le_bytes([bytes[6], bytes[7]]) {
        VERSION => Ok(()),
        other => Err(SecureError::Version(other)),
    }
}

fn frame(out: &mut Vec<u8>, message: &[u8]) {
    let len = u16::try_from(message.len()).expect("handshake messages are short");
    out.extend_from_slice(&len.to_le_bytes());
    out.extend_from_slice(message);
}

fn read_frame(stream: &mut impl Read) -> Result<Vec<u8>, SecureError> {
    let mut len = [0; 2];
    stream.read_exact(&mut len)?;
    let len = usize::from(u16::from_le_bytes(len));
    if len > HANDSHAKE_BYTES_MAX && !Mutation::TrustHandshakeLength.is_active() {
        return Err(SecureError::TooLong(len));
    }
    if len == 0 {
        return Err(SecureError::WrongKey);
    }
    let mut message = vec![0; len];
    stream.read_exact(&mut message)?;
    Ok(message)
}

/// A cipher for both directions of a connection. A record is a u16 length and as many encrypted
/// bytes.
pub struct RecordCipher(Box<TransportState>);

impl std::fmt::Debug for RecordCipher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RecordCipher(..)")
    }
}

impl RecordCipher {
    /// Encrypts `plain` and appends the records to `out`.
    pub fn encrypt(&mut self, plain: &[u8], out: &mut Vec<u8>) {
        for part in plain.chunks(PLAIN_BYTES_MAX) {
            let at = out.len();
            out.resize(at + 2 + part.len() + TAG_BYTES, 0);
            let len = self
                .0
                .write_message(part, &mut out[at + 2..])
                .expect("the buffer fits, 2^64 records do not come");
            let len = u16::try_from(len).expect("records are that short");
            out[at..at + 2].copy_from_slice(&len.to_le_bytes());
        }
    }

    /// Decrypts the complete records in `sealed` and appends their contents to `plain`. Returns the
    /// number of bytes used.
    ///
    /// # Errors
    /// If a record was changed on the way.
    pub fn decrypt(&mut self, sealed: &[u8], plain: &mut Vec<u8>) -> Result<usize, SecureError> {
        let mut at = 0;
        while let Some(head) = sealed.get(at..at + 2) {
            let len = usize::from(u16::from_le_bytes([head[0], head[1]]));
            let Some(record) = sealed.get(at + 2..at + 2 + len) else {
                break;
            };
            let end = plain.len();
            plain.resize(end + len, 0);
            let opened = self.0.read_message(record, &mut plain[end..])?;
            plain.truncate(end + opened);
            at += 2 + len;
        }
        Ok(at)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use aquifer_mutation::Mutations;

    use super::super::ticket::TicketSecret;
    use super::*;
    use crate::target::{Host, Tenant};

    fn pair(
        one: &ClusterKey,
        other: &ClusterKey,
    ) -> (Result<SecureChannel<UnixStream>, SecureError>, Result<SecureChannel<UnixStream>, SecureError>)
    {
        let (left, right) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let responder = scope.spawn(|| respond(right, other));
            let initiator = initiate(left, one);
            (initiator, responder.join().unwrap())
        })
    }

    #[test]
    fn ends_with_the_same_key_exchange_messages() {
        let key = ClusterKey::generate().unwrap();
        let (one, other) = pair(&key, &key);
        let (mut one, mut other) = (one.unwrap(), other.unwrap());
        one.send(b"hello").unwrap();
        assert_eq!(other.receive().unwrap(), b"hello");
        let (mut left, mut right) = (one.into_parts().1, other.into_parts().1);
        let plain: Vec<u8> = (0..200_000_u32).map(|at| at.to_le_bytes()[0]).collect();
        let (mut sealed, mut opened) = (Vec::new(), Vec::new());
        left.encrypt(&plain, &mut sealed);
        assert!(!sealed.windows(64).any(|window| window == &plain[..64]));
        let first = right.decrypt(&sealed[..100_000], &mut opened).unwrap();
        assert_eq!(right.decrypt(&sealed[first..], &mut opened).unwrap(), sealed.len() - first);
        assert!(opened == plain);
        left.encrypt(b"secret", &mut sealed);
        let last = sealed.len() - 1;
        sealed[last] ^= 1;
        let start = sealed.len() - 2 - 6 - TAG_BYTES;
        assert!(right.decrypt(&sealed[start..], &mut opened).is_err(), "a changed record is noticed");
    }

    #[test]
    fn ends_with_different_keys_notice() {
        let (one, other) = pair(&ClusterKey([1; 32]), &ClusterKey([2; 32]));
        assert!(matches!(one, Err(SecureError::WrongKey)), "{one:?}");
        assert!(matches!(other, Err(SecureError::WrongKey)), "{other:?}");
    }

    const TICKET: Ticket =
        Ticket { tenant: Tenant(70), host: Host(7), epoch: 5, expiry_s: 1_800_000_000, service: 3 };
    const TARGET_KEY: ClusterKey = ClusterKey([1; 32]);

    /// The ticket that a target with this admission finds.
    fn admitted(credential: &Credential, admission: Admission) -> Result<Option<Ticket>, SecureError> {
        let (left, right) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let initiator = scope.spawn(|| initiate_by(left, credential).map(|_| ()));
            let responded = respond_to(right, &TARGET_KEY, admission).map(|(_, ticket)| ticket);
            let initiated = initiator.join().unwrap();
            assert_eq!(initiated.is_ok(), responded.is_ok(), "both ends agree");
            responded
        })
    }

    #[test]
    fn a_ticket_is_admitted_for_its_service_only() {
        let ticket = Credential::Ticket(TICKET, TICKET.secret(&TARGET_KEY));
        let member = Credential::Member(TARGET_KEY.clone());
        for (admission, has_members, has_ticket) in [
            (Admission::Members, true, false),
            (Admission::Tickets(3), false, true),
            (Admission::MembersAndTickets(3), true, true),
            (Admission::Tickets(4), false, false),
            (Admission::MembersAndTickets(4), true, false),
        ] {
            assert_eq!(admitted(&member, admission).is_ok_and(|found| found.is_none()), has_members);
            assert_eq!(admitted(&ticket, admission).is_ok_and(|found| found == Some(TICKET)), has_ticket);
        }
        Mutation::AcceptAnyService.while_active(|| {
            assert!(admitted(&ticket, Admission::Tickets(4)).is_ok(), "the mutation is noticed");
        });
    }

    #[test]
    fn altered_and_foreign_tickets_are_refused() {
        let secret = TICKET.secret(&TARGET_KEY);
        let both = Admission::MembersAndTickets(3);
        let altered = [
            Ticket { tenant: Tenant(0), ..TICKET },
            Ticket { host: Host(8), ..TICKET },
            Ticket { epoch: 6, ..TICKET },
            Ticket { expiry_s: u64::MAX, ..TICKET },
        ];
        for ticket in altered {
            let outcome = admitted(&Credential::Ticket(ticket, secret.clone()), both);
            assert!(matches!(outcome, Err(SecureError::WrongKey)), "{ticket:?}");
        }
        let other_service = Ticket { service: 4, ..TICKET };
        let replayed = admitted(&Credential::Ticket(other_service, secret.clone()), Admission::Tickets(4));
        assert!(matches!(replayed, Err(SecureError::WrongKey)), "the secret is that of another service");
        let foreign = TICKET.secret(&ClusterKey([2; 32]));
        assert!(admitted(&Credential::Ticket(TICKET, foreign), both).is_err());
        let own_key = admitted(&Credential::Ticket(TICKET, TicketSecret(TARGET_KEY.0)), both);
        assert!(matches!(own_key, Err(SecureError::WrongKey)), "the cluster's key proves no ticket");
        let as_member = admitted(&Credential::Member(ClusterKey(secret.0)), both);
        assert!(matches!(as_member, Err(SecureError::WrongKey)), "a ticket does not prove membership");
    }

    #[test]
    fn other_protocols_and_versions_are_distinguished() {
        let hear = |bytes: &[u8]| {
            let (mut left, right) = UnixStream::pair().unwrap();
            left.write_all(bytes).unwrap();
            left.shutdown(std::net::Shutdown::Write).unwrap();
            respond(right, &ClusterKey([0; 32])).unwrap_err()
        };
        assert!(matches!(hear(b"GET / HTTP/1.1\r\n"), SecureError::Magic));
        assert!(matches!(hear(b"AQFTCP\x09\0...."), SecureError::Version(9)));
        assert!(matches!(hear(b"AQFTCP\x03\0\0\xff\xff...."), SecureError::TooLong(65_535)));
        assert!(matches!(hear(b"AQFTCP\x03\0\0\x05\0abcde"), SecureError::WrongKey));
        assert!(matches!(hear(b"AQFTCP\x03\0\x02\x05\0abcde"), SecureError::Credential(2)));
        assert!(matches!(hear(b"AQFTC"), SecureError::System(_)));
        assert!(!format!("{:?}", ClusterKey([7; 32])).contains('7'));
    }
}
