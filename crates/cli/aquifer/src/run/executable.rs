//! Search for the program's file, and checks whether it can be paged.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use object::Endianness;
use object::elf::{DT_NEEDED, EM_X86_64, FileHeader64, SHT_DYNSYM};
use object::read::ReadCache;
use object::read::elf::{Dyn, FileHeader, ProgramHeader};

/// Longest chain of script interpreters, as in the kernel.
const SCRIPT_DEPTH_MAX: u32 = 4;
/// The extended attribute with the capabilities of a file.
const CAPABILITIES: &str = "security.capability";
/// Prefixes of the file names of AddressSanitizer's runtime.
const ASAN_RUNTIME: [&[u8]; 2] = [b"libasan.so", b"libclang_rt.asan"];

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
    /// The program is for another C library.
    #[error("{0} is for another C library than glibc, so the shim cannot be loaded into it: page it by \
             kernel swap: aquifer run --swap, as root", program.display())]
    OtherLibrary {
        /// The file.
        program: PathBuf,
    },
    /// The program has the dynamic runtime of AddressSanitizer, which must be the first library.
    #[error("{0} has the dynamic runtime of AddressSanitizer, which must be loaded before the shim: link it \
             with -static-libasan", program.display())]
    AddressSanitizer {
        /// The file.
        program: PathBuf,
    },
    /// The file has capabilities, so the dynamic linker ignores LD_PRELOAD.
    #[error("{0} has file capabilities, so the shim cannot be loaded into it: run it as root, or page it by \
             kernel swap: aquifer run --swap, as root", program.display())]
    Capabilities {
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

use ExecutableError::{
    AddressSanitizer, Capabilities, NotExecutable, NotFound, OtherLibrary, OtherMachine, SetId, Static,
    Unreadable,
};

/// Finds a program by its path, or by its name in the folders of PATH.
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
/// The reason why it cannot be paged.
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
    let is_root = rustix::process::geteuid().is_root();
    if metadata.permissions().mode() & 0o6000 != 0 && !is_root {
        return Err(SetId { program: name() });
    }
    if has_capabilities(file) && !is_root {
        return Err(Capabilities { program: name() });
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
    match kind_of(opened) {
        Elf::Dynamic => Ok(()),
        Elf::Static => Err(Static { program: name() }),
        Elf::OtherLibrary => Err(OtherLibrary { program: name() }),
        Elf::AddressSanitizer => Err(AddressSanitizer { program: name() }),
        Elf::OtherMachine => Err(OtherMachine { program: name() }),
        Elf::Damaged => Err(NotExecutable { program: name() }),
    }
}

/// Whether a file gives its process capabilities; false if the attribute cannot be read. The watch
/// for unpaged processes finds such a process later.
fn has_capabilities(file: &Path) -> bool {
    rustix::fs::getxattr(file, CAPABILITIES, &mut [0u8; 64]).is_ok_and(|length| length > 0)
}

fn is_executable(path: &Path) -> bool {
    rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok() && path.is_file()
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Elf {
    Dynamic,
    Static,
    /// Dynamic, for another C library than glibc.
    OtherLibrary,
    /// Dynamic, with the dynamic runtime of AddressSanitizer.
    AddressSanitizer,
    OtherMachine,
    Damaged,
}

/// Classifies an ELF file.
fn kind_of(file: impl Read + std::io::Seek) -> Elf {
    let file = ReadCache::new(file);
    let Ok(header) = FileHeader64::<Endianness>::parse(&file) else { return Elf::OtherMachine };
    let Ok(Endianness::Little) = header.endian() else { return Elf::OtherMachine };
    let endian = Endianness::Little;
    if header.e_machine(endian) != EM_X86_64 {
        return Elf::OtherMachine;
    }
    let Ok(segments) = header.program_headers(endian, &file) else { return Elf::Damaged };
    let interpreter = segments.iter().find_map(|segment| segment.interpreter(endian, &file).transpose());
    match interpreter {
        None => Elf::Static,
        Some(Err(_)) => Elf::Damaged,
        Some(Ok(linker)) if !is_linker_of_glibc(linker) => Elf::OtherLibrary,
        Some(Ok(_)) if needs_asan(header, endian, &file).unwrap_or(false) => Elf::AddressSanitizer,
        Some(Ok(_)) => Elf::Dynamic,
    }
}

/// Whether a dynamic linker may be that of glibc, whose name is `ld-linux-x86-64.so.2` or, in some
/// distributions, `ld-2.NN.so`.
fn is_linker_of_glibc(path: &[u8]) -> bool {
    let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    !name.starts_with(b"ld-musl") && !name.starts_with(b"ld-uClibc") && name != b"linker64"
}

/// Whether a file needs the dynamic runtime of AddressSanitizer.
fn needs_asan<'a, R: object::ReadRef<'a>>(
    header: &FileHeader64<Endianness>,
    endian: Endianness,
    file: R,
) -> object::Result<bool> {
    let sections = header.sections(endian, file)?;
    let Some((entries, names)) = sections.dynamic(endian, file)? else { return Ok(false) };
    let names = sections.strings(endian, file, names)?;
    let needed = entries.iter().filter(|entry| entry.tag32(endian) == Some(DT_NEEDED));
    let mut libraries = needed.filter_map(|entry| names.get(entry.val32(endian)?).ok());
    Ok(libraries.any(|library| ASAN_RUNTIME.iter().any(|name| library.starts_with(name))))
}

/// Symbols that identify the runtime of SBCL, which has an executable heap.
const EXECUTABLE_HEAP_SYMBOLS: [&[u8]; 2] = [b"dynamic_space_size", b"DYNAMIC_SPACE_START"];

/// Whether a program is known to have its data in executable memory, which is not paged.
pub(super) fn has_executable_heap(program: &Path) -> bool {
    let Ok(file) = File::open(program) else { return false };
    exports_all(&ReadCache::new(file), &EXECUTABLE_HEAP_SYMBOLS).unwrap_or(false)
}

/// Whether a file exports all of these symbols.
fn exports_all<'a, R: object::ReadRef<'a>>(file: R, wanted: &[&[u8]]) -> object::Result<bool> {
    let header = FileHeader64::<Endianness>::parse(file)?;
    let endian = header.endian()?;
    let symbols = header.sections(endian, file)?.symbols(endian, file, SHT_DYNSYM)?;
    let has = |name: &[u8]| symbols.iter().any(|symbol| symbols.symbol_name(endian, symbol) == Ok(name));
    Ok(wanted.iter().all(|name| has(name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PT_INTERP: u32 = 3;

    /// An ELF file with segments of these kinds, and the path of this dynamic linker.
    fn elf(kinds: &[u32], linker: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0u8; 64 + kinds.len() * 56];
        bytes[..7].copy_from_slice(&[0x7f, b'E', b'L', b'F', 2, 1, 1]);
        (bytes[18], bytes[32], bytes[54]) = (62, 64, 56);
        bytes[56] = u8::try_from(kinds.len()).unwrap();
        let end = bytes.len() as u64;
        for (number, kind) in kinds.iter().enumerate() {
            let segment = &mut bytes[64 + number * 56..][..56];
            segment[..4].copy_from_slice(&kind.to_le_bytes());
            segment[8..16].copy_from_slice(&end.to_le_bytes());
            segment[32..40].copy_from_slice(&(linker.len() as u64 + 1).to_le_bytes());
        }
        bytes.extend(linker);
        bytes.push(0);
        bytes
    }

    fn parse(bytes: &[u8]) -> Elf {
        kind_of(std::io::Cursor::new(bytes))
    }

    const GLIBC: &[u8] = b"/lib64/ld-linux-x86-64.so.2";

    #[test]
    fn a_program_is_dynamic_by_its_linker() {
        assert_eq!(parse(&elf(&[6, PT_INTERP, 1], GLIBC)), Elf::Dynamic);
        assert_eq!(parse(&elf(&[1, 1, 2], GLIBC)), Elf::Static);
        assert_eq!(parse(&elf(&[PT_INTERP], b"/lib/ld-musl-x86_64.so.1")), Elf::OtherLibrary);
    }

    #[test]
    fn damaged_files_and_other_processors_are_distinguished() {
        let mut other = elf(&[PT_INTERP], GLIBC);
        other[18] = 183;
        assert_eq!(parse(&other), Elf::OtherMachine);
        let whole = elf(&[1, PT_INTERP], GLIBC);
        for end in 0..whole.len() - 1 {
            assert_ne!(parse(&whole[..end]), Elf::Dynamic, "cut at {end}");
        }
        let mut far = elf(&[PT_INTERP], GLIBC);
        far[32..40].copy_from_slice(&u64::MAX.to_le_bytes());
        assert_eq!(parse(&far), Elf::Damaged);
    }

    proptest::proptest! {
        #[test]
        fn no_file_is_read_out_of_its_bounds(
            bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..300),
            at in 0usize..200,
            value in proptest::num::u8::ANY,
        ) {
            let _ = parse(&bytes);
            let mut changed = elf(&[6, PT_INTERP, 2], GLIBC);
            changed[at] = value;
            let _ = parse(&changed);
        }
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
