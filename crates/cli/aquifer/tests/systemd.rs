//! Daemons under systemd: socket activation, readiness notification, and the units.

use std::io::Read;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use aquifer_channel::paths::SYSTEM_FOLDER;
use aquifer_directory::{embedded, names};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
use rustix::process::{Pid, Signal, kill_process};

/// Time after which a test fails. A test that passes does not wait for it.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A stand-in for systemd: starts daemons, receives their notifications, and kills them when it is
/// dropped.
pub struct ServiceManager {
    folder: tempfile::TempDir,
    state: PathBuf,
    notified: UnixDatagram,
    services: Vec<Child>,
}

impl ServiceManager {
    pub fn new() -> Self {
        let mut manager = Self::at(PathBuf::new());
        manager.state = manager.folder.path().join("state");
        std::fs::DirBuilder::new().mode(0o700).create(&manager.state).unwrap();
        manager
    }

    /// Starts services in a state folder that exists.
    pub fn at(state: PathBuf) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let notified = UnixDatagram::bind(folder.path().join("notify")).unwrap();
        notified.set_read_timeout(Some(TIMEOUT)).unwrap();
        Self { folder, state, notified, services: Vec::new() }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.state.join(name)
    }

    /// Starts a service, with a socket of this name as descriptor 3 if there is one.
    fn spawn(&self, arguments: &[&str], socket: Option<(&str, OwnedFd)>) -> Child {
        let mut command = Command::new("sh");
        let (name, stdin) = match socket {
            Some((name, socket)) => (name, Stdio::from(socket)),
            None => ("", Stdio::null()),
        };
        // LISTEN_PID must be the number of the process, which only the process knows before its
        // exec.
        let script = if name.is_empty() {
            "exec \"$@\""
        } else {
            "LISTEN_PID=$$ LISTEN_FDS=1 exec \"$@\" 3<&0 </dev/null"
        };
        command
            .args(["-c", script, "sh", env!("CARGO_BIN_EXE_aquifer"), "--state"])
            .arg(self.path(""))
            .args(arguments)
            .env("NOTIFY_SOCKET", self.folder.path().join("notify"))
            .env("LISTEN_FDNAMES", name)
            .stdin(stdin)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    /// Starts a service and waits for its readiness notification.
    pub fn start(&mut self, arguments: &[&str], socket: Option<(&str, OwnedFd)>) {
        let mut service = self.spawn(arguments, socket);
        let mut buffer = [0; 64];
        let received = self.notified.recv(&mut buffer).map(|count| buffer[..count].to_vec());
        if received.as_deref().is_ok_and(|text| text == b"READY=1") {
            self.services.push(service);
            return;
        }
        let _killed = service.kill();
        panic!("{arguments:?} does not serve: {received:?} {}", said(&mut service));
    }

    pub fn stop_last(&mut self) {
        let mut service = self.services.pop().unwrap();
        kill_process(Pid::from_child(&service), Signal::TERM).unwrap();
        assert!(service.wait().unwrap().success());
    }

    pub fn kill_last(&mut self) {
        let mut service = self.services.pop().unwrap();
        service.kill().unwrap();
        service.wait().unwrap();
    }
}

impl Drop for ServiceManager {
    fn drop(&mut self) {
        for service in self.services.iter_mut().rev() {
            let _killed = service.kill();
            let _waited = service.wait();
        }
    }
}

fn said(service: &mut Child) -> String {
    let mut text = String::new();
    service.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    text
}

/// A listening Unix socket, as systemd makes it for `ListenSequentialPacket=`, or for
/// `ListenStream=`.
fn unix_socket(path: &Path, kind: SocketType) -> OwnedFd {
    let socket = rustix::net::socket(AddressFamily::UNIX, kind, None).unwrap();
    rustix::net::bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    rustix::net::listen(&socket, 16).unwrap();
    socket
}

#[test]
fn a_node_uses_the_socket_of_systemd() {
    let mut manager = ServiceManager::new();
    manager.start(&["directory"], None);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let key = manager.path("cluster.key");
    std::fs::write(&key, "0f".repeat(32)).unwrap();
    std::fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let config = manager.path("node.toml");
    std::fs::write(&config, "id = 3\nmemory = \"8M\"\nencrypt = true\nthreads = 2\n").unwrap();
    let config = config.to_str().unwrap().to_owned();
    manager.start(&["node", "--config", &config], Some(("node", listener.into())));
    let directory = embedded::connect(&manager.path("directory.sock")).unwrap();
    let nodes = names::nodes(&directory).unwrap();
    assert_eq!((nodes[0].id, nodes[0].address.as_str()), (3, address.to_string().as_str()));
    assert!(std::net::TcpStream::connect(address).is_ok());
    manager.stop_last();
    assert!(names::nodes(&directory).unwrap().is_empty());
}

#[test]
fn an_agents_socket_of_systemd_outlives_the_agent() {
    let mut manager = ServiceManager::new();
    manager.start(&["directory"], None);
    let keeper = unix_socket(&manager.path("keeper.sock"), SocketType::SEQPACKET);
    manager.start(&["keeper"], Some(("keeper", keeper)));
    let path = manager.path("agent.sock");
    let socket = unix_socket(&path, SocketType::SEQPACKET);
    for name in ["agent", "aquifer-agent.socket"] {
        manager.start(&["agent", "--mempool", "8M"], Some((name, socket.try_clone().unwrap())));
        assert!(aquifer_host::client::status(&path).unwrap().is_some());
        manager.stop_last();
        assert!(path.exists(), "the socket belongs to systemd");
    }
}

#[test]
fn a_socket_of_the_wrong_kind_or_name_is_refused() {
    let mut manager = ServiceManager::new();
    manager.start(&["directory"], None);
    let refused = |arguments: &[&str], name: &str, socket: OwnedFd| {
        let mut service = manager.spawn(arguments, Some((name, socket)));
        let said = said(&mut service);
        assert_eq!(service.wait().unwrap().code(), Some(1), "{said}");
        said
    };
    let stream = unix_socket(&manager.path("stream"), SocketType::STREAM);
    assert!(refused(&["keeper"], "keeper", stream).contains("ListenSequentialPacket="));
    let other = unix_socket(&manager.path("other"), SocketType::SEQPACKET);
    assert!(refused(&["keeper"], "other", other).contains("FileDescriptorName=keeper"));
    let not_listening = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    let node = ["node", "--id", "1", "--memory", "8M"];
    assert!(refused(&node, "node", not_listening).contains("ListenStream="));
}

#[test]
fn invalid_files_and_options_are_refused() {
    let manager = ServiceManager::new();
    let config = manager.path("node.toml");
    let refused = |text: &str, more: &[&str]| {
        std::fs::write(&config, text).unwrap();
        let mut arguments = vec!["node", "--config", config.to_str().unwrap()];
        arguments.extend(more);
        let mut service = manager.spawn(&arguments, None);
        let said = said(&mut service);
        assert!(!service.wait().unwrap().success(), "{said}");
        said
    };
    let said = refused("id = 1\nmemory = \"8M\"\n\nthread = 2\n", &[]);
    assert!(said.contains("line 4") && said.contains("`thread`") && said.contains("node.toml"), "{said}");
    assert!(refused("id = 1\n", &[]).contains("--memory"));
    assert!(refused("memory = \"8M\"\n", &[]).contains("--id"));
    assert!(refused("id = 1\nmemory = \"8M\"\nthreads = 2\n", &[]).contains("--listen"));
    let said = refused("id = 1\nmemory = \"8M\"\n", &["--directory", "redis://x:1"]);
    assert!(said.contains("etcd://HOST:PORT"), "{said}");
    std::fs::write(manager.path("cluster.key"), "0f".repeat(32)).unwrap();
    std::fs::set_permissions(
        manager.path("cluster.key"),
        std::os::unix::fs::PermissionsExt::from_mode(0o600),
    )
    .unwrap();
    let said = refused("id = 1\nmemory = \"8M\"\nlisten = \"0.0.0.0:0\"\n", &[]);
    assert!(said.contains("--advertise"), "{said}");
    // A certificate needs its key.
    assert!(refused("", &["--directory-cert", "/x.pem"]).contains("--directory-key"));
}

fn units() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../packaging/systemd");
    let mut units: Vec<_> = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
    units.sort();
    units
}

/// Checks the units' syntax, and with `systemd-analyze verify` if it is installed.
#[test]
fn units_are_valid() {
    let folder = tempfile::tempdir().unwrap();
    let mut copies = Vec::new();
    for unit in units() {
        let text = std::fs::read_to_string(&unit).unwrap();
        for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let is_section = ["[Unit]", "[Service]", "[Socket]", "[Install]"].contains(&line);
            assert!(
                is_section || line.split_once('=').is_some_and(|(key, _)| !key.is_empty()),
                "{unit:?}: {line}"
            );
        }
        // The units name the installed binary; the test has the one that was built.
        let copy = folder.path().join(unit.file_name().unwrap());
        std::fs::write(&copy, text.replace("/usr/bin/aquifer", env!("CARGO_BIN_EXE_aquifer"))).unwrap();
        copies.push(copy);
    }
    assert_eq!(copies.len(), 6);
    match Command::new("systemd-analyze").arg("verify").arg("--man=no").args(&copies).output() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        verified => {
            let verified = verified.unwrap();
            let said = String::from_utf8_lossy(&verified.stderr).into_owned();
            // systemd-analyze also reports problems of the machine's other units.
            let ours: Vec<_> = said.lines().filter(|line| line.contains("aquifer")).collect();
            assert!(ours.is_empty(), "{ours:#?}");
        }
    }
}

/// Daemons of systemd are not in root's own folder, where `aquifer up` starts others.
#[test]
fn units_use_a_state_folder_of_their_own() {
    let name = SYSTEM_FOLDER.strip_prefix("/run/").unwrap();
    for unit in units() {
        let text = std::fs::read_to_string(&unit).unwrap();
        let folder = |line: &str| line.split_once("AQUIFER_STATE=").map(|(_, rest)| rest.to_owned());
        let has_line = |wanted: &str| text.lines().any(|line| line == wanted);
        if unit.extension().is_some_and(|extension| extension == "socket") {
            assert!(has_line(&format!("ListenSequentialPacket={SYSTEM_FOLDER}/agent.sock")), "{unit:?}");
            continue;
        }
        let state = text.lines().find_map(folder).unwrap();
        assert_eq!(state.split(' ').next(), Some(SYSTEM_FOLDER), "{unit:?}");
        assert!(has_line(&format!("RuntimeDirectory={name}")), "{unit:?}");
    }
}

#[test]
fn units_start_commands_that_exist() {
    for unit in units() {
        let text = std::fs::read_to_string(&unit).unwrap();
        let Some(command) = text.lines().find_map(|line| line.strip_prefix("ExecStart=/usr/bin/aquifer "))
        else {
            continue;
        };
        // A variable has options from a file that need not exist.
        let mut words: Vec<_> = command.split(' ').filter(|word| !word.starts_with('$')).collect();
        words.push("--help");
        let helped = Command::new(env!("CARGO_BIN_EXE_aquifer")).args(words).output().unwrap();
        assert!(helped.status.success(), "{unit:?}");
    }
}
