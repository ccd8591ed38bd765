//! Search for the program's file, and checks whether it can be paged.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Longest chain of script interpreters, as in the kernel.
const SCRIPT_DEPTH_MAX: u32 = 4;
const PROGRAM_HEADERS_MAX: u16 = 256;
const PT_INTERP: u32 = 3;
const ELF_64_LITTLE: [u8; 6] = [0x7f, b'E', b'L', b'F', 2, 1];
const MACHINE_X86_64: u16 = 62;

/// Why a program cannot be run on the pool.
#[derive(Debug, thiserror::Error)]
pub enum ExecutableError {
    /// There is no such file.
    #[error("{0}: no such program", program.display())]
    NotFound {
        /// The name as given.
        program: PathBuf,
    },
    /// The file may not be executed.
    #[error("{0}: not an executable file", program.display())]
    NotExecutable {
        /// The file.
        program: PathBuf,
    },
    /// The file cannot be read.
    #[error("{0} cannot be read: {source}", program.display())]
    Unreadable {
        /// The file.
        program: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The program is statically linked.
    #[error("{0} is statically linked, so the shim cannot be loaded into it: use a dynamically linked build \
             (for Go: CGO_ENABLED=1 and -linkmode external; for Rust: a gnu target; for C: without -static), \
             or page it by kernel swap: aquifer run --swap", program.display())]
    Static {
        /// The file.
        program: PathBuf,
    },
    /// The program is for another processor.
    #[error("{0} is not a 64-bit x86 program: only such programs can be paged", program.display())]
    OtherMachine {
        /// The file.
        program: PathBuf,
    },
    /// The program has a set-user-ID or set-group-ID bit, so the dynamic linker ignores LD_PRELOAD.
    #[error("{0} is a set-user-ID or set-group-ID program, so the shim cannot be loaded into it: \
             run it as its target user, or page it by kernel swap: aquifer run --swap, as \
             root", program.display())]
    SetId {
        /// The file.
        program: PathBuf,
    },
}

use ExecutableError::{NotExecutable, NotFound, OtherMachine, SetId, Static, Unreadable};

/// Finds a program as a shell does.
///
/// # Errors
/// `NotFound`.
pub(super) fn find(name: &OsStr) -> Result<PathBuf, ExecutableError> {
    let given = PathBuf::from(name);
    if name.as_bytes().contains(&b'/') {
        return if given.exists() { Ok(given) } else { Err(NotFound { program: given }) };
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    let mut candidates =
        std::env::split_paths(&path).map(|folder| folder.join(name)).filter(|path| path.is_file());
    candidates.find(|path| is_executable(path)).ok_or(NotFound { program: given })
}

/// Checks that a program can be paged by the shim.
///
/// # Errors
/// Why it cannot.
pub(super) fn check(program: &Path) -> Result<(), ExecutableError> {
    check_file(program, program, SCRIPT_DEPTH_MAX)
}

/// Checks that a program can be executed, before a swap device is created for it.
///
/// # Errors
/// `NotExecutable`.
pub(super) fn check_startable(program: &Path) -> Result<(), ExecutableError> {
    if is_executable(program) { Ok(()) } else { Err(NotExecutable { program: program.to_owned() }) }
}

fn check_file(program: &Path, file: &Path, depth: u32) -> Result<(), ExecutableError> {
    let name = || program.to_owned();
    let unreadable = |source| Unreadable { program: file.to_owned(), source };
    let metadata = std::fs::metadata(file).map_err(unreadable)?;
    if !metadata.is_file() || !is_executable(file) {
        return Err(NotExecutable { program: name() });
    }
    if metadata.permissions().mode() & 0o6000 != 0 && !rustix::process::geteuid().is_root() {
        return Err(SetId { program: name() });
    }
    let opened = match File::open(file) {
        Ok(opened) => opened,
        // The file can be executed, but not read. Such a program cannot be checked.
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => return Ok(()),
        Err(error) => return Err(unreadable(error)),
    };
    let mut head = Vec::new();
    (&opened).take(256).read_to_end(&mut head).map_err(unreadable)?;
    if let Some(line) = head.strip_prefix(b"#!") {
        let words = line.split(|byte| *byte == b'\n').next().unwrap_or_default();
        let interpreter = words.split(|byte| byte.is_ascii_whitespace()).find(|word| !word.is_empty());
        return match interpreter {
            Some(path) if depth > 0 => check_file(program, Path::new(OsStr::from_bytes(path)), depth - 1),
            _ => Err(NotExecutable { program: name() }),
        };
    }
    if !head.starts_with(b"\x7fELF") {
        return Err(NotExecutable { program: name() });
    }
    match parse_elf(&head, |offset, buffer| opened.read_exact_at(buffer, offset).is_ok()) {
        Elf::Dynamic => Ok(()),
        Elf::Static => Err(Static { program: name() }),
        Elf::OtherMachine => Err(OtherMachine { program: name() }),
        Elf::Damaged => Err(NotExecutable { program: name() }),
    }
}

fn is_executable(path: &Path) -> bool {
    rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok() && path.is_file()
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Elf {
    Dynamic,
    Static,
    OtherMachine,
    Damaged,
}

/// Classifies an ELF file by its first bytes and its program headers, which `read` reads at an
/// offset.
fn parse_elf(head: &[u8], read: impl Fn(u64, &mut [u8]) -> bool) -> Elf {
    let half = |at: usize| Some(u16::from_le_bytes(head.get(at..at + 2)?.try_into().ok()?));
    if !head.starts_with(&ELF_64_LITTLE) || half(18) != Some(MACHINE_X86_64) {
        return Elf::OtherMachine;
    }
    let table = head.get(32..40).and_then(|bytes| bytes.try_into().ok()).map(u64::from_le_bytes);
    let (Some(table), Some(size), Some(count)) = (table, half(54), half(56)) else { return Elf::Damaged };
    if size < 56 || count > PROGRAM_HEADERS_MAX {
        return Elf::Damaged;
    }
    for number in 0..u64::from(count) {
        let mut kind = [0; 4];
        let Some(offset) = table.checked_add(number * u64::from(size)) else { return Elf::Damaged };
        if !read(offset, &mut kind) {
            return Elf::Damaged;
        }
        if u32::from_le_bytes(kind) == PT_INTERP {
            return Elf::Dynamic;
        }
    }
    Elf::Static
}

#[cfg(test)]
mod tests {
    use super::*;

    fn elf(kinds: &[u32]) -> Vec<u8> {
        let mut bytes = vec![0u8; 64 + kinds.len() * 56];
        bytes[..6].copy_from_slice(&ELF_64_LITTLE);
        bytes[18] = 62;
        bytes[32] = 64;
        bytes[54] = 56;
        bytes[56] = u8::try_from(kinds.len()).unwrap();
        for (number, kind) in kinds.iter().enumerate() {
            bytes[64 + number * 56..][..4].copy_from_slice(&kind.to_le_bytes());
        }
        bytes
    }

    fn parse(bytes: &[u8]) -> Elf {
        let read = |offset: u64, buffer: &mut [u8]| {
            let start = usize::try_from(offset).unwrap_or(usize::MAX);
            let part = start.checked_add(buffer.len()).and_then(|end| bytes.get(start..end));
            part.map(|part| buffer.copy_from_slice(part)).is_some()
        };
        parse_elf(&bytes[..bytes.len().min(256)], read)
    }

    #[test]
    fn a_program_with_an_interpreter_is_dynamic() {
        assert_eq!(parse(&elf(&[6, 3, 1])), Elf::Dynamic);
        assert_eq!(parse(&elf(&[1, 1, 2])), Elf::Static);
    }

    #[test]
    fn damaged_files_and_other_processors_are_distinguished() {
        let mut other = elf(&[3]);
        other[18] = 183;
        assert_eq!(parse(&other), Elf::OtherMachine);
        let whole = elf(&[1, 3]);
        for end in 6..whole.len() - 56 {
            assert_ne!(parse(&whole[..end]), Elf::Dynamic, "cut at {end}");
        }
        let mut far = elf(&[3]);
        far[32..40].copy_from_slice(&u64::MAX.to_le_bytes());
        assert_eq!(parse(&far), Elf::Damaged);
    }

    #[test]
    fn programs_are_found_and_checked() {
        let shell = find(OsStr::new("sh")).unwrap();
        check(&shell).unwrap();
        assert!(matches!(find(OsStr::new("no-such-program-here")), Err(NotFound { .. })));
        assert!(matches!(check(Path::new("/etc/hostname")), Err(NotExecutable { .. })));
        assert!(matches!(check(Path::new("/etc")), Err(NotExecutable { .. })));
    }
}
