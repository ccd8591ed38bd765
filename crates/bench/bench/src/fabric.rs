//! `aquifer fabric`: lists RDMA devices, and tests whether two hosts can lend memory to each other.
//!
//! - `info` lists devices.
//! - `check` tests and measures operations over a connection to another host, where `lend` serves.
//! - `messages` encodes the messages between both.

pub mod arguments;
mod check;
mod info;
mod lend;
mod messages;

use std::net::SocketAddr;
use std::process::ExitCode;

use aquifer::Outcome;
use aquifer::key;
use aquifer::settings::Network;
use aquifer::state::StateDir;
use aquifer_bench::support::interrupt;
use aquifer_fabric::ClusterKey;

use arguments::{CheckArguments, FabricCommand};

/// Address, network and key of a check.
#[derive(Debug)]
struct CheckEnd {
    address: SocketAddr,
    network: Network,
    key: ClusterKey,
}

/// Runs a command of `aquifer fabric`.
pub fn run(command: FabricCommand) -> Outcome {
    match command {
        FabricCommand::Info => Ok(info::info()),
        FabricCommand::Check(arguments) => run_check(&arguments),
    }
}

fn run_check(arguments: &CheckArguments) -> Outcome {
    let key = match &arguments.key {
        Some(path) => key::load(path)?,
        None => key::load(&StateDir::locate(arguments.state.as_deref())?.key_file())?,
    };
    let end = |address| CheckEnd { address, network: arguments.fabric, key: key.clone() };
    match (arguments.listen, arguments.host) {
        (Some(address), _) => {
            interrupt::install();
            lend::lend(&end(address))?;
            Ok(ExitCode::SUCCESS)
        }
        (None, Some(address)) => check::check(&end(address)),
        (None, None) => unreachable!("the command line requires one of them"),
    }
}
