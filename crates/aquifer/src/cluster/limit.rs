//! `aquifer limit`: change what a running program may have.

use std::process::ExitCode;

use crate::Outcome;
use crate::cli::LimitArguments;
use crate::say::say_line;
use crate::state::StateDir;
use aquifer_ipc::size::ByteSize;

/// Change it, and say what it is now.
pub fn limit(state: &StateDir, arguments: &LimitArguments) -> Outcome {
    let run = aquifer_host::client::set_limit(&arguments.agent.socket(state), arguments.pid, arguments.size)
        .map_err(|error| format!("the limit of process {} stays: {error}", arguments.pid))?;
    say_line!(
        "{}: may have {} from now on, has {} resident",
        run.name,
        ByteSize(run.limit_bytes),
        ByteSize(run.resident_bytes)
    );
    Ok(ExitCode::SUCCESS)
}
