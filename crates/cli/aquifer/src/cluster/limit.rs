//! `aquifer limit`: changes the limit of a run.

use std::path::Path;
use std::process::ExitCode;

use crate::Outcome;
use crate::cli::LimitArguments;
use crate::say::say_line;
use aquifer_ipc::SetLimit;
use aquifer_ipc::size::ByteSize;

/// Changes the limit of a run and prints the new one.
pub fn limit(state: Option<&Path>, arguments: &LimitArguments) -> Outcome {
    let set = SetLimit { pid: arguments.pid, limit_bytes: arguments.size, limit_max_bytes: arguments.max };
    let run = aquifer_host::client::set_limit(&arguments.agent.socket(state)?, set)
        .map_err(|error| format!("cannot change the limit of process {}: {error}", arguments.pid))?;
    say_line!("{}: limit {}, resident {}", run.name, ByteSize(run.limit_bytes), ByteSize(run.resident_bytes));
    Ok(ExitCode::SUCCESS)
}
