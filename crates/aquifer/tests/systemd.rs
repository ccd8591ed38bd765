//! Parts as systemd starts them: sockets that listen already, word that they serve, and the units themselves.

use std::io::Read;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use aquifer_directory::{embedded, names};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
use rustix::process::{Pid, Signal, kill_process};

/// Long enough for any machine; a test that works never waits for it.
const PATIENCE: Duration = Duration::from_secs(60);

/// A machine with services; they end with it.
struct Machine {
    folder: tempfile::TempDir,
    notified: UnixDatagram,
    services: Vec<Child>,
}

impl Machine {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("state")).unwrap();
        let notified = UnixDatagram::bind(folder.path().join("notify")).unwrap();
        notified.set_read_timeout(Some(PATIENCE)).unwrap();
        Self { folder, notified, services: Vec::new() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join("state").join(name)
    }

    /// Start a service, with a socket of this name as descriptor 3 if there is one.
    fn spawn(&self, arguments: &[&str], socket: Option<(&str, OwnedFd)>) -> Child {
        let mut command = Command::new("sh");
        let (name, stdin) = match socket {
            Some((name, socket)) => (name, Stdio::from(socket)),
            None => ("", Stdio::null()),
        };
        // Only the process itself knows its number before it begins.
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

    /// Start one, and wait until it says that it serves.
    fn start(&mut self, arguments: &[&str], socket: Option<(&str, OwnedFd)>) {
        let mut service = self.spawn(arguments, socket);
        let mut told = [0; 64];
        let told = self.notified.recv(&mut told).map(|count| told[..count].to_vec());
        if told.as_deref().is_ok_and(|told| told == b"READY=1") {
            self.services.push(service);
            return;
        }
        let _dead = service.kill();
        panic!("{arguments:?} does not serve: {told:?} {}", said(&mut service));
    }

    fn stop_last(&mut self) {
        let mut service = self.services.pop().unwrap();
        kill_process(Pid::from_child(&service), Signal::TERM).unwrap();
        assert!(service.wait().unwrap().success());
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        for service in self.services.iter_mut().rev() {
            let _dead = service.kill();
            let _waited = service.wait();
        }
    }
}

fn said(service: &mut Child) -> String {
    let mut text = String::new();
    service.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    text
}

/// A socket as systemd makes it for `ListenSequentialPacket=`, or for `ListenStream=`.
fn unix_socket(path: &Path, kind: SocketType) -> OwnedFd {
    let socket = rustix::net::socket(AddressFamily::UNIX, kind, None).unwrap();
    rustix::net::bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    rustix::net::listen(&socket, 16).unwrap();
    socket
}

#[test]
fn a_node_takes_the_socket_that_listens_already() {
    let mut machine = Machine::new();
    machine.start(&["directory"], None);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let key = machine.path("cluster.key");
    std::fs::write(&key, "0f".repeat(32)).unwrap();
    std::fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let config = machine.path("node.toml");
    std::fs::write(&config, "id = 3\nmemory = \"8M\"\nencrypt = true\nthreads = 2\n").unwrap();
    let config = config.to_str().unwrap().to_owned();
    machine.start(&["node", "--config", &config], Some(("node", listener.into())));
    let directory = embedded::connect(&machine.path("directory.sock")).unwrap();
    let nodes = names::nodes(&directory).unwrap();
    assert_eq!((nodes[0].id, nodes[0].address.as_str()), (3, address.to_string().as_str()));
    assert!(std::net::TcpStream::connect(address).is_ok());
    machine.stop_last();
    assert!(names::nodes(&directory).unwrap().is_empty());
}

#[test]
fn an_agents_socket_outlives_it() {
    let mut machine = Machine::new();
    machine.start(&["directory"], None);
    let keeper = unix_socket(&machine.path("keeper.sock"), SocketType::SEQPACKET);
    machine.start(&["keeper"], Some(("keeper", keeper)));
    let path = machine.path("agent.sock");
    let socket = unix_socket(&path, SocketType::SEQPACKET);
    for name in ["agent", "aquifer-agent.socket"] {
        machine.start(&["agent", "--mempool", "8M"], Some((name, socket.try_clone().unwrap())));
        assert!(aquifer_host::client::status(&path).unwrap().is_some());
        machine.stop_last();
        assert!(path.exists(), "it is systemd's");
    }
}

#[test]
fn a_socket_of_the_wrong_kind_or_name_is_refused() {
    let mut machine = Machine::new();
    machine.start(&["directory"], None);
    let refused = |arguments: &[&str], name: &str, socket: OwnedFd| {
        let mut service = machine.spawn(arguments, Some((name, socket)));
        let said = said(&mut service);
        assert_eq!(service.wait().unwrap().code(), Some(1), "{said}");
        said
    };
    let stream = unix_socket(&machine.path("stream"), SocketType::STREAM);
    assert!(refused(&["keeper"], "keeper", stream).contains("ListenSequentialPacket="));
    let other = unix_socket(&machine.path("other"), SocketType::SEQPACKET);
    assert!(refused(&["keeper"], "other", other).contains("FileDescriptorName=keeper"));
    let deaf = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    let node = ["node", "--id", "1", "--memory", "8M"];
    assert!(refused(&node, "node", deaf).contains("ListenStream="));
}

#[test]
fn files_and_flags_that_make_no_sense_are_refused() {
    let machine = Machine::new();
    let config = machine.path("node.toml");
    let refused = |text: &str, more: &[&str]| {
        std::fs::write(&config, text).unwrap();
        let mut arguments = vec!["node", "--config", config.to_str().unwrap()];
        arguments.extend(more);
        let mut service = machine.spawn(&arguments, None);
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
    std::fs::write(machine.path("cluster.key"), "0f".repeat(32)).unwrap();
    std::fs::set_permissions(
        machine.path("cluster.key"),
        std::os::unix::fs::PermissionsExt::from_mode(0o600),
    )
    .unwrap();
    let said = refused("id = 1\nmemory = \"8M\"\nlisten = \"0.0.0.0:0\"\n", &[]);
    assert!(said.contains("--advertise"), "{said}");
    // A certificate needs its key.
    assert!(refused("", &["--directory-cert", "/x.pem"]).contains("--directory-key"));
}

fn units() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/systemd");
    let mut units: Vec<_> = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
    units.sort();
    units
}

/// systemd itself, where it is, finds nothing to complain of.
#[test]
fn units_are_as_systemd_wants_them() {
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
        // The program is where it was built, not where it will be.
        let copy = folder.path().join(unit.file_name().unwrap());
        std::fs::write(&copy, text.replace("/usr/bin/aquifer", env!("CARGO_BIN_EXE_aquifer"))).unwrap();
        copies.push(copy);
    }
    assert_eq!(copies.len(), 4);
    match Command::new("systemd-analyze").arg("verify").arg("--man=no").args(&copies).output() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        verified => {
            let verified = verified.unwrap();
            let said = String::from_utf8_lossy(&verified.stderr).into_owned();
            // It looks at the machine's own units too, and complains of those.
            let ours: Vec<_> = said.lines().filter(|line| line.contains("aquifer")).collect();
            assert!(ours.is_empty(), "{ours:#?}");
        }
    }
}

/// What units say on the command line is understood.
#[test]
fn units_start_commands_that_exist() {
    for unit in units() {
        let text = std::fs::read_to_string(&unit).unwrap();
        let Some(command) = text.lines().find_map(|line| line.strip_prefix("ExecStart=/usr/bin/aquifer "))
        else {
            continue;
        };
        let mut words = command.split(' ').collect::<Vec<_>>();
        words.push("--help");
        let helped = Command::new(env!("CARGO_BIN_EXE_aquifer")).args(words).output().unwrap();
        assert!(helped.status.success(), "{unit:?}");
    }
}
