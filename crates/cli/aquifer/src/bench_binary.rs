//! Commands that the binary `aquifer-bench` implements.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use crate::Outcome;
use crate::cli::PassedArguments;

/// Name of the binary. It is in the folder of this one.
const BENCH: &str = "aquifer-bench";

/// Replaces this process by `aquifer-bench COMMAND ARGUMENTS`; returns only on failure. `state` is
/// for a command that uses the state folder.
pub fn exec(command: &str, state: Option<&Path>, passed: &PassedArguments) -> Outcome {
    let program = std::env::current_exe()?.with_file_name(BENCH);
    // Not as an option, because only a subcommand has it.
    let state = state.map(|state| ("AQUIFER_STATE", state));
    let error = Command::new(&program).envs(state).arg(command).args(&passed.arguments).exec();
    let program = program.display();
    Err(format!(
        "`aquifer {command}` needs {program}, which cannot be started: {error}; build it with \
        `cargo build --release`"
    )
    .into())
}
