//! The demo's program: Debian's sqlite3 builds a search index of the Linux kernel's documentation
//! in memory, and queries it.

use std::path::{Path, PathBuf};
use std::process::Command;

use aquifer_bench::BenchError;

const SCRIPT: &str = include_str!("../../../../../scripts/demo/kernel-docs.sql");
const DOCS: &str = "/usr/share/doc";
/// Start of the documentation's folder; the version follows.
const DOCS_PREFIX: &str = "linux-doc-";

/// The program, its input and its working directory.
#[derive(Clone, Debug)]
pub struct Program {
    sqlite: PathBuf,
    pages: PathBuf,
    /// File with the program's standard input.
    pub script: PathBuf,
}

impl Program {
    /// Finds the program and the documentation, and writes the script into `folder`.
    ///
    /// # Errors
    /// If the program or the documentation is not installed.
    pub fn find(folder: &Path) -> Result<Self, BenchError> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let sqlite = std::env::split_paths(&path).map(|dir| dir.join("sqlite3")).find(|path| path.is_file());
        let sqlite = sqlite.ok_or(BenchError::Missing { what: "sqlite3" })?;
        let pages = newest_docs(Path::new(DOCS))
            .ok_or(BenchError::Missing { what: "the kernel's documentation (linux-doc)" })?;
        let script = folder.join("kernel-docs.sql");
        std::fs::write(&script, SCRIPT).map_err(BenchError::io("write", &script))?;
        Ok(Self { sqlite, pages, script })
    }

    /// One-line description.
    pub fn about(&self) -> String {
        format!(
            "{} builds a full-text index of the Linux kernel's documentation ({}) in memory, and asks it.",
            self.sqlite.display(),
            self.pages.display()
        )
    }

    /// Path of the program.
    pub fn executable(&self) -> &Path {
        &self.sqlite
    }

    /// Adds arguments and working directory to a command.
    pub fn arrange(&self, command: &mut Command) {
        command.args(["-batch", ":memory:"]).current_dir(&self.pages);
    }
}

/// The pages of the newest version with any.
fn newest_docs(docs: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(docs).ok()?.flatten();
    let versions = entries.filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let version = version(name.strip_prefix(DOCS_PREFIX)?);
        let pages = entry.path().join("html");
        pages.join("index.html").is_file().then_some((version, pages))
    });
    versions.max().map(|(_, pages)| pages)
}

/// The numbers in a version, so that 6.10 is newer than 6.9.
fn version(text: &str) -> Vec<u32> {
    text.split(|character: char| !character.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_documentation_with_pages_is_chosen() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(newest_docs(folder.path()), None);
        for name in ["linux-doc-6.9", "linux-doc-6.10", "other-7.0"] {
            let pages = folder.path().join(name).join("html");
            std::fs::create_dir_all(&pages).unwrap();
            std::fs::write(pages.join("index.html"), "").unwrap();
        }
        // The package may be installed without its pages.
        std::fs::create_dir_all(folder.path().join("linux-doc-6.11/html")).unwrap();
        assert_eq!(newest_docs(folder.path()), Some(folder.path().join("linux-doc-6.10/html")));
    }
}
