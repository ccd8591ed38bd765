//! A serving process: another process of this binary that serves a bench until the bench ends.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

use super::cluster::own_program;
use super::folder;
use crate::BenchError;

/// A serving process, which ends when its standard input is closed. Dropping this closes it.
#[derive(Debug)]
pub struct ServingProcess {
    child: Child,
    _folder: TempDir,
}

impl Drop for ServingProcess {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        // An error means that the process was reaped before.
        let _ = self.child.wait();
    }
}

impl ServingProcess {
    /// Starts the serving process of a bench. Returns the process, the text of its ready message,
    /// and the path at which it listens.
    ///
    /// # Errors
    /// If the process does not start.
    pub fn start(bench: &str) -> Result<(Self, String, PathBuf), BenchError> {
        let folder = folder::temporary()?;
        let path = folder.path().join("target");
        let own = own_program()?;
        let child = Command::new(&own)
            .args(["bench", bench, "--serve-at"].map(OsStr::new))
            .arg(&path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(BenchError::io("start", &own))?;
        let mut process = Self { child, _folder: folder };
        let mut line = String::new();
        if let Some(stdout) = process.child.stdout.take() {
            BufReader::new(stdout)
                .read_line(&mut line)
                .map_err(BenchError::io("read the output of", &own))?;
        }
        let Some(ready) = line.strip_prefix("ready ") else {
            drop(process.child.stdin.take());
            let status = process.child.wait().map_err(BenchError::io("wait for", &own))?;
            return Err(BenchError::ServingProcess { status: status.to_string() });
        };
        let ready = ready.trim().to_owned();
        Ok((process, ready, path))
    }

    /// Process number.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

/// Reports that this serving process is ready, and ends it when standard input ends.
///
/// # Errors
/// If standard output cannot be written.
pub fn ready(path: &Path, text: &str) -> Result<(), BenchError> {
    std::thread::spawn(|| {
        // An error ends the process as well: the process that measures has ended.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
    let mut out = std::io::stdout();
    writeln!(out, "ready {text}")
        .and_then(|()| out.flush())
        .map_err(BenchError::io("report readiness at", path))
}
