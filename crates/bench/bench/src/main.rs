//! The binary `aquifer-bench`: benches, the demo, and tests of RDMA devices.
//!
//! `aquifer bench`, `aquifer demo` and `aquifer fabric` start it.

mod bench;
mod demo;
#[cfg(feature = "verbs")]
mod fabric;
#[cfg(test)]
mod golden_tests;
mod peers;

use std::process::ExitCode;

use aquifer::Outcome;
use clap::{Parser, Subcommand};

#[derive(Parser, Debug)]
#[command(name = "aquifer", bin_name = "aquifer", version, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Measure Aquifer beside its peers; `list` lists the benches
    Bench(bench::BenchArgs),
    /// Compare a real program on the pool, on kernel swap and without either
    Demo(demo::DemoArgs),
    /// List and test RDMA devices
    #[cfg(feature = "verbs")]
    #[command(subcommand)]
    Fabric(fabric::arguments::FabricCommand),
    /// Not available: this build has no support for RDMA devices
    #[cfg(not(feature = "verbs"))]
    Fabric {
        /// Ignored
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        _arguments: Vec<std::ffi::OsString>,
    },
}

fn main() -> ExitCode {
    aquifer::prepare();
    let cli = Cli::parse();
    let outcome: Outcome = match cli.command {
        Command::Bench(arguments) => bench::run(&arguments).map_err(Into::into),
        Command::Demo(arguments) => demo::run(&arguments).map_err(Into::into),
        #[cfg(feature = "verbs")]
        Command::Fabric(command) => fabric::run(command),
        #[cfg(not(feature = "verbs"))]
        Command::Fabric { .. } => Err(aquifer_fabric::WITHOUT_VERBS.into()),
    };
    aquifer::finish(outcome)
}
