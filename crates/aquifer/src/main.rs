//! `aquifer`: one binary that plays every role.
//!
//! `cluster` starts, stops and shows a cluster on this machine and is its parts in the foreground; `run` starts an unmodified
//! program on the pool. A command fails with one sentence on stderr.

mod bench;
mod cli;
mod cluster;
mod demo;
mod ending;
#[cfg(feature = "verbs")]
mod fabric;
mod peers;
mod run;
mod say;
mod settings;
mod setup;
mod state;
mod swap;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

use cli::{Cli, Command, RunArguments};
use state::StateDir;

/// What a command comes to: its exit code, or why it could not be done.
type Outcome = Result<ExitCode, Box<dyn Error>>;

fn main() -> ExitCode {
    abort_on_panic();
    #[cfg(feature = "verbs")]
    aquifer_fabric_verbs::install();
    let cli = Cli::parse();
    let outcome = match cli.command {
        Command::Up(arguments) => state(&cli.state).and_then(|state| cluster::up(&state, &arguments)),
        Command::Down => state(&cli.state).and_then(|state| cluster::down(&state)),
        Command::Status(arguments) => state(&cli.state).and_then(|state| cluster::status(&state, &arguments)),
        Command::Limit(arguments) => state(&cli.state).and_then(|state| cluster::limit(&state, &arguments)),
        Command::Lend(arguments) => state(&cli.state).and_then(|state| cluster::lend(&state, &arguments)),
        Command::Run(arguments) => Ok(run(&cli.state, arguments)),
        Command::Demo(arguments) => demo::run(&arguments).map_err(Into::into),
        Command::Bench(arguments) => bench::run(&arguments).map_err(Into::into),
        #[cfg(feature = "verbs")]
        Command::Fabric(command) => fabric::run(&cli.state, command),
        #[cfg(not(feature = "verbs"))]
        Command::Fabric(_) => Err(aquifer_fabric::WITHOUT_VERBS.into()),
        Command::SwapServer(arguments) => state(&cli.state).and_then(|state| swap::serve(&state, &arguments)),
        Command::Part(part) => state(&cli.state).and_then(|state| cluster::be(&state, part)),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("aquifer: {error}");
        ExitCode::FAILURE
    })
}

/// A panic on any thread ends the process at once, however the binary was built. What a daemon must leave behind lies in memory that outlives it.
fn abort_on_panic() {
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

fn fail(error: &dyn Error, code: i32) -> ExitCode {
    eprintln!("aquifer: {error}");
    exit_code(code)
}

/// A program's code has eight bits; other numbers come from nowhere.
fn exit_code(code: i32) -> ExitCode {
    ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX))
}
