//! scikit-learn: models that are trained on one large array.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use aquifer_bench::BenchError;
use aquifer_bench::support::child::{self, ProgramOutcome, Streams, Watched};

use super::{App, Played, Size};

/// Debian's Python, which has Debian's packages.
const PYTHON: &str = "/usr/bin/python3";
const SCRIPT: &str = include_str!("learn.py");

/// A model, and how it uses the array.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Model {
    /// Reads all of the array in each iteration.
    KMeans,
    /// Reads all of the array several times in each iteration.
    Logistic,
    /// Makes a smaller array of its own, which it reads by features.
    Boosting,
    /// Reads random points of a copy.
    Forest,
}

impl Model {
    /// All models.
    pub const ALL: [Self; 4] = [Self::KMeans, Self::Logistic, Self::Boosting, Self::Forest];

    /// The script's name for the model.
    fn option(self) -> &'static str {
        match self {
            Self::KMeans => "kmeans",
            Self::Logistic => "logistic",
            Self::Boosting => "boosting",
            Self::Forest => "forest",
        }
    }
}

/// The script and its parameters.
#[derive(Debug)]
pub struct Learn {
    model: Model,
    script: PathBuf,
    size: Size,
}

impl Learn {
    /// The program with each model, if it is installed; else `None`. Writes the script to `folder`.
    ///
    /// # Errors
    /// If the script cannot be written.
    pub fn find(size: Size, folder: &Path) -> Result<Option<Vec<Self>>, BenchError> {
        let import = Command::new(PYTHON)
            .args(["-c", "import numpy, sklearn.cluster, sklearn.ensemble, sklearn.linear_model"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        if !import.is_ok_and(|status| status.success()) {
            return Ok(None);
        }
        let script = folder.join("learn.py");
        std::fs::write(&script, SCRIPT).map_err(BenchError::io("write", &script))?;
        Ok(Some(Model::ALL.map(|model| Self { model, script: script.clone(), size }).into()))
    }
}

impl App for Learn {
    fn name(&self) -> &'static str {
        match self.model {
            Model::KMeans => "scikit-learn k-means",
            Model::Logistic => "logistic regression",
            Model::Boosting => "gradient boosting",
            Model::Forest => "random forest",
        }
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
        command.arg(&self.script).args(["--model", self.model.option()]);
        command.arg("--bytes").arg(self.size.learn_bytes.to_string());
        command.arg("--rounds").arg(self.size.learn_rounds.to_string());
        let outcome = child::run(command, &Streams { input: None, output }, watched, |_| {})?;
        let digest = std::fs::read_to_string(output).map_err(BenchError::io("read", output))?;
        let played = Played::new(outcome.elapsed.as_secs_f64(), Vec::new(), digest);
        Ok((outcome, Ok(played)))
    }
}
