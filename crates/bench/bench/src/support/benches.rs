//! The list of a program's benches.

use super::report::Report;
use crate::BenchError;

/// A bench of a program with the arguments `A`.
#[derive(Debug)]
pub struct Bench<A> {
    /// The name of the bench on the command line.
    pub name: &'static str,
    /// The quantities that the bench measures.
    pub about: &'static str,
    /// The targets of the bench.
    pub targets: &'static str,
    /// The options of the bench, of those that only some benches have.
    pub options: &'static [&'static str],
    /// The function that runs the bench.
    pub run: fn(&A) -> Result<Report, BenchError>,
}

/// The benches of a program.
#[derive(Debug)]
pub struct BenchList<A: 'static> {
    /// The command that a bench's name follows.
    pub command: &'static str,
    /// The benches.
    pub benches: &'static [Bench<A>],
}

impl<A> BenchList<A> {
    /// A line for each bench: its name, what it measures, and its targets.
    pub fn to_text(&self) -> String {
        let line = |bench: &Bench<A>| format!("{:9} {}; {}\n", bench.name, bench.about, bench.targets);
        self.benches.iter().map(line).collect()
    }

    /// The bench with a name. `given` are the given options, of those that only some benches have.
    ///
    /// # Errors
    /// If there is no such bench, or it does not have a given option.
    pub fn select(
        &self,
        name: &str,
        given: impl IntoIterator<Item = &'static str>,
    ) -> Result<&Bench<A>, BenchError> {
        let command = self.command;
        let bench = self
            .benches
            .iter()
            .find(|bench| bench.name == name)
            .ok_or_else(|| BenchError::NoSuchBench { command, name: name.to_owned() })?;
        if let Some(option) = given.into_iter().find(|option| !bench.options.contains(option)) {
            let benches = self.benches.iter().filter(|other| other.options.contains(&option));
            let benches = benches.map(|other| format!("`{command} {}`", other.name)).collect();
            return Err(BenchError::NoSuchOption { command, name: bench.name, option, benches });
        }
        Ok(bench)
    }
}

/// The figures of a paper that `--only` selects, of those that a bench has; all without it.
///
/// # Errors
/// If the bench has no such figure.
pub fn select_figures(only: Option<&str>, figures: &[u32]) -> Result<Vec<u32>, BenchError> {
    let Some(only) = only else { return Ok(figures.to_vec()) };
    let chosen = figures.iter().find(|figure| figure.to_string() == only);
    let known = || figures.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
    chosen
        .map(|figure| vec![*figure])
        .ok_or_else(|| BenchError::NoSuchFigure { only: only.to_owned(), known: known() })
}
