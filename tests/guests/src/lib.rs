//! Virtual machines to run a command in: a kernel of Debian's with what this machine's lacks, on
//! this machine's own files.
//!
//! A guest sees the host's file system, and keeps what it writes in memory. It has a Soft-RoCE
//! device on a network of its own, or on one that two guests share. Processors are emulated, so
//! that no times mean anything there.

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

/// Why there is no guest, or none any more.
#[derive(Debug)]
pub enum GuestError {
    /// A program or a file that it takes is not to be had.
    Lacking(String),
    /// The system refused.
    System(&'static str, io::Error),
    /// Time was up before the command had ended; what the console, and the command's two outputs,
    /// had said by then.
    TimedOut(Box<Outcome>),
    /// The guest ended, and the command had not; likewise.
    Crashed(Box<Outcome>),
}

/// What a command has left.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// As a shell has it: 128 and the signal's number if a signal ended it.
    pub exit_code: i32,
    /// What it wrote.
    pub stdout: String,
    /// What it complained of.
    pub stderr: String,
    /// What the guest's kernel and its start said.
    pub console: String,
}

/// How a guest's network goes on.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Link {
    /// It is alone.
    #[default]
    None,
    /// To another guest: where this one's frames come in, and the other's.
    Pair {
        /// A Unix socket that it makes.
        own: PathBuf,
        /// The other's.
        other: PathBuf,
    },
}

/// A machine to be started.
#[derive(Clone, Debug)]
pub struct Guest {
    /// Bytes of memory, in MiB.
    pub memory_mib: u32,
    /// How long it may live.
    pub time_limit: Duration,
    /// Its address on the network that Soft-RoCE is on.
    pub address: Ipv4Addr,
    /// The folder in which its command begins.
    pub folder: PathBuf,
    /// What is at the other end of its network.
    pub link: Link,
}

impl Default for Guest {
    /// Enough for a suite of tests.
    fn default() -> Self {
        Self {
            memory_mib: 2048,
            time_limit: Duration::from_mins(5),
            address: Ipv4Addr::new(10, 9, 0, 1),
            folder: workspace(),
            link: Link::None,
        }
    }
}

impl Guest {
    /// Two on one network, at 10.9.0.1 and 10.9.0.2. `folder` is where their frames pass; it must
    /// outlive them.
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

    /// Boot, and run a command.
    ///
    /// # Errors
    /// If it cannot be started at all.
    pub fn start(&self, kernel: &Kernel, command: &[&str]) -> Result<Running, GuestError> {
        Running::start(self, kernel, command)
    }

    /// Boot, run a command, and wait for its end.
    ///
    /// # Errors
    /// Everything but a command that fails.
    pub fn run(&self, kernel: &Kernel, command: &[&str]) -> Result<Outcome, GuestError> {
        self.start(kernel, command)?.wait()
    }
}

impl Outcome {
    /// The statistics of a run, which it wrote last.
    ///
    /// # Panics
    /// If there are none.
    #[must_use]
    pub fn statistics(&self) -> serde_json::Value {
        let at = self.stdout.find('{').unwrap_or_else(|| panic!("no statistics: {self}"));
        let mut values = serde_json::Deserializer::from_str(&self.stdout[at..]).into_iter();
        let value = values.next().unwrap_or_else(|| panic!("no statistics: {self}"));
        value.unwrap_or_else(|error| panic!("{error}: {self}"))
    }

    /// It must have ended well.
    ///
    /// # Panics
    /// If it has not, with all that is known.
    #[must_use]
    pub fn success(self) -> Self {
        assert!(self.exit_code == 0, "{self}");
        self
    }
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { exit_code, stdout, stderr, console } = self;
        write!(f, "exit code {exit_code}\n-- stdout:\n{stdout}\n-- stderr:\n{stderr}\n-- console:\n{console}")
    }
}

impl std::fmt::Display for GuestError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Lacking(what) => {
                write!(f, "{what}; scripts/install-deps.sh long installs what guests need")
            }
            Self::System(what, error) => write!(f, "cannot {what}: {error}"),
            Self::TimedOut(outcome) => write!(f, "time was up\n{outcome}"),
            Self::Crashed(outcome) => write!(f, "the guest ended before its command did\n{outcome}"),
        }
    }
}

impl std::error::Error for GuestError {}

/// One of `tests/guests/scripts`.
#[must_use]
pub fn script(name: &str) -> PathBuf {
    workspace().join("tests/guests/scripts").join(name)
}

/// Where the sources are.
#[must_use]
pub fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap_or(Path::new("/")).to_owned()
}

/// The kernel for this run of the tests.
///
/// # Panics
/// If there is none: nothing is skipped in silence.
#[must_use]
pub fn kernel() -> Kernel {
    Kernel::prepare().unwrap_or_else(|error| panic!("{error}"))
}

fn is_success(status: io::Result<ExitStatus>) -> bool {
    status.is_ok_and(|status| status.success())
}
