//! What a node and an agent are told, by flags or by a file: the same words in both, and the flags win.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use aquifer_metrics::MetricsAddress;
use clap::Args;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize};

use crate::cli::parse_time_ms;
use aquifer_ipc::size;

/// Where files are looked for that are not named.
const FOLDER: &str = "/etc/aquifer";
/// Nothing sensible is longer.
const FILE_BYTES_MAX: u64 = 64 << 10;

/// Why a file is of no use.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// Unreadable.
    #[error("{path} cannot be read: {source}", path = path.display())]
    System {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// It has too many bytes.
    #[error("{path} has {bytes} bytes, and no file of settings has more than {FILE_BYTES_MAX}", path = path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
        /// Its length.
        bytes: u64,
    },
    /// What it says makes no sense; the line is in it.
    #[error("{path} cannot be understood: {why}", path = path.display())]
    Unfit {
        /// The file.
        path: PathBuf,
        /// Which line, and what is wrong with it.
        why: String,
    },
}

/// Where the cluster's directory is.
#[derive(Args, Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DirectorySettings {
    /// The cluster's directory: `embedded`, the socket of an embedded one (`unix:PATH`), or an etcd
    /// (etcd://HOST:PORT[,HOST:PORT...][/CLUSTER], etcds:// for TLS) [default: embedded]
    #[arg(long = "directory", value_name = "PLACE")]
    pub address: Option<String>,
    /// For etcds://, the certificates of who signed etcd's, PEM
    #[arg(long = "directory-ca", value_name = "FILE")]
    pub ca: Option<PathBuf>,
    /// For etcds://, our own certificate, PEM, if etcd wants one
    #[arg(long = "directory-cert", value_name = "FILE", requires = "directory-key")]
    pub cert: Option<PathBuf>,
    /// The key of that certificate, PEM
    #[arg(id = "directory-key", long = "directory-key", value_name = "FILE", requires = "cert")]
    pub key: Option<PathBuf>,
}

/// How others reach a node, if not by shared memory.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Network {
    /// TCP
    #[default]
    Tcp,
    /// RDMA verbs, by the device that has the address; `aquifer fabric info` lists devices
    Verbs,
}

#[cfg(feature = "verbs")]
impl Network {
    /// As it is written on command lines.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Verbs => "verbs",
        }
    }
}

/// What a node is told.
#[derive(Args, Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct NodeSettings {
    /// Its number in the cluster
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(1..))]
    #[serde(deserialize_with = "number")]
    pub id: Option<u16>,
    /// Memory that it lends, such as 512M or 2G
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    #[serde(deserialize_with = "bytes")]
    pub memory: Option<u64>,
    /// The most that `aquifer lend` may make it lend [default: what --memory says]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    #[serde(deserialize_with = "bytes")]
    pub memory_max: Option<u64>,
    /// Lend less, as far as nobody uses it, when this machine has less than so much memory available, and more again when it has [default: lend what --memory says]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    #[serde(deserialize_with = "bytes")]
    pub keep_free: Option<u64>,
    /// When this node's process ends, this machine's keeper holds its memory for so long, and others wait for the node to come back with it; as long as that of the keeper [default: the memory ends with it]
    #[arg(long, value_name = "TIME", value_parser = parse_time_ms)]
    #[serde(deserialize_with = "time_ms")]
    pub grace: Option<u64>,
    /// Lend it over a network at this address, such as 10.0.0.1:7400, to whoever has the cluster's key [default: to this machine, by shared memory]
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Option<SocketAddr>,
    /// Over which network, with --listen [default: tcp]
    #[arg(long, value_name = "NETWORK")]
    pub fabric: Option<Network>,
    /// Over a network, where others reach it, if that is not where it listens
    #[arg(long, value_name = "ADDRESS")]
    pub advertise: Option<SocketAddr>,
    /// The file with the cluster's key [default: cluster.key in the cluster's folder]
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// Over TCP, encrypt everything, whatever the other end wants
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub encrypt: Option<bool>,
    /// Over TCP, threads that serve [default: 1]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=64))]
    #[serde(deserialize_with = "threads")]
    pub threads: Option<u16>,
    /// Over TCP, the most that one tenant may read and write in a second, such as 500M [default: no bound]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    #[serde(deserialize_with = "bytes")]
    pub rate_bytes: Option<u64>,
    /// Over TCP, the most operations of one tenant in a second [default: no bound]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    #[serde(deserialize_with = "operations")]
    pub rate_operations: Option<u32>,
    /// Serve figures for Prometheus at this address of this machine, such as 127.0.0.1:7480, or unix:PATH [default: nowhere]
    #[arg(long, value_name = "ADDRESS")]
    #[serde(deserialize_with = "place")]
    pub metrics: Option<MetricsAddress>,
    /// The directory.
    #[command(flatten)]
    pub directory: DirectorySettings,
}

/// What an agent is told.
#[derive(Args, Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct AgentSettings {
    /// Most memory that it takes as the host's mempool [default: half of what is available, at most 4G]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    #[serde(deserialize_with = "bytes")]
    pub mempool: Option<u64>,
    /// Most that one user's programs may have as extents [default: half of what the memory nodes lend]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    #[serde(deserialize_with = "bytes")]
    pub extents_per_user: Option<u64>,
    /// The file with the cluster's key [default: cluster.key in the cluster's folder, if there is one]
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// Serve all users of this host, who find the agent at this socket; usual is /run/aquifer.sock [default: only its own user]
    #[arg(long, value_name = "PATH")]
    pub shared_socket: Option<PathBuf>,
    /// Encrypt everything to and from nodes over TCP, whatever they want
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub encrypt: Option<bool>,
    /// When this agent dies, other hosts leave its memory alone for so long after its lease; as long as that of the keeper [default: 30s]
    #[arg(long, value_name = "TIME", value_parser = parse_time_ms)]
    #[serde(deserialize_with = "time_ms")]
    pub grace: Option<u64>,
    /// Serve figures for Prometheus at this address of this machine, such as 127.0.0.1:7481, or unix:PATH [default: nowhere]
    #[arg(long, value_name = "ADDRESS")]
    #[serde(deserialize_with = "place")]
    pub metrics: Option<MetricsAddress>,
    /// The directory.
    #[command(flatten)]
    pub directory: DirectorySettings,
}

/// Settings, of which some may be missing.
pub trait Settings: DeserializeOwned {
    /// These, and where nothing is said, those of `other`.
    fn or(self, other: Self) -> Self;
}

impl Settings for DirectorySettings {
    fn or(self, other: Self) -> Self {
        // The files belong to the place.
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

impl Settings for AgentSettings {
    fn or(self, other: Self) -> Self {
        Self {
            mempool: self.mempool.or(other.mempool),
            extents_per_user: self.extents_per_user.or(other.extents_per_user),
            grace: self.grace.or(other.grace),
            key: self.key.or(other.key),
            shared_socket: self.shared_socket.or(other.shared_socket),
            encrypt: self.encrypt.or(other.encrypt),
            metrics: self.metrics.or(other.metrics),
            directory: self.directory.or(other.directory),
        }
    }
}

/// The flags, and for what they do not say the file: the one that was named, else, where `usual` names it, the one in
/// /etc/aquifer if there is one.
///
/// # Errors
/// A file that cannot be read or understood.
pub fn complete<T: Settings>(
    flags: T,
    named: Option<&Path>,
    usual: Option<&str>,
) -> Result<T, SettingsError> {
    let usual = usual.map(|name| Path::new(FOLDER).join(name)).filter(|path| path.exists());
    match named.map(Path::to_owned).or(usual) {
        Some(path) => Ok(flags.or(load(&path)?)),
        None => Ok(flags),
    }
}

fn load<T: DeserializeOwned>(path: &Path) -> Result<T, SettingsError> {
    let system = |source| SettingsError::System { path: path.to_owned(), source };
    let bytes = std::fs::metadata(path).map_err(system)?.len();
    if bytes > FILE_BYTES_MAX {
        return Err(SettingsError::TooLong { path: path.to_owned(), bytes });
    }
    let text = std::fs::read_to_string(path).map_err(system)?;
    parse(&text).map_err(|why| SettingsError::Unfit { path: path.to_owned(), why })
}

fn parse<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    toml::from_str(text).map_err(|error| error.to_string().trim_end().to_owned())
}

fn bytes<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    size::parse(&String::deserialize(from)?).map(Some).map_err(D::Error::custom)
}

fn time_ms<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    parse_time_ms(&String::deserialize(from)?).map(Some).map_err(D::Error::custom)
}

fn place<'de, D: Deserializer<'de>>(from: D) -> Result<Option<MetricsAddress>, D::Error> {
    String::deserialize(from)?.parse().map(Some).map_err(D::Error::custom)
}

fn within<'de, T, D>(from: D, least: T, most: T) -> Result<Option<T>, D::Error>
where
    T: Deserialize<'de> + PartialOrd + std::fmt::Display,
    D: Deserializer<'de>,
{
    let number = T::deserialize(from)?;
    if number < least || number > most {
        return Err(D::Error::custom(format!("{number} is not in {least}..={most}")));
    }
    Ok(Some(number))
}

fn number<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u16>, D::Error> {
    within(from, 1, u16::MAX)
}

fn threads<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u16>, D::Error> {
    within(from, 1, 64)
}

fn operations<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    within(from, 1, u32::MAX)
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
    fn a_file_says_all_that_flags_do() {
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
    fn flags_win() {
        let flags = NodeSettings { id: Some(9), encrypt: Some(false), ..Default::default() };
        let both = flags.or(parse(NODE).unwrap());
        assert_eq!((both.id, both.encrypt, both.memory), (Some(9), Some(false), Some(8 << 30)));
        assert!(both.directory.ca.is_some());
        let address = Some("embedded".to_owned());
        let elsewhere = DirectorySettings { address, ..Default::default() };
        let flags = NodeSettings { directory: elsewhere.clone(), ..Default::default() };
        assert_eq!(flags.or(parse(NODE).unwrap()).directory, elsewhere, "the files belong to the place");
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        for (text, line, what) in [
            ("id = 1\nmemmory = \"1G\"\n", "line 2", "memmory"),
            ("[directory]\n\nplace = \"x\"\n", "line 3", "place"),
            ("id = 0\n", "line 1", "not in 1..=65535"),
            ("\nmemory = 5\n", "line 2", "string"),
            ("memory = \"lots\"\n", "line 1", "not a size"),
            ("threads = 65\n", "line 1", "not in 1..=64"),
            ("rate-operations = 0\n", "line 1", "not in 1..="),
            ("id = 1\nmetrics = \"0.0.0.0:7480\"\n", "line 2", "proxy that speaks TLS"),
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
    fn files_are_found_or_refused() {
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
        fn any_text_is_refused_or_read(text in "([a-z-]{1,8} = [\"a-z0-9.:]{0,8}\n|\\PC{0,20}\n){0,6}") {
            let _either = parse::<NodeSettings>(&text);
        }
    }
}

#[cfg(test)]
mod golden_tests;
