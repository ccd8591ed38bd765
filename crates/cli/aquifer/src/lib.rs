//! The command line `aquifer`: all commands and all daemons in one binary.
//!
//! `cluster` starts, stops and shows a cluster on this machine, and contains the daemons. `run`
//! starts an unmodified program on the pool, and `core_dump` writes its memory to a file. `kv` has
//! key-value stores, and `cache` a server for clients of memcached. A command that fails writes one
//! sentence to standard error. `aquifer bench`, `demo` and `fabric` start the binary
//! `aquifer-bench`, which uses the public items of this crate.

mod bench_binary;
mod cache;
mod check;
mod cli;
mod cluster;
mod core_dump;
#[cfg(test)]
mod golden_tests;
mod kv;
mod log_limit;
mod run;
pub mod say;
pub mod settings;
pub mod state;

pub use cli::Fabric;
pub use cluster::{DirectoryLocation, key};

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;

use cli::{Cli, Command, RunArguments};
use state::StateDir;

/// Result of a command: its exit code, or an error to print.
pub type Outcome = Result<ExitCode, Box<dyn Error>>;

/// Runs the command of the command line.
#[must_use]
pub fn main() -> ExitCode {
    prepare();
    let cli = Cli::parse();
    let given = cli.state.as_deref();
    let outcome = match cli.command {
        Command::Up(arguments) => state(&cli.state).and_then(|state| cluster::up(&state, &arguments)),
        Command::Down(arguments) => state(&cli.state).and_then(|state| cluster::down(&state, &arguments)),
        Command::Status(arguments) => state(&cli.state).and_then(|state| cluster::status(&state, &arguments)),
        Command::Limit(arguments) => cluster::limit(given, &arguments),
        Command::Drain(arguments) => state(&cli.state).and_then(|state| cluster::drain(&state, &arguments)),
        Command::Lend(arguments) => state(&cli.state).and_then(|state| cluster::lend(&state, &arguments)),
        Command::Heap(arguments) => state(&cli.state).and_then(|state| cluster::heap(&state, &arguments)),
        Command::Segment(arguments) => cluster::segment(given, &arguments),
        Command::Kv(arguments) => kv::kv(given, arguments),
        Command::Cache(arguments) => cache::cache(cli.state.as_deref(), &arguments),
        Command::Check(arguments) => check::check(given, &arguments),
        Command::Core(arguments) => core_dump::write(&arguments),
        Command::Run(arguments) => Ok(run(given, arguments)),
        Command::Demo(arguments) => bench_binary::exec("demo", None, &arguments),
        Command::Bench(arguments) => bench_binary::exec("bench", None, &arguments),
        Command::Fabric(arguments) => bench_binary::exec("fabric", cli.state.as_deref(), &arguments),
        Command::SwapServer(arguments) => {
            state(&cli.state).and_then(|state| run::serve_swap(&state, &arguments))
        }
        Command::Gateway => cluster::gateway(),
        Command::Daemon(daemon) => state(&cli.state).and_then(|state| cluster::serve(&state, daemon)),
    };
    finish(outcome)
}

/// Prints the error of a command, if it failed, and returns its exit code.
///
/// A command whose output could not be written has failed.
pub fn finish(outcome: Outcome) -> ExitCode {
    match (outcome, say::write_error()) {
        (Ok(code), None) => code,
        (Ok(_), Some(error)) => fail(&format!("cannot write to standard output: {error}"), 1),
        (Err(error), _) => fail(&error, 1),
    }
}

/// Set-up of each binary: installs the provider `verbs`, and makes a panic on any thread end the
/// process.
///
/// A daemon must not continue after a panic. The memory that must outlive it is with the keeper.
pub fn prepare() {
    #[cfg(feature = "verbs")]
    aquifer_fabric_verbs::install();
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::abort();
    }));
}

fn state(given: &Option<PathBuf>) -> Result<StateDir, Box<dyn Error>> {
    Ok(StateDir::locate(given.as_deref())?)
}

/// Runs a program; returns its exit code, or that of the error.
fn run(given: Option<&Path>, arguments: RunArguments) -> ExitCode {
    let swap = || {
        StateDir::locate(given).map(|state| run::SwapOptions {
            log: state.log("swap"),
            state: state.path().to_owned(),
            bytes: arguments.swap_size,
        })
    };
    let swap = arguments.swap.then(swap).transpose();
    let (agent_socket, swap) = match (arguments.agent.socket(given), swap) {
        (Ok(agent_socket), Ok(swap)) => (agent_socket, swap),
        (Err(error), _) | (_, Err(error)) => return fail(&error, aquifer_ipc::EXIT_FAILED),
    };
    let options = run::RunOptions {
        agent_socket,
        local_bytes: arguments.local,
        local_max_bytes: arguments.local_max,
        replicas: arguments.replicas,
        backup: arguments.backup,
        swap,
        detach: arguments.detach,
        strict: arguments.strict,
        wait_for_room_ms: arguments.wait_for_room,
        stats: arguments.stats,
        command: arguments.command,
    };
    match run::run(&options) {
        Ok(code) => exit_code(code),
        Err(error) => fail(&error, error.exit_code()),
    }
}

fn fail(error: &dyn std::fmt::Display, code: i32) -> ExitCode {
    crate::say::say_error!("{error}");
    exit_code(code)
}

/// The exit code as a number of eight bits. Codes of programs have no more.
fn exit_code(code: i32) -> ExitCode {
    ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX))
}
