//! The implementations, behind one face.

use std::sync::Arc;
use std::time::Duration;

use aquifer_directory::clock::ManualClock;
use aquifer_directory::embedded::{Embedded, ServeOptions, Server, connect};
use aquifer_directory::{Directory, sim};

/// A directory under test.
pub trait Harness {
    /// One more caller's access to it.
    fn directory(&self) -> Arc<dyn Directory>;
    /// Let its time pass.
    fn advance(&self, by: Duration);
}

/// A file in this process.
pub struct InProcess {
    directory: Embedded,
    clock: Arc<ManualClock>,
    _folder: tempfile::TempDir,
}

impl InProcess {
    pub fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let clock = Arc::new(ManualClock::default());
        let directory =
            Embedded::open_with_clock(&folder.path().join("directory.redb"), clock.clone()).unwrap();
        Self { directory, clock, _folder: folder }
    }
}

impl Harness for InProcess {
    fn directory(&self) -> Arc<dyn Directory> {
        Arc::new(self.directory.clone())
    }

    fn advance(&self, by: Duration) {
        self.clock.advance(by);
        self.directory.tick().unwrap();
    }
}

/// A file served over a socket.
pub struct OverSocket {
    // Dropped in this order: the server before its folder.
    _server: Server,
    inner: InProcess,
}

impl OverSocket {
    pub fn start() -> Self {
        let inner = InProcess::start();
        let socket = inner._folder.path().join("socket");
        let server = Server::start(inner.directory.clone(), &socket, ServeOptions::default()).unwrap();
        Self { _server: server, inner }
    }
}

impl Harness for OverSocket {
    fn directory(&self) -> Arc<dyn Directory> {
        Arc::new(connect(&self.inner._folder.path().join("socket")).unwrap())
    }

    fn advance(&self, by: Duration) {
        self.inner.advance(by);
    }
}

/// The simulated one.
pub struct Simulated {
    world: sim::World,
}

impl Simulated {
    pub fn start() -> Self {
        Self { world: sim::World::new(1) }
    }
}

impl Harness for Simulated {
    fn directory(&self) -> Arc<dyn Directory> {
        Arc::new(self.world.host(1))
    }

    fn advance(&self, by: Duration) {
        self.world.advance(by);
    }
}
