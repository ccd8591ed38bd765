//! Commands that another binary has: what measures and draws is not in the one that serves.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use crate::Outcome;
use crate::cli::Passed;

/// The other binary, beside this one.
const BENCH: &str = "aquifer-bench";

/// Becomes `aquifer-bench COMMAND ARGUMENTS`; returns only if that cannot be.
pub fn hand_over(command: &str, state: &Option<PathBuf>, passed: &Passed) -> Outcome {
    let program = std::env::current_exe()?.with_file_name(BENCH);
    let state = state.iter().map(|state| format!("--state={}", state.display()));
    let error = Command::new(&program).args(state).arg(command).args(&passed.arguments).exec();
    let program = program.display();
    Err(format!("`aquifer {command}` needs {program}, which cannot be started: {error}; build it with `cargo build --release`").into())
}
