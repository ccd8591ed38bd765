//! Golden names: the command line, its environment variables and its exit codes.
//! A changed golden file needs a line in CHANGELOG: users' scripts depend on these.

use aquifer_tests_support::golden;
use clap::CommandFactory;

use crate::cli::{Cli, parse_time_ms};
use crate::run::{ExecutableError, RunError};

#[test]
fn golden_command_line() {
    let mut golden = golden!("command-line");
    golden.command_line(&Cli::command(), "");
    for time in ["500ms", "30s", "2m", "7"] {
        golden.text(time, &parse_time_ms(time).expect("it is a time").to_string());
    }
    golden.check();
}

#[test]
fn golden_exit_codes() {
    let mut golden = golden!("exit-codes");
    let program = || "program".into();
    let failed = |kind: std::io::ErrorKind| std::io::Error::from(kind);
    let other = std::io::ErrorKind::Other;
    let not_found = std::io::ErrorKind::NotFound;
    let errors = [
        ("no such program", RunError::Executable(ExecutableError::NotFound { program: program() })),
        ("not executable", RunError::Executable(ExecutableError::NotExecutable { program: program() })),
        ("not there when it is started", RunError::Start { program: program(), source: failed(not_found) }),
        ("not started", RunError::Start { program: program(), source: failed(other) }),
        ("no cluster", RunError::NoCluster { path: program() }),
        ("stranger", RunError::OtherUser(failed(other))),
        ("refused", RunError::Refused(String::new())),
        ("agent", RunError::Agent(failed(other))),
        ("no shim", RunError::NoShim { path: program() }),
        ("not root", RunError::SwapNeedsRoot),
        ("swap", RunError::SwapServer(failed(other))),
        ("statistics", RunError::Stats { path: program(), source: failed(other) }),
        ("ended", RunError::Ended { program: program(), reason: String::new() }),
    ];
    for (name, error) in errors {
        golden.text(name, &error.exit_code().to_string());
    }
    golden.check();
}
