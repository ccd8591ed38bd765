//! The file with the cluster's key: 64 hexadecimal digits, for its owner's eyes only.

use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use aquifer_fabric::ClusterKey;

/// Why there is no key.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// Not read or written.
    #[error("the cluster's key, {path}: {source}", path = path.display())]
    System {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Others can read it.
    #[error("the cluster's key, {path}, can be read by others: chmod 600 {path}, and consider it known", path = path.display())]
    Open {
        /// The file.
        path: PathBuf,
    },
    /// Not a key.
    #[error("{path} holds no cluster key: it should be 64 hexadecimal digits, as `aquifer up` writes them", path = path.display())]
    NotAKey {
        /// The file.
        path: PathBuf,
    },
}

/// Read a key.
///
/// # Errors
/// If there is none, or others than its owner can read it.
pub fn load(path: &Path) -> Result<ClusterKey, KeyError> {
    let system = |source| KeyError::System { path: path.to_owned(), source };
    let mode = std::fs::metadata(path).map_err(system)?.mode();
    if mode & 0o077 != 0 {
        return Err(KeyError::Open { path: path.to_owned() });
    }
    let text = std::fs::read(path).map_err(system)?;
    parse(text.trim_ascii()).ok_or_else(|| KeyError::NotAKey { path: path.to_owned() })
}

fn parse(text: &[u8]) -> Option<ClusterKey> {
    let text = std::str::from_utf8(text).ok().filter(|text| text.len() == 64)?;
    let mut key = [0; 32];
    for (byte, digits) in key.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        let digits = std::str::from_utf8(digits).ok().filter(|digits| !digits.starts_with('+'))?;
        *byte = u8::from_str_radix(digits, 16).ok()?;
    }
    Some(ClusterKey(key))
}

/// Make a key, unless there is one.
///
/// # Errors
/// If it cannot be written.
pub fn ensure(path: &Path) -> Result<(), KeyError> {
    let system = |source| KeyError::System { path: path.to_owned(), source };
    if path.exists() {
        return Ok(());
    }
    let key = ClusterKey::generate().map_err(system)?;
    let digits: String = key.0.iter().map(|byte| format!("{byte:02x}")).collect();
    // Written whole or not at all: half of a key, on a full disk, would be in the way of every later start.
    let folder = path.parent().unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(folder).map_err(system)?;
    writeln!(file, "{digits}").map_err(system)?;
    match file.persist_noclobber(path) {
        Err(error) if error.error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        persisted => persisted.map(drop).map_err(|error| system(error.error)),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_key_is_made_once_and_read_by_its_owner_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cluster.key");
        assert!(matches!(load(&path), Err(KeyError::System { .. })));
        ensure(&path).unwrap();
        let key = load(&path).unwrap();
        ensure(&path).unwrap();
        assert!(load(&path).unwrap() == key);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        let error = load(&path).unwrap_err().to_string();
        assert!(error.contains("chmod 600"), "{error}");
    }

    #[test]
    fn what_is_no_key_is_refused() {
        for text in ["", "12", &"g".repeat(64), &"+1".repeat(32), &"a".repeat(65)] {
            assert!(parse(text.as_bytes()).is_none(), "{text}");
        }
        assert!(parse("0f".repeat(32).as_bytes()) == Some(ClusterKey([15; 32])));
    }
}
