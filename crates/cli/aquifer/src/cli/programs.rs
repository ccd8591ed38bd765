//! The commands for programs on the pool.

use std::ffi::OsString;
use std::path::PathBuf;

use aquifer_agent::Backup;
use aquifer_ipc::size;
use clap::Args;

use super::{AgentChoice, parse_time_ms};

/// The help text after the options of `aquifer run`.
pub const RUN_HELP: &str = "\
Example:
  aquifer run --local 256M -- python3 analysis.py

Exit codes:
  The program's own. If a signal ended the program, `aquifer run` ends by the same signal.
  125  `aquifer run` failed, or Aquifer ended the program
  126  the program cannot be executed, or cannot be paged
  127  there is no such program
  2    the command line of `aquifer run` is wrong";

/// Arguments of `aquifer run`.
#[derive(Args, Clone, Debug)]
pub struct RunArguments {
    /// The agent to connect to.
    #[command(flatten)]
    pub agent: AgentChoice,
    /// Limit of the program's resident memory, at least 8M, such as 512M; its part of the mempool
    /// counts as well
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub local: u64,
    /// Limit while this host has idle memory, such as 8G, or auto for as much as it has; what is
    /// beyond --local is taken back when others need it [default: the agent's, mostly --local]
    #[arg(long, value_name = "SIZE|auto", value_parser = size::parse_or_auto, conflicts_with = "swap")]
    pub local_max: Option<u64>,
    /// Number of memory nodes that hold a copy of each page, 1 to 3. With 2, the program survives
    /// the loss of a node. Each copy takes memory of the pool
    #[arg(long, value_name = "COUNT", env = "AQUIFER_REPLICAS", hide_env_values = true, default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=3))]
    pub replicas: u32,
    /// When pages have a copy on a disk, if a node lends one: never; if-needed, while memory nodes
    /// have no room or a replica is missing; or always [default: the agent's, mostly if-needed]
    #[arg(long, value_name = "POLICY", env = "AQUIFER_BACKUP", hide_env_values = true)]
    pub backup: Option<Backup>,
    /// Page the program by kernel swap on a device in the pool: for static and set-user-ID
    /// programs; needs root
    #[arg(long)]
    pub swap: bool,
    /// Size of the swap device, such as 2G [default: eight times --local, at most twice the pool's
    /// free memory]
    #[arg(long, value_name = "SIZE", value_parser = size::parse, requires = "swap")]
    pub swap_size: Option<u64>,
    /// Let the program continue if this command is killed (SIGKILL); otherwise it ends, too
    #[arg(long)]
    pub detach: bool,
    /// End the run, with exit code 125, when a process of it is not paged
    #[arg(long)]
    pub strict: bool,
    /// Time for which the program waits when the pool is full, such as 30s or 2h, before it is
    /// ended [default: 10m]
    #[arg(long, value_name = "TIME", value_parser = parse_time_ms)]
    pub wait_for_room: Option<u64>,
    /// Write statistics as JSON to this file when the program ends
    #[arg(long, value_name = "FILE")]
    pub stats: Option<PathBuf>,
    /// The program and its arguments
    // The program's own options follow its name. Before it, a word with a hyphen is an option of
    // `aquifer`.
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    pub command: Vec<OsString>,
}

/// The help text after the options of `aquifer check`.
pub const CHECK_HELP: &str = "\
Example:
  aquifer check -- sqlite3

Exit codes:
  0    programs can run on the pool, and so can the one that was given
  1    something is missing, and the output says what";

/// Arguments of `aquifer check`.
#[derive(Args, Clone, Debug)]
pub struct CheckArguments {
    /// The agent to ask.
    #[command(flatten)]
    pub agent: AgentChoice,
    /// A program, whose arguments are ignored
    #[arg(trailing_var_arg = true, value_name = "PROGRAM")]
    pub command: Vec<OsString>,
}

/// The help text after the options of `aquifer core`.
pub const CORE_HELP: &str = "\
The process is stopped meanwhile, and goes on afterwards. Core dumps of the kernel and of gcore have
zeros for pages that are not resident, and /proc/PID/mem has errors.

Example:
  aquifer core 4711 && gdb /path/to/program core.4711";

/// Arguments of `aquifer core`.
#[derive(Args, Clone, Debug)]
pub struct CoreArguments {
    /// The process
    #[arg(value_name = "PID", value_parser = clap::value_parser!(i32).range(1..))]
    pub pid: i32,
    /// The file, which is replaced if it exists [default: core.PID]
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// Arguments of `aquifer limit`.
#[derive(Args, Clone, Debug)]
pub struct LimitArguments {
    /// The agent to connect to.
    #[command(flatten)]
    pub agent: AgentChoice,
    /// A process of the run, or the `aquifer run` that started it
    #[arg(value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pub pid: u32,
    /// The run's new limit, such as 512M. A run works with a few pages, but slowly
    #[arg(value_name = "SIZE", value_parser = size::parse)]
    pub size: u64,
    /// The run's new limit while the host has idle memory, such as 8G, or auto [default: it stays]
    #[arg(long, value_name = "SIZE|auto", value_parser = size::parse_or_auto)]
    pub max: Option<u64>,
}
