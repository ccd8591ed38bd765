//! Test programs of other crates that run in a guest.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::workspace;

/// Path of the test program `name` of a package. Builds it first if needed.
///
/// # Panics
/// If it cannot be built.
#[must_use]
pub fn test_program(package: &str, name: &str) -> PathBuf {
    let mut cargo = Command::new(env!("CARGO"));
    // The whole workspace: a build of one package alone would select other features.
    cargo.args(["test", "--workspace", "--test", name, "--no-run", "--message-format=json"]);
    let output = cargo.current_dir(workspace()).stderr(Stdio::inherit()).output().expect("cargo can be run");
    assert!(output.status.success(), "{package}'s test {name} cannot be built");
    let messages = String::from_utf8_lossy(&output.stdout);
    let built = messages.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let path = built
        .filter(|message| message["target"]["name"] == name)
        .find_map(|message| message["executable"].as_str().map(PathBuf::from));
    path.expect("cargo names the test program")
}
