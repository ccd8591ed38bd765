//! Golden files: the bytes of a format after its last intended change.
//!
//! A golden test encodes fixed values, decodes the same bytes, and compares them with a file in
//! the folder `golden` of its crate's tests.
//! Each line of the file is a name and a value: bytes in hexadecimal, or a text.
//! The names are plain words and not identifiers, so that the code can be renamed.
//!
//! To change a format, change its document and the version there, run its golden tests with
//! `AQUIFER_WRITE_GOLDEN=1`, and commit files and document together.

use std::os::fd::BorrowedFd;
use std::path::PathBuf;

use rustix::fs::{SeekFrom, seek};
use rustix::io::pread;

/// If this variable is 1, golden tests write their files instead of comparing them.
pub const WRITE_VARIABLE: &str = "AQUIFER_WRITE_GOLDEN";

/// A golden file and its expected content.
#[derive(Debug)]
pub struct Golden {
    path: PathBuf,
    lines: Vec<String>,
}

/// The golden file `tests/golden/NAME.txt` of the calling crate.
#[macro_export]
macro_rules! golden {
    ($name:literal) => {
        $crate::golden::Golden::at(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/", $name, ".txt"))
    };
}

/// Adds the size of a struct and the offsets of its fields, in the order given.
/// Does not compile if a field is left out.
#[macro_export]
macro_rules! golden_layout {
    ($golden:expr, $name:literal, $type:ident { $($field:ident),+ $(,)? }) => {{
        let _ = |value: &$type| {
            let $type { $($field: _),+ } = value;
        };
        let offsets = [$(std::mem::offset_of!($type, $field)),+].map(|offset| offset.to_string()).join(" ");
        let (size, align) = (size_of::<$type>(), align_of::<$type>());
        $golden.text($name, &format!("{size} bytes, aligned to {align}, fields at {offsets}"));
    }};
}

impl Golden {
    /// The golden file at a path.
    #[must_use]
    pub fn at(path: &str) -> Self {
        Self { path: path.into(), lines: Vec::new() }
    }

    /// Adds bytes under a name.
    pub fn bytes(&mut self, name: &str, bytes: &[u8]) {
        let words: Vec<String> =
            bytes.chunks(8).map(|word| word.iter().map(|byte| format!("{byte:02x}")).collect()).collect();
        self.text(name, &words.join(" "));
    }

    /// Adds a text of one line under a name.
    pub fn text(&mut self, name: &str, text: &str) {
        assert!(!text.contains('\n'), "{name}: a line of a golden file is one line");
        self.lines.push(format!("{name}: {text}"));
    }

    /// Adds the non-zero 8-byte words of a memory, each under its offset.
    pub fn memory(&mut self, bytes: &[u8]) {
        self.memory_at(0, bytes);
    }

    /// Adds the non-zero 8-byte words of a memfd, which may be large and sparse.
    ///
    /// # Panics
    /// If it cannot be read.
    pub fn memfd(&mut self, fd: BorrowedFd<'_>) {
        let mut at = 0;
        // An error says that only a hole follows.
        while let Ok(start) = seek(fd, SeekFrom::Data(at)) {
            at = seek(fd, SeekFrom::Hole(start)).expect("every file ends with a hole");
            let mut bytes = vec![0; usize::try_from(at - start).expect("memory fits memory")];
            let read = pread(fd, &mut bytes, start).expect("a memfd can be read");
            self.memory_at(start, &bytes[..read]);
        }
    }

    fn memory_at(&mut self, offset: u64, bytes: &[u8]) {
        for (at, word) in (offset..).step_by(8).zip(bytes.chunks(8)) {
            if word.iter().any(|byte| *byte != 0) {
                self.bytes(&format!("at {at}"), word);
            }
        }
    }

    /// Adds the options of a command and its subcommands: names, possible values, environment
    /// variables and defaults. Help texts and placeholders are left out: they may be reworded.
    pub fn command_line(&mut self, command: &clap::Command, path: &str) {
        let path = format!("{path} {}", command.get_name()).trim().to_owned();
        for argument in command.get_arguments() {
            let mut words = vec![path.clone()];
            words.extend(argument.get_short().map(|short| format!("-{short}")));
            words.extend(argument.get_long().map(|long| format!("--{long}")));
            if argument.get_action().takes_values() {
                let possible = argument.get_possible_values();
                let possible: Vec<_> = possible.iter().map(|value| value.get_name()).collect();
                words.push(if possible.is_empty() { "VALUE".to_owned() } else { possible.join("|") });
            }
            words.extend(environment_variable(argument).map(|name| format!("env {name}")));
            let values = argument.get_default_values().iter();
            words.extend(values.map(|value| format!("else {}", value.display())));
            words.extend(argument.is_required_set().then(|| "required".to_owned()));
            self.lines.push(words.join(" "));
        }
        if command.get_arguments().next().is_none() {
            self.lines.push(path.clone());
        }
        for below in command.get_subcommands() {
            self.command_line(below, &path);
        }
    }

    /// Adds a text of several lines, without a name.
    pub fn lines(&mut self, text: &str) {
        self.lines.extend(text.lines().map(str::to_owned));
    }

    /// Compares all that was added with the file.
    ///
    /// # Panics
    /// If they differ, or the file cannot be read.
    pub fn check(self) {
        let found = self.lines.join("\n") + "\n";
        if std::env::var_os(WRITE_VARIABLE).is_some_and(|value| value == "1") {
            let folder = self.path.parent().expect("a golden file lies in a folder");
            std::fs::create_dir_all(folder)
                .and_then(|()| std::fs::write(&self.path, found))
                .unwrap_or_else(|error| panic!("cannot write {}: {error}", self.path.display()));
        } else {
            self.compare(&found);
        }
    }

    fn compare(&self, found: &str) {
        let path = self.path.display();
        let wanted =
            std::fs::read_to_string(&self.path).unwrap_or_else(|error| panic!("cannot read {path}: {error}"));
        let differing = wanted.lines().zip(&self.lines).position(|(wanted, found)| wanted != found);
        let count = wanted.lines().count();
        assert!(
            wanted == found,
            "{path} differs from what the code writes. If the change is intended, change the format's \
             document and its version, then run this test with {WRITE_VARIABLE}=1. {}",
            match differing {
                Some(at) => format!(
                    "Line {}:\n  file: {}\n  code: {}",
                    at + 1,
                    wanted.lines().nth(at).unwrap_or_default(),
                    self.lines[at]
                ),
                None => format!("The file has {count} lines, the code wrote {}.", self.lines.len()),
            }
        );
    }
}

/// The environment variable of an argument: that of clap, or the one that its help names as `[env:
/// NAME]`.
fn environment_variable(argument: &clap::Arg) -> Option<String> {
    let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
    let named = help.split_once("[env: ").and_then(|(_, rest)| rest.split_once(']'));
    let of_clap = argument.get_env().map(|name| name.display().to_string());
    of_clap.or_else(|| named.map(|(name, _)| name.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    struct GoldenPair {
        first: u8,
        second: u32,
    }

    fn compare(path: &std::path::Path, byte: u8) {
        let mut golden = Golden::at(path.to_str().expect("the path is UTF-8"));
        golden.bytes("bytes", &[1, 2, 3, 4, 5, 6, 7, 8, byte]);
        golden.text("text", "{}");
        crate::golden_layout!(golden, "pair", GoldenPair { first, second });
        golden.compare(&(golden.lines.join("\n") + "\n"));
    }

    #[test]
    fn a_changed_byte_a_missing_line_and_a_missing_file_are_noticed() {
        let folder = tempfile::tempdir().expect("there is room for a folder");
        let path = folder.path().join("pair.txt");
        let passes = |byte| std::panic::catch_unwind(|| compare(&path, byte)).is_ok();
        assert!(!passes(9), "there is no file yet");
        let text = "bytes: 0102030405060708 09\ntext: {}\npair: 8 bytes, aligned to 4, fields at 0 4\n";
        std::fs::write(&path, text).expect("the file can be written");
        assert!(passes(9));
        assert!(!passes(8));
        std::fs::write(&path, text.replace("text: {}\n", "")).expect("the file can be written");
        assert!(!passes(9));
    }
}
