//! Configuration of a local cluster, stored so that `aquifer up` can restart daemons with the same
//! settings.

use std::ffi::OsString;
use std::io::{self, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::daemon::Daemon;
use super::location::DirectoryLocation;
use crate::cli::{Fabric, GRACE_MS, UpArguments};
use crate::settings::DirectorySettings;
use crate::state::StateDir;
use aquifer_ipc::size::{self, ByteSize};

/// Version of the stored configuration.
const VERSION: u32 = 3;
/// Longest configuration file that is accepted, in bytes.
const FILE_BYTES_MAX: u64 = 64 << 10;

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ClusterConfigError {
    /// The file cannot be read, or is not a configuration.
    #[error("cluster configuration {path} cannot be used: {why}; remove it with `aquifer \
        down`", path = path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// The file cannot be written.
    #[error("cluster configuration {path} cannot be written: {source}", path = path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A cluster with other settings runs in this state folder.
    #[error(
        "a cluster with other settings runs here ({running}): it has {}; stop it with `aquifer down`, \
            leave these options out, or choose another state folder with --state",
        differences.join(", ")
    )]
    Differs {
        /// The cluster that runs.
        running: String,
        /// Each setting that differs from the given options.
        differences: Vec<String>,
    },
}

/// Configuration of a local cluster.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterConfig {
    version: u32,
    /// Number of memory nodes.
    pub nodes: u16,
    /// Memory that each node lends.
    pub memory_bytes: u64,
    /// Upper bound for `aquifer lend` on each node, if it was given.
    #[serde(default)]
    pub memory_bytes_max: Option<u64>,
    /// Room that a further node lends on a disk, if there is one. Otherwise this and the next two
    /// are not written, so that the previous version of `aquifer` can read the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_bytes: Option<u64>,
    /// The directory in which that room is reserved, if it was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_path: Option<PathBuf>,
    /// The port of the node with the disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_port: Option<u16>,
    /// Memory of each node that heaps may take, if it serves any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heap_memory_bytes: Option<u64>,
    /// The port of each service of heaps.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub heap_ports: Vec<u16>,
    /// Whether the keeper keeps the memory of a node whose process has ended.
    #[serde(default)]
    pub keep_memory: bool,
    /// Largest size of the mempool, if it was given.
    pub mempool_bytes: Option<u64>,
    /// Most of the page cache that one user may have, if it was given.
    #[serde(default)]
    pub cache_per_user: Option<u64>,
    /// Most remote memory that the sessions of one user may hold, if it was given.
    #[serde(default)]
    pub extents_per_user: Option<u64>,
    /// Most remote memory of the programs of one user, if it was given. Otherwise it is not
    /// written, so that the previous version of `aquifer` can read the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pages_per_user: Option<u64>,
    /// Most bytes a second that are moved off nodes that are being emptied, if it was given. 0: no
    /// limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub move_rate: Option<u64>,
    /// Socket of the agent for other users, if it serves them.
    #[serde(default)]
    pub shared_socket: Option<PathBuf>,
    /// Grace time of keeper, agent and nodes.
    pub grace_ms: u64,
    /// How the agent reaches the nodes.
    pub fabric: Fabric,
    /// Over TCP, the port of each node, so that a restarted node listens at the same one.
    pub ports: Vec<u16>,
    /// Whether the cluster has no supervisor. False is not written, so that the previous version of
    /// `aquifer` can read the file.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub no_restart: bool,
    /// Location of the directory.
    pub directory: DirectorySettings,
}

impl ClusterConfig {
    /// The configuration of these arguments, with defaults for options that were not given.
    pub fn from_arguments(arguments: &UpArguments) -> Self {
        Self {
            version: VERSION,
            nodes: arguments.nodes.unwrap_or(3),
            memory_bytes: arguments.memory.unwrap_or(1 << 30),
            memory_bytes_max: arguments.memory_max,
            disk_bytes: arguments.disk,
            disk_path: arguments.disk_path.clone(),
            disk_port: None,
            heap_memory_bytes: arguments.heap_memory,
            heap_ports: Vec::new(),
            keep_memory: arguments.keep_memory,
            mempool_bytes: arguments.mempool,
            cache_per_user: arguments.cache_per_user,
            extents_per_user: arguments.extents_per_user,
            pages_per_user: arguments.pages_per_user,
            move_rate: arguments.move_rate,
            shared_socket: arguments.shared_socket.clone(),
            grace_ms: arguments.grace.unwrap_or(GRACE_MS),
            fabric: arguments.fabric.unwrap_or(Fabric::Shm),
            ports: Vec::new(),
            no_restart: arguments.no_restart,
            directory: arguments.directory.clone(),
        }
    }

    /// Sockets of the agent that were deleted, so that programs cannot reach it although it runs.
    pub fn lost_sockets(&self, state: &StateDir) -> Vec<PathBuf> {
        let sockets = [Some(state.agent_socket()), self.shared_socket.clone()];
        let is_lost = |path: &PathBuf| {
            path.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
        };
        sockets.into_iter().flatten().filter(is_lost).collect()
    }

    /// The cluster's daemons. They include the directory only if it is the embedded one of the
    /// cluster, and the supervisor only if it is configured.
    pub fn daemons(&self) -> Vec<Daemon> {
        let is_own = DirectoryLocation::new(&self.directory).is_ok_and(|location| location.is_own());
        let mut all = Daemon::all(self.nodes, self.heap_memory_bytes.is_some());
        all.extend(self.disk_node().map(Daemon::Node));
        all.sort_unstable();
        let is_wanted = |daemon: &Daemon| match daemon {
            Daemon::Directory => is_own,
            Daemon::Supervisor => !self.no_restart,
            _ => true,
        };
        all.into_iter().filter(is_wanted).collect()
    }

    /// The number of the node with a disk, if there is one.
    pub fn disk_node(&self) -> Option<u16> {
        self.disk_bytes.map(|_| self.nodes + 1)
    }

    /// The directory in which the node with a disk reserves its room.
    pub fn disk_directory(&self) -> &Path {
        self.disk_path.as_deref().unwrap_or(Path::new("/var/tmp"))
    }

    /// Options that give a daemon the location of the directory.
    pub fn directory_flags(&self) -> Vec<OsString> {
        let DirectorySettings { address, ca, cert, key } = &self.directory;
        let path = |flag: &str, path: &Option<PathBuf>| {
            path.as_ref().map(|path| {
                let mut flag = OsString::from(format!("--directory-{flag}="));
                flag.push(path);
                flag
            })
        };
        let location = address.as_ref().map(|address| format!("--directory={address}").into());
        [location, path("ca", ca), path("cert", cert), path("key", key)].into_iter().flatten().collect()
    }

    /// Chooses free ports of this machine: one for each node, if nodes serve over TCP, one for each
    /// service of heaps, and one for the node with a disk.
    ///
    /// # Errors
    /// If there is no free port.
    pub fn choose_ports(&mut self) -> io::Result<()> {
        let count = |is_served: bool| if is_served { self.nodes } else { 0 };
        let of_nodes = count(self.fabric == Fabric::Tcp);
        // All ports are bound at the same time, so that they differ.
        let of_disk = u16::from(self.disk_bytes.is_some());
        let listeners: Vec<TcpListener> = (0..of_nodes + count(self.heap_memory_bytes.is_some()) + of_disk)
            .map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))
            .collect::<io::Result<_>>()?;
        let ports = listeners.iter().map(|listener| Ok(listener.local_addr()?.port()));
        self.ports = ports.collect::<io::Result<_>>()?;
        self.heap_ports = self.ports.split_off(usize::from(of_nodes));
        self.disk_port = self.disk_bytes.and_then(|_| self.heap_ports.pop());
        Ok(())
    }

    /// Reads the configuration of the cluster in a state folder; `None` if there is no cluster.
    ///
    /// # Errors
    /// If the file cannot be read, or is not valid.
    pub fn load(state: &StateDir) -> Result<Option<Self>, ClusterConfigError> {
        let path = state.cluster_config();
        let unusable = |why: String| ClusterConfigError::Unusable { path: path.clone(), why };
        let length = match std::fs::metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            metadata => metadata.map_err(|error| unusable(error.to_string()))?.len(),
        };
        if length > FILE_BYTES_MAX {
            return Err(unusable(format!("it has {length} bytes; at most {FILE_BYTES_MAX} are accepted")));
        }
        let text = std::fs::read(&path).map_err(|error| unusable(error.to_string()))?;
        let config: Self = serde_json::from_slice(&text).map_err(|error| unusable(error.to_string()))?;
        if config.version != VERSION {
            return Err(unusable(format!(
                "it has version {}, but this build supports version {VERSION} only",
                config.version
            )));
        }
        let ports = if config.fabric == Fabric::Tcp { usize::from(config.nodes) } else { 0 };
        DirectoryLocation::new(&config.directory).map_err(|error| unusable(error.to_string()))?;
        let heap_ports = config.heap_memory_bytes.map_or(0, |_| usize::from(config.nodes));
        let has_ports = config.ports.len() == ports
            && config.heap_ports.len() == heap_ports
            && config.disk_port.is_some() == config.disk_bytes.is_some();
        if !(1..=64).contains(&config.nodes) || config.memory_bytes == 0 || !has_ports {
            return Err(unusable("its number of nodes, its memory or its ports are out of range".to_owned()));
        }
        Ok(Some(config))
    }

    /// Writes the configuration to the state folder.
    ///
    /// # Errors
    /// If a system call fails.
    pub fn save(&self, state: &StateDir) -> Result<(), ClusterConfigError> {
        let path = state.cluster_config();
        let text = serde_json::to_string_pretty(self).expect("the configuration can be written as JSON");
        // An unchanged file is not written, so missing daemons can be started on a full disk.
        if std::fs::read_to_string(&path).is_ok_and(|stored| stored == text) {
            return Ok(());
        }
        // Renamed into place when it is complete.
        let new = path.with_extension("new");
        // Other users can enter root's state folder, and must neither read nor change its
        // configuration.
        let mut options = std::fs::OpenOptions::new();
        let file = options.write(true).create(true).truncate(true).mode(0o600).open(&new);
        let written = file.and_then(|mut file| file.write_all(text.as_bytes()));
        let written = written.and_then(|()| std::fs::rename(&new, &path));
        written.map_err(|source| ClusterConfigError::Write { path, source })
    }

    /// Checks that the options that were given agree with this configuration.
    ///
    /// # Errors
    /// `Differs` with all settings that do not.
    pub fn check(&self, arguments: &UpArguments) -> Result<(), ClusterConfigError> {
        let differences = self.differences(arguments);
        if differences.is_empty() {
            return Ok(());
        }
        Err(ClusterConfigError::Differs { running: self.to_string(), differences })
    }

    /// Each setting that differs from the options that were given, as text.
    fn differences(&self, arguments: &UpArguments) -> Vec<String> {
        let (given, own) = (&arguments.directory, &self.directory);
        // The certificates belong to the address.
        let certificate = |option, given_file, own_file| {
            let given_file = given.address.as_ref().map(|_| given_file);
            difference(option, given_file, Some(own_file), |file: &&Option<PathBuf>| {
                file.as_ref().map_or_else(|| "none".to_owned(), |file| file.display().to_string())
            })
        };
        let size = |bytes: &u64| exact_size(*bytes);
        let path = |path: &&PathBuf| path.display().to_string();
        let (given_socket, own_socket) = (arguments.shared_socket.as_ref(), self.shared_socket.as_ref());
        [
            difference("--nodes", arguments.nodes, Some(self.nodes), u16::to_string),
            difference("--memory", arguments.memory, Some(self.memory_bytes), size),
            difference("--memory-max", arguments.memory_max, self.memory_bytes_max, size),
            difference("--disk", arguments.disk, self.disk_bytes, size),
            difference("--disk-path", arguments.disk_path.as_ref(), self.disk_path.as_ref(), path),
            difference("--heap-memory", arguments.heap_memory, self.heap_memory_bytes, size),
            (arguments.keep_memory && !self.keep_memory).then(|| "no --keep-memory".to_owned()),
            difference("--fabric", arguments.fabric, Some(self.fabric), |fabric| fabric.name().to_owned()),
            difference("--mempool", arguments.mempool, self.mempool_bytes, size),
            difference("--shared-socket", given_socket, own_socket, path),
            difference("--cache-per-user", arguments.cache_per_user, self.cache_per_user, size),
            difference("--extents-per-user", arguments.extents_per_user, self.extents_per_user, size),
            difference("--pages-per-user", arguments.pages_per_user, self.pages_per_user, size),
            difference("--move-rate", arguments.move_rate, self.move_rate, size),
            difference("--grace", arguments.grace, Some(self.grace_ms), |ms| format!("{ms}ms")),
            (arguments.no_restart && !self.no_restart).then(|| "no --no-restart".to_owned()),
            difference("--directory", given.address.as_ref(), own.address.as_ref(), |address| {
                address.to_string()
            }),
            certificate("--directory-ca", &given.ca, &own.ca),
            certificate("--directory-cert", &given.cert, &own.cert),
            certificate("--directory-key", &given.key, &own.key),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}

/// A setting that differs, as text; `None` if the option was not given, or agrees.
fn difference<T: PartialEq>(
    option: &str,
    given: Option<T>,
    running: Option<T>,
    show: impl Fn(&T) -> String,
) -> Option<String> {
    let given = given?;
    match running {
        Some(running) if running == given => None,
        Some(running) => Some(format!("{option} {} instead of {}", show(&running), show(&given))),
        None => Some(format!("no {option} instead of {}", show(&given))),
    }
}

/// A size as text, in bytes if the usual text is rounded.
fn exact_size(bytes: u64) -> String {
    let text = ByteSize(bytes).to_string();
    if size::parse(&text.replace(' ', "")) == Ok(bytes) { text } else { format!("{bytes} bytes") }
}

impl std::fmt::Display for ClusterConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let plural = if self.nodes == 1 { "" } else { "s" };
        let fabric = if self.fabric == Fabric::Tcp { " over TCP" } else { "" };
        write!(f, "{} node{plural} of {}{fabric}", self.nodes, ByteSize(self.memory_bytes))?;
        if let Some(bytes) = self.disk_bytes {
            write!(f, ", {} on a disk", ByteSize(bytes))?;
        }
        self.directory.address.iter().try_for_each(|address| write!(f, ", directory {address}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(nodes: Option<u16>, memory: Option<u64>) -> UpArguments {
        UpArguments {
            nodes,
            memory,
            memory_max: None,
            disk: None,
            disk_path: None,
            heap_memory: None,
            keep_memory: false,
            fabric: None,
            mempool: None,
            cache_per_user: None,
            extents_per_user: None,
            pages_per_user: None,
            move_rate: None,
            shared_socket: None,
            grace: None,
            without_runs: false,
            no_restart: false,
            directory: DirectorySettings::default(),
        }
    }

    fn state() -> (tempfile::TempDir, StateDir) {
        let folder = aquifer_tests_support::state_folder();
        let state = StateDir::locate(Some(folder.path())).unwrap();
        (folder, state)
    }

    #[test]
    fn a_configuration_is_stored() {
        let (_folder, state) = state();
        assert_eq!(ClusterConfig::load(&state).unwrap(), None);
        let config = ClusterConfig::from_arguments(&arguments(Some(2), None));
        config.save(&state).unwrap();
        assert_eq!(ClusterConfig::load(&state).unwrap(), Some(config));
        let mode = std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(state.cluster_config()).unwrap());
        assert_eq!(mode & 0o777, 0o600, "other users can neither read nor change it");
    }

    #[test]
    fn an_external_directory_is_no_daemon_and_is_passed_to_daemons() {
        let mut arguments = arguments(Some(1), None);
        assert_eq!(ClusterConfig::from_arguments(&arguments).daemons().len(), 5);
        arguments.directory.address = Some("etcds://h:1/c".to_owned());
        arguments.directory.ca = Some("/ca.pem".into());
        let config = ClusterConfig::from_arguments(&arguments);
        assert_eq!(config.daemons(), [Daemon::Keeper, Daemon::Node(1), Daemon::Agent, Daemon::Supervisor]);
        arguments.no_restart = true;
        let daemons = ClusterConfig::from_arguments(&arguments).daemons();
        assert_eq!(daemons, [Daemon::Keeper, Daemon::Node(1), Daemon::Agent]);
        arguments.no_restart = false;
        assert_eq!(config.directory_flags(), ["--directory=etcds://h:1/c", "--directory-ca=/ca.pem"]);
        config.check(&self::arguments(None, None)).unwrap();
        arguments.directory.address = Some("etcds://h:2/c".to_owned());
        assert!(config.check(&arguments).unwrap_err().to_string().contains("etcds://h:1/c"));
    }

    #[test]
    fn only_given_options_must_agree() {
        let config = ClusterConfig::from_arguments(&arguments(Some(2), Some(1 << 30)));
        for same in [arguments(None, None), arguments(Some(2), None), arguments(None, Some(1 << 30))] {
            config.check(&same).unwrap();
        }
        for other in [arguments(Some(3), None), arguments(None, Some(2 << 30))] {
            let error = config.check(&other).unwrap_err().to_string();
            assert!(error.contains("2 nodes of 1 GiB"), "{error}");
        }
    }

    #[test]
    fn a_refusal_names_all_settings_that_differ() {
        let config = ClusterConfig::from_arguments(&arguments(Some(2), Some(1 << 30)));
        let mut other = arguments(Some(3), Some((1 << 30) + 4096));
        (other.keep_memory, other.mempool, other.grace) = (true, Some(1 << 20), Some(500));
        other.no_restart = true;
        other.fabric = Some(Fabric::Shm);
        let ClusterConfigError::Differs { differences, .. } = config.check(&other).unwrap_err() else {
            panic!("the settings differ");
        };
        let expected = [
            "--nodes 2 instead of 3",
            "--memory 1 GiB instead of 1073745920 bytes",
            "no --keep-memory",
            "no --mempool instead of 1 MiB",
            "--grace 30000ms instead of 500ms",
            "no --no-restart",
        ];
        assert_eq!(differences, expected);
        other = arguments(None, None);
        other.directory.address = Some("etcds://h:1/c".to_owned());
        other.directory.ca = Some("/ca.pem".into());
        let error = config.check(&other).unwrap_err().to_string();
        for word in ["no --directory instead of etcds://h:1/c", "--directory-ca none instead of /ca.pem"] {
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn invalid_configurations_are_refused() {
        let (_folder, state) = state();
        let valid = serde_json::to_string(&ClusterConfig::from_arguments(&arguments(None, None))).unwrap();
        let invalid = [
            String::new(),
            "{".to_owned(),
            "\u{0}".repeat(100),
            " ".repeat(70_000),
            valid.replace("\"version\":3", "\"version\":2"),
            valid.replace("\"nodes\":3", "\"nodes\":0"),
            valid.replace("\"nodes\":3", "\"nodes\":65"),
            valid.replace("\"nodes\":3", "\"nodes\":-1"),
            valid.replace("\"nodes\":3", "\"nodes\":3,\"more\":1"),
            valid.replace("\"shm\"", "\"tcp\""),
        ];
        for text in invalid {
            std::fs::write(state.cluster_config(), &text).unwrap();
            let error = ClusterConfig::load(&state).unwrap_err();
            assert!(matches!(error, ClusterConfigError::Unusable { .. }), "{text}: {error}");
        }
        std::fs::write(state.cluster_config(), valid).unwrap();
        assert!(ClusterConfig::load(&state).unwrap().is_some());
    }
}
