//! A server that is one of several.

use std::error::Error;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use aquifer_cache::server::ServerOptions;
use aquifer_cache_cluster::{ClusterOptions, ClusterServer};
use aquifer_fabric::ClusterKey;

use super::CacheArguments;
use super::arguments::ClusterChoice;
use crate::cluster::daemon::Daemon;
use crate::cluster::key;
use crate::cluster::location::DirectoryLocation;
use crate::state::StateDir;

/// Refuses options that one of several servers cannot honour.
///
/// # Errors
/// If there are such.
pub fn check(arguments: &CacheArguments) -> Result<(), String> {
    let is_one_of_several = arguments.cluster.directory.address.is_some();
    if is_one_of_several && arguments.memory_file.is_some() {
        return Err("-e keeps the items of a server on its own: it cannot be given with --directory, where \
            partitions move between servers"
            .to_owned());
    }
    if is_one_of_several
        && arguments.peer_listen.is_some_and(|at| at.with_any_port().ip().is_unspecified())
        && arguments.advertise.is_none()
    {
        return Err(
            "other servers cannot connect to an unspecified address: give the address at which they \
            reach this one with --advertise ADDRESS"
                .to_owned(),
        );
    }
    Ok(())
}

/// Starts a server of the cache.
///
/// # Errors
/// If it cannot join the others, or cannot serve.
pub fn start(
    state: &StateDir,
    arguments: &CacheArguments,
    options: ServerOptions,
) -> Result<ClusterServer, Box<dyn Error>> {
    let listen = arguments
        .peer_listen
        .map_or(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0), super::arguments::ListenAt::with_any_port);
    let cluster = ClusterOptions {
        name: arguments.cluster.name.clone(),
        directory: DirectoryLocation::new(&arguments.cluster.directory)?.connect(state)?,
        key: load_key(state, &arguments.cluster)?,
        encrypt: arguments.encrypt.unwrap_or(true),
        listen,
        advertise: arguments.advertise,
        memory_socket: memory_socket(),
        keeper: Some(state.socket(&Daemon::Keeper.to_string())),
        interference: None,
    };
    let server = ClusterServer::start(options, cluster)?;
    tracing::info!(
        cache = arguments.cluster.name,
        server = server.number(),
        address = %server.address(),
        "server has joined the cache"
    );
    Ok(server)
}

/// The key of the cluster.
///
/// # Errors
/// If it cannot be read.
pub fn load_key(state: &StateDir, cluster: &ClusterChoice) -> Result<ClusterKey, key::KeyError> {
    key::load(&cluster.key.clone().unwrap_or_else(|| state.key_file()))
}

/// The path of a socket that only this user's processes reach.
fn memory_socket() -> PathBuf {
    let folder = std::env::var_os("XDG_RUNTIME_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
    folder.join(format!("aquifer-cache-{}.sock", std::process::id()))
}
