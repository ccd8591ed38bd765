//! `aquifer fabric`: what this machine's RDMA devices can do, and whether two hosts can lend to one another over them.
//!
//! - `info` lists devices.
//! - `check` measures and tries everything over a connection to another host, where `lend` answers; `talk` is what both say.

pub mod arguments;
mod check;
mod info;
mod lend;
mod talk;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use aquifer_fabric::ClusterKey;

use crate::bench::support::interrupt;
use aquifer::Outcome;
use aquifer::key;
use aquifer::settings::Network;
use aquifer::state::StateDir;
use arguments::{CheckArguments, FabricCommand};

/// One end of a check.
#[derive(Debug)]
struct End {
    address: SocketAddr,
    network: Network,
    key: ClusterKey,
}

/// Does it.
pub fn run(state: &Option<PathBuf>, command: FabricCommand) -> Outcome {
    match command {
        FabricCommand::Info => Ok(info::info()),
        FabricCommand::Check(arguments) => both_ends(state, &arguments),
    }
}

fn both_ends(state: &Option<PathBuf>, arguments: &CheckArguments) -> Outcome {
    let key = match &arguments.key {
        Some(path) => key::load(path)?,
        None => key::load(&StateDir::locate(state.as_deref())?.key_file())?,
    };
    let end = |address| End { address, network: arguments.fabric, key: key.clone() };
    match (arguments.listen, arguments.host) {
        (Some(address), _) => {
            interrupt::install();
            lend::lend(&end(address))?;
            Ok(ExitCode::SUCCESS)
        }
        (None, Some(address)) => check::check(&end(address)),
        (None, None) => unreachable!("one of them is required"),
    }
}
