//! Command line of `aquifer fabric`.

use std::net::SocketAddr;
use std::path::PathBuf;

use aquifer::settings::Network;
use clap::{Args, Subcommand};

/// Commands of `aquifer fabric`.
#[derive(Subcommand, Clone, Debug)]
pub enum FabricCommand {
    /// List this machine's RDMA devices and whether they support what Aquifer needs
    Info,
    /// Test and measure the operations between two hosts: run with --listen on the other host, then
    /// with its address on this one
    Check(CheckArguments),
}

/// Arguments of `aquifer fabric check`.
#[derive(Args, Clone, Debug)]
pub struct CheckArguments {
    /// Address at which the other host listens, such as 10.0.0.1:7401
    #[arg(value_name = "HOST:PORT", required_unless_present = "listen", conflicts_with = "listen")]
    pub host: Option<SocketAddr>,
    /// Be the other host: lend memory for the tests at this address until Ctrl-C
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Option<SocketAddr>,
    /// The network
    #[arg(long, value_name = "NETWORK", default_value = "verbs")]
    pub fabric: Network,
    /// File with the cluster key, the same on both hosts [default: cluster.key in the state folder]
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// The state folder with the cluster key, if --key is not given [default: as for `aquifer`]
    /// [env: AQUIFER_STATE]
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,
}
