//! Settings of a node and of an agent, from the command line and from a TOML file.
//!
//! The options and the file use the same names. The command line takes precedence over the file.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use aquifer_agent::Backup;
use aquifer_metrics::MetricsAddress;
use clap::Args;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

mod cache_weight;
mod user_backup;
mod values;

use crate::cli::{parse_grace_ms, parse_lent_memory, parse_mempool, parse_time_ms};
use aquifer_ipc::size;
use values::*;

pub use cache_weight::CacheWeight;
pub use user_backup::UserBackup;

/// Folder of the settings files that are read if `--config` is not given.
const FOLDER: &str = "/etc/aquifer";
/// Longest settings file that is accepted, in bytes.
const FILE_BYTES_MAX: u64 = 64 << 10;

/// Why a settings file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The file cannot be read.
    #[error("settings file {path} cannot be read: {source}", path = path.display())]
    System {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file is too long.
    #[error("settings file {path} has {bytes} bytes; at most {FILE_BYTES_MAX} are \
        accepted", path = path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
        /// The length of the file in bytes.
        bytes: u64,
    },
    /// The file has a syntax error, or an unknown or invalid setting.
    #[error("settings file {path} is not valid: {why}", path = path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The parser's message, with the line.
        why: String,
    },
}

/// Address of the cluster's directory, and certificates to reach it.
#[expect(rustdoc::broken_intra_doc_links, reason = "the help text has optional parts in brackets")]
#[derive(Args, Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DirectorySettings {
    /// The cluster's directory: `embedded` for the one in the state folder, `unix:PATH` for the
    /// socket of another embedded one, or an etcd (etcd://HOST:PORT[,HOST:PORT...][/CLUSTER],
    /// etcds:// for TLS) [default: embedded]
    #[arg(long = "directory", value_name = "PLACE")]
    pub address: Option<String>,
    /// For etcds://, certificates of the authorities that signed etcd's certificate, PEM
    #[arg(long = "directory-ca", value_name = "FILE")]
    pub ca: Option<PathBuf>,
    /// For etcds://, client certificate, PEM, if etcd requires one
    #[arg(long = "directory-cert", value_name = "FILE", requires = "directory-key")]
    pub cert: Option<PathBuf>,
    /// For etcds://, private key of the client certificate, PEM
    #[arg(id = "directory-key", long = "directory-key", value_name = "FILE", requires = "cert")]
    pub key: Option<PathBuf>,
}

/// The fabric by which other machines reach a node.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Network {
    /// TCP
    #[default]
    Tcp,
    /// RDMA verbs, on the device with the address of --listen; `aquifer fabric info` lists devices
    Verbs,
}

#[cfg(feature = "verbs")]
impl Network {
    /// The value of `--fabric`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Verbs => "verbs",
        }
    }
}

/// Settings of a memory node.
#[derive(Args, Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct NodeSettings {
    /// The node's number in the cluster
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(1..))]
    #[serde(deserialize_with = "node_number")]
    pub id: Option<u16>,
    /// Memory that the node lends, such as 512M or 2G
    #[arg(long, value_name = "SIZE", value_parser = parse_lent_memory)]
    #[serde(deserialize_with = "lent_memory")]
    pub memory: Option<u64>,
    /// Upper bound for `aquifer lend` on this node [default: the value of --memory]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    #[serde(deserialize_with = "bytes")]
    pub memory_max: Option<u64>,
    /// Keep this much memory of the machine available: lend less, as far as lent memory is free,
    /// and more again later [default: always lend the value of --memory]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    #[serde(deserialize_with = "bytes")]
    pub keep_free: Option<u64>,
    /// Time for which this machine's keeper keeps the node's memory after the node's process ended,
    /// and hosts wait for the node; must be the keeper's --grace [default: the memory is lost]
    #[arg(long, value_name = "TIME", value_parser = parse_grace_ms)]
    #[serde(deserialize_with = "grace_ms")]
    pub grace: Option<u64>,
    /// Lend room on a disk instead of memory: a file in this directory, which other processes
    /// cannot see, reserved and encrypted; needs --listen. Runs use it when memory is short (see
    /// `aquifer run --backup`)
    #[arg(long, value_name = "DIRECTORY")]
    pub disk: Option<PathBuf>,
    /// When the node is asked to stop, wait at most this long until hosts have moved their pages to
    /// other nodes, such as 2m [default: it stops at once]
    #[arg(long, value_name = "TIME", value_parser = parse_time_ms)]
    #[serde(deserialize_with = "time_ms")]
    pub drain_on_stop: Option<u64>,
    /// Lend over a network at this address, such as 10.0.0.1:7400, to hosts with the cluster key
    /// [default: lend to this machine only, by shared memory]
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Option<SocketAddr>,
    /// The network, with --listen [default: tcp]
    #[arg(long, value_name = "NETWORK")]
    pub fabric: Option<Network>,
    /// Address at which hosts reach the node, if it is not the one of --listen
    #[arg(long, value_name = "ADDRESS")]
    pub advertise: Option<SocketAddr>,
    /// File with the cluster key [default: cluster.key in the state folder]
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// Encrypt all TCP traffic; false permits plain traffic with hosts that want it too [default:
    /// true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub encrypt: Option<bool>,
    /// Threads that serve TCP connections [default: 1, and 8 with --disk]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=64))]
    #[serde(deserialize_with = "threads")]
    pub threads: Option<u16>,
    /// Over TCP, bytes that one tenant may read and write per second, such as 500M [default:
    /// unlimited]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    #[serde(deserialize_with = "bytes")]
    pub rate_bytes: Option<u64>,
    /// Over TCP, operations of one tenant per second [default: unlimited]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    #[serde(deserialize_with = "operations")]
    pub rate_operations: Option<u32>,
    /// Serve metrics for Prometheus at this local address, such as 127.0.0.1:7480, or at unix:PATH
    /// [default: no metrics]
    #[arg(long, value_name = "ADDRESS")]
    #[serde(deserialize_with = "metrics_address")]
    pub metrics: Option<MetricsAddress>,
    /// The directory of the cluster.
    #[command(flatten)]
    pub directory: DirectorySettings,
}

/// Settings of a service of heaps.
#[derive(Args, Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct HeapServiceSettings {
    /// The number of the memory node that it belongs to
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(1..=4095))]
    #[serde(deserialize_with = "heap_node_number")]
    pub id: Option<u16>,
    /// Memory that all heaps together may take of what the node lends, such as 512M or 2G
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    #[serde(deserialize_with = "bytes")]
    pub memory: Option<u64>,
    /// Give the heaps memory of their own, beside what the node lends: needed if the node's memory
    /// is pinned, for RDMA [default: false]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub own_memory: Option<bool>,
    /// Serve programs with tickets of their agents at this TCP address, such as 10.0.0.1:7401
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Option<SocketAddr>,
    /// Address at which programs reach the service, if it is not the one of --listen
    #[arg(long, value_name = "ADDRESS")]
    pub advertise: Option<SocketAddr>,
    /// Serve reads by the RDMA device with this address; requests still go over TCP. The heaps have
    /// memory of their own, which is pinned
    #[arg(long, value_name = "ADDRESS")]
    pub rdma: Option<SocketAddr>,
    /// Memory of each heap that an RDMA device serves, such as 256M [default: half of --memory]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    #[serde(deserialize_with = "bytes")]
    pub rdma_heap: Option<u64>,
    /// File with the cluster key [default: cluster.key in the state folder]
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// Encrypt all traffic; false permits plain traffic with programs that want it too [default:
    /// true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub encrypt: Option<bool>,
    /// Threads that answer requests [default: 1]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=64))]
    #[serde(deserialize_with = "threads")]
    pub threads: Option<u16>,
    /// Time for which this machine's keeper keeps the heaps after the process ended; must be the
    /// keeper's --grace [default: 30s]
    #[arg(long, value_name = "TIME", value_parser = parse_grace_ms)]
    #[serde(deserialize_with = "grace_ms")]
    pub grace: Option<u64>,
    /// Serve metrics for Prometheus at this local address, such as 127.0.0.1:7482, or at unix:PATH
    /// [default: no metrics]
    #[arg(long, value_name = "ADDRESS")]
    #[serde(deserialize_with = "metrics_address")]
    pub metrics: Option<MetricsAddress>,
    /// The directory of the cluster.
    #[command(flatten)]
    pub directory: DirectorySettings,
}

/// Settings of an agent.
#[derive(Args, Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct AgentSettings {
    /// Largest size of the mempool, with the page cache [default: half of the available memory]
    #[arg(long, value_name = "SIZE", value_parser = parse_mempool)]
    #[serde(deserialize_with = "mempool_bytes")]
    pub mempool: Option<u64>,
    /// Keep this much memory of the machine available: the page cache returns its memory before
    /// less is [default: a 16th of the machine's memory, 256M to 4G]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    #[serde(deserialize_with = "bytes")]
    pub keep_free: Option<u64>,
    /// Limit of programs while this host has idle memory, for those that give no --local-max: a
    /// size, or auto for as much as there is [default: they are held at --local]
    #[arg(long, value_name = "SIZE|auto", value_parser = size::parse_or_auto)]
    #[serde(deserialize_with = "bytes_or_auto")]
    pub local_max: Option<u64>,
    /// Most of the page cache that one user may have; 0 for no page cache [default: all of it]
    #[arg(long, value_name = "SIZE", value_parser = size::parse_or_zero)]
    #[serde(deserialize_with = "bytes_or_zero")]
    pub cache_per_user: Option<u64>,
    /// Weight of a user in a full page cache; may be given for several users [default: 1]
    #[arg(long, value_name = "UID=WEIGHT")]
    pub cache_weight: Vec<CacheWeight>,
    /// Most remote memory that the sessions of one user may hold as extents [default: half of what
    /// the nodes lend]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    #[serde(deserialize_with = "bytes")]
    pub extents_per_user: Option<u64>,
    /// Most remote memory that the programs of one user's runs may have [default: all that the
    /// nodes lend, and when it is short, users that have less of it come first]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    #[serde(deserialize_with = "bytes")]
    pub pages_per_user: Option<u64>,
    /// Remote memory that other users cannot take from the runs of a user [default: 1/64 of what
    /// the nodes lend, at least 8M]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    #[serde(deserialize_with = "bytes")]
    pub pages_share: Option<u64>,
    /// Most bytes a second that this host moves off nodes that are being emptied, such as 20M; 0
    /// for no limit [default: 100M]
    #[arg(long, value_name = "SIZE", value_parser = size::parse_or_zero)]
    #[serde(deserialize_with = "bytes_or_zero")]
    pub move_rate: Option<u64>,
    /// When pages of runs that do not choose have a copy on a disk, if a node lends one: never,
    /// if-needed or always [default: if-needed]
    #[arg(long, value_name = "POLICY")]
    #[serde(deserialize_with = "backup")]
    pub backup: Option<Backup>,
    /// Policy of copies on a disk for one user, such as 1000=always; may be given for several
    #[arg(long, value_name = "UID=POLICY")]
    pub backup_of: Vec<UserBackup>,
    /// Address and port at which agents of other hosts hand segments over; they must have the
    /// cluster key [default: segments stay on this host]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub segment_listen: Option<SocketAddr>,
    /// Most memory of one user's segments on this host [default: half of the available memory]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    #[serde(deserialize_with = "bytes")]
    pub segment_memory: Option<u64>,
    /// Most bytes per second of segments that this host pulls ahead of programs, such as 100M.
    /// Pages that programs wait for are not limited [default: no limit]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    #[serde(deserialize_with = "bytes")]
    pub segment_pull_rate: Option<u64>,
    /// File with the cluster key [default: cluster.key in the state folder, if it exists]
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// Serve all users of this host, at this socket; programs look for /run/aquifer.sock [default:
    /// serve only the agent's own user]
    #[arg(long, value_name = "PATH")]
    pub shared_socket: Option<PathBuf>,
    /// Encrypt all TCP traffic to nodes; false permits plain traffic with nodes that want it too
    /// [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub encrypt: Option<bool>,
    /// Time after the end of this agent's lease before other hosts free its memory; must be the
    /// keeper's --grace [default: 30s]
    #[arg(long, value_name = "TIME", value_parser = parse_grace_ms)]
    #[serde(deserialize_with = "grace_ms")]
    pub grace: Option<u64>,
    /// Serve metrics for Prometheus at this local address, such as 127.0.0.1:7481, or at unix:PATH
    /// [default: no metrics]
    #[arg(long, value_name = "ADDRESS")]
    #[serde(deserialize_with = "metrics_address")]
    pub metrics: Option<MetricsAddress>,
    /// The directory of the cluster.
    #[command(flatten)]
    pub directory: DirectorySettings,
}

/// A group of settings, each of which may be unset.
pub trait Settings: DeserializeOwned {
    /// Takes unset values from `other`.
    fn or(self, other: Self) -> Self;
}

impl Settings for DirectorySettings {
    fn or(self, other: Self) -> Self {
        // Certificates belong to an address: with another address, those of the file do not apply.
        if self.address.is_some() {
            return self;
        }
        Self {
            address: other.address,
            ca: self.ca.or(other.ca),
            cert: self.cert.or(other.cert),
            key: self.key.or(other.key),
        }
    }
}

impl Settings for NodeSettings {
    fn or(self, other: Self) -> Self {
        Self {
            id: self.id.or(other.id),
            memory: self.memory.or(other.memory),
            memory_max: self.memory_max.or(other.memory_max),
            keep_free: self.keep_free.or(other.keep_free),
            disk: self.disk.or(other.disk),
            drain_on_stop: self.drain_on_stop.or(other.drain_on_stop),
            grace: self.grace.or(other.grace),
            listen: self.listen.or(other.listen),
            fabric: self.fabric.or(other.fabric),
            advertise: self.advertise.or(other.advertise),
            key: self.key.or(other.key),
            encrypt: self.encrypt.or(other.encrypt),
            threads: self.threads.or(other.threads),
            rate_bytes: self.rate_bytes.or(other.rate_bytes),
            rate_operations: self.rate_operations.or(other.rate_operations),
            metrics: self.metrics.or(other.metrics),
            directory: self.directory.or(other.directory),
        }
    }
}

impl Settings for HeapServiceSettings {
    fn or(self, other: Self) -> Self {
        Self {
            id: self.id.or(other.id),
            memory: self.memory.or(other.memory),
            own_memory: self.own_memory.or(other.own_memory),
            rdma: self.rdma.or(other.rdma),
            rdma_heap: self.rdma_heap.or(other.rdma_heap),
            listen: self.listen.or(other.listen),
            advertise: self.advertise.or(other.advertise),
            key: self.key.or(other.key),
            encrypt: self.encrypt.or(other.encrypt),
            threads: self.threads.or(other.threads),
            grace: self.grace.or(other.grace),
            metrics: self.metrics.or(other.metrics),
            directory: self.directory.or(other.directory),
        }
    }
}

impl Settings for AgentSettings {
    fn or(self, other: Self) -> Self {
        Self {
            mempool: self.mempool.or(other.mempool),
            keep_free: self.keep_free.or(other.keep_free),
            local_max: self.local_max.or(other.local_max),
            cache_per_user: self.cache_per_user.or(other.cache_per_user),
            cache_weight: if self.cache_weight.is_empty() { other.cache_weight } else { self.cache_weight },
            extents_per_user: self.extents_per_user.or(other.extents_per_user),
            pages_per_user: self.pages_per_user.or(other.pages_per_user),
            pages_share: self.pages_share.or(other.pages_share),
            move_rate: self.move_rate.or(other.move_rate),
            backup: self.backup.or(other.backup),
            backup_of: if self.backup_of.is_empty() { other.backup_of } else { self.backup_of },
            segment_listen: self.segment_listen.or(other.segment_listen),
            segment_memory: self.segment_memory.or(other.segment_memory),
            segment_pull_rate: self.segment_pull_rate.or(other.segment_pull_rate),
            grace: self.grace.or(other.grace),
            key: self.key.or(other.key),
            shared_socket: self.shared_socket.or(other.shared_socket),
            encrypt: self.encrypt.or(other.encrypt),
            metrics: self.metrics.or(other.metrics),
            directory: self.directory.or(other.directory),
        }
    }
}

/// Completes the settings of the command line with those of a file.
///
/// The file is `config`, the value of `--config`; without it, the file with the name `default` in
/// /etc/aquifer, if it exists.
///
/// # Errors
/// If the file cannot be read, or is not valid.
pub fn complete<T: Settings>(
    command_line: T,
    config: Option<&Path>,
    default: Option<&str>,
) -> Result<T, SettingsError> {
    let default = default.map(|name| Path::new(FOLDER).join(name)).filter(|path| path.exists());
    match config.map(Path::to_owned).or(default) {
        Some(path) => Ok(command_line.or(load(&path)?)),
        None => Ok(command_line),
    }
}

fn load<T: DeserializeOwned>(path: &Path) -> Result<T, SettingsError> {
    let system = |source| SettingsError::System { path: path.to_owned(), source };
    let bytes = std::fs::metadata(path).map_err(system)?.len();
    if bytes > FILE_BYTES_MAX {
        return Err(SettingsError::TooLong { path: path.to_owned(), bytes });
    }
    let text = std::fs::read_to_string(path).map_err(system)?;
    parse(&text).map_err(|why| SettingsError::Invalid { path: path.to_owned(), why })
}

fn parse<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    toml::from_str(text).map_err(|error| error.to_string().trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NODE: &str = r#"
id = 7
memory = "8G"
listen = "0.0.0.0:7400"
fabric = "tcp"
advertise = "10.0.0.1:7400"
key = "/etc/aquifer/cluster.key"
encrypt = true
threads = 4
rate-bytes = "500M"
rate-operations = 100000
metrics = "127.0.0.1:7480"

[directory]
address = "etcds://a:2379,b:2379/blue"
ca = "/etc/aquifer/ca.pem"
cert = "/etc/aquifer/own.pem"
key = "/etc/aquifer/own.key"
"#;

    #[test]
    fn a_file_can_have_every_setting() {
        let node: NodeSettings = parse(NODE).unwrap();
        assert_eq!((node.id, node.memory, node.threads), (Some(7), Some(8 << 30), Some(4)));
        assert_eq!((node.rate_bytes, node.rate_operations), (Some(500 << 20), Some(100_000)));
        assert_eq!(node.listen, Some("0.0.0.0:7400".parse().unwrap()));
        assert_eq!(node.advertise, Some("10.0.0.1:7400".parse().unwrap()));
        assert_eq!((node.encrypt, node.fabric), (Some(true), Some(Network::Tcp)));
        assert_eq!(node.metrics, Some("127.0.0.1:7480".parse().unwrap()));
        assert_eq!(node.directory.address.as_deref(), Some("etcds://a:2379,b:2379/blue"));
        let agent: AgentSettings =
            parse("mempool = \"1G\"\ngrace = \"2m\"\nencrypt = false\nmetrics = \"unix:/x\"\n[directory]\n")
                .unwrap();
        assert_eq!(agent.metrics, Some("unix:/x".parse().unwrap()));
        assert_eq!((agent.mempool, agent.encrypt, agent.grace), (Some(1 << 30), Some(false), Some(120_000)));
        assert_eq!(parse::<NodeSettings>("").unwrap(), NodeSettings::default());
    }

    #[test]
    fn the_command_line_takes_precedence() {
        let command_line = NodeSettings { id: Some(9), encrypt: Some(false), ..Default::default() };
        let both = command_line.or(parse(NODE).unwrap());
        assert_eq!((both.id, both.encrypt, both.memory), (Some(9), Some(false), Some(8 << 30)));
        assert!(both.directory.ca.is_some());
        let address = Some("embedded".to_owned());
        let elsewhere = DirectorySettings { address, ..Default::default() };
        let command_line = NodeSettings { directory: elsewhere.clone(), ..Default::default() };
        assert_eq!(
            command_line.or(parse(NODE).unwrap()).directory,
            elsewhere,
            "certificates belong to an address"
        );
    }

    #[test]
    fn an_error_names_its_line() {
        for (text, line, what) in [
            ("id = 1\nmemmory = \"1G\"\n", "line 2", "memmory"),
            ("[directory]\n\nplace = \"x\"\n", "line 3", "place"),
            ("id = 0\n", "line 1", "not in 1..=65535"),
            ("\nmemory = 5\n", "line 2", "string"),
            ("memory = \"lots\"\n", "line 1", "not a size"),
            ("threads = 65\n", "line 1", "not in 1..=64"),
            ("rate-operations = 0\n", "line 1", "not in 1..="),
            ("id = 1\nmetrics = \"0.0.0.0:7480\"\n", "line 2", "proxy with TLS"),
            ("metrics = 7480\n", "line 1", "string"),
            ("listen = \"somewhere\"\n", "line 1", "address"),
            ("fabric = \"pigeon\"\n", "line 1", "verbs"),
            ("id = 1\nid = 2\n", "line 2", "duplicate"),
            ("id = \n", "line 1", ""),
        ] {
            let why = parse::<NodeSettings>(text).unwrap_err();
            assert!(why.contains(line) && why.contains(what), "{text}: {why}");
        }
        assert!(parse::<AgentSettings>("id = 1").unwrap_err().contains("`id`"));
    }

    #[test]
    fn files_are_read_or_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("node.toml");
        let complete = |path: &Path| complete(NodeSettings::default(), Some(path), None);
        assert!(matches!(complete(&path), Err(SettingsError::System { .. })));
        std::fs::write(&path, NODE).unwrap();
        assert_eq!(complete(&path).unwrap().id, Some(7));
        std::fs::write(&path, "x").unwrap();
        assert!(complete(&path).unwrap_err().to_string().contains("node.toml"));
        std::fs::write(&path, " ".repeat(70_000)).unwrap();
        assert!(matches!(complete(&path), Err(SettingsError::TooLong { .. })));
    }

    proptest! {
        #[test]
        fn arbitrary_text_does_not_panic(text in "([a-z-]{1,8} = [\"a-z0-9.:]{0,8}\n|\\PC{0,20}\n){0,6}") {
            let _either = parse::<NodeSettings>(&text);
        }
    }
}

#[cfg(test)]
mod golden_tests;
