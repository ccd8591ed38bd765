//! The programs: Aquifer, and the test programs in C.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use rustix::fs::{FlockOperation, flock};

/// Names the `aquifer` to test. If it is not set, the one beside this test program is brought up to
/// date and used.
pub const BINARY_VARIABLE: &str = "AQUIFER_BIN";

/// The root of the project.
#[must_use]
pub fn root() -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    path.canonicalize().expect("the tests lie in the project")
}

/// A lock that all test programs share.
///
/// # Panics
/// If the file cannot be made.
#[must_use]
pub fn lock(name: &str) -> File {
    let folder = root().join("target");
    std::fs::create_dir_all(&folder).expect("the target folder can be made");
    let file = File::create(folder.join(name)).expect("a lock file can be made");
    flock(&file, FlockOperation::LockExclusive).expect("a lock can be waited for");
    file
}

/// The `aquifer` under test.
///
/// # Panics
/// If it cannot be built.
#[must_use]
pub fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        if let Some(given) = std::env::var_os(BINARY_VARIABLE) {
            return PathBuf::from(given);
        }
        let _lock = lock("e2e-build.lock");
        // Of some packages alone it would be another build, with other features of what they share.
        run_to_end(
            Command::new(env!("CARGO")).args(["build", "--workspace", "--all-targets"]).current_dir(root()),
        );
        root().join("target/debug/aquifer")
    })
}

/// The folder of the C programs, built.
///
/// # Panics
/// If they cannot be built.
#[must_use]
pub fn programs() -> &'static Path {
    static PROGRAMS: OnceLock<PathBuf> = OnceLock::new();
    PROGRAMS.get_or_init(|| {
        let _lock = lock("e2e-build.lock");
        let out = root().join("target/e2e-programs");
        std::fs::create_dir_all(&out).expect("a folder for programs can be made");
        let mut out_is = std::ffi::OsString::from("OUT=");
        out_is.push(&out);
        run_to_end(Command::new("make").arg("-s").arg("-C").arg(sources()).arg(out_is));
        out
    })
}

/// The folder of the programs' sources, and of those in Python.
#[must_use]
pub fn sources() -> PathBuf {
    root().join("tests/e2e/programs")
}

/// A C program of a few lines, built with these options into `folder`.
///
/// # Panics
/// If it cannot be built.
#[must_use]
pub fn compile(folder: &Path, name: &str, text: &str, options: &[&str]) -> PathBuf {
    let source = folder.join(format!("{name}.c"));
    std::fs::write(&source, text).expect("a source can be written");
    let program = folder.join(name);
    run_to_end(Command::new("cc").arg("-O1").args(options).arg("-o").arg(&program).arg(&source));
    program
}

fn run_to_end(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
    assert!(output.status.success(), "{command:?} failed: {}", String::from_utf8_lossy(&output.stderr));
}
