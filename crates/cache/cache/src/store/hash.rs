//! The hash of keys: a keyed one, so that no client can choose keys that have the same hash.

use std::fmt;
use std::io;

use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Serialize};
use siphasher::sip::SipHasher13;

/// A key and its hash.
#[derive(Clone, Copy, Debug)]
pub struct Key<'a> {
    /// The bytes of the key, 1 to 250.
    pub bytes: &'a [u8],
    /// The hash, which chooses the partition and the place in the index.
    pub hash: u64,
}

/// The secret of a cache: the key of its hash.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct HashSecret(pub [u64; 2]);

impl HashSecret {
    /// Creates a random secret.
    ///
    /// # Errors
    /// If the system has no random numbers.
    pub fn random() -> io::Result<Self> {
        let mut words = [0; 2];
        for word in &mut words {
            let mut bytes = [0; 8];
            getrandom(&mut bytes, GetRandomFlags::empty())?;
            *word = u64::from_le_bytes(bytes);
        }
        Ok(Self(words))
    }
}

impl fmt::Debug for HashSecret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("HashSecret(..)")
    }
}

/// Computes the hashes of keys: SipHash-1-3 (Aumasson and Bernstein, INDOCRYPT 2012).
#[derive(Clone, Copy)]
pub struct KeyHasher {
    sip: SipHasher13,
    secret: HashSecret,
    /// The bits of each hash that a test keeps.
    #[cfg(debug_assertions)]
    mask: u64,
}

impl KeyHasher {
    /// The hasher of a cache with this secret.
    #[must_use]
    pub fn new(secret: HashSecret) -> Self {
        let HashSecret([first, second]) = secret;
        Self {
            sip: SipHasher13::new_with_keys(first, second),
            secret,
            #[cfg(debug_assertions)]
            mask: u64::MAX,
        }
    }

    /// A hasher with a random secret.
    ///
    /// # Errors
    /// If the system has no random numbers.
    pub fn random() -> io::Result<Self> {
        HashSecret::random().map(Self::new)
    }

    /// Replaces the secret.
    #[must_use]
    pub fn with_secret(self, secret: HashSecret) -> Self {
        Self { secret, sip: Self::new(secret).sip, ..self }
    }

    /// Keeps only some bits of each hash, so that keys collide.
    #[cfg(debug_assertions)]
    #[must_use]
    pub fn with_mask(self, mask: u64) -> Self {
        Self { mask, ..self }
    }

    /// The secret.
    #[must_use]
    pub fn secret(&self) -> HashSecret {
        self.secret
    }

    /// The hash of a key.
    #[inline]
    #[must_use]
    pub fn hash(&self, key: &[u8]) -> u64 {
        let hash = self.sip.hash(key);
        #[cfg(debug_assertions)]
        let hash = hash & self.mask;
        hash
    }
}

impl fmt::Debug for KeyHasher {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("KeyHasher").field("secret", &self.secret).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_hash() {
        // A test vector of the authors.
        let hasher = KeyHasher::new(HashSecret([0x0706_0504_0302_0100, 0x0F0E_0D0C_0B0A_0908]));
        let key: Vec<u8> = (0..15).collect();
        assert_eq!(hasher.hash(&key), 0xD320_D86D_2A51_9956, "{:#018x}", hasher.hash(&key));
    }

    #[test]
    fn the_secret_changes_all_hashes_and_is_not_shown() {
        let [one, other] = [1, 2].map(|word| KeyHasher::new(HashSecret([word, 7])));
        assert_ne!(one.hash(b"key"), other.hash(b"key"));
        assert_eq!(one.with_secret(other.secret()).hash(b"key"), other.hash(b"key"));
        assert!(!format!("{one:?}").contains('7'));
        assert_ne!(HashSecret::random().unwrap(), HashSecret::random().unwrap());
        assert_eq!(one.with_mask(0).hash(b"key"), 0);
    }
}
