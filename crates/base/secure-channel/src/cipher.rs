//! Encryption of the bytes of a connection after its handshake.

use snow::TransportState;

use crate::SecureError;

/// Maximum bytes of one encrypted record.
const RECORD_BYTES_MAX: usize = 65_535;
/// Bytes that encryption adds to a record.
const TAG_BYTES: usize = 16;
/// Maximum plain bytes in one record.
const PLAIN_BYTES_MAX: usize = RECORD_BYTES_MAX - TAG_BYTES;

/// The cipher for both directions of a connection. A record is a u16 length, followed by this
/// number of encrypted bytes.
pub struct RecordCipher(Box<TransportState>);

impl std::fmt::Debug for RecordCipher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RecordCipher(..)")
    }
}

impl RecordCipher {
    /// The cipher after a handshake.
    pub(super) fn new(transport: TransportState) -> Self {
        Self(Box::new(transport))
    }

    /// Decrypts the contents of one record, without its length.
    pub(super) fn decrypt_record(&mut self, record: &[u8]) -> Result<Vec<u8>, SecureError> {
        let mut message = vec![0; record.len()];
        let len = self.0.read_message(record, &mut message)?;
        message.truncate(len);
        Ok(message)
    }

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
