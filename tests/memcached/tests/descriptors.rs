//! Descriptors that another user sends to the Unix socket of a server, and whose last close blocks.

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use aquifer_tests_memcached::{Options, Program, Server};
use rustix::process::Signal;

/// The user id of the attacker.
const OTHER_USER: u32 = 65534;
/// Environment variable with which the server behaves as on a kernel without `SO_PASSRIGHTS`.
const WITHOUT_PASSRIGHTS: &str = "AQUIFER_TEST_NO_PASSRIGHTS";

/// A program that sends lingering TCP sockets on several connections, in messages that the server
/// receives and in messages that it does not. It prints how many were sent and how many were
/// refused, and runs until its standard input ends.
const ATTACK: &str = r#"
import array, os, socket, struct, sys
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
listener.bind(("127.0.0.1", 0))
listener.listen(64)
kept = []
def lingering():
    client = socket.create_connection(listener.getsockname())
    kept.append(listener.accept()[0])
    client.setblocking(False)
    try:
        while True:
            client.send(b"x" * 65536)
    except BlockingIOError:
        pass
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 100000))
    return client
sent = refused = 0
for number in range(12):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    kept.append(connection)
    descriptor = lingering()
    rights = array.array("i", [descriptor.fileno()])
    if number % 2:
        # What follows is closed with the connection.
        connection.send(b"quit\r\n")
    try:
        connection.sendmsg([b"get a\r\n"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        descriptor.close()
        sent += 1
    except PermissionError:
        kept.append(descriptor)
        refused += 1
print(sent, refused, flush=True)
sys.stdin.read()
os._exit(0)
"#;

/// Starts an attack on a server. Returns the attacker, and the line with how many descriptors it
/// has sent and how many were refused.
fn attack(path: &str) -> (Child, String) {
    let mut command = Command::new("python3");
    command.args(["-c", ATTACK, path]).uid(OTHER_USER).gid(OTHER_USER);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut attacker = command.spawn().expect("python3 can be started");
    let mut line = String::new();
    let output = attacker.stdout.take().expect("standard output is a pipe");
    BufReader::new(output).read_line(&mut line).expect("the attacker prints a line");
    (attacker, line.trim().to_owned())
}

fn check(options: Options, expected: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).expect("the path belongs to this user");
    let path = folder.path().join("cache.sock");
    let server = Server::start(options.on_socket(&path).with(&["-a", "777"]));
    assert_eq!(server.connect().request("set a 0 0 1\r\nx\r\n"), b"STORED\r\n");
    // The attacker closes its descriptors before the server receives them.
    server.signal_all(Signal::STOP);
    let (mut attacker, sent) = attack(path.to_str().expect("text"));
    server.signal_all(Signal::CONT);
    assert_eq!(sent, expected);
    // Both workers serve.
    let mut connections: Vec<_> = (0..4).map(|_| server.connect()).collect();
    for connection in &mut connections {
        assert_eq!(connection.request("get a\r\n"), b"VALUE a 0 1\r\nx\r\nEND\r\n");
        let value = vec![b'v'; 500_000];
        let request = [format!("set long 0 0 {}\r\n", value.len()).as_bytes(), &value, b"\r\n"].concat();
        assert_eq!(connection.request(request), b"STORED\r\n");
        let reply = connection.request("get long\r\n");
        assert!(reply.len() > value.len() && reply.ends_with(b"\r\nEND\r\n"));
        connection.send(b"quit\r\n");
        assert_eq!(connection.receive(100), b"", "the connection is closed");
    }
    assert!(server.end_by(Signal::TERM), "the server ends with success");
    drop(attacker.stdin.take().map(|mut input| input.write_all(b"end")));
    attacker.wait().expect("the process is a child of this one");
}

#[test]
fn a_socket_for_all_users_accepts_no_descriptors() {
    check(Options::new(Program::Aquifer), "0 12");
}

#[test]
fn descriptors_of_a_user_do_not_stop_a_server_that_must_accept_them() {
    check(Options::new(Program::Aquifer).with_variable(WITHOUT_PASSRIGHTS, "1"), "12 0");
}
