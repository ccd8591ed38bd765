//! Descriptors whose last close waits for ever, sent to the Unix socket of a cache.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use aquifer_tests_e2e::eventually;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

use crate::user::{ANNE, Attack, MALLORY, Victim};

/// Longest wait for an answer of a cache that may have been stopped.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// A cache, which is killed when it is dropped.
struct Cache(Child);

impl Cache {
    fn start(command: &mut Command) -> Self {
        Self(command.spawn().expect("setpriv can be started"))
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        let _killed = self.0.kill();
        let _reaped = self.0.wait();
    }
}

fn ask_version(path: &Path) -> std::io::Result<String> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // No process may accept connections any more.
    set_socket_timeout(&socket, Timeout::Send, Some(ANSWER_TIMEOUT))?;
    set_socket_timeout(&socket, Timeout::Recv, Some(ANSWER_TIMEOUT))?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    let mut connection = UnixStream::from(socket);
    connection.write_all(b"version\r\n")?;
    let mut answer = [0; 7];
    connection.read_exact(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

#[test]
fn locked_memories_stop_no_other_client_of_a_cache_without_passrights() {
    let victim = Victim::up();
    let socket = victim.0.private_folder("cache", ANNE).join("cache.sock");
    let mut command = victim.0.plain_command(ANNE, &victim.0.path("aquifer"));
    command.args(["cache", "-m", "64", "-a", "777", "-s"]).arg(&socket);
    let _cache = Cache::start(command.env("AQUIFER_TEST_NO_PASSRIGHTS", "1"));
    eventually("the cache to serve", || ask_version(&socket).ok());
    let device = victim.fuse_device();
    let folder = victim.0.private_folder("mount", MALLORY);
    let attack = Attack::start(victim.attacker("locked-cache").arg(device).arg(folder).arg(&socket));
    assert_eq!(ask_version(&socket).expect("others are served"), "VERSION");
    attack.end();
}
