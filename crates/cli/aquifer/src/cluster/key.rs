//! File with the cluster key: 64 hexadecimal digits, readable by its owner only.

use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use aquifer_fabric::ClusterKey;

/// Why a cluster key cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The file cannot be read or written.
    #[error("cluster key {path} cannot be {attempt}: {source}", path = path.display())]
    System {
        /// The file.
        path: PathBuf,
        /// The attempted action: "read" or "written".
        attempt: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// Users other than the owner can read the file.
    #[error("cluster key {path} can be read by other users: run chmod 600 {path}, and replace the key if \
        other users may have read it", path = path.display())]
    ReadableByOthers {
        /// The file.
        path: PathBuf,
    },
    /// The file has no key in it.
    #[error("{path} is not a cluster key: expected 64 hexadecimal digits, as `aquifer up` writes \
        them", path = path.display())]
    NotAKey {
        /// The file.
        path: PathBuf,
    },
}

/// Reads a key.
///
/// # Errors
/// If the file cannot be read, is not a key, or can be read by other users.
pub fn load(path: &Path) -> Result<ClusterKey, KeyError> {
    let system = |source| KeyError::System { path: path.to_owned(), attempt: "read", source };
    let mode = std::fs::metadata(path).map_err(system)?.mode();
    if mode & 0o077 != 0 {
        return Err(KeyError::ReadableByOthers { path: path.to_owned() });
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

/// Writes a new random key, unless the file exists.
///
/// # Errors
/// If the file cannot be written.
pub fn ensure(path: &Path) -> Result<(), KeyError> {
    let system = |source| KeyError::System { path: path.to_owned(), attempt: "written", source };
    if path.exists() {
        return Ok(());
    }
    let key = ClusterKey::generate().map_err(system)?;
    let digits: String = key.0.iter().map(|byte| format!("{byte:02x}")).collect();
    // Renamed into place when it is complete: a partial key, left by a full disk, would make each
    // later start fail.
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
    fn a_key_is_written_once_and_must_be_private() {
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
    fn other_texts_are_not_keys() {
        for text in ["", "12", &"g".repeat(64), &"+1".repeat(32), &"a".repeat(65)] {
            assert!(parse(text.as_bytes()).is_none(), "{text}");
        }
        assert!(parse("0f".repeat(32).as_bytes()) == Some(ClusterKey([15; 32])));
    }
}
