//! Virtual machines that run a command with a kernel from Debian's packages.
//!
//! A guest sees the host's file system, and keeps its writes in memory. It has a Soft-RoCE device
//! on a network of its own, or on one that two guests share. Processors are emulated, so times
//! measured in a guest have no meaning.

#![forbid(unsafe_code)]

mod kernel;
mod programs;
mod qemu;

use std::io;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

pub use kernel::Kernel;
pub use programs::test_program;
pub use qemu::Running;

/// Why a guest did not complete its command.
#[derive(Debug)]
pub enum GuestError {
    /// A program or file that guests need is missing.
    Missing(String),
    /// A system call failed.
    System(&'static str, io::Error),
    /// The command did not end within the time limit. Has its output so far.
    TimedOut(Box<GuestOutcome>),
    /// The guest ended before the command. Has the command's output so far.
    Crashed(Box<GuestOutcome>),
}

/// Exit code and output of a command.
#[derive(Clone, Debug, Default)]
pub struct GuestOutcome {
    /// Exit code, as of a shell: 128 + the signal's number if a signal ended the command.
    pub exit_code: i32,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    /// Output of the guest's kernel and of its start.
    pub console: String,
}

/// The other end of a guest's network.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Link {
    /// There is none.
    #[default]
    None,
    /// Another guest. Each receives frames at a Unix socket.
    Pair {
        /// Socket of this guest.
        own: PathBuf,
        /// Socket of the other guest.
        other: PathBuf,
    },
}

/// Settings of a virtual machine.
#[derive(Clone, Debug)]
pub struct Guest {
    /// Memory in MiB.
    pub memory_mib: u32,
    /// Number of processors.
    pub processors: u32,
    /// Time after which the machine is ended.
    pub time_limit: Duration,
    /// Address on the network with Soft-RoCE.
    pub address: Ipv4Addr,
    /// Working directory of the command.
    pub folder: PathBuf,
    /// The other end of its network.
    pub link: Link,
}

impl Default for Guest {
    /// Settings for a suite of tests.
    fn default() -> Self {
        Self {
            memory_mib: 2048,
            processors: 2,
            time_limit: Duration::from_mins(5),
            address: Ipv4Addr::new(10, 9, 0, 1),
            folder: workspace(),
            link: Link::None,
        }
    }
}

impl Guest {
    /// Two guests on one network, at 10.9.0.1 and 10.9.0.2. Their sockets are in `folder`, which
    /// must outlive them.
    #[must_use]
    pub fn pair(folder: &Path) -> [Self; 2] {
        let paths = [folder.join("link-1"), folder.join("link-2")];
        let guest = |own: usize| Self {
            address: Ipv4Addr::new(10, 9, 0, if own == 0 { 1 } else { 2 }),
            link: Link::Pair { own: paths[own].clone(), other: paths[1 - own].clone() },
            ..Self::default()
        };
        [guest(0), guest(1)]
    }

    /// Boots, and runs a command.
    ///
    /// # Errors
    /// If the guest cannot be started.
    pub fn start(&self, kernel: &Kernel, command: &[&str]) -> Result<Running, GuestError> {
        Running::start(self, kernel, command)
    }

    /// Boots, runs a command, and waits for its end.
    ///
    /// # Errors
    /// If the guest cannot be started or ends too early. A command that fails is no error.
    pub fn run(&self, kernel: &Kernel, command: &[&str]) -> Result<GuestOutcome, GuestError> {
        self.start(kernel, command)?.wait()
    }
}

impl GuestOutcome {
    /// The statistics of a run: the first JSON value in the output.
    ///
    /// # Panics
    /// If there is none.
    #[must_use]
    pub fn statistics(&self) -> serde_json::Value {
        let at = self.stdout.find('{').unwrap_or_else(|| panic!("no statistics: {self}"));
        let mut values = serde_json::Deserializer::from_str(&self.stdout[at..]).into_iter();
        let value = values.next().unwrap_or_else(|| panic!("no statistics: {self}"));
        value.unwrap_or_else(|error| panic!("{error}: {self}"))
    }

    /// Asserts that the command succeeded.
    ///
    /// # Panics
    /// If it did not, with its exit code and output.
    #[must_use]
    pub fn success(self) -> Self {
        assert!(self.exit_code == 0, "{self}");
        self
    }
}

impl std::fmt::Display for GuestOutcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { exit_code, stdout, stderr, console } = self;
        write!(f, "exit code {exit_code}\n-- stdout:\n{stdout}\n-- stderr:\n{stderr}\n-- console:\n{console}")
    }
}

impl std::fmt::Display for GuestError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Missing(what) => {
                write!(f, "{what}; scripts/install-deps.sh long installs what guests need")
            }
            Self::System(what, error) => write!(f, "cannot {what}: {error}"),
            Self::TimedOut(outcome) => write!(f, "the time limit was reached\n{outcome}"),
            Self::Crashed(outcome) => write!(f, "the guest ended before its command did\n{outcome}"),
        }
    }
}

impl std::error::Error for GuestError {}

/// Path of a script in `tests/guests/scripts`.
#[must_use]
pub fn script(name: &str) -> PathBuf {
    workspace().join("tests/guests/scripts").join(name)
}

/// Root folder of the workspace.
#[must_use]
pub fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap_or(Path::new("/")).to_owned()
}

/// The kernel that tests boot.
///
/// # Panics
/// If there is none: these tests are never skipped.
#[must_use]
pub fn kernel() -> Kernel {
    Kernel::prepare().unwrap_or_else(|error| panic!("{error}"))
}

fn is_success(status: io::Result<ExitStatus>) -> bool {
    status.is_ok_and(|status| status.success())
}
