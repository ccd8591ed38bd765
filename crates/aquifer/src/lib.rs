//! `aquifer`: one binary that plays every role.
//!
//! `cluster` starts, stops and shows a cluster on this machine and is its parts in the foreground; `run` starts an unmodified
//! program on the pool. A command fails with one sentence on stderr. What measures and draws is another binary, `aquifer-bench`, which
//! `aquifer bench`, `demo` and `fabric` start; it uses what is public here.

mod cli;
mod cluster;
#[cfg(test)]
mod golden_tests;
mod measure;
mod run;
pub mod say;
pub mod settings;
pub mod state;

pub use cli::Fabric;
pub use cluster::{Source, key};

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

use cli::{Cli, Command, RunArguments};
use state::StateDir;

/// What a command comes to: its exit code, or why it could not be done.
pub type Outcome = Result<ExitCode, Box<dyn Error>>;

/// Does what the command line says.
#[must_use]
pub fn main() -> ExitCode {
    prepare();
    let cli = Cli::parse();
    let outcome = match cli.command {
        Command::Up(arguments) => state(&cli.state).and_then(|state| cluster::up(&state, &arguments)),
        Command::Down => state(&cli.state).and_then(|state| cluster::down(&state)),
        Command::Status(arguments) => state(&cli.state).and_then(|state| cluster::status(&state, &arguments)),
        Command::Limit(arguments) => state(&cli.state).and_then(|state| cluster::limit(&state, &arguments)),
        Command::Lend(arguments) => state(&cli.state).and_then(|state| cluster::lend(&state, &arguments)),
        Command::Run(arguments) => Ok(run(&cli.state, arguments)),
        Command::Demo(passed) => measure::hand_over("demo", &cli.state, &passed),
        Command::Bench(passed) => measure::hand_over("bench", &cli.state, &passed),
        Command::Fabric(passed) => measure::hand_over("fabric", &cli.state, &passed),
        Command::SwapServer(arguments) => {
            state(&cli.state).and_then(|state| run::serve_swap(&state, &arguments))
        }
        Command::Part(part) => state(&cli.state).and_then(|state| cluster::be(&state, part)),
    };
    finish(outcome)
}

/// The exit code for what a command comes to, after its error was printed.
pub fn finish(outcome: Outcome) -> ExitCode {
    match (outcome, say::unwritten()) {
        (Ok(code), None) => code,
        (Ok(_), Some(error)) => fail(&format!("the output cannot be written: {error}"), 1),
        (Err(error), _) => fail(&error, 1),
    }
}

/// What each binary does first. A panic on any thread ends the process at once, however the binary was built: what a daemon must leave
/// behind lies in memory that outlives it.
pub fn prepare() {
    #[cfg(feature = "verbs")]
    aquifer_fabric_verbs::install();
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::abort();
    }));
}

fn state(asked: &Option<PathBuf>) -> Result<StateDir, Box<dyn Error>> {
    Ok(StateDir::locate(asked.as_deref())?)
}

/// The program's exit code, or one that says why there is none.
fn run(state: &Option<PathBuf>, arguments: RunArguments) -> ExitCode {
    let state = match StateDir::locate(state.as_deref()) {
        Ok(state) => state,
        Err(error) => return fail(&error, aquifer_ipc::EXIT_FAILED),
    };
    let options = run::RunOptions {
        agent_socket: arguments.agent.socket(&state),
        local_bytes: arguments.local,
        replicas: arguments.replicas,
        swap: arguments.swap.then(|| run::SwapOptions {
            log: state.log("swap"),
            state: state.path().to_owned(),
            bytes: arguments.swap_size,
        }),
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

/// A program's code has eight bits; other numbers come from nowhere.
fn exit_code(code: i32) -> ExitCode {
    ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX))
}
