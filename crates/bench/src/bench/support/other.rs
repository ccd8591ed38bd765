//! Another process of this very program, which serves a bench for as long as that wants it.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

use super::cluster::own_program;
use crate::bench::BenchError;

/// The other process; it ends when its input does.
#[derive(Debug)]
pub struct Other {
    child: Child,
    _folder: TempDir,
}

impl Drop for Other {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        // It has ended or is about to.
        let _ = self.child.wait();
    }
}

impl Other {
    /// Starts the serving end of a bench, with a path in a folder of its own. Returns what it says when it is ready, too: what follows that word, and its path.
    ///
    /// # Errors
    /// If it does not start.
    pub fn start(bench: &str) -> Result<(Self, String, std::path::PathBuf), BenchError> {
        let folder =
            tempfile::tempdir().map_err(BenchError::io("make a folder in", &std::env::temp_dir()))?;
        let path = folder.path().join("target");
        let own = own_program()?;
        let child = Command::new(&own)
            .args(["bench", bench, "--serve-at"].map(OsStr::new))
            .arg(&path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(BenchError::io("start", &own))?;
        let mut other = Self { child, _folder: folder };
        let mut line = String::new();
        if let Some(stdout) = other.child.stdout.take() {
            BufReader::new(stdout).read_line(&mut line).map_err(BenchError::io("hear from", &own))?;
        }
        let Some(ready) = line.strip_prefix("ready ") else {
            return Err(BenchError::Fabric {
                reason: "the other process did not start; its message is above".into(),
            });
        };
        Ok((other, ready.trim().to_owned(), path))
    }

    /// Its number.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

/// In the other process: say that it is ready, and end it when its input ends, as it does when whoever started it is gone.
///
/// # Errors
/// If nobody hears it.
pub fn ready(path: &Path, said: &str) -> Result<(), BenchError> {
    std::thread::spawn(|| {
        // Whatever ends the input, an error too, means that nobody needs us any more.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
    let mut out = std::io::stdout();
    writeln!(out, "ready {said}").and_then(|()| out.flush()).map_err(BenchError::io("say ready at", path))
}
