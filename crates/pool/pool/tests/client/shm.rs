//! Tests of the client over shared memory.

#[path = "suite.rs"]
mod suite;

use std::path::PathBuf;

use aquifer_fabric::shm::{self, ShmOptions, ShmTarget};
use aquifer_fabric::{Endpoint, EndpointError, Identity, Target};

/// A node's target.
struct Bed {
    _dir: tempfile::TempDir,
    path: PathBuf,
    target: ShmTarget,
}

impl Bed {
    const TURNS: u64 = 3000;

    fn bare() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("node");
        let target = ShmTarget::listen(&path, ShmOptions::default()).expect("a target");
        Self { _dir: dir, path, target }
    }

    fn target(&self) -> &dyn Target {
        &self.target
    }

    fn connect(&self, who: Identity) -> Result<Box<dyn Endpoint>, EndpointError> {
        shm::connect(&self.path, who)
    }
}
