//! The command line: commands, options and their help texts.

mod lending;
mod programs;
#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use aquifer_channel::paths::{chosen_agent_socket, is_agent_in_environment};
use clap::{Args, Parser, Subcommand};
use serde::{Deserialize, Serialize};

use crate::cache::CacheArguments;
use crate::kv::KvArguments;
use crate::settings::{AgentSettings, DirectorySettings, HeapServiceSettings, NodeSettings};
use crate::state::{StateDir, StateError};
use aquifer_ipc::size;
pub use lending::{DrainArguments, LendArguments};
pub use programs::{CheckArguments, CoreArguments, LimitArguments, RunArguments};

const HELP: &str = "\
{about-with-newline}
{usage-heading} {usage}

Cluster on this machine:
  up         Start memory nodes and an agent in the background
  down       Stop them
  status     Show daemons, free memory and running programs
  lend       Change how much memory a node lends, while it is in use
  drain      Empty a node, so that it can be stopped
  heap       List, compact and limit the heaps of objects that programs have
  segment    List, move and free the segments of programs on this host

Programs:
  run        Run an unmodified program with a limit on its resident memory
  check      Check whether this machine, this user and a program can use the pool
  limit      Change the limit of a running program
  core       Write a core dump of a program, with its pages that are elsewhere
  kv         Use key-value stores in the memory of nodes
  cache      Serve a cache that speaks memcached's protocols

Measurements:
  demo       Compare a real program on the pool, on kernel swap and without either
  bench      Measure Aquifer beside its peers; `aquifer bench list` lists the benches
  fabric     List and test RDMA devices

Daemons, in the foreground (`aquifer up` starts them in the background):
  directory     Serve the cluster's metadata
  keeper        Hold memory and descriptors that outlive an agent or a node
  node          Lend memory of this machine
  heap-service  Serve heaps of objects in memory of this machine
  agent         Serve this machine's programs from the pool

Options:
{options}

Example:
  aquifer up --nodes 3 --memory 1G
  aquifer run --local 256M -- python3 analysis.py
  aquifer limit 4711 128M
  aquifer status
  aquifer down
";

const STATUS_EXIT_CODES: &str = "\
Exit codes:
  0  all daemons of the cluster run
  1  the status cannot be determined
  3  a daemon of the cluster does not run; `aquifer up` starts it again
  4  no cluster is up, or the directory has none of this name";

/// Pools the memory of a cluster's machines and lends it to programs that need it
#[derive(Parser, Debug)]
#[command(name = "aquifer", version, help_template = HELP, disable_help_subcommand = true)]
pub struct Cli {
    /// The cluster's state folder; each cluster has its own [default: aquifer in the user's runtime
    /// folder; without one /run/aquifer for root, and ~/.local/state/aquifer for others] [env:
    /// AQUIFER_STATE]
    // Not by clap's `env`: a usage line would show the option as required.
    #[arg(long, global = true, value_name = "DIR")]
    pub state: Option<PathBuf>,
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// A command and its arguments.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Start a cluster on this machine in the background, or those of its daemons that do not run
    Up(UpArguments),
    /// Stop the cluster and end the programs that run on it
    Down(DownArguments),
    /// Show daemons, free memory and running programs
    #[command(after_help = STATUS_EXIT_CODES)]
    Status(StatusArguments),
    /// Change how much memory a node lends, while it is in use
    Lend(LendArguments),
    /// Empty a node: move what programs have there to other nodes, so that it can be stopped
    Drain(DrainArguments),
    /// List, compact and limit the heaps of objects that programs have
    Heap(HeapArguments),
    /// List, move and free the segments of programs on this host
    Segment(SegmentArguments),
    /// Use key-value stores in the memory of nodes
    Kv(KvArguments),
    /// Serve a cache that speaks memcached's protocols, with memcached's options
    Cache(Box<CacheArguments>),
    /// Run an unmodified program with a limit on its resident memory; the rest is on memory nodes
    #[command(after_help = programs::RUN_HELP)]
    Run(RunArguments),
    /// Check whether this machine, this user and a program can use the pool
    #[command(after_help = programs::CHECK_HELP)]
    Check(CheckArguments),
    /// Change the limit of a running program
    Limit(LimitArguments),
    /// Write a core dump of a process on the pool, with its pages that are elsewhere
    #[command(after_help = programs::CORE_HELP)]
    Core(CoreArguments),
    /// Compare a real program on the pool, on kernel swap and without either
    #[command(disable_help_flag = true)]
    Demo(PassedArguments),
    /// Measure Aquifer beside its peers; `list` lists the benches
    #[command(disable_help_flag = true)]
    Bench(PassedArguments),
    /// List and test RDMA devices
    #[command(disable_help_flag = true)]
    Fabric(PassedArguments),
    /// Serve the swap device of a run; started by `aquifer run --swap`
    #[command(hide = true)]
    SwapServer(SwapServerArguments),
    /// Accept connections for an agent; started by the agent
    #[command(hide = true)]
    Gateway,
    /// A daemon of a cluster, in the foreground.
    #[command(flatten)]
    Daemon(DaemonCommand),
}

/// Arguments of `aquifer up`.
#[derive(Args, Clone, Debug)]
pub struct UpArguments {
    /// Number of memory nodes [default: 3]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub nodes: Option<u16>,
    /// Memory that each node lends, such as 512M or 2G [default: 1G]
    #[arg(long, value_name = "SIZE", value_parser = parse_lent_memory)]
    pub memory: Option<u64>,
    /// Upper bound for `aquifer lend` on each node [default: the value of --memory]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub memory_max: Option<u64>,
    /// Lend room on a disk as well, for runs when memory is short: one more node, with this much
    /// room [default: none]
    #[arg(long, value_name = "SIZE", value_parser = parse_lent_memory)]
    pub disk: Option<u64>,
    /// Directory on whose file system that room is reserved [default: /var/tmp]
    #[arg(long, value_name = "DIRECTORY", requires = "disk")]
    pub disk_path: Option<PathBuf>,
    /// Memory of each node that heaps of objects may take, such as 512M [default: no heaps]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub heap_memory: Option<u64>,
    /// Keep a node's memory for the time of --grace after the node was killed or stopped; programs
    /// wait until it is started again [default: its memory is lost]
    #[arg(long)]
    pub keep_memory: bool,
    /// How the agent reaches nodes: by shared memory, or over TCP as between machines [default:
    /// shm]
    #[arg(long, value_name = "FABRIC")]
    pub fabric: Option<Fabric>,
    /// Largest size of the agent's mempool, with the page cache [default: half of the available
    /// memory]
    #[arg(long, value_name = "SIZE", value_parser = parse_mempool)]
    pub mempool: Option<u64>,
    /// Most of the page cache that one user may have; 0 for no page cache [default: all of it]
    #[arg(long, value_name = "SIZE", value_parser = size::parse_or_zero)]
    pub cache_per_user: Option<u64>,
    /// Serve all users of this host, at this socket; programs look for /run/aquifer.sock [default:
    /// serve only your own programs]
    #[arg(long, value_name = "PATH")]
    pub shared_socket: Option<PathBuf>,
    /// Most remote memory that the sessions of one user may hold as extents [default: half of what
    /// the nodes lend]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub extents_per_user: Option<u64>,
    /// Most remote memory that the programs of one user's runs may have [default: all that the
    /// nodes lend, and when it is short, users that have less of it come first]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub pages_per_user: Option<u64>,
    /// Most bytes a second that are moved off nodes that are being emptied, such as 20M; 0 for no
    /// limit [default: 10M for each processor, at most 100M]
    #[arg(long, value_name = "SIZE", value_parser = size::parse_or_zero)]
    pub move_rate: Option<u64>,
    /// Time for which programs wait for a new agent after theirs died, before they are ended, such
    /// as 500ms or 2m [default: 30s]
    #[arg(long, value_name = "TIME", value_parser = parse_grace_ms)]
    pub grace: Option<u64>,
    /// Start the cluster although this user may not use userfaultfd: for extents, heaps and caches.
    /// `aquifer run` finds this cluster's agent then, which can serve no program
    #[arg(long)]
    pub without_runs: bool,
    /// Do not start daemons again when they die; a second `aquifer up` does so [default: a
    /// supervisor starts them again]
    #[arg(long)]
    pub no_restart: bool,
    /// The directory of the cluster.
    #[command(flatten)]
    pub directory: DirectorySettings,
}

/// The fabric between the agent and the nodes of a cluster on one machine.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fabric {
    /// Shared memory
    Shm,
    /// TCP, with the cluster key
    Tcp,
}

impl Fabric {
    /// The value of `--fabric`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Tcp => "tcp",
        }
    }
}

/// The agent that a command connects to.
#[derive(Args, Clone, Debug)]
pub struct AgentChoice {
    /// The agent's socket [default: the one in the folder of --state, of AQUIFER_STATE or of your
    /// own cluster; without these /run/aquifer.sock, or that of systemd's agent] [env:
    /// AQUIFER_AGENT]
    #[arg(long, value_name = "PATH")]
    pub agent: Option<PathBuf>,
}

impl AgentChoice {
    /// The socket of `--agent`; else the one in the folder of `--state`; else that of the
    /// environment; else the default.
    ///
    /// # Errors
    /// If the socket is in a state folder that cannot be used.
    pub fn socket(&self, state: Option<&Path>) -> Result<PathBuf, StateError> {
        let is_named = self.agent.is_some() || state.is_none() && is_agent_in_environment();
        // The socket of another user needs no folder of one's own.
        let state = if is_named { None } else { Some(StateDir::locate(state)?) };
        Ok(chosen_agent_socket(self.agent.as_deref(), state.as_ref().and_then(StateDir::by_option)))
    }
}

/// Arguments of `aquifer status`.
#[derive(Args, Clone, Debug)]
pub struct StatusArguments {
    /// The agent to connect to.
    #[command(flatten)]
    pub agent: AgentChoice,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// The directory, if it is not the one of the cluster in the state folder.
    #[command(flatten)]
    pub directory: DirectorySettings,
}

/// Arguments of `aquifer down`.
#[derive(Args, Clone, Debug)]
pub struct DownArguments {
    /// Remove the cluster key, the logs and the directory, too
    #[arg(long)]
    pub purge: bool,
}

/// Arguments of `aquifer heap`.
#[derive(Args, Clone, Debug)]
pub struct HeapArguments {
    /// The directory, if it is not the one of the cluster in the state folder.
    #[command(flatten)]
    pub directory: DirectorySettings,
    /// File with the cluster key [default: cluster.key in the state folder]
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// The command.
    #[command(subcommand)]
    pub command: HeapCommand,
}

/// Commands of `aquifer heap`.
#[derive(Subcommand, Clone, Debug)]
pub enum HeapCommand {
    /// Show all heaps: what they hold, and how fragmented they are
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Compact the heaps of a user now, until nothing can be merged
    Compact {
        /// The user's number
        #[arg(value_name = "UID")]
        uid: u32,
    },
    /// Change how much memory the heap of a user may take on each node; what it takes already stays
    Limit {
        /// The user's number
        #[arg(value_name = "UID")]
        uid: u32,
        /// The new limit, such as 512M
        #[arg(value_name = "SIZE", value_parser = size::parse)]
        size: u64,
    },
}

/// Arguments of `aquifer segment`.
#[derive(Args, Clone, Debug)]
pub struct SegmentArguments {
    /// The agent to connect to.
    #[command(flatten)]
    pub agent: AgentChoice,
    /// The command.
    #[command(subcommand)]
    pub command: SegmentCommand,
}

/// Commands of `aquifer segment`.
#[derive(Subcommand, Clone, Debug)]
pub enum SegmentCommand {
    /// Show the segments on this host: their processes, how much of them is here, and where they
    /// were synced to; and lost ones that can be restored
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show one segment: where it is, what has followed it, and how long programs have paused
    Status {
        /// The segment's number
        #[arg(value_name = "SEGMENT")]
        id: u64,
        /// The segment's user, if several users have a segment of this number
        #[arg(long, value_name = "UID")]
        user: Option<u32>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Request that the process that owns a segment hands it over to another process, and wait for
    /// that. A process hands segments over when it polls for requests
    Move {
        /// The segment's number
        #[arg(value_name = "SEGMENT")]
        id: u64,
        /// The name of the process that is to have it
        #[arg(value_name = "PROCESS")]
        process: String,
        /// The segment's user, if several users have a segment of this number
        #[arg(long, value_name = "UID")]
        user: Option<u32>,
        /// How long to wait, such as 500ms or 2m
        #[arg(long = "timeout", value_name = "TIME", value_parser = parse_time_ms, default_value = "30s")]
        timeout_ms: u64,
    },
    /// Free a segment whose process has ended, with its copies. Its contents are lost
    Free {
        /// The segment's number
        #[arg(value_name = "SEGMENT")]
        id: u64,
        /// The segment's user, if several users have a segment of this number
        #[arg(long, value_name = "UID")]
        user: Option<u32>,
    },
}

/// Arguments that are passed on to `aquifer-bench` as they are.
#[derive(Args, Clone, Debug)]
pub struct PassedArguments {
    /// All arguments after the command.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    pub arguments: Vec<OsString>,
}

/// Arguments of `aquifer swap-server`. Its standard input is the socket to `aquifer run`.
#[derive(Args, Clone, Debug)]
pub struct SwapServerArguments {
    /// The run's limit.
    #[arg(long, value_parser = size::parse)]
    pub local: u64,
    /// The device's size, if not the default.
    #[arg(long, value_parser = size::parse)]
    pub swap_size: Option<u64>,
    /// The program's name, for logs and `aquifer status`.
    #[arg(long)]
    pub name: String,
}

/// The daemons of a cluster.
#[derive(Subcommand, Debug)]
pub enum DaemonCommand {
    /// Serve the cluster's metadata
    Directory(DirectoryArguments),
    /// Hold memory and descriptors that outlive an agent or a node
    Keeper(KeeperArguments),
    /// Lend memory of this machine
    Node(NodeArguments),
    /// Serve heaps of objects in memory of this machine
    HeapService(HeapServiceArguments),
    /// Serve this machine's programs from the pool
    Agent(AgentArguments),
    /// Start the daemons of `aquifer up` again when they die; started by `aquifer up`
    #[command(hide = true)]
    Supervisor(SupervisorArguments),
}

/// Arguments of every daemon.
#[derive(Args, Clone, Debug)]
pub struct DetachArguments {
    /// Start a session of its own, and write `ready` to standard output once the daemon serves; for
    /// `aquifer up`.
    #[arg(long, hide = true)]
    pub detached: bool,
}

/// Arguments of `aquifer directory`.
#[derive(Args, Clone, Debug)]
pub struct DirectoryArguments {
    /// Whether the daemon detaches.
    #[command(flatten)]
    pub detach: DetachArguments,
}

/// Arguments of `aquifer keeper`.
#[derive(Args, Clone, Debug)]
pub struct KeeperArguments {
    /// Time for which programs wait for a new agent, and kept memory for its node, such as 500ms or
    /// 2m; the agent and the nodes need the same --grace [default: 30s]
    #[arg(long, value_name = "TIME", value_parser = parse_grace_ms)]
    pub grace: Option<u64>,
    /// Whether the daemon detaches.
    #[command(flatten)]
    pub detach: DetachArguments,
}

/// Arguments of `aquifer node`.
#[derive(Args, Clone, Debug)]
pub struct NodeArguments {
    /// TOML file with settings; options on the command line override it [default:
    /// /etc/aquifer/node.toml, if it exists]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The other settings.
    #[command(flatten)]
    pub settings: NodeSettings,
    /// Whether the daemon detaches.
    #[command(flatten)]
    pub detach: DetachArguments,
}

/// Arguments of `aquifer heap-service`.
#[derive(Args, Clone, Debug)]
pub struct HeapServiceArguments {
    /// TOML file with settings; options on the command line override it [default:
    /// /etc/aquifer/heap-service.toml, if it exists]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The other settings.
    #[command(flatten)]
    pub settings: HeapServiceSettings,
    /// Whether the daemon detaches.
    #[command(flatten)]
    pub detach: DetachArguments,
}

/// Arguments of `aquifer agent`.
#[derive(Args, Clone, Debug)]
pub struct AgentArguments {
    /// TOML file with settings; options on the command line override it [default:
    /// /etc/aquifer/agent.toml, if it exists]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The other settings.
    #[command(flatten)]
    pub settings: AgentSettings,
    /// Whether the daemon detaches.
    #[command(flatten)]
    pub detach: DetachArguments,
    /// Wait for the end of this process, the agent before this one.
    #[arg(long, hide = true, value_name = "PID", overrides_with = "after")]
    pub after: Option<i32>,
}

/// Arguments of `aquifer supervisor`.
#[derive(Args, Clone, Debug)]
pub struct SupervisorArguments {
    /// Whether the daemon detaches.
    #[command(flatten)]
    pub detach: DetachArguments,
}

/// Least memory of a mempool: four blocks, the smallest share of a run.
const MEMPOOL_BYTES_MIN: u64 = 1 << 20;
/// Least memory of a node: one section.
const LENT_BYTES_MIN: u64 = 2 << 20;
/// Default of `--grace`.
pub const GRACE_MS: u64 = 30_000;
/// The longest time that can be given: one day.
const TIME_MS_MAX: u64 = 86_400_000;

/// Parses the time of `--grace`, which is not zero: programs would be ended at once.
///
/// # Errors
/// A message if the text is not such a time.
pub fn parse_grace_ms(text: &str) -> Result<u64, String> {
    match parse_time_ms(text)? {
        0 => Err("programs would be ended as soon as their agent dies: give at least 1ms".into()),
        time_ms => Ok(time_ms),
    }
}

/// Parses the size of a mempool.
///
/// # Errors
/// A message if the text is not a size, or too little for one run.
pub fn parse_mempool(text: &str) -> Result<u64, String> {
    at_least(MEMPOOL_BYTES_MIN, text, "a run needs that much to evict pages")
}

/// Parses the memory that a node lends.
///
/// # Errors
/// A message if the text is not a size, or less than a node can lend.
pub fn parse_lent_memory(text: &str) -> Result<u64, String> {
    at_least(LENT_BYTES_MIN, text, "a node lends its memory in pieces of that size")
}

fn at_least(least: u64, text: &str, why: &str) -> Result<u64, String> {
    let bytes = size::parse(text).map_err(|error| error.to_string())?;
    let (given, wanted) = (size::ByteSize(bytes), size::ByteSize(least));
    if bytes >= least {
        Ok(bytes)
    } else {
        Err(format!("{given} is too little: give at least {wanted}, because {why}"))
    }
}

/// Parses `500ms`, `30s`, `2m`, `1h`, or seconds without a unit, into milliseconds.
///
/// # Errors
/// A message if the text is not a time, or longer than a day.
pub fn parse_time_ms(text: &str) -> Result<u64, String> {
    let not_a_time =
        || format!("\"{text}\" is not a time: write seconds, or a number with ms, s, m or h, such as 500ms");
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit_ms = match unit {
        "ms" => 1,
        "" | "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return Err(not_a_time()),
    };
    if number.is_empty() {
        return Err(not_a_time());
    }
    let time_ms = number.parse::<u64>().ok().and_then(|number| number.checked_mul(unit_ms));
    time_ms
        .filter(|time_ms| *time_ms <= TIME_MS_MAX)
        .ok_or_else(|| format!("\"{text}\" is longer than a day"))
}
