//! The key of a cluster.

use std::io;

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_do_not_show_a_key() {
        assert!(!format!("{:?}", ClusterKey([7; 32])).contains('7'));
    }
}
