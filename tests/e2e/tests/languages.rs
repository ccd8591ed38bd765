//! Programs in languages with their own memory management, with a part of their memory.

use std::path::{Path, PathBuf};
use std::process::Command;

use aquifer_tests_e2e::cluster::text;
use aquifer_tests_e2e::{Case, Cluster, build, compare};

fn run_to_end(command: &mut Command, what: &str) {
    let output = command.output().unwrap_or_else(|error| {
        panic!("{what}: {error}; scripts/install-deps.sh test installs what it needs")
    });
    assert!(output.status.success(), "{what}: {}", text(&output.stderr));
}

fn check_java(collector: &str) {
    let cluster = Cluster::up(2, "512M");
    let folder = cluster.state().to_str().expect("a plain path").to_owned();
    let mut compiler = Command::new("javac");
    run_to_end(compiler.args(["-d", &folder]).arg(build::sources().join("Check.java")), "javac");
    let program = ["java", collector, "-Xmx320m", "-XX:TieredStopAtLevel=1", "-cp", &folder, "Check", "128"];
    compare(&cluster, Case { program: &program, forks: false });
}

/// Builds a Go program in a folder, without a network.
fn build_go(folder: &Path, name: &str, cgo: &str, sources: &[&str]) -> PathBuf {
    let program = folder.join(name);
    let mut compiler = Command::new("go");
    compiler.args(["build", "-o"]).arg(&program).args(sources.iter().map(|name| build::sources().join(name)));
    compiler.env("CGO_ENABLED", cgo).env("GO111MODULE", "off").env("GOTOOLCHAIN", "local").env("GOFLAGS", "");
    run_to_end(compiler.env("GOCACHE", folder.join("go-cache")).current_dir(folder), "go build");
    program
}

mod long {
    use super::*;

    #[test]
    fn java_with_the_g1_collector() {
        check_java("-XX:+UseG1GC");
    }

    #[test]
    fn java_with_the_serial_collector() {
        check_java("-XX:+UseSerialGC");
    }

    #[test]
    fn go_linked_with_libc() {
        let cluster = Cluster::up(2, "512M");
        let program = build_go(cluster.state(), "check-cgo", "1", &["check.go", "check_cgo.go"]);
        let program = [program.to_str().expect("a plain path"), "128"];
        compare(&cluster, Case { program: &program, forks: false });
    }

    #[test]
    fn a_static_go_program_is_refused_with_instructions() {
        let cluster = Cluster::up(1, "64M");
        let program = build_go(cluster.state(), "check-static", "0", &["check.go"]);
        let output = cluster.run("64M", &[program.to_str().expect("a plain path"), "16"]);
        assert_eq!(output.status.code(), Some(126));
        let said = text(&output.stderr);
        assert!(said.contains("is statically linked") && said.contains("CGO_ENABLED=1"), "{said}");
    }
}
