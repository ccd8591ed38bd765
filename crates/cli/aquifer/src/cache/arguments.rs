//! The options of `aquifer cache`: those of memcached.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::LazyLock;

use aquifer_cache::commands::{PROTOCOL_VERSION, Protocol};
use aquifer_cache::server::TlsFiles;
use aquifer_cache::store::PARTITIONS;
use clap::{Args, Subcommand, ValueEnum};

use aquifer_ipc::size;
use aquifer_metrics::MetricsAddress;

use crate::cli::{AgentChoice, parse_time_ms};
use crate::settings::DirectorySettings;

/// Minimum number of partitions of a stand-alone server.
const PARTITIONS_MIN: usize = 4;
/// Memory of each partition of a stand-alone server that is too small for the default number.
const BYTES_PER_PARTITION: u64 = 2 << 20;
/// The default TCP port of memcached.
const PORT: u16 = 11211;
/// Smallest possible limit of an item's size, in bytes.
const ITEM_SIZE_MIN: u64 = 1 << 10;
/// Largest possible limit of an item's size, in bytes.
const ITEM_SIZE_MAX: u64 = 1 << 30;

/// The version that `-V` prints.
static VERSION: LazyLock<String> =
    LazyLock::new(|| format!("{} (replies as memcached {PROTOCOL_VERSION})", env!("CARGO_PKG_VERSION")));

/// Arguments of `aquifer cache`.
#[derive(Args, Clone, Debug)]
#[command(args_conflicts_with_subcommands = true, args_override_self = true, version = VERSION.as_str())]
pub struct CacheArguments {
    /// TCP port; 0 for none [default: 11211, or none with -s]
    #[arg(short, long, value_name = "PORT")]
    pub port: Option<u16>,
    /// UDP is not supported: only 0 is accepted
    #[arg(short = 'U', long, value_name = "PORT", value_parser = parse_udp_port)]
    pub udp_port: Option<u16>,
    /// Addresses to listen on, separated by commas, each with or without a port; 0.0.0.0 or :: for
    /// all of this machine; notls:ADDRESS for one without encryption [default: 127.0.0.1]
    #[arg(short, long, value_name = "ADDRESS", value_delimiter = ',', value_parser = parse_address)]
    pub listen: Vec<ListenAt>,
    /// Listen at this path, and on no TCP port unless -p is given
    #[arg(short = 's', long, value_name = "PATH")]
    pub unix_socket: Option<PathBuf>,
    /// Permissions of the socket of -s, in octal
    #[arg(short = 'a', long, value_name = "MODE", default_value = "700", value_parser = parse_octal)]
    pub unix_mask: u32,
    /// Memory for items and their index: a number of mebibytes, or a size such as 4G
    #[arg(short, long, value_name = "SIZE", default_value = "64", value_parser = parse_memory)]
    pub memory_limit: u64,
    /// Refuse items if the memory is full, instead of evicting others
    #[arg(short = 'M', long)]
    pub disable_evictions: bool,
    /// Largest item, such as 1m or 512k
    #[arg(short = 'I', long, value_name = "SIZE", default_value = "1m", value_parser = parse_item_size)]
    pub max_item_size: u64,
    /// Most connections at a time
    #[arg(short, long, value_name = "COUNT", default_value_t = 1024,
        value_parser = clap::value_parser!(u32).range(1..))]
    pub conn_limit: u32,
    /// Threads that serve connections
    #[arg(short, long, value_name = "COUNT", default_value_t = 4,
        value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: u16,
    /// Requests of a connection after which others are served [default: as many as have arrived]
    #[arg(short = 'R', long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_reqs_per_event: Option<u32>,
    /// Connections that may wait to be accepted
    #[arg(short = 'b', long, value_name = "COUNT", default_value_t = 1024,
        value_parser = clap::value_parser!(i32).range(1..))]
    pub listen_backlog: i32,
    /// The protocol of all connections, or the one that the first byte shows
    #[arg(short = 'B', long, value_name = "NAME", default_value = "auto")]
    pub protocol: ProtocolName,
    /// Keep items in this file, in a file system in memory such as /dev/shm; a server that is
    /// started with the same options after an orderly stop has them again
    #[arg(short = 'e', long, value_name = "FILE")]
    pub memory_file: Option<PathBuf>,
    /// Give items no cas numbers, which saves 4 bytes an item
    #[arg(short = 'C', long)]
    pub disable_cas: bool,
    /// Serve only clients that show a line of this file as their token: USER:PASSWORD
    #[arg(short = 'Y', long, value_name = "FILE")]
    pub auth_file: Option<PathBuf>,
    /// Let clients stop the server by the command shutdown
    #[arg(short = 'A', long)]
    pub enable_shutdown: bool,
    /// Refuse the command flush_all
    #[arg(short = 'F', long)]
    pub disable_flush_all: bool,
    /// Refuse the command stats cachedump
    #[arg(short = 'X', long)]
    pub disable_dumping: bool,
    /// Partitions of the items, the same on all servers of a cache [default: 128; fewer on a server
    /// of its own with less than 256M]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub partitions: Option<u32>,
    /// Encrypt TCP connections; the certificate and key are those of -o ssl_chain_cert and ssl_key
    #[arg(short = 'Z', long)]
    pub enable_ssl: bool,
    /// Options of memcached's -o, separated by commas: idle_timeout=SECONDS, ssl_chain_cert=FILE,
    /// ssl_key=FILE, ssl_ca_cert=FILE, ssl_verify_mode=0|1|2
    #[arg(short = 'o', long, value_name = "OPTION", value_delimiter = ',', value_parser = parse_extended)]
    pub extended: Vec<Extended>,
    /// Become a daemon
    #[arg(short, long)]
    pub daemon: bool,
    /// Take the identity of this user, if started by root
    #[arg(short, long, value_name = "USER")]
    pub user: Option<String>,
    /// Write the process number to this file
    #[arg(short = 'P', long, value_name = "FILE")]
    pub pidfile: Option<PathBuf>,
    /// Lock the process's memory, as far as it is used
    #[arg(short = 'k', long)]
    pub lock_memory: bool,
    /// Let core dumps be as large as they become
    #[arg(short = 'r', long)]
    pub enable_coredumps: bool,
    /// Keep items that have no room in this much memory of the cluster, such as 4G, instead of
    /// evicting them; the machine's agent must run (`aquifer up`)
    #[arg(long, value_name = "SIZE", value_parser = size::parse, conflicts_with = "disable_evictions")]
    pub pool: Option<u64>,
    /// The agent of `--pool`.
    #[command(flatten)]
    pub agent: AgentChoice,
    /// Serve metrics for Prometheus at this local address, such as 127.0.0.1:7483, or at unix:PATH
    /// [default: no metrics]
    #[arg(long, value_name = "ADDRESS")]
    pub metrics: Option<MetricsAddress>,
    /// Read options from this file, such as /etc/memcached.conf of Debian; those of the command
    /// line count more
    #[arg(long, value_name = "FILE")]
    pub memcached_conf: Option<PathBuf>,
    /// Print the version and the licence
    #[arg(short = 'i', long)]
    pub license: bool,
    /// Options of memcached that are refused.
    #[command(flatten)]
    pub refused: RefusedOptions,
    /// Log connections
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// The cluster of caches, if this server is one of several.
    #[command(flatten)]
    pub cluster: ClusterChoice,
    /// With --directory: address and port at which other servers of the cache reach this one; they
    /// must have the cluster key [default: 127.0.0.1, any port]
    #[arg(long, value_name = "ADDRESS[:PORT]", value_parser = parse_address, requires = "address")]
    pub peer_listen: Option<ListenAt>,
    /// With --directory: address at which other servers reach this one, if it is not the one of
    /// --peer-listen
    #[arg(long, value_name = "ADDRESS", requires = "address")]
    pub advertise: Option<IpAddr>,
    /// With --directory: encrypt requests and partitions on their way between servers; false
    /// permits plain traffic with servers that want it too [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", requires = "address")]
    pub encrypt: Option<bool>,
    /// With --directory: time such as 500ms after which a request ends for whose key no server may
    /// answer at present; a read finds nothing then, and a change fails [default: 100ms]
    #[arg(long, value_name = "TIME", value_parser = parse_partition_timeout_ms, requires = "address")]
    pub partition_timeout: Option<u64>,
    /// The command for a cache of several servers, if one is given.
    #[command(subcommand)]
    pub command: Option<CacheCommand>,
}

/// Options of memcached that have no meaning here: their parsers refuse them by name.
#[derive(Args, Clone, Debug)]
pub struct RefusedOptions {
    /// Growth of slab classes.
    #[arg(short = 'f', long, hide = true, value_parser = refuse_slabs)]
    slab_growth_factor: Option<String>,
    /// Smallest slab class.
    #[arg(short = 'n', long, hide = true, value_parser = refuse_slabs)]
    slab_min_size: Option<String>,
    /// Large pages for slabs.
    #[arg(short = 'L', long, hide = true, num_args = 0, default_missing_value = "true",
        value_parser = refuse_large_pages)]
    enable_largepages: Option<String>,
}

/// The name and the directory of a cache of several servers.
#[derive(Args, Clone, Debug)]
pub struct ClusterChoice {
    /// The directory of the cluster.
    #[command(flatten)]
    pub directory: DirectorySettings,
    /// The name of the cache: servers with the same directory and name are one cache
    #[arg(long, value_name = "NAME", default_value = "main", value_parser = parse_name)]
    pub name: String,
    /// File with the cluster key [default: cluster.key in the state folder]
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
}

/// Commands of `aquifer cache` for a cache of several servers.
#[derive(Subcommand, Clone, Debug)]
pub enum CacheCommand {
    /// Show the servers of a cache, their partitions and their load
    Status {
        /// The cache.
        #[command(flatten)]
        cluster: ClusterChoice,
        /// Print JSON, with all partitions
        #[arg(long)]
        json: bool,
    },
    /// Move a partition to another server, while it is used
    Move {
        /// The cache.
        #[command(flatten)]
        cluster: ClusterChoice,
        /// The number of the partition
        #[arg(value_name = "PARTITION")]
        partition: usize,
        /// The number of the server that is to have it
        #[arg(value_name = "SERVER")]
        to: u16,
    },
    /// Move partitions now, so that all servers have about the same load. Servers do so by
    /// themselves, but a few partitions at a time
    Balance {
        /// The cache.
        #[command(flatten)]
        cluster: ClusterChoice,
    },
    /// Move all partitions away from a server, and wait until it has none: then it can be stopped
    /// without a loss
    Drain {
        /// The cache.
        #[command(flatten)]
        cluster: ClusterChoice,
        /// The number of the server
        #[arg(value_name = "SERVER")]
        server: u16,
        /// Let the server have partitions again
        #[arg(long)]
        undo: bool,
    },
}

/// The name of a protocol.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum ProtocolName {
    /// Text commands and meta commands.
    Ascii,
    /// The binary protocol.
    Binary,
    /// The protocol that the first byte of a connection shows.
    Auto,
}

impl ProtocolName {
    /// The protocol of all connections; `None` if each connection shows its own.
    pub fn fixed(self) -> Option<Protocol> {
        match self {
            Self::Ascii => Some(Protocol::Text),
            Self::Binary => Some(Protocol::Binary),
            Self::Auto => None,
        }
    }
}

/// An option of `-o`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Extended {
    /// Seconds after which an idle connection is closed; 0 for never.
    IdleTimeout(u32),
    /// Close connections beyond the limit at once, which this server always does.
    MaxconnsFast,
    /// The file with the server's certificate and the certificates that sign it.
    SslChainCert(PathBuf),
    /// The file with the server's private key.
    SslKey(PathBuf),
    /// The file with the certificates that sign those of clients.
    SslCaCert(PathBuf),
    /// Whether clients must have certificates: 0 or 1 no, 2 yes.
    SslVerifyMode(u8),
}

/// An address to listen on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ListenAt {
    ip: IpAddr,
    port: Option<u16>,
    /// Connections are not encrypted even with -Z.
    pub is_plain: bool,
}

impl ListenAt {
    /// The address, with any port if none is given.
    pub fn with_any_port(self) -> SocketAddr {
        SocketAddr::new(self.ip, self.port.unwrap_or(0))
    }
}

impl CacheArguments {
    /// The files of certificates, if connections are encrypted.
    ///
    /// # Errors
    /// If a file is not given, or given without `-Z`.
    pub fn tls_files(&self) -> Result<Option<TlsFiles>, String> {
        let mut files = TlsFiles::default();
        for option in &self.extended {
            match option {
                Extended::SslChainCert(path) => files.chain.clone_from(path),
                Extended::SslKey(path) => files.key.clone_from(path),
                Extended::SslCaCert(path) => files.client_ca = Some(path.clone()),
                Extended::SslVerifyMode(mode) => files.requires_client = *mode == 2,
                Extended::IdleTimeout(_) | Extended::MaxconnsFast => {}
            }
        }
        if !self.enable_ssl && files != TlsFiles::default() {
            return Err("certificates are given, but connections are not encrypted: add -Z".to_owned());
        }
        if !self.enable_ssl {
            return Ok(None);
        }
        if files.chain.as_os_str().is_empty() {
            return Err("-Z needs a certificate: give -o ssl_chain_cert=FILE".to_owned());
        }
        if files.key.as_os_str().is_empty() {
            files.key.clone_from(&files.chain);
        }
        Ok(Some(files))
    }

    /// Partitions of the items.
    pub fn partitions(&self) -> usize {
        let is_alone = self.cluster.directory.address.is_none();
        // Each partition has several runs of its own. A small memory has room for few partitions.
        let fitting = usize::try_from(self.memory_limit / BYTES_PER_PARTITION).unwrap_or(usize::MAX);
        let own = if is_alone { fitting.clamp(PARTITIONS_MIN, PARTITIONS) } else { PARTITIONS };
        self.partitions.map_or(own, |partitions| partitions as usize)
    }

    /// The addresses to listen on, and whether connections there are not encrypted even with `-Z`.
    pub fn addresses(&self) -> Vec<(SocketAddr, bool)> {
        let port = match (self.port, &self.unix_socket) {
            (Some(port), _) => port,
            (None, Some(_)) if self.listen.is_empty() => 0,
            (None, _) => PORT,
        };
        let default = [ListenAt { ip: IpAddr::V4(Ipv4Addr::LOCALHOST), port: None, is_plain: false }];
        let listen = if self.listen.is_empty() { &default[..] } else { &self.listen };
        let addresses =
            listen.iter().map(|at| (SocketAddr::new(at.ip, at.port.unwrap_or(port)), at.is_plain));
        addresses.filter(|(address, _)| address.port() != 0).collect()
    }

    /// Seconds after which an idle connection is closed; 0 for never.
    pub fn idle_timeout_s(&self) -> u32 {
        self.extended
            .iter()
            .rev()
            .find_map(|option| match option {
                Extended::IdleTimeout(seconds) => Some(*seconds),
                _ => None,
            })
            .unwrap_or(0)
    }
}

fn parse_udp_port(text: &str) -> Result<u16, String> {
    match text.parse() {
        Ok(0) => Ok(0),
        _ => Err("UDP is not supported; leave this option out, or set it to 0".to_owned()),
    }
}

fn refuse_slabs(_: &str) -> Result<String, String> {
    Err("items are not in slab classes; leave this option out".to_owned())
}

fn refuse_large_pages(_: &str) -> Result<String, String> {
    Err("large pages are not supported; leave this option out".to_owned())
}

fn parse_address(text: &str) -> Result<ListenAt, String> {
    let (is_plain, address) = text.strip_prefix("notls:").map_or((false, text), |address| (true, address));
    parse_ip(address).map(|(ip, port)| ListenAt { ip, port, is_plain })
}

fn parse_ip(text: &str) -> Result<(IpAddr, Option<u16>), String> {
    if let Ok(address) = text.parse::<SocketAddr>() {
        return Ok((address.ip(), Some(address.port())));
    }
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    if let Ok(ip) = bare.parse::<IpAddr>() {
        return Ok((ip, None));
    }
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) => (host, Some(port.parse().map_err(|_| format!("\"{port}\" is not a port"))?)),
        None => (text, None),
    };
    let mut found = std::net::ToSocketAddrs::to_socket_addrs(&(host, 0))
        .map_err(|error| format!("the address of \"{host}\" cannot be found: {error}"))?;
    found.next().map(|address| (address.ip(), port)).ok_or_else(|| format!("\"{host}\" has no address"))
}

fn parse_name(text: &str) -> Result<String, String> {
    let is_valid = (1..=64).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
    if is_valid {
        return Ok(text.to_owned());
    }
    Err("write up to 64 of a-z, A-Z, 0-9, dots, dashes and underscores".to_owned())
}

fn parse_partition_timeout_ms(text: &str) -> Result<u64, String> {
    match parse_time_ms(text)? {
        0 => Err("no server could answer for another one: give at least 1ms".into()),
        time_ms => Ok(time_ms),
    }
}

fn parse_octal(text: &str) -> Result<u32, String> {
    u32::from_str_radix(text, 8)
        .ok()
        .filter(|mode| *mode <= 0o777)
        .ok_or_else(|| "write permissions as an octal number up to 777".to_owned())
}

fn parse_memory(text: &str) -> Result<u64, String> {
    let bytes = match text.parse::<u64>() {
        Ok(mebibytes) => mebibytes.checked_mul(1 << 20).filter(|bytes| *bytes <= 1 << 50),
        Err(_) => Some(size::parse(text).map_err(|error| error.to_string())?),
    };
    match bytes {
        Some(bytes) if bytes >= aquifer_cache::store::LIMIT_MIN => Ok(bytes),
        Some(_) => Err("a cache needs 1M at least".to_owned()),
        None => Err("a plain number is one of mebibytes; this one is too large".to_owned()),
    }
}

fn parse_item_size(text: &str) -> Result<u64, String> {
    let bytes = size::parse(text).map_err(|error| error.to_string())?;
    if (ITEM_SIZE_MIN..=ITEM_SIZE_MAX).contains(&bytes) {
        Ok(bytes)
    } else {
        Err("the largest item can have 1k to 1024m".to_owned())
    }
}

fn parse_extended(text: &str) -> Result<Extended, String> {
    let (name, value) = text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value)));
    match (name, value) {
        ("idle_timeout", Some(seconds)) => seconds
            .parse()
            .map(Extended::IdleTimeout)
            .map_err(|_| format!("\"{seconds}\" is not a number of seconds")),
        ("idle_timeout", None) => Err("write idle_timeout=SECONDS".to_owned()),
        ("maxconns_fast", None) => Ok(Extended::MaxconnsFast),
        ("ssl_chain_cert", Some(file)) => Ok(Extended::SslChainCert(file.into())),
        ("ssl_key", Some(file)) => Ok(Extended::SslKey(file.into())),
        ("ssl_ca_cert", Some(file)) => Ok(Extended::SslCaCert(file.into())),
        ("ssl_verify_mode", Some("0")) => Ok(Extended::SslVerifyMode(0)),
        ("ssl_verify_mode", Some("1")) => Ok(Extended::SslVerifyMode(1)),
        ("ssl_verify_mode", Some("2")) => Ok(Extended::SslVerifyMode(2)),
        ("ssl_verify_mode", _) => Err("ssl_verify_mode is 0, 1 or 2".to_owned()),
        _ => Err(format!("\"{name}\" is not supported; `aquifer cache --help` lists what is")),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser, Debug)]
    struct Command {
        #[command(flatten)]
        cache: CacheArguments,
    }

    fn parse(line: &str) -> Result<CacheArguments, String> {
        let words = std::iter::once("cache").chain(line.split_whitespace());
        Command::try_parse_from(words).map(|command| command.cache).map_err(|error| error.to_string())
    }

    #[test]
    fn the_options_of_debians_configuration_are_accepted() {
        let line = "-d -v -vv -m 64 -p 11211 -u memcache -l 127.0.0.1 -c 1024 -k -M -r \
            -P /var/run/memcached/memcached.pid -U 0 -t 4 -I 2m -C -e /dev/shm/cache";
        let arguments = parse(line).unwrap();
        assert_eq!((arguments.memory_limit, arguments.max_item_size), (64 << 20, 2 << 20));
        assert_eq!(arguments.addresses(), [("127.0.0.1:11211".parse().unwrap(), false)]);
        assert_eq!(arguments.verbose, 3);
    }

    #[test]
    fn addresses_have_ports_of_their_own_or_the_common_one() {
        let addresses = |line: &str| -> Vec<String> {
            parse(line).unwrap().addresses().iter().map(|(address, _)| address.to_string()).collect()
        };
        assert_eq!(addresses("-l 10.0.0.1,[::1]:5,::1 -p 7"), ["10.0.0.1:7", "[::1]:5", "[::1]:7"]);
        assert_eq!(addresses("-s /run/x"), [""; 0]);
        assert_eq!(addresses("-s /run/x -p 9"), ["127.0.0.1:9"]);
    }

    #[test]
    fn unsupported_options_are_refused_by_name() {
        for (line, named) in [
            ("-U 11211", "--udp-port"),
            ("-f 1.25", "--slab-growth-factor"),
            ("-n 48", "not in slab classes"),
            ("-L", "--enable-largepages"),
            ("-o hashpower=20", "hashpower"),
            ("-m 0", "1M at least"),
            ("-I 2g", "1024m"),
            ("-a 999", "octal"),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(named), "{line}: {error}");
        }
    }
}
