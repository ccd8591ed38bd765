//! `aquifer fabric check` over TCP. `tests/guests` has the tests over RDMA devices.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

use aquifer_tests_e2e::build;
use tempfile::TempDir;

/// The end that lends.
struct Lender {
    child: Child,
    address: String,
    key: PathBuf,
    _folder: TempDir,
}

impl Lender {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let key = folder.path().join("cluster.key");
        write_key(&key, '7');
        let mut command = Command::new(build::binary());
        command.args(["fabric", "check", "--fabric", "tcp", "--listen", "127.0.0.1:0", "--key"]).arg(&key);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.split_whitespace().last().expect("it says where it listens").to_owned();
        Self { child, address, key, _folder: folder }
    }

    fn check(&self, key: &std::path::Path) -> Output {
        let mut command = Command::new(build::binary());
        command.args(["fabric", "check", "--fabric", "tcp", &self.address, "--key"]).arg(key);
        command.output().unwrap()
    }
}

impl Drop for Lender {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

fn write_key(path: &std::path::Path, digit: char) {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).unwrap();
    writeln!(file, "{}", digit.to_string().repeat(64)).unwrap();
}

#[test]
fn two_working_hosts_pass_the_check() {
    let lender = Lender::start();
    let output = lender.check(&lender.key);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    for line in [
        "READ of 4 KiB",
        "fetch-and-add",
        "message and answer",
        "WRITEs of 16 KiB",
        "a READ returns the written bytes",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    let windows: Vec<&str> = text.lines().filter(|line| line.contains(" window ")).collect();
    assert_eq!(windows.len(), 4, "{text}");
    assert!(windows.iter().all(|line| line.ends_with("yes")), "{text}");
}

#[test]
fn another_key_is_reported() {
    let lender = Lender::start();
    let other = lender.key.with_file_name("other.key");
    write_key(&other, '8');
    let output = lender.check(&other);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("the cluster keys differ"), "{text}");
}

#[test]
fn one_end_must_be_named() {
    let output = Command::new(build::binary()).args(["fabric", "check"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}
