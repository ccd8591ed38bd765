//! Compares `aquifer cache` with memcached.

mod authentication;
mod case_lists;
mod cases;
mod clients;
mod cluster;
mod descriptors;
mod differential;
mod expiry;
mod kills;
mod limits;
mod operators;
mod pool;
mod restart;
mod room;
mod statistics;
mod tls;
mod traps;
mod unavailable;

use aquifer_tests_memcached::server::memcached_is_installed;
use aquifer_tests_memcached::{Options, Pair, Program, Server};

/// memcached and `aquifer cache`, started with the same arguments.
struct Servers {
    memcached: Server,
    aquifer: Server,
}

impl Servers {
    /// Starts both servers; `None` if memcached is not installed.
    fn start(arguments: &[&str]) -> Option<Self> {
        memcached_is_installed().then(|| Self {
            memcached: Server::start(Options::new(Program::Memcached).with(arguments)),
            aquifer: start_aquifer(arguments),
        })
    }

    fn pair(&self) -> Pair<'_> {
        Pair { reference: &self.memcached, candidate: &self.aquifer }
    }

    fn both(&self) -> [&Server; 2] {
        [&self.memcached, &self.aquifer]
    }
}

fn start_aquifer(arguments: &[&str]) -> Server {
    Server::start(Options::new(Program::Aquifer).with(arguments))
}
