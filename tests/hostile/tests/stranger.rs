//! A stranger that waits where an agent is expected gets no memory, and is not asked for any.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use aquifer_tests_e2e::cluster::text;

use crate::user::{ANNE, MALLORY, Victim};

/// The stranger, which listens.
fn listen(victim: &Victim) -> (Child, PathBuf) {
    let path = victim.0.private_folder("mallory", MALLORY).join("agent.sock");
    let mut command = victim.attacker("listen");
    let mut stranger = command.arg(&path).stdout(Stdio::piped()).spawn().expect("setpriv can be started");
    let mut line = String::new();
    let output = stranger.stdout.as_mut().expect("it is piped");
    BufReader::new(output).read_line(&mut line).expect("it listens");
    (stranger, path)
}

/// Points a command at the stranger, and checks that it reports the user that listens and sends
/// nothing.
fn refuses(victim: &Victim, make: impl FnOnce(&Path) -> Command) {
    let (mut stranger, path) = listen(victim);
    let output = make(&path).output().expect("setpriv can be started");
    let said = text(&output.stderr);
    assert!(said.contains("listens at"), "{}: {said}", output.status);
    assert!(stranger.wait().expect("it ends").success(), "the stranger was sent a frame");
}

#[test]
fn a_run_sends_nothing_to_a_stranger() {
    let victim = Victim::up();
    refuses(&victim, |path| {
        let mut command = victim.0.command(ANNE, &["run", "--local", "24M", "--", "true"]);
        command.env("AQUIFER_AGENT", path);
        command
    });
}

#[test]
fn a_paged_program_sends_nothing_to_a_stranger() {
    let victim = Victim::up();
    refuses(&victim, |path| {
        let mut command = victim.0.plain_command(ANNE, Path::new("/usr/bin/true"));
        command.env("LD_PRELOAD", victim.0.path("libaquifer_shim.so"));
        command.env(aquifer_ipc::SOCKET_VARIABLE, path).env(aquifer_ipc::RUN_VARIABLE, "00".repeat(16));
        command
    });
}
