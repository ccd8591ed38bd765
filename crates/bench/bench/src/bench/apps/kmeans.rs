//! scikit-learn's k-means, which reads one large array repeatedly.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use aquifer_bench::BenchError;
use aquifer_bench::support::child::{self, ProgramOutcome, Streams, Watched};

use super::{App, Played, Size};

/// Debian's Python, which has Debian's packages.
const PYTHON: &str = "/usr/bin/python3";
const SCRIPT: &str = include_str!("kmeans.py");

/// The script and its parameters.
#[derive(Debug)]
pub struct KMeans {
    script: PathBuf,
    size: Size,
}

impl KMeans {
    /// The program, if it is installed. Writes the script to `folder`.
    ///
    /// # Errors
    /// If the script cannot be written.
    pub fn find(size: Size, folder: &Path) -> Result<Option<Self>, BenchError> {
        let import = Command::new(PYTHON)
            .args(["-c", "import numpy, sklearn.cluster"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        if !import.is_ok_and(|status| status.success()) {
            return Ok(None);
        }
        let script = folder.join("kmeans.py");
        std::fs::write(&script, SCRIPT).map_err(BenchError::io("write", &script))?;
        Ok(Some(Self { script, size }))
    }
}

impl App for KMeans {
    fn name(&self) -> &'static str {
        "scikit-learn k-means"
    }

    fn program(&self) -> &Path {
        Path::new(PYTHON)
    }

    fn play(
        &self,
        mut command: Command,
        watched: Watched,
        output: &Path,
    ) -> Result<(ProgramOutcome, Result<Played, BenchError>), BenchError> {
        command.arg(&self.script).arg("--bytes").arg(self.size.kmeans_bytes.to_string());
        command.arg("--iterations").arg(self.size.kmeans_iterations.to_string());
        let outcome = child::run(command, &Streams { input: None, output }, watched, |_| {})?;
        let digest = std::fs::read_to_string(output).map_err(BenchError::io("read", output))?;
        let played = Played::new(outcome.elapsed.as_secs_f64(), Vec::new(), digest);
        Ok((outcome, Ok(played)))
    }
}
