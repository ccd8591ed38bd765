//! The arguments of `aquifer kv`.

use std::ffi::OsString;

use clap::{Args, Subcommand};

use crate::cli::{AgentChoice, PassedArguments};

pub(super) const EXIT_CODES: &str = "\
Exit codes:
  0  it is done
  1  it failed, or the key has no value

Examples:
  aquifer kv put greeting 'far away'
  aquifer kv get greeting
  aquifer kv put photo < photo.jpg
  aquifer kv scan --prefix user: --values";

/// Arguments of `aquifer kv`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXIT_CODES)]
pub struct KvArguments {
    /// The agent to connect to.
    #[command(flatten)]
    pub agent: AgentChoice,
    /// Node whose heap has the store [default: one of this machine, if there is one]
    #[arg(long, global = true, value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(1..))]
    pub node: Option<u16>,
    /// Name of the store; `put` makes it if there is none
    #[arg(
        long,
        global = true,
        value_name = "NAME",
        env = "AQUIFER_STORE",
        hide_env_values = true,
        default_value = "default"
    )]
    pub store: String,
    /// The command.
    #[command(subcommand)]
    pub command: KvCommand,
}

/// Commands of `aquifer kv`.
#[derive(Subcommand, Clone, Debug)]
pub enum KvCommand {
    /// Give a key a value
    Put {
        /// The key
        key: OsString,
        /// The value [default: standard input to its end]
        value: Option<OsString>,
    },
    /// Print the value of a key
    Get {
        /// The key
        key: OsString,
    },
    /// Delete keys
    Del {
        /// The keys
        #[arg(required = true, value_name = "KEY")]
        keys: Vec<OsString>,
    },
    /// Print all keys, one on a line, in no order; control characters and backslashes are escaped
    Scan {
        /// Only keys that begin with this
        #[arg(long, value_name = "PREFIX")]
        prefix: Option<OsString>,
        /// At most this number of keys
        #[arg(long, value_name = "COUNT")]
        limit: Option<usize>,
        /// Print a tab and the value after each key
        #[arg(long)]
        values: bool,
    },
    /// Make a store for many keys
    Create {
        /// Number of keys; a store may have more, and is slower then
        #[arg(long, value_name = "COUNT", default_value_t = super::KEYS_DEFAULT)]
        keys: u64,
    },
    /// Delete the store with all its keys
    Drop,
    /// List the stores
    List,
    /// Measure a store beside redis and memcached; the same as `aquifer bench kv`
    #[command(disable_help_flag = true)]
    Bench(PassedArguments),
}
