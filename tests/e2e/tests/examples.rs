//! The programs of `examples/`, as a reader would run them.

use std::path::PathBuf;
use std::process::Command;

use aquifer_tests_e2e::cluster::text;
use aquifer_tests_e2e::{Cluster, build};
use tempfile::TempDir;

/// The output of a program that finds the agent by the state folder, as a library does.
fn output(cluster: &Cluster, command: &mut Command) -> String {
    let command = command.env_remove("AQUIFER_AGENT").env("AQUIFER_STATE", cluster.state());
    let output = command.output().expect("it can be started");
    assert!(output.status.success(), "{command:?}: {}", text(&output.stderr));
    text(&output.stdout).trim().to_owned()
}

/// The path of an example in Rust, which cargo builds beside this test program.
pub(super) fn rust_example(name: &str) -> PathBuf {
    let own = std::env::current_exe().expect("this program has a path");
    own.parent()
        .and_then(|deps| deps.parent())
        .expect("it lies in the target folder")
        .join("examples")
        .join(name)
}

#[test]
fn examples_do_what_they_say() {
    let cluster = Cluster::up(1, "128M");
    let said = output(&cluster, Command::new(rust_example("far_array")).arg("100001"));
    assert_eq!(said, "100001 numbers, reversed; their sum is 5000050000");

    let folder = TempDir::new().expect("a folder");
    let source = std::fs::read_to_string(build::root().join("examples/hand_over.c")).expect("its source");
    let header = format!("-I{}", build::root().join("bindings/c").display());
    let libraries = build::binary().parent().expect("it lies in a folder").to_owned();
    let library = format!("-L{}", libraries.display());
    let flags = ["-Wall", "-Wextra", "-Werror", &header, "-Wl,--no-as-needed", &library, "-laquifer"];
    let program = build::compile(folder.path(), "hand_over", &source, &flags);
    let said = output(&cluster, Command::new(program).env("LD_LIBRARY_PATH", &libraries));
    assert_eq!(said, "child: written by the parent, read by the child");
}
