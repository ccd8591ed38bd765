//! `aquifer cache`: a server that speaks memcached's protocols.

mod arguments;
mod cluster;
mod memcached_conf;
mod metrics;
mod operate;
mod pool;
mod process;
mod relay;

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use aquifer_cache::server::{
    Listener, ListenerAddress, PARTITION_TIMEOUT, POOL_WAIT, Server, ServerHandle, ServerOptions, TlsSettings,
};
use aquifer_cache::store::StoreOptions;
use aquifer_cache::store::hash::KeyHasher;
use aquifer_cache::tokens::Tokens;
use aquifer_cache_cluster::ClusterServer;
use aquifer_metrics::MetricsListener;
use rustix::net::SocketType;
use rustix::process::Signal;

use crate::Outcome;
use crate::cluster::signals::StopSignal;
use crate::cluster::systemd;
use crate::say::{log_to_stderr, say};
use crate::state::StateDir;

pub use arguments::CacheArguments;

/// Time in which one of several servers hands its partitions over to the others before it stops.
const DRAIN_TIME: Duration = Duration::from_secs(30);
/// Mode bits of a socket that let other users connect.
const OTHERS_MAY_CONNECT: u32 = 0o022;
/// The number of `-v` options from which on connections are logged.
const LOGS_CONNECTIONS: u8 = 1;

/// Serves until it is asked to stop.
///
/// # Errors
/// If the server cannot be started.
pub fn cache(state: Option<&Path>, arguments: &CacheArguments) -> Outcome {
    if let Some(command) = &arguments.command {
        return operate::operate(&StateDir::locate(state)?, command);
    }
    if arguments.license {
        say!("aquifer {}\n\n{}", env!("CARGO_PKG_VERSION"), include_str!("../../../../LICENSE"));
        return Ok(ExitCode::SUCCESS);
    }
    let with_file = arguments.memcached_conf.as_deref().map(memcached_conf::read).transpose()?;
    let arguments = with_file.as_ref().unwrap_or(arguments);
    cluster::check(arguments)?;
    let options = options(arguments)?;
    let listeners = &options.listeners;
    let addresses: Vec<_> = listeners.iter().map(|listener| listener.address().to_string()).collect();
    process::raise_descriptor_limit(arguments)?;
    if arguments.enable_coredumps {
        process::raise_core_limit()?;
    }
    if arguments.daemon {
        process::become_daemon(arguments.verbose > 0)?;
    }
    let pid_file = arguments.pidfile.as_deref().map(process::PidFile::write).transpose()?;
    if let Some(user) = &arguments.user {
        process::become_user(user)?;
    }
    log_to_stderr();
    let options = protect_from_descriptors(arguments, options)?;
    warn_if_open(&options);
    let metrics_listener = arguments.metrics.as_ref().map(MetricsListener::bind).transpose()?;
    let mut stop = StopSignal::install_with(&[Signal::USR1])?;
    let server = Running::start(state, arguments, options)?;
    if arguments.lock_memory {
        process::lock_memory()?;
    }
    tracing::info!(addresses = addresses.join(" "), memory = arguments.memory_limit, "cache serves");
    if let Err(error) = systemd::notify_ready() {
        tracing::warn!(%error, "readiness notification to systemd failed");
    }
    let metrics = match metrics_listener {
        Some(listener) => Some(metrics::serve(listener, server.handle())?),
        None => None,
    };
    stop.wait(None);
    drop(metrics);
    server.stop();
    drop(pid_file);
    Ok(ExitCode::SUCCESS)
}

/// A running server, alone or one of several.
enum Running {
    Alone(Server),
    InCluster(ClusterServer),
}

impl Running {
    fn start(
        state: Option<&Path>,
        arguments: &CacheArguments,
        mut options: ServerOptions,
    ) -> Result<Self, Box<dyn Error>> {
        if arguments.pool.is_some() {
            options.pool = Some(pool::open(&arguments.agent.socket(state)?)?);
        }
        if arguments.cluster.directory.address.is_some() {
            return Ok(Self::InCluster(cluster::start(&StateDir::locate(state)?, arguments, options)?));
        }
        if arguments.memory_file.is_some() {
            process::report_missing_pages();
        }
        let server = Server::start(options).map_err(|error| match &arguments.memory_file {
            Some(path) => format!("cannot serve from {}: {error}", path.display()),
            None => format!("cannot serve: {error}"),
        })?;
        Ok(Self::Alone(server))
    }

    fn handle(&self) -> ServerHandle {
        match self {
            Self::Alone(server) => server.handle(),
            Self::InCluster(server) => server.handle(),
        }
    }

    fn stop(self) {
        match self {
            Self::Alone(server) => server.stop(),
            Self::InCluster(server) => {
                let left = server.drain(DRAIN_TIME);
                if left > 0 {
                    tracing::warn!(
                        left,
                        "some partitions were not handed over to other servers before the stop"
                    );
                }
                server.stop();
            }
        }
    }
}

/// Makes the Unix sockets refuse descriptors of other users. Must be called before the first
/// thread.
fn protect_from_descriptors(
    arguments: &CacheArguments,
    mut options: ServerOptions,
) -> Result<ServerOptions, Box<dyn Error>> {
    // The mode of a socket from systemd is unknown.
    let is_open_to_others = arguments.unix_socket.is_none() || arguments.unix_mask & OTHERS_MAY_CONNECT != 0;
    let protect = |listener: Listener| match listener.address() {
        ListenerAddress::Unix(_) => relay::protect(listener, is_open_to_others),
        ListenerAddress::Tcp(_) => Ok(listener),
    };
    let listeners = options.listeners.into_iter().map(protect).collect::<Result<_, _>>();
    options.listeners = listeners
        .map_err(|error| format!("cannot start the process that relays users' connections: {error}"))?;
    Ok(options)
}

/// Warns if clients of other machines are served without authentication.
fn warn_if_open(options: &ServerOptions) {
    let is_open = options.listeners.iter().find(|listener| match listener.address() {
        ListenerAddress::Tcp(address) => {
            let is_proven = listener.is_encrypted()
                && options.tls.as_ref().is_some_and(TlsSettings::requires_client_certificates);
            !address.ip().is_loopback() && !is_proven
        }
        ListenerAddress::Unix(_) => false,
    });
    if let (Some(listener), None) = (is_open, &options.tokens) {
        tracing::warn!(
            address = %listener.address(),
            "clients of other machines are served without authentication: use --auth-file, or a firewall"
        );
    }
}

fn options(arguments: &CacheArguments) -> Result<ServerOptions, Box<dyn Error>> {
    let tokens = arguments.auth_file.as_deref().map(Tokens::read).transpose();
    Ok(ServerOptions {
        listeners: listen(arguments)?,
        store: StoreOptions {
            limit: arguments.memory_limit,
            partitions: arguments.partitions(),
            threads: usize::from(arguments.threads),
            has_cas: !arguments.disable_cas,
            evicts: !arguments.disable_evictions,
            pool: arguments.pool.unwrap_or(0),
            // Servers of a cluster share a secret, and a file of items has its own.
            hasher: KeyHasher::random()?,
        },
        memory_file: arguments.memory_file.clone(),
        kept: BTreeMap::new(),
        connections_max: arguments.conn_limit as usize,
        item_size_max: usize::try_from(arguments.max_item_size)?,
        requests_per_turn: arguments.max_reqs_per_event.unwrap_or(0) as usize,
        idle_timeout_s: arguments.idle_timeout_s(),
        tokens: tokens.map_err(|error| format!("the file of --auth-file cannot be used: {error}"))?,
        tls: arguments.tls_files()?.map(TlsSettings::read).transpose()?,
        protocol: arguments.protocol.fixed(),
        flush_is_enabled: !arguments.disable_flush_all,
        dump_is_enabled: !arguments.disable_dumping,
        shutdown_is_enabled: arguments.enable_shutdown,
        verbosity: u32::from(arguments.verbose >= LOGS_CONNECTIONS),
        // Set later, once the process has become a daemon.
        pool: None,
        pool_wait: POOL_WAIT,
        partition_timeout: arguments.partition_timeout.map_or(PARTITION_TIMEOUT, Duration::from_millis),
        connector: None,
        version: env!("CARGO_PKG_VERSION"),
    })
}

fn listen(arguments: &CacheArguments) -> Result<Vec<Listener>, Box<dyn Error>> {
    if let Some(socket) = systemd::listener("cache", SocketType::STREAM)? {
        return Ok(vec![Listener::from_socket(socket)?]);
    }
    let mut listeners = Vec::new();
    for (address, is_plain) in arguments.addresses() {
        let listener = Listener::tcp(address, arguments.listen_backlog)
            .map_err(|error| format!("cannot listen on {address}: {error}"))?;
        listeners.push(if is_plain { listener.without_tls() } else { listener });
    }
    if let Some(path) = &arguments.unix_socket {
        let listener = Listener::unix(path, arguments.unix_mask, arguments.listen_backlog)
            .map_err(|error| format!("cannot listen at {}: {error}", path.display()))?;
        listeners.push(listener);
    }
    if listeners.is_empty() {
        return Err(
            "nothing to listen on: port 0 is none; give another with -p PORT, or a path with -s PATH".into(),
        );
    }
    Ok(listeners)
}
