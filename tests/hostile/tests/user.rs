//! The hostile user, and the cluster that it attacks.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use aquifer_tests_e2e::SharedCluster;
use aquifer_tests_e2e::cluster::text;

/// The user that attacks.
pub const MALLORY: u32 = 65_521;
/// Another ordinary user.
pub const ANNE: u32 = 65_522;

/// A cluster of root, with the program of the hostile user.
pub struct Victim(pub SharedCluster);

impl Victim {
    pub fn up() -> Self {
        Self::up_in(&[])
    }

    /// A cluster of root with environment variables for its daemons.
    pub fn up_in(environment: &[(&str, &str)]) -> Self {
        assert!(rustix::process::geteuid().is_root(), "only root can run a cluster for other users");
        Self::of(SharedCluster::up_in(environment, 2, &[]))
    }

    /// A cluster with the attacker's program.
    pub fn of(shared: SharedCluster) -> Self {
        let attacker = Path::new(env!("CARGO_BIN_EXE_attacker"));
        std::fs::copy(attacker, shared.path("attacker")).expect("a program can be copied");
        Self(shared)
    }

    /// A device of FUSE that all users may open, as most distributions have it.
    pub fn fuse_device(&self) -> PathBuf {
        let path = self.0.path("fuse");
        let device = std::fs::metadata("/dev/fuse").expect("the kernel has FUSE").rdev();
        let mode = rustix::fs::Mode::from_raw_mode(0o666);
        let kind = rustix::fs::FileType::CharacterDevice;
        rustix::fs::mknodat(rustix::fs::CWD, &path, kind, mode, device).expect("root may");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).expect("our own file");
        path
    }

    /// The attacker, as a plain process.
    pub fn attacker(&self, attack: &str) -> Command {
        self.attacker_as(MALLORY, attack)
    }

    /// The attacker under another id.
    pub fn attacker_as(&self, uid: u32, attack: &str) -> Command {
        let mut command = self.0.plain_command(uid, &self.0.path("attacker"));
        command.arg(attack).env("AQUIFER_AGENT", self.0.path("agent.sock"));
        command
    }

    /// The attacker, as a program on the pool.
    pub fn paged_attacker(&self, attack: &str, limit: &str) -> Command {
        let attacker = self.0.path("attacker");
        let words = ["run", "--local", limit, "--", attacker.to_str().expect("a plain path"), attack];
        self.0.command(MALLORY, &words)
    }

    /// Runs an attack and checks that it was repelled, and that all its memory is free.
    pub fn repels(&self, attack: &mut Command) -> Output {
        let output = attack.output().expect("setpriv can be started");
        let said = text(&output.stdout) + &text(&output.stderr);
        assert!(output.status.success(), "{attack:?}: {}: {said}", output.status);
        self.0.cluster.assert_all_free();
        output
    }
}

/// An attack in progress.
pub struct Attack(Child);

impl Attack {
    /// Starts an attack, and waits until it has sent everything.
    pub fn start(command: &mut Command) -> Self {
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = child.expect("setpriv can be started");
        let mut line = String::new();
        let output = child.stdout.as_mut().expect("it is piped");
        BufReader::new(output).read_line(&mut line).expect("it speaks");
        assert_eq!(line, "sent\n");
        Self(child)
    }
}

impl Attack {
    /// Ends the attack, and checks that it has sent something.
    pub fn end(mut self) {
        drop(self.0.stdin.take());
        assert!(self.0.wait().expect("it ends").success(), "it has sent nothing");
    }
}

impl Drop for Attack {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _reaped = self.0.wait();
    }
}
