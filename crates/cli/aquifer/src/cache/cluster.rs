//! Start of a server that is one of several.

use std::error::Error;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use aquifer_cache::server::ServerOptions;
use aquifer_cache_cluster::{ClusterOptions, ClusterServer};
use aquifer_fabric::ClusterKey;

use super::CacheArguments;
use super::arguments::ClusterChoice;
use crate::cluster::daemon::Daemon;
use crate::cluster::key;
use crate::cluster::location::DirectoryLocation;
use crate::state::StateDir;

/// Checks that one of several servers supports the given options.
///
/// # Errors
/// A message about the first option that it does not support.
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
/// If the server cannot join the others, or cannot serve.
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
        memory_socket: memory_socket(&runtime_folder()),
        keeper: Some(state.socket(&Daemon::Keeper.to_string())),
        return_time: aquifer_cache_cluster::lease::RETURN_TIME,
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
/// If the file cannot be read.
pub fn load_key(state: &StateDir, cluster: &ClusterChoice) -> Result<ClusterKey, key::KeyError> {
    key::load(&cluster.key.clone().unwrap_or_else(|| state.key_file()))
}

/// The folder of sockets that only processes of this user can reach.
fn runtime_folder() -> PathBuf {
    std::env::var_os("XDG_RUNTIME_DIR").map_or_else(std::env::temp_dir, PathBuf::from)
}

/// The path of this process's socket in a folder. Removes the sockets of killed servers of this
/// user.
fn memory_socket(folder: &Path) -> PathBuf {
    let own = rustix::process::geteuid().as_raw();
    let name_of = |pid: u32| format!("aquifer-cache-{pid}.sock");
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name
            .to_str()
            .and_then(|name| name.strip_prefix("aquifer-cache-")?.strip_suffix(".sock")?.parse::<u32>().ok());
        let is_own_socket =
            entry.metadata().is_ok_and(|found| found.file_type().is_socket() && found.uid() == own);
        // A server that is about to listen refuses connections, too, but its process lives.
        let has_ended = |pid: u32| !Path::new(&format!("/proc/{pid}")).exists();
        if pid.is_some_and(has_ended) && is_own_socket && is_refused(&entry.path()) {
            // Another server may have removed the socket.
            let _ = std::fs::remove_file(entry.path());
        }
    }
    folder.join(name_of(std::process::id()))
}

/// Whether no process listens at a socket.
fn is_refused(path: &Path) -> bool {
    UnixStream::connect(path).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn sockets_of_servers_that_were_killed_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        // No process has such a number.
        let names = ["aquifer-cache-4194305.sock", "aquifer-cache-1.sock", "other-4194305.sock"];
        names.iter().for_each(|name| drop(UnixListener::bind(at(name)).unwrap()));
        let _live = UnixListener::bind(at("aquifer-cache-4194306.sock")).unwrap();
        std::fs::write(at("aquifer-cache-4194307.sock"), "no socket").unwrap();
        let own = memory_socket(folder.path());
        assert_eq!(own, at(&format!("aquifer-cache-{}.sock", std::process::id())));
        let left: Vec<bool> = names.iter().map(|name| at(name).exists()).collect();
        assert_eq!(left, [false, true, true]);
        assert!(at("aquifer-cache-4194306.sock").exists() && at("aquifer-cache-4194307.sock").exists());
    }
}
