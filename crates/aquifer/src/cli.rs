//! What can be typed.

use std::ffi::OsString;
use std::path::PathBuf;

use aquifer_channel::paths::own_or_shared_socket;
use clap::{Args, Parser, Subcommand};
use serde::{Deserialize, Serialize};

use crate::settings::{AgentSettings, DirectorySettings, NodeSettings};
use crate::state::StateDir;
use aquifer_ipc::size;

const HELP: &str = "\
{about-with-newline}
{usage-heading} {usage}

A cluster on this machine:
  up         Start memory nodes and an agent in the background
  down       Stop them
  status     What is up, how much memory is free, what runs
  lend       Change how much a memory node lends, while it is used

Programs:
  run        Run an unmodified program with a bound on its resident memory; the rest is in the cluster
  limit      Change that bound while the program runs

Measure and show:
  demo       A real program on a quarter of the memory that it needs, beside the same on kernel swap
  bench      Measure; `aquifer bench list` names what
  fabric     What this machine's RDMA devices can do

Parts of a cluster, in the foreground (aquifer up starts them for you):
  directory  Serve the cluster's metadata
  keeper     Hold what must outlive the agent
  node       Lend memory
  agent      Borrow memory for this machine's programs

Options:
{options}

An example:
  aquifer up --nodes 3 --memory 1G
  aquifer run --local 256M -- python3 analysis.py
  aquifer limit 4711 128M
  aquifer status
  aquifer down
";

/// Aquifer pools the memory of a cluster's machines and lends it to the programs that need it.
#[derive(Parser, Debug)]
#[command(name = "aquifer", version, help_template = HELP, disable_help_subcommand = true)]
pub struct Cli {
    /// The cluster's folder; clusters with different ones live side by side [default: the user's runtime folder]
    #[arg(long, global = true, value_name = "DIR", env = "AQUIFER_STATE", hide_env_values = true)]
    pub state: Option<PathBuf>,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Start a cluster on this machine in the background, or what of it is missing
    Up(UpArguments),
    /// Stop the cluster; programs that run on it are ended
    Down,
    /// Show what is up, how much memory is free, what runs
    Status(StatusArguments),
    /// Change how much a memory node lends, while it is used
    Lend(LendArguments),
    /// Run an unmodified program with a bound on its resident memory; the rest is in the cluster
    Run(RunArguments),
    /// Change the limit of a running program
    Limit(LimitArguments),
    /// A real program on a quarter of the memory that it needs, beside the same on kernel swap
    #[command(disable_help_flag = true)]
    Demo(Passed),
    /// Measure something, beside its peers; `list` names what
    #[command(disable_help_flag = true)]
    Bench(Passed),
    /// What this machine's RDMA devices can do, or why there are none
    #[command(disable_help_flag = true)]
    Fabric(Passed),
    /// Serve the swap device of a run; `aquifer run --swap` starts it.
    #[command(hide = true)]
    SwapServer(SwapServerArguments),
    /// A part of a cluster.
    #[command(flatten)]
    Part(PartCommand),
}

/// `aquifer up`
#[derive(Args, Clone, Debug)]
pub struct UpArguments {
    /// Memory nodes [default: 3]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub nodes: Option<u16>,
    /// Memory that each of them lends, such as 512M or 2G [default: 1G]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub memory: Option<u64>,
    /// The most that `aquifer lend` may make each of them lend [default: the same]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub memory_max: Option<u64>,
    /// When a node is killed or stopped, keep its memory for as long as --grace says: programs wait for it meanwhile, and `aquifer up` starts it again [default: its memory ends with it]
    #[arg(long)]
    pub keep_memory: bool,
    /// How nodes are reached: over this machine's shared memory, or over TCP as if they were elsewhere [default: shm]
    #[arg(long, value_name = "FABRIC")]
    pub fabric: Option<Fabric>,
    /// Most memory that the agent takes as the host's mempool [default: half of what is available, at most 4G]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub mempool: Option<u64>,
    /// Serve all users of this host, who find the agent at this socket; usual is /run/aquifer.sock [default: only you]
    #[arg(long, value_name = "PATH")]
    pub shared_socket: Option<PathBuf>,
    /// Most that one user's programs may have as extents [default: half of what the memory nodes lend]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub extents_per_user: Option<u64>,
    /// How long programs wait for an agent that died, before they are ended, such as 500ms or 2m [default: 30s]
    #[arg(long, value_name = "TIME", value_parser = parse_time_ms)]
    pub grace: Option<u64>,
    /// The directory.
    #[command(flatten)]
    pub directory: DirectorySettings,
}

/// How memory nodes are reached.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fabric {
    /// Shared memory
    Shm,
    /// TCP, proved by the cluster's key
    Tcp,
}

impl Fabric {
    /// As it is written on command lines.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Tcp => "tcp",
        }
    }
}

/// Which host agent is meant.
#[derive(Args, Clone, Debug)]
pub struct AgentChoice {
    /// The host agent's socket [default: that of the cluster in --state, else /run/aquifer.sock]
    #[arg(long, value_name = "PATH", env = "AQUIFER_AGENT", hide_env_values = true)]
    pub agent: Option<PathBuf>,
}

impl AgentChoice {
    /// The socket to use: the one asked for; else that of our own cluster, unless there is none and the host has one for all.
    pub fn socket(&self, state: &StateDir) -> PathBuf {
        self.agent.clone().unwrap_or_else(|| own_or_shared_socket(state.agent_socket()))
    }
}

/// `aquifer status`
#[derive(Args, Clone, Debug)]
pub struct StatusArguments {
    /// Which agent.
    #[command(flatten)]
    pub agent: AgentChoice,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

/// `aquifer lend`
#[derive(Args, Clone, Debug)]
pub struct LendArguments {
    /// What the node shall lend from now on, such as 512M; 0 to empty it. What is in use is not taken away: that follows when it is given back
    #[arg(value_name = "SIZE", value_parser = size::parse_or_zero)]
    pub size: u64,
    /// Which node [default: the only one]
    #[arg(long, value_name = "NUMBER")]
    pub node: Option<u16>,
    /// Do not wait until it is so
    #[arg(long)]
    pub no_wait: bool,
    /// The directory, if it is not that of the cluster in --state.
    #[command(flatten)]
    pub directory: DirectorySettings,
}

/// `aquifer run`
#[derive(Args, Clone, Debug)]
pub struct RunArguments {
    /// Which agent.
    #[command(flatten)]
    pub agent: AgentChoice,
    /// Resident memory that the program may have, such as 512M
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub local: u64,
    /// Keep each page on so many memory nodes, 1 to 3: with 2, a node may die without the program's noticing. Costs as many times the
    /// pool's memory
    #[arg(long, value_name = "COUNT", env = "AQUIFER_REPLICAS", hide_env_values = true, default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=3))]
    pub replicas: u32,
    /// Page it by kernel swap on a device of the cluster's memory: for static and set-user-ID programs, as root
    #[arg(long)]
    pub swap: bool,
    /// Size of that device, such as 2G [default: eight times --local, at most twice what the cluster has free]
    #[arg(long, value_name = "SIZE", value_parser = size::parse, requires = "swap")]
    pub swap_size: Option<u64>,
    /// Write statistics there when the program ends, as JSON
    #[arg(long, value_name = "FILE")]
    pub stats: Option<PathBuf>,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    pub command: Vec<OsString>,
}

/// `aquifer limit`
#[derive(Args, Clone, Debug)]
pub struct LimitArguments {
    /// Which agent.
    #[command(flatten)]
    pub agent: AgentChoice,
    /// A process of the run, or the `aquifer run` that started it
    #[arg(value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pub pid: u32,
    /// Resident memory that the run may have from now on, such as 512M; a few pages will do, if slowly
    #[arg(value_name = "SIZE", value_parser = size::parse)]
    pub size: u64,
}

/// The arguments of a command that `aquifer-bench` has, as they are.
#[derive(Args, Clone, Debug)]
pub struct Passed {
    /// All of them.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    pub arguments: Vec<OsString>,
}

/// `aquifer swap-server`, on whose standard input is the run.
#[derive(Args, Clone, Debug)]
pub struct SwapServerArguments {
    /// The run's limit.
    #[arg(long, value_parser = size::parse)]
    pub local: u64,
    /// The device's size.
    #[arg(long, value_parser = size::parse)]
    pub swap_size: Option<u64>,
    /// The program's name, for people.
    #[arg(long)]
    pub name: String,
}

/// The parts of a cluster.
#[derive(Subcommand, Debug)]
pub enum PartCommand {
    /// Serve the cluster's metadata
    Directory(DirectoryArguments),
    /// Hold what must outlive the agent, and the memory of nodes
    Keeper(KeeperArguments),
    /// Lend memory
    Node(NodeArguments),
    /// Borrow memory for this machine's programs
    Agent(AgentArguments),
}

/// What every part takes.
#[derive(Args, Clone, Debug)]
pub struct Foreground {
    /// Detach, and write `ready` to stdout when it serves; for `aquifer up`.
    #[arg(long, hide = true)]
    pub detached: bool,
}

/// `aquifer directory`
#[derive(Args, Clone, Debug)]
pub struct DirectoryArguments {
    /// How it is started.
    #[command(flatten)]
    pub foreground: Foreground,
}

/// `aquifer keeper`
#[derive(Args, Clone, Debug)]
pub struct KeeperArguments {
    /// How long programs wait for an agent that died, before they are ended, and memory for its node, such as 500ms or 2m [default: 30s]
    #[arg(long, value_name = "TIME", value_parser = parse_time_ms)]
    pub grace: Option<u64>,
    /// How it is started.
    #[command(flatten)]
    pub foreground: Foreground,
}

/// `aquifer node`
#[derive(Args, Clone, Debug)]
pub struct NodeArguments {
    /// Read what is not said here from this file [default: /etc/aquifer/node.toml, if it is there]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// What it is told.
    #[command(flatten)]
    pub settings: NodeSettings,
    /// How it is started.
    #[command(flatten)]
    pub foreground: Foreground,
}

/// `aquifer agent`
#[derive(Args, Clone, Debug)]
pub struct AgentArguments {
    /// Read what is not said here from this file [default: /etc/aquifer/agent.toml, if it is there]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// What it is told.
    #[command(flatten)]
    pub settings: AgentSettings,
    /// How it is started.
    #[command(flatten)]
    pub foreground: Foreground,
}

/// How long programs wait for their agent as a rule.
pub const GRACE_MS: u64 = 30_000;
/// Nobody waits for longer than a day.
const TIME_MS_MAX: u64 = 86_400_000;

/// Read `500ms`, `30s`, `2m`, or seconds without a unit.
pub fn parse_time_ms(text: &str) -> Result<u64, String> {
    let wrong =
        || format!("\"{text}\" is not a time: write seconds, or a number with ms, s or m, such as 500ms");
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit_ms = match unit {
        "ms" => 1,
        "" | "s" => 1000,
        "m" => 60_000,
        _ => return Err(wrong()),
    };
    if number.is_empty() {
        return Err(wrong());
    }
    let time_ms = number.parse::<u64>().ok().and_then(|number| number.checked_mul(unit_ms));
    time_ms
        .filter(|time_ms| *time_ms <= TIME_MS_MAX)
        .ok_or_else(|| format!("\"{text}\" is longer than a day"))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_holds_together() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_help_names_every_command() {
        let mut command = Cli::command();
        let help = command.render_help().to_string();
        let shown = command.get_subcommands().filter(|command| !command.is_hide_set());
        for name in shown.map(clap::Command::get_name) {
            let is_listed = help.lines().any(|line| line.trim_start().split(' ').next() == Some(name));
            assert!(is_listed, "`{name}` is missing in the help:\n{help}");
        }
    }

    #[test]
    fn times_are_read_and_bounded() {
        let known =
            [("0", 0), ("1s", 1000), ("500ms", 500), ("2m", 120_000), ("30", 30_000), ("1440m", TIME_MS_MAX)];
        for (text, time_ms) in known {
            assert_eq!(parse_time_ms(text), Ok(time_ms), "{text}");
        }
        for text in ["", "s", "1h", "-1s", "1.5s", "1 s"] {
            assert!(parse_time_ms(text).unwrap_err().contains("is not a time"), "{text}");
        }
        for text in ["1441m", "86401", "99999999999999999999", "18446744073709551615m"] {
            assert!(parse_time_ms(text).unwrap_err().contains("longer than a day"), "{text}");
        }
    }

    #[test]
    fn what_follows_the_program_is_the_programs() {
        let words = "aquifer run --local 64M -- tar --state x -- y";
        let cli = Cli::try_parse_from(words.split(' ')).unwrap();
        assert_eq!(cli.state, None);
        let Command::Run(arguments) = cli.command else { panic!("it is a run") };
        assert_eq!(arguments.command, ["tar", "--state", "x", "--", "y"]);
        assert_eq!((arguments.local, arguments.replicas), (64 << 20, 1));
        for count in ["0", "4", "two", "-1"] {
            let words = ["aquifer", "run", "--local", "64M", "--replicas", count, "--", "true"];
            assert!(Cli::try_parse_from(words).is_err(), "{count} replicas are impossible");
        }
        assert!(Cli::try_parse_from(["aquifer", "run", "--local", "64M"]).is_err(), "a program is needed");
        assert!(Cli::try_parse_from(["aquifer", "run", "--", "true"]).is_err(), "a limit is needed");
    }
}
