//! Commands that the binary `aquifer-bench` implements.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use crate::Outcome;
use crate::cli::PassedArguments;

/// Name of the binary. It is in the folder of this one.
const BENCH: &str = "aquifer-bench";

/// Replaces this process by `aquifer-bench COMMAND ARGUMENTS`; returns only on failure.
pub fn exec(command: &str, state: &Option<PathBuf>, passed: &PassedArguments) -> Outcome {
    let program = std::env::current_exe()?.with_file_name(BENCH);
    let state = state.iter().map(|state| format!("--state={}", state.display()));
    let error = Command::new(&program).args(state).arg(command).args(&passed.arguments).exec();
    let program = program.display();
    Err(format!(
        "`aquifer {command}` needs {program}, which cannot be started: {error}; build it with \
        `cargo build --release`"
    )
    .into())
}
