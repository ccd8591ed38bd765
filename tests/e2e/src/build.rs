//! Builds of Aquifer and of the test programs in C.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use rustix::fs::{FlockOperation, flock};

/// Variable with the path of the `aquifer` to test. If it is not set, the workspace is built and
/// its binary is used.
pub const BINARY_VARIABLE: &str = "AQUIFER_BIN";

/// Root folder of the workspace.
#[must_use]
pub fn root() -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    path.canonicalize().expect("the tests are in the workspace")
}

/// Acquires a lock that all test programs share.
///
/// # Panics
/// If the file cannot be created.
#[must_use]
pub fn lock(name: &str) -> File {
    let folder = root().join("target");
    std::fs::create_dir_all(&folder).expect("the target folder can be made");
    let file = File::create(folder.join(name)).expect("a lock file can be made");
    flock(&file, FlockOperation::LockExclusive).expect("a lock can be waited for");
    file
}

/// Path of the `aquifer` under test.
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
        // The whole workspace: a build of some packages would select other features.
        run_to_end(
            Command::new(env!("CARGO")).args(["build", "--workspace", "--all-targets"]).current_dir(root()),
        );
        root().join("target/debug/aquifer")
    })
}

/// Path of the `aquifer` of the last release; `None` in a clone without history.
///
/// # Panics
/// If it cannot be built.
#[must_use]
pub fn last_release() -> Option<PathBuf> {
    let _lock = lock("e2e-build.lock");
    let output = Command::new(root().join("scripts/last-release.sh")).output().expect("it can be started");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let folder = String::from_utf8(output.stdout).expect("a plain path");
    (!folder.is_empty()).then(|| Path::new(folder.trim()).join("aquifer"))
}

/// Folder of the built C programs.
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
        let mut out_argument = std::ffi::OsString::from("OUT=");
        out_argument.push(&out);
        run_to_end(Command::new("make").arg("-s").arg("-C").arg(sources()).arg(out_argument));
        out
    })
}

/// Folder of the C sources and of the Python programs.
#[must_use]
pub fn sources() -> PathBuf {
    root().join("tests/e2e/programs")
}

/// Builds a C program from a text into `folder`.
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

/// Compiles a program in C++ that uses libaquifer, and returns its path.
///
/// # Panics
/// If the compiler fails.
pub fn compile_cpp(folder: &Path, source: &Path) -> PathBuf {
    let program = folder.join(source.file_stem().expect("a source has a name"));
    let libraries = binary().parent().expect("the binary is in a folder").to_owned();
    let mut command = Command::new("c++");
    command.args(["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-Wl,--no-as-needed"]);
    command.arg("-I").arg(root().join("bindings/c")).arg("-o").arg(&program).arg(source);
    run_to_end(command.arg("-L").arg(libraries).arg("-laquifer"));
    program
}

fn run_to_end(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
    assert!(output.status.success(), "{command:?} failed: {}", String::from_utf8_lossy(&output.stderr));
}
