//! Arguments of the commands that change what a node lends.

use aquifer_ipc::size;
use clap::Args;

use crate::settings::DirectorySettings;

/// Arguments of `aquifer lend`.
#[derive(Args, Clone, Debug)]
pub struct LendArguments {
    /// Memory that the node lends from now on, such as 512M; 0 to lend none. If it has more in use,
    /// hosts move their pages to other nodes; what cannot move stays until it is freed
    #[arg(value_name = "SIZE", value_parser = size::parse_or_zero)]
    pub size: u64,
    /// The node's number [default: the only node]
    #[arg(long, value_name = "NUMBER")]
    pub node: Option<u16>,
    /// Do not wait until the node lends this much
    #[arg(long)]
    pub no_wait: bool,
    /// The directory, if it is not the one of the cluster in the state folder.
    #[command(flatten)]
    pub directory: DirectorySettings,
}

/// Arguments of `aquifer drain`.
#[derive(Args, Clone, Debug)]
pub struct DrainArguments {
    /// The node's number [default: the only node]
    #[arg(value_name = "NODE")]
    pub node: Option<u16>,
    /// Let the node lend again what it lent before
    #[arg(long)]
    pub undo: bool,
    /// Do not wait until the node is empty
    #[arg(long, conflicts_with = "undo")]
    pub no_wait: bool,
    /// Name what does not move, ask, and end the node: programs end that need memory which is lost
    #[arg(long, conflicts_with_all = ["undo", "no_wait"])]
    pub force: bool,
    /// Do not ask before the node ends
    #[arg(long, requires = "force")]
    pub yes: bool,
    /// The directory, if it is not the one of the cluster in the state folder.
    #[command(flatten)]
    pub directory: DirectorySettings,
}
