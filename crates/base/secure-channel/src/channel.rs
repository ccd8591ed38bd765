//! The handshake of a connection, and the encrypted messages after it.

use std::io::{self, Read, Write};

use snow::{Builder, HandshakeState};

use crate::{Mutation, RecordCipher};

/// The first bytes of a connection in both directions.
pub const MAGIC: [u8; 6] = *b"AQFTCP";
/// The version of the protocol.
pub const VERSION: u16 = 3;
/// Maximum bytes of a handshake message, far above the length of any message.
const HANDSHAKE_BYTES_MAX: usize = 4096;
/// The Noise protocol of the handshake.
const PATTERN: &str = "Noise_NNpsk0_25519_AESGCM_BLAKE2s";

/// Why the handshake failed.
#[derive(Debug, thiserror::Error)]
pub enum SecureError {
    /// The connection failed.
    #[error("{0}")]
    System(#[from] io::Error),
    /// The peer speaks another protocol.
    #[error("the peer speaks another protocol")]
    Magic,
    /// The peer speaks another version.
    #[error("the peer speaks version {0} of the protocol, this program speaks version {VERSION}")]
    Version(u16),
    /// The peer presents a credential of an unknown kind.
    #[error("the peer presents a credential of unknown kind {0}")]
    Credential(u8),
    /// The peer's proof is wrong: it does not hold this cluster's key, or the secret of a ticket
    /// that is admitted.
    #[error("the peer does not hold this cluster's key or an accepted ticket")]
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

/// The state of the Noise handshake. The credential is in the prologue, so that both ends prove
/// that they use the same credential.
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

/// The credential of an initiator, and the secret by which the initiator must prove it.
#[derive(Clone, Debug)]
pub struct Presented<T> {
    /// The bytes of the credential on the connection.
    pub bytes: Vec<u8>,
    /// The secret that both ends must hold.
    pub secret: [u8; 32],
    /// The meaning of the credential to the caller of [`respond`].
    pub meaning: T,
}

/// Runs the initiator's part of the handshake. `presented` is the credential, by which the target
/// finds the secret.
///
/// # Errors
/// If the connection fails, or the peer does not accept the credential or does not hold the secret.
pub fn initiate<S: Read + Write>(
    mut stream: S,
    presented: &[u8],
    secret: &[u8; 32],
) -> Result<SecureChannel<S>, SecureError> {
    let mut noise = noise(secret, presented, true)?;
    let mut buffer = [0; HANDSHAKE_BYTES_MAX];
    let len = noise.write_message(&[], &mut buffer)?;
    let mut first = preamble().to_vec();
    first.extend_from_slice(presented);
    frame(&mut first, &buffer[..len]);
    stream.write_all(&first)?;
    read_preamble(&mut stream)?;
    let answer = read_frame(&mut stream)?;
    noise.read_message(&answer, &mut buffer)?;
    Ok(SecureChannel { stream, cipher: RecordCipher::new(noise.into_transport_mode()?) })
}

/// Runs the target's part of the handshake. `read_presented` reads the initiator's credential, and
/// returns `None` if the credential is not accepted. Also returns the meaning of the credential.
///
/// # Errors
/// If the connection fails, or the peer cannot prove that it holds the secret. A peer of another
/// version has received this version's preamble by then. A peer that is not accepted has received
/// the answer to a wrong key, which is empty.
pub fn respond<S: Read + Write, T>(
    mut stream: S,
    read_presented: impl FnOnce(&mut S) -> Result<Option<Presented<T>>, SecureError>,
) -> Result<(SecureChannel<S>, T), SecureError> {
    let mut buffer = [0; HANDSHAKE_BYTES_MAX];
    let theirs = read_preamble(&mut stream);
    stream.write_all(&preamble())?;
    theirs?;
    let presented = read_presented(&mut stream)?;
    let request = read_frame(&mut stream)?;
    let begun = presented.map(|Presented { bytes, secret, meaning }| {
        let mut noise = noise(&secret, &bytes, false)?;
        noise.read_message(&request, &mut buffer)?;
        Ok((noise, meaning))
    });
    let (mut noise, meaning) = match begun.unwrap_or(Err(SecureError::WrongKey)) {
        Ok(begun) => begun,
        Err(error) => {
            // An empty answer reports that the keys differ.
            stream.write_all(&0_u16.to_le_bytes())?;
            return Err(error);
        }
    };
    let len = noise.write_message(&[], &mut buffer)?;
    let mut answer = Vec::new();
    frame(&mut answer, &buffer[..len]);
    stream.write_all(&answer)?;
    let cipher = RecordCipher::new(noise.into_transport_mode()?);
    Ok((SecureChannel { stream, cipher }, meaning))
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
        self.cipher.decrypt_record(&record)
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

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::ClusterKey;

    /// The byte that is presented.
    const KIND: u8 = 7;

    type Outcome = Result<SecureChannel<UnixStream>, SecureError>;

    fn respond_by(stream: UnixStream, key: &ClusterKey) -> Outcome {
        let read_presented = |stream: &mut UnixStream| {
            let mut kind = [0];
            stream.read_exact(&mut kind)?;
            Ok((kind == [KIND]).then(|| Presented { bytes: kind.to_vec(), secret: key.0, meaning: () }))
        };
        respond(stream, read_presented).map(|(channel, ())| channel)
    }

    fn pair(kind: u8, one: &ClusterKey, other: &ClusterKey) -> (Outcome, Outcome) {
        let (left, right) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let responder = scope.spawn(|| respond_by(right, other));
            let initiator = initiate(left, &[kind], &one.0);
            (initiator, responder.join().unwrap())
        })
    }

    #[test]
    fn ends_with_the_same_key_exchange_messages() {
        let key = ClusterKey::generate().unwrap();
        let (one, other) = pair(KIND, &key, &key);
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
        // The length and the tag of a record are 18 bytes.
        let start = sealed.len() - 6 - 18;
        assert!(right.decrypt(&sealed[start..], &mut opened).is_err(), "a changed record is noticed");
    }

    #[test]
    fn ends_with_different_keys_notice() {
        let keys = [ClusterKey([1; 32]), ClusterKey([2; 32])];
        for (one, other) in [pair(KIND, &keys[0], &keys[1]), pair(KIND + 1, &keys[0], &keys[0])] {
            assert!(matches!(one, Err(SecureError::WrongKey)), "{one:?}");
            assert!(matches!(other, Err(SecureError::WrongKey)), "{other:?}");
        }
    }

    #[test]
    fn other_protocols_and_versions_are_distinguished() {
        let hear = |bytes: &[u8]| {
            let (mut left, right) = UnixStream::pair().unwrap();
            left.write_all(bytes).unwrap();
            left.shutdown(std::net::Shutdown::Write).unwrap();
            respond_by(right, &ClusterKey([0; 32])).unwrap_err()
        };
        assert!(matches!(hear(b"GET / HTTP/1.1\r\n"), SecureError::Magic));
        assert!(matches!(hear(b"AQFTCP\x09\0...."), SecureError::Version(9)));
        assert!(matches!(hear(b"AQFTCP\x03\0\x07\xff\xff...."), SecureError::TooLong(65_535)));
        assert!(matches!(hear(b"AQFTCP\x03\0\x07\x05\0abcde"), SecureError::WrongKey));
        assert!(matches!(hear(b"AQFTC"), SecureError::System(_)));
    }
}
