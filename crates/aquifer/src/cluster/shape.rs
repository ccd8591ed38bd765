//! What a cluster consists of, remembered so that `up` can bring back what died.

use std::ffi::OsString;
use std::io::{self, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::part::Part;
use super::source::Source;
use crate::cli::{Fabric, GRACE_MS, UpArguments};
use crate::settings::DirectorySettings;
use crate::state::StateDir;
use aquifer_ipc::size::ByteSize;

const VERSION: u32 = 3;
/// Nothing sensible is longer.
const FILE_BYTES_MAX: u64 = 64 << 10;

/// Why the shape is of no use.
#[derive(Debug, thiserror::Error)]
pub enum ShapeError {
    /// Unreadable.
    #[error("{path} cannot be used: {why}; aquifer down removes it", path = path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// Not written.
    #[error("{path} cannot be written: {source}", path = path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Another one is up.
    #[error("a cluster of another shape is up here, {is}: aquifer down first, or use another --state")]
    Differs {
        /// What is up.
        is: String,
    },
}

/// What a cluster consists of.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    version: u32,
    /// Memory nodes.
    pub nodes: u16,
    /// What each lends.
    pub memory_bytes: u64,
    /// The most that each may be asked to lend, if it was given.
    #[serde(default)]
    pub memory_bytes_max: Option<u64>,
    /// Whether what they lend outlives their processes.
    #[serde(default)]
    pub keep_memory: bool,
    /// The mempool's bound, if it was given.
    pub mempool_bytes: Option<u64>,
    /// What one user's programs may have as extents, if it was given.
    #[serde(default)]
    pub extents_per_user: Option<u64>,
    /// Where other users find the agent, if it serves them.
    #[serde(default)]
    pub shared_socket: Option<PathBuf>,
    /// How long programs wait for an agent.
    pub grace_ms: u64,
    /// How nodes are reached.
    pub fabric: Fabric,
    /// Over TCP, the port of each node: one that is brought back listens where it did.
    pub ports: Vec<u16>,
    /// Where the directory is.
    pub directory: DirectorySettings,
}

impl Shape {
    /// What was asked for, and the usual where nothing was.
    pub fn asked(arguments: &UpArguments) -> Self {
        Self {
            version: VERSION,
            nodes: arguments.nodes.unwrap_or(3),
            memory_bytes: arguments.memory.unwrap_or(1 << 30),
            memory_bytes_max: arguments.memory_max,
            keep_memory: arguments.keep_memory,
            mempool_bytes: arguments.mempool,
            extents_per_user: arguments.extents_per_user,
            shared_socket: arguments.shared_socket.clone(),
            grace_ms: arguments.grace.unwrap_or(GRACE_MS),
            fabric: arguments.fabric.unwrap_or(Fabric::Shm),
            ports: Vec::new(),
            directory: arguments.directory.clone(),
        }
    }

    /// Files are found from wherever parts run.
    ///
    /// # Errors
    /// If this process is nowhere.
    pub fn make_paths_absolute(&mut self) -> io::Result<()> {
        let DirectorySettings { ca, cert, key, .. } = &mut self.directory;
        for path in [ca, cert, key].into_iter().flatten() {
            *path = std::path::absolute(&path)?;
        }
        Ok(())
    }

    /// What the cluster consists of: a directory of its own only if it is not elsewhere.
    pub fn parts(&self) -> Vec<Part> {
        let is_own = Source::new(&self.directory).is_ok_and(|source| source.is_own());
        Part::all(self.nodes).into_iter().filter(|part| is_own || *part != Part::Directory).collect()
    }

    /// What parts are told of the directory.
    pub fn directory_flags(&self) -> Vec<OsString> {
        let DirectorySettings { address, ca, cert, key } = &self.directory;
        let path = |flag: &str, path: &Option<PathBuf>| {
            path.as_ref().map(|path| {
                let mut flag = OsString::from(format!("--directory-{flag}="));
                flag.push(path);
                flag
            })
        };
        let place = address.as_ref().map(|address| format!("--directory={address}").into());
        [place, path("ca", ca), path("cert", cert), path("key", key)].into_iter().flatten().collect()
    }

    /// Choose a free port of this machine for each node, if they need any.
    ///
    /// # Errors
    /// If the system has none.
    pub fn choose_ports(&mut self) -> io::Result<()> {
        if self.fabric == Fabric::Tcp {
            let held: io::Result<Vec<TcpListener>> =
                (0..self.nodes).map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).collect();
            self.ports = held?.iter().map(|held| Ok(held.local_addr()?.port())).collect::<io::Result<_>>()?;
        }
        Ok(())
    }

    /// The cluster that is here, if one is.
    pub fn load(state: &StateDir) -> Result<Option<Self>, ShapeError> {
        let path = state.shape();
        let unusable = |why: String| ShapeError::Unusable { path: path.clone(), why };
        let length = match std::fs::metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            metadata => metadata.map_err(|error| unusable(error.to_string()))?.len(),
        };
        if length > FILE_BYTES_MAX {
            return Err(unusable(format!("it has {length} bytes")));
        }
        let text = std::fs::read(&path).map_err(|error| unusable(error.to_string()))?;
        let shape: Self = serde_json::from_slice(&text).map_err(|error| unusable(error.to_string()))?;
        if shape.version != VERSION {
            return Err(unusable(format!(
                "it has version {}, and this program knows {VERSION} only",
                shape.version
            )));
        }
        let ports = if shape.fabric == Fabric::Tcp { usize::from(shape.nodes) } else { 0 };
        Source::new(&shape.directory).map_err(|error| unusable(error.to_string()))?;
        if !(1..=64).contains(&shape.nodes) || shape.memory_bytes == 0 || shape.ports.len() != ports {
            return Err(unusable("its numbers make no sense".to_owned()));
        }
        Ok(Some(shape))
    }

    /// Remember it.
    pub fn save(&self, state: &StateDir) -> Result<(), ShapeError> {
        let path = state.shape();
        let text = serde_json::to_string_pretty(self).expect("plain structs are JSON");
        // Renamed into place, so that it is never half there.
        let new = path.with_extension("new");
        // Others may pass through root's folder, and must not say what its cluster is.
        let mut options = std::fs::OpenOptions::new();
        let file = options.write(true).create(true).truncate(true).mode(0o600).open(&new);
        let written = file.and_then(|mut file| file.write_all(text.as_bytes()));
        let written = written.and_then(|()| std::fs::rename(&new, &path));
        written.map_err(|source| ShapeError::Write { path, source })
    }

    /// Whether what was asked for, as far as it was, is what this is.
    pub fn check(&self, arguments: &UpArguments) -> Result<(), ShapeError> {
        let agrees = arguments.nodes.is_none_or(|nodes| nodes == self.nodes)
            && arguments.memory.is_none_or(|memory| memory == self.memory_bytes)
            && arguments.memory_max.is_none_or(|most| Some(most) == self.memory_bytes_max)
            && (!arguments.keep_memory || self.keep_memory)
            && arguments.mempool.is_none_or(|mempool| Some(mempool) == self.mempool_bytes)
            && arguments.extents_per_user.is_none_or(|quota| Some(quota) == self.extents_per_user)
            && (arguments.shared_socket.is_none() || arguments.shared_socket == self.shared_socket)
            && arguments.grace.is_none_or(|grace| grace == self.grace_ms)
            && arguments.fabric.is_none_or(|fabric| fabric == self.fabric)
            && (arguments.directory.address.is_none() || arguments.directory == self.directory);
        if agrees { Ok(()) } else { Err(ShapeError::Differs { is: self.to_string() }) }
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let plural = if self.nodes == 1 { "" } else { "s" };
        let fabric = if self.fabric == Fabric::Tcp { " over TCP" } else { "" };
        write!(f, "{} node{plural} of {}{fabric}", self.nodes, ByteSize(self.memory_bytes))?;
        self.directory.address.iter().try_for_each(|address| write!(f, ", directory {address}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(nodes: Option<u16>, memory: Option<u64>) -> UpArguments {
        UpArguments {
            nodes,
            memory,
            memory_max: None,
            keep_memory: false,
            fabric: None,
            mempool: None,
            extents_per_user: None,
            shared_socket: None,
            grace: None,
            directory: DirectorySettings::default(),
        }
    }

    fn state() -> (tempfile::TempDir, StateDir) {
        let folder = tempfile::tempdir().unwrap();
        let state = StateDir::locate(Some(folder.path())).unwrap();
        (folder, state)
    }

    #[test]
    fn a_shape_is_remembered() {
        let (_folder, state) = state();
        assert_eq!(Shape::load(&state).unwrap(), None);
        let shape = Shape::asked(&asked(Some(2), None));
        shape.save(&state).unwrap();
        assert_eq!(Shape::load(&state).unwrap(), Some(shape));
        let mode = std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(state.shape()).unwrap());
        assert_eq!(mode & 0o777, 0o600, "nobody else may say, or see, what the cluster is");
    }

    #[test]
    fn a_directory_elsewhere_is_no_part_and_is_told_to_those_that_are() {
        let mut arguments = asked(Some(1), None);
        assert_eq!(Shape::asked(&arguments).parts().len(), 4);
        arguments.directory.address = Some("etcds://h:1/c".to_owned());
        arguments.directory.ca = Some("/ca.pem".into());
        let shape = Shape::asked(&arguments);
        assert_eq!(shape.parts(), [Part::Keeper, Part::Node(1), Part::Agent]);
        assert_eq!(shape.directory_flags(), ["--directory=etcds://h:1/c", "--directory-ca=/ca.pem"]);
        shape.check(&asked(None, None)).unwrap();
        arguments.directory.address = Some("etcds://h:2/c".to_owned());
        assert!(shape.check(&arguments).unwrap_err().to_string().contains("etcds://h:1/c"));
    }

    #[test]
    fn only_what_is_said_must_agree() {
        let shape = Shape::asked(&asked(Some(2), Some(1 << 30)));
        for fine in [asked(None, None), asked(Some(2), None), asked(None, Some(1 << 30))] {
            shape.check(&fine).unwrap();
        }
        for other in [asked(Some(3), None), asked(None, Some(2 << 30))] {
            let error = shape.check(&other).unwrap_err().to_string();
            assert!(error.contains("2 nodes of 1 GiB"), "{error}");
        }
    }

    #[test]
    fn what_is_not_a_shape_is_refused() {
        let (_folder, state) = state();
        let good = serde_json::to_string(&Shape::asked(&asked(None, None))).unwrap();
        let bad = [
            String::new(),
            "{".to_owned(),
            "\u{0}".repeat(100),
            " ".repeat(70_000),
            good.replace("\"version\":3", "\"version\":2"),
            good.replace("\"nodes\":3", "\"nodes\":0"),
            good.replace("\"nodes\":3", "\"nodes\":65"),
            good.replace("\"nodes\":3", "\"nodes\":-1"),
            good.replace("\"nodes\":3", "\"nodes\":3,\"more\":1"),
            good.replace("\"shm\"", "\"tcp\""),
        ];
        for text in bad {
            std::fs::write(state.shape(), &text).unwrap();
            let error = Shape::load(&state).unwrap_err();
            assert!(matches!(error, ShapeError::Unusable { .. }), "{text}: {error}");
        }
        std::fs::write(state.shape(), good).unwrap();
        assert!(Shape::load(&state).unwrap().is_some());
    }
}
