//! Errors of benches and of the demo.

use std::io;
use std::path::{Path, PathBuf};

use aquifer_swap::setup::SetupError;

/// Why a bench or the demo failed.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// There is no bench with this name.
    #[error("there is no bench {name:?}; `{command} list` lists the benches")]
    NoSuchBench {
        /// The command that runs benches.
        command: &'static str,
        /// The given name.
        name: String,
    },
    /// The bench does not have this option.
    #[error("`{command} {name}` has no option {option}; {} has it", benches.join(" or "))]
    NoSuchOption {
        /// The command that runs benches.
        command: &'static str,
        /// The bench.
        name: &'static str,
        /// The option.
        option: &'static str,
        /// The commands that have it.
        benches: Vec<String>,
    },
    /// The bench has no such figure.
    #[error("there is no figure {only:?}; --only has one of {known}")]
    NoSuchFigure {
        /// The given figure.
        only: String,
        /// The figures.
        known: String,
    },
    /// A heap of objects cannot be used.
    #[error("the heap cannot be used: {reason}")]
    Heap {
        /// The reason.
        reason: String,
    },
    /// A segment cannot be used.
    #[error("a segment cannot be used: {reason}")]
    Segment {
        /// The reason.
        reason: String,
    },
    /// A trace is not valid.
    #[error("trace {path} cannot be replayed: {reason}", path = path.display())]
    Trace {
        /// The file.
        path: PathBuf,
        /// The line, and what is wrong with it.
        reason: String,
    },
    /// The measured programs cannot be compiled.
    #[error(
        "the measured programs cannot be compiled: {reason}; install a C compiler with \
            scripts/install-deps.sh bench"
    )]
    Build {
        /// The compiler's output.
        reason: String,
    },
    /// A command that manages the bench's cluster failed.
    #[error("`aquifer {what}` failed ({status}): {message}")]
    Cluster {
        /// The command.
        what: &'static str,
        /// The exit status.
        status: String,
        /// The output of the command.
        message: String,
    },
    /// The agent reports no such run.
    #[error("`aquifer status` does not show {what}")]
    NoStatus {
        /// The run.
        what: &'static str,
    },
    /// A measured program failed.
    #[error("{program} failed ({context}; {status}): {message}")]
    Program {
        /// The program.
        program: String,
        /// The configuration or operation of the program.
        context: String,
        /// The exit status.
        status: String,
        /// The output of the program.
        message: String,
    },
    /// A measured program printed no valid results.
    #[error("{program} printed no valid results ({context}): {text:?}")]
    Figures {
        /// The program.
        program: String,
        /// The configuration or operation of the program.
        context: String,
        /// The output of the program.
        text: String,
    },
    /// A measured server does not work.
    #[error("server {program} failed: {reason}")]
    Server {
        /// The server.
        program: String,
        /// The reason.
        reason: String,
    },
    /// A measured program returned wrong data.
    #[error("{program} returned wrong data ({context}): {what}")]
    Wrong {
        /// The program.
        program: String,
        /// The configuration or operation of the program.
        context: String,
        /// The found and the expected data.
        what: String,
    },
    /// No program of the bench is installed.
    #[error(
        "no program of `aquifer bench apps` is installed; install them with scripts/install-deps.sh bench"
    )]
    NoApps,
    /// No installed program has this name.
    #[error(
        "--only {name:?}: no installed program of `aquifer bench apps` has this in its name; the bench \
            measures redis, memcached, PostgreSQL and models of scikit-learn"
    )]
    NoSuchApp {
        /// The given name.
        name: String,
    },
    /// The bench does not measure with this percentage of a program's memory.
    #[error("--fit {percent} is not measured; give one of {}", list(fits))]
    NoSuchFit {
        /// The given percentage.
        percent: u64,
        /// The measured percentages.
        fits: &'static [u64],
    },
    /// The demo's program or its input is not installed.
    #[error("the demo needs {what}, which is not installed; install it with scripts/install-deps.sh demo")]
    Missing {
        /// The missing program or input.
        what: &'static str,
    },
    /// The output of a run differs from that of the plain run.
    #[error("the output ({context}) differs from that of the plain run; compare {plain} with {other}",
        plain = plain.display(), other = other.display())]
    OutputDiffers {
        /// The name of the differing run.
        context: String,
        /// The plain run's output.
        plain: PathBuf,
        /// The other output.
        other: PathBuf,
    },
    /// A measured allocator failed.
    #[error("allocator failed: {reason}")]
    Allocator {
        /// The reason.
        reason: String,
    },
    /// The agent's allocation service failed.
    #[error("allocation service failed: {0}")]
    Service(#[from] aquifer_client::Error),
    /// An operation of the fabric failed.
    #[error("fabric failed: {reason}")]
    Fabric {
        /// The reason.
        reason: String,
    },
    /// The serving process of a bench did not start.
    #[error(
        "the serving process of the bench ended before it served ({status}); it needs up to 512 MiB of \
            memory, and prints other errors itself"
    )]
    ServingProcess {
        /// The exit status.
        status: String,
    },
    /// A picture cannot be drawn.
    #[error("cannot draw {path}: {reason}", path = path.display())]
    Picture {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// A signal asked to stop.
    #[error("stopped by a signal; all started processes were ended")]
    Interrupted,
    /// Kernel swap cannot be set up.
    #[error(transparent)]
    Peer(#[from] SetupError),
    /// A system call failed.
    #[error("cannot {what} {path}: {source}", path = path.display())]
    Io {
        /// The attempted action.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

fn list(fits: &[u64]) -> String {
    fits.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")
}

impl BenchError {
    /// Converts an error of a heap; for `map_err`.
    pub fn heap(error: impl std::fmt::Display) -> Self {
        Self::Heap { reason: error.to_string() }
    }

    /// Converts an error of the system; for `map_err`.
    pub fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { what, path, source }
    }
}
