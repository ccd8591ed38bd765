//! Why a bench or the demo could not do its work.

use std::io;
use std::path::{Path, PathBuf};

use aquifer_swap::setup::SetupError;

/// Why a bench or the demo could not do its work.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// No such bench.
    #[error("there is no bench {name:?}; `aquifer bench list` names them all")]
    NoSuchBench {
        /// What was asked for.
        name: String,
    },
    /// A flag that is for others.
    #[error("`aquifer bench {name}` takes no {flag}: {} takes it", takers.join(" or "))]
    NotTaken {
        /// Which bench.
        name: &'static str,
        /// The flag.
        flag: &'static str,
        /// The commands that take it.
        takers: Vec<String>,
    },
    /// A trace says something else than when which size is wanted.
    #[error("the trace {path} cannot be replayed: {reason}", path = path.display())]
    Trace {
        /// The file.
        path: PathBuf,
        /// In which line, and what is wrong with it.
        reason: String,
    },
    /// No compiler.
    #[error(
        "the bench's programs cannot be built: {reason}; install a C compiler (scripts/install-deps.sh bench)"
    )]
    Build {
        /// What the compiler said.
        reason: String,
    },
    /// A command that belongs to the cluster failed.
    #[error("`aquifer {what}` failed ({status}): {message}")]
    Cluster {
        /// Which command.
        what: &'static str,
        /// How it ended.
        status: String,
        /// What it said.
        message: String,
    },
    /// A measured program failed.
    #[error("{program} failed {way} ({status}): {message}")]
    Program {
        /// The program.
        program: String,
        /// How it was run.
        way: String,
        /// How it ended.
        status: String,
        /// What it said.
        message: String,
    },
    /// A measured program said something else than a line of figures.
    #[error("{program} printed no figures that hold ({way}): {text:?}")]
    Figures {
        /// The program.
        program: String,
        /// How it was run.
        way: String,
        /// What it printed.
        text: String,
    },
    /// A measured server cannot be worked with.
    #[error("cannot work with {program}: {reason}")]
    Server {
        /// The server's program.
        program: String,
        /// What happened.
        reason: String,
    },
    /// A measured program computed or kept something wrong.
    #[error("{program} gave a wrong result ({way}): {what}")]
    Wrong {
        /// The program.
        program: String,
        /// How it was run.
        way: String,
        /// What was found, and what should have been.
        what: String,
    },
    /// No program to be measured.
    #[error(
        "none of the programs of `aquifer bench apps` is installed; scripts/install-deps.sh bench installs them"
    )]
    NoApps,
    /// No program of that name is there.
    #[error(
        "no program of `aquifer bench apps` that is installed has {name:?} in its name; it measures redis, PostgreSQL and k-means"
    )]
    NoSuchApp {
        /// What was asked for.
        name: String,
    },
    /// No blocks of that size are measured.
    #[error("--only {name:?} names no size of blocks that is measured; choose one of {}", sizes.join(", "))]
    NoSuchSize {
        /// What was asked for.
        name: String,
        /// What there is.
        sizes: Vec<&'static str>,
    },
    /// So much of a program's memory is not measured.
    #[error("--fit {percent} is not measured; choose one of {}", list(fits))]
    NoSuchFit {
        /// What was asked for.
        percent: u64,
        /// What there is.
        fits: &'static [u64],
    },
    /// The demo's program or its corpus.
    #[error("the demo needs {what}, which is not installed; run scripts/install-deps.sh demo")]
    Missing {
        /// What is missing.
        what: &'static str,
    },
    /// Outputs differ.
    #[error("the output {way} differs from the plain run's; both are kept: {plain} and {other}",
        plain = plain.display(), other = other.display())]
    OutputDiffers {
        /// How it was run.
        way: String,
        /// The plain output.
        plain: PathBuf,
        /// The other.
        other: PathBuf,
    },
    /// An allocator that is compared.
    #[error("an allocator failed: {reason}")]
    Allocator {
        /// How.
        reason: String,
    },
    /// The allocation service.
    #[error("the allocation service failed: {0}")]
    Service(#[from] aquifer_client::Error),
    /// The fabric.
    #[error("the fabric bench failed: {reason}")]
    Fabric {
        /// What happened.
        reason: String,
    },
    /// The picture.
    #[error("cannot draw {path}: {reason}", path = path.display())]
    Picture {
        /// The file.
        path: PathBuf,
        /// What went wrong.
        reason: String,
    },
    /// Ctrl-C and its like.
    #[error("stopped by a signal; everything that was started has been ended")]
    Interrupted,
    /// Kernel swap.
    #[error(transparent)]
    Peer(#[from] SetupError),
    /// The system refused.
    #[error("cannot {what} {path}: {source}", path = path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

fn list(fits: &[u64]) -> String {
    fits.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")
}

impl BenchError {
    /// For `map_err`.
    pub fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { what, path, source }
    }
}
