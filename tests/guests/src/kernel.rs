//! The kernel that guests boot.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use rustix::fs::{FlockOperation, flock};

use crate::{GuestError, is_success, workspace};

/// Programs without which there is no guest.
const PROGRAMS: [&str; 4] = ["qemu-system-x86_64", "busybox", "cpio", "depmod"];

/// A kernel with its modules, and the initramfs made for it.
#[derive(Clone, Debug)]
pub struct Kernel {
    folder: PathBuf,
}

impl Kernel {
    /// The newest that Debian has, fetched if it is not here: some 100 MB.
    ///
    /// # Errors
    /// If a program is missing, or there is no such package.
    pub fn prepare() -> Result<Self, GuestError> {
        Self::prepare_of(None)
    }

    /// The newest that a certain suite of Debian's has, whatever this machine's sources are.
    ///
    /// # Errors
    /// As [`Self::prepare`].
    pub fn prepare_of(suite: Option<&str>) -> Result<Self, GuestError> {
        for program in PROGRAMS {
            let mut found = Command::new("sh");
            found.args(["-c", &format!("command -v {program}")]).stdout(Stdio::null());
            if !is_success(found.status()) {
                return Err(GuestError::Lacking(format!("there is no {program} here")));
            }
        }
        let cache = workspace().join("target/guests");
        std::fs::create_dir_all(&cache).map_err(|error| GuestError::System("make target/guests", error))?;
        // Whoever comes second waits, and finds it made.
        let lock = File::create(cache.join("lock"))
            .map_err(|error| GuestError::System("lock target/guests", error))?;
        flock(&lock, FlockOperation::LockExclusive)
            .map_err(|error| GuestError::System("lock target/guests", error.into()))?;
        let mut script = Command::new(workspace().join("tests/guests/kernel.sh"));
        script.arg(&cache).args(suite);
        let output = script.output().map_err(|error| GuestError::System("run kernel.sh", error))?;
        if !output.status.success() {
            return Err(GuestError::Lacking(format!(
                "no kernel: {}",
                String::from_utf8_lossy(&output.stderr)
            )));
        }
        Ok(Self { folder: String::from_utf8_lossy(&output.stdout).trim_end().into() })
    }

    pub(crate) fn image(&self) -> PathBuf {
        self.folder.join("vmlinuz")
    }

    pub(crate) fn initrd(&self) -> PathBuf {
        self.folder.join("initrd")
    }

    /// The folder of its modules, by its version.
    ///
    /// # Errors
    /// If the package has none.
    pub(crate) fn modules(&self) -> Result<PathBuf, GuestError> {
        let bases = ["package/lib/modules", "package/usr/lib/modules"];
        let mut found = bases
            .iter()
            .filter_map(|base| std::fs::read_dir(self.folder.join(base)).ok())
            .flatten()
            .flatten();
        let entry = found
            .next()
            .ok_or_else(|| GuestError::Lacking(format!("no modules in {}", self.folder.display())))?;
        Ok(entry.path())
    }
}
