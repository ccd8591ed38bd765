//! The arguments of `aquifer fabric`.

use std::net::SocketAddr;
use std::path::PathBuf;

use aquifer::settings::Network;
use clap::{Args, Subcommand};

/// `aquifer fabric`
#[derive(Subcommand, Clone, Debug)]
pub enum FabricCommand {
    /// List the RDMA devices of this machine and what they can bear; or say why memory cannot be lent over RDMA here
    Info,
    /// Try and measure everything that one host does with another's memory: start it with --listen there, then with that address here
    Check(CheckArguments),
}

/// `aquifer fabric check`
#[derive(Args, Clone, Debug)]
pub struct CheckArguments {
    /// Where the other host listens, such as 10.0.0.1:7401
    #[arg(value_name = "HOST:PORT", required_unless_present = "listen", conflicts_with = "listen")]
    pub host: Option<SocketAddr>,
    /// Be the other host: lend some memory at this address until Ctrl-C
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Option<SocketAddr>,
    /// Over which network
    #[arg(long, value_name = "NETWORK", default_value = "verbs")]
    pub fabric: Network,
    /// The file with the cluster's key, the same on both hosts [default: cluster.key in the cluster's folder]
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
}
