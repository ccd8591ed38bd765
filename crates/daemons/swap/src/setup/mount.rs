//! The folder at which a volume's file is mounted.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use super::SetupError;
use super::record::{SetupRecord, SetupStep};

/// Creates a folder below `parent` that only this user can access. The record undoes a mount there,
/// and removes the folder.
pub fn create(record: &mut SetupRecord, parent: &Path) -> Result<PathBuf, SetupError> {
    let path = parent.join(record.name());
    record.add(SetupStep::Mount(path.clone()))?;
    DirBuilder::new().mode(0o700).create(&path).map_err(SetupError::io("create the folder", &path))?;
    Ok(path)
}

/// Unmounts and removes the folder, if it exists.
pub fn remove(path: &Path) -> Result<(), SetupError> {
    aquifer_block::fuse::unmount(path).map_err(SetupError::io("unmount", path))?;
    match fs::remove_dir(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(SetupError::io("remove the folder", path)(error))
        }
        _ => Ok(()),
    }
}
