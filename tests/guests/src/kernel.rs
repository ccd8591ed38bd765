//! The kernel that guests boot.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use rustix::fs::{FlockOperation, flock};

use crate::{GuestError, is_success, workspace};

/// Programs that a guest needs.
const PROGRAMS: [&str; 4] = ["qemu-system-x86_64", "busybox", "cpio", "depmod"];

/// An unpacked kernel with its modules, and its initramfs.
#[derive(Clone, Debug)]
pub struct Kernel {
    folder: PathBuf,
}

impl Kernel {
    /// Unpacks Debian's newest kernel, and downloads it first if needed: about 100 MB.
    ///
    /// # Errors
    /// If a program is missing, or there is no such package.
    pub fn prepare() -> Result<Self, GuestError> {
        Self::prepare_of(None)
    }

    /// Unpacks the newest kernel of a suite of Debian, or of this machine's sources.
    ///
    /// # Errors
    /// If a program is missing, or there is no such package.
    pub fn prepare_of(suite: Option<&str>) -> Result<Self, GuestError> {
        for program in PROGRAMS {
            let mut found = Command::new("sh");
            found.args(["-c", &format!("command -v {program}")]).stdout(Stdio::null());
            if !is_success(found.status()) {
                return Err(GuestError::Missing(format!("{program} is not installed")));
            }
        }
        let cache = workspace().join("target/guests");
        std::fs::create_dir_all(&cache).map_err(|error| GuestError::System("create target/guests", error))?;
        // A second test waits, and finds the kernel unpacked.
        let lock = File::create(cache.join("lock"))
            .map_err(|error| GuestError::System("lock target/guests", error))?;
        flock(&lock, FlockOperation::LockExclusive)
            .map_err(|error| GuestError::System("lock target/guests", error.into()))?;
        let mut script = Command::new(workspace().join("tests/guests/kernel.sh"));
        script.arg(&cache).args(suite);
        let output = script.output().map_err(|error| GuestError::System("run kernel.sh", error))?;
        if !output.status.success() {
            return Err(GuestError::Missing(format!(
                "the kernel cannot be unpacked: {}",
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

    /// Folder of the kernel's modules, named by its version.
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
            .ok_or_else(|| GuestError::Missing(format!("no modules in {}", self.folder.display())))?;
        Ok(entry.path())
    }
}
