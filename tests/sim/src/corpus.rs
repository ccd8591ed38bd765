//! The recorded corpus of a simulator: for each mutation the first schedule that notices it.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Seeds by the name of the mutation.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Corpus(pub BTreeMap<String, u64>);

fn path(simulator: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(format!("{simulator}.txt"))
}

impl Corpus {
    /// Reads a simulator's corpus; it is empty if there is no file.
    pub fn read(simulator: &str) -> Self {
        std::fs::read_to_string(path(simulator)).map(|text| Self::parse(&text)).unwrap_or_default()
    }

    fn parse(text: &str) -> Self {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let entry = |line: &str| {
            let (name, seed) = line.split_once(' ')?;
            Some((name.to_owned(), seed.parse().ok()?))
        };
        Self(lines.map(|line| entry(line).unwrap_or_else(|| panic!("not 'NAME SEED': {line}"))).collect())
    }

    /// Writes a simulator's corpus.
    pub fn write(&self, simulator: &str) {
        let text = self.to_text(simulator);
        std::fs::write(path(simulator), text).expect("the folder of the corpora can be written");
    }

    fn to_text(&self, simulator: &str) -> String {
        let mut text = format!(
            "# The first schedule of the simulator '{simulator}' that notices each mutation. \
             Written by `make mutants`.\n"
        );
        for (name, seed) in &self.0 {
            let _ = writeln!(text, "{name} {seed}");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_corpus_is_parsed_again() {
        let corpus = Corpus([("SkipFlush".to_owned(), 3), ("KeepOld".to_owned(), 1_999)].into());
        assert_eq!(Corpus::parse(&corpus.to_text("some")), corpus);
    }
}
