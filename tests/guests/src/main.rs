//! Runs a command in a guest, and exits with its exit code.

#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::time::Duration;

use aquifer_tests_guests::{Guest, Kernel};
use clap::Parser;

/// Runs a command in a virtual machine with a Debian kernel, Soft-RoCE at 10.9.0.1, and this
/// machine's files
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Memory of the virtual machine
    #[arg(long, value_name = "MIB", default_value_t = 2048)]
    memory: u32,
    /// Time after which the virtual machine is ended
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    time_limit: u64,
    /// Also print the output of the kernel
    #[arg(long)]
    console: bool,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true)]
    command: Vec<String>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let guest = Guest {
        memory_mib: args.memory,
        time_limit: Duration::from_secs(args.time_limit),
        folder: std::env::current_dir().unwrap_or_else(|_| "/".into()),
        ..Guest::default()
    };
    let command: Vec<&str> = args.command.iter().map(String::as_str).collect();
    let outcome = match Kernel::prepare().and_then(|kernel| guest.run(&kernel, &command)) {
        Ok(outcome) => outcome,
        Err(error) => {
            eprintln!("aquifer-tests-guests: {error}");
            return ExitCode::from(125);
        }
    };
    print!("{}", outcome.stdout);
    eprint!("{}", outcome.stderr);
    if args.console {
        eprint!("{}", outcome.console);
    }
    ExitCode::from(u8::try_from(outcome.exit_code).unwrap_or(255))
}
