//! Finds out which processes are workers, without libc and without an allocation.

use core::mem::offset_of;

use crate::raw::{close, syscall};

/// The name of each worker's process.
pub const WORKER_NAME: &core::ffi::CStr = c"aquifer-worker";
/// Maximum number of processes of a system (`PID_MAX_LIMIT`).
const PROCESSES_MAX: u32 = 1 << 22;
const NUMBER_DIGITS_MAX: usize = 10;
/// Bytes that are read of a folder at once.
const ENTRIES_BYTES: usize = 2048;

/// A path below `/proc`, on the stack.
struct Path {
    /// The path, with a zero after its end.
    bytes: [u8; 48],
    used: usize,
}

impl Path {
    fn new() -> Self {
        Self { bytes: [0; 48], used: 0 }
    }

    /// Appends a part. The last byte is never used.
    fn append(mut self, part: &[u8]) -> Self {
        for byte in part {
            if self.used + 1 < self.bytes.len() {
                self.bytes[self.used] = *byte;
                self.used += 1;
            }
        }
        self
    }

    fn append_number(self, mut number: u32) -> Self {
        let mut digits = [0; NUMBER_DIGITS_MAX];
        let mut at = digits.len();
        loop {
            at -= 1;
            digits[at] = b'0' + (number % 10) as u8;
            number /= 10;
            if number == 0 {
                return self.append(&digits[at..]);
            }
        }
    }
}

/// Opens a path for reading, from a folder. Returns a negative errno on failure.
fn open(folder: i32, path: &Path, flags: i32) -> i32 {
    let flags = (libc::O_RDONLY | libc::O_CLOEXEC | flags) as usize;
    // SAFETY: the path ends with a zero, and the call only opens a descriptor.
    let fd =
        unsafe { syscall(libc::SYS_openat, [folder as usize, path.bytes.as_ptr() as usize, flags, 0, 0, 0]) };
    fd as i32
}

/// Reads the beginning of a file into `buffer`. Returns the bytes that were read; none on failure.
fn read<'a>(folder: i32, path: &Path, buffer: &'a mut [u8]) -> &'a [u8] {
    let fd = open(folder, path, 0);
    if fd < 0 {
        return &[];
    }
    // SAFETY: the kernel writes at most as much as the buffer has.
    let length = unsafe {
        syscall(libc::SYS_read, [fd as usize, buffer.as_mut_ptr() as usize, buffer.len(), 0, 0, 0])
    };
    close(fd);
    &buffer[..length.max(0) as usize]
}

fn parse(digits: &[u8]) -> Option<u32> {
    let is_number = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    let add = |sum: u32, digit: &u8| sum.checked_mul(10)?.checked_add(u32::from(digit - b'0'));
    if is_number { digits.iter().try_fold(0, add) } else { None }
}

fn own_pid() -> u32 {
    // SAFETY: only returns a number.
    unsafe { syscall(libc::SYS_getpid, [0; 6]) as u32 }
}

/// Whether the numbers in `/proc` are those of the caller's PID namespace.
fn is_proc_ours() -> bool {
    let mut target = [0_u8; NUMBER_DIGITS_MAX + 1];
    let path = Path::new().append(b"/proc/self");
    // SAFETY: the path ends with a zero. The kernel writes at most as much as the buffer has.
    let length = unsafe {
        let at = path.bytes.as_ptr() as usize;
        let folder = libc::AT_FDCWD as usize;
        syscall(libc::SYS_readlinkat, [folder, at, target.as_mut_ptr() as usize, target.len(), 0, 0])
    };
    length > 0 && parse(&target[..length as usize]) == Some(own_pid())
}

/// Whether the process with an entry of this name in an open folder of `/proc` is a worker.
pub fn is_worker_in(folder: i32, name: &[u8]) -> bool {
    let mut buffer = [0; 32];
    let comm = read(folder, &Path::new().append(name).append(b"/comm"), &mut buffer);
    comm.strip_suffix(b"\n") == Some(WORKER_NAME.to_bytes())
}

/// Whether a process is a worker that is a child of the caller and has ended.
pub fn is_ended_worker(pid: u32) -> bool {
    let mut buffer = [0; 96];
    let path = Path::new().append(b"/proc/").append_number(pid).append(b"/stat");
    is_ended_worker_of(own_pid(), read(libc::AT_FDCWD, &path, &mut buffer)) && is_proc_ours()
}

/// Whether a process is a worker that is a child of `parent` and has ended, from the beginning of
/// its `/proc/PID/stat`: `PID (aquifer-worker) Z PARENT …`.
fn is_ended_worker_of(parent: u32, stat: &[u8]) -> bool {
    let Some(open) = stat.iter().position(|byte| *byte == b'(') else { return false };
    let Some(rest) = stat[open + 1..].strip_prefix(WORKER_NAME.to_bytes()) else { return false };
    let Some(rest) = rest.strip_prefix(b") Z ") else { return false };
    let end = rest.iter().position(|byte| *byte == b' ').unwrap_or(0);
    parse(&rest[..end]) == Some(parent)
}

/// The processes of the caller's PID namespace.
pub enum Processes {
    /// The processes are in this folder, which is open.
    Listed(i32),
    /// No folder lists the processes, whose numbers are at most this one.
    Numbered(u32),
}

impl Processes {
    pub fn open() -> Self {
        if is_proc_ours() {
            let fd = open(libc::AT_FDCWD, &Path::new().append(b"/proc"), libc::O_DIRECTORY);
            if fd >= 0 {
                return Self::Listed(fd);
            }
        }
        let mut buffer = [0; 16];
        let path = Path::new().append(b"/proc/sys/kernel/pid_max");
        let text = read(libc::AT_FDCWD, &path, &mut buffer);
        let max = text.strip_suffix(b"\n").and_then(parse);
        Self::Numbered(max.unwrap_or(PROCESSES_MAX).min(PROCESSES_MAX))
    }

    /// Calls `visit` with the number of each process that is not a worker, until it returns false.
    /// Some numbers are not in use.
    ///
    /// Without a folder, only the worker of the caller is known, whose number is `own_worker`.
    pub fn for_each(self, own_worker: u32, mut visit: impl FnMut(u32) -> bool) {
        match self {
            Self::Listed(fd) => {
                visit_listed(fd, visit);
                close(fd);
            }
            Self::Numbered(max) => {
                let _ = (1..=max).all(|pid| pid == own_worker || visit(pid));
            }
        }
    }
}

/// Calls `visit` with the number of each process that an open folder of `/proc` lists and that is
/// not a worker, until it returns false.
fn visit_listed(folder: i32, mut visit: impl FnMut(u32) -> bool) {
    const LENGTH_AT: usize = offset_of!(libc::dirent64, d_reclen);
    const NAME_AT: usize = offset_of!(libc::dirent64, d_name);
    let mut buffer = [0_u8; ENTRIES_BYTES];
    loop {
        // SAFETY: the kernel writes at most as much as the buffer has.
        let length = unsafe {
            let at = buffer.as_mut_ptr() as usize;
            syscall(libc::SYS_getdents64, [folder as usize, at, buffer.len(), 0, 0, 0])
        };
        if length <= 0 {
            return;
        }
        let mut rest = &buffer[..length as usize];
        while rest.len() > NAME_AT {
            let entry_bytes = u16::from_ne_bytes([rest[LENGTH_AT], rest[LENGTH_AT + 1]]) as usize;
            let entry = &rest[..entry_bytes.clamp(NAME_AT, rest.len())];
            let name = entry[NAME_AT..].split(|byte| *byte == 0).next().unwrap_or_default();
            if let Some(pid) = parse(name)
                && !is_worker_in(folder, name)
                && !visit(pid)
            {
                return;
            }
            rest = &rest[entry.len()..];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_workers_end_is_one() {
        assert!(is_ended_worker_of(17, b"4711 (aquifer-worker) Z 17 4711 1 0"));
        for other in [
            &b"4711 (aquifer-worker) S 17 4711"[..],
            b"4711 (aquifer-worker) Z 18 4711",
            b"4711 (aquifer-worker) Z 17",
            b"4711 (aquifer) Z 17 4711",
            b"4711 (sh) Z 17 4711",
            b"",
        ] {
            assert!(!is_ended_worker_of(17, other), "{}", String::from_utf8_lossy(other));
        }
    }

    #[test]
    fn this_process_is_listed() {
        let mut found = false;
        Processes::open().for_each(0, |pid| {
            found |= pid == own_pid();
            true
        });
        assert!(found && is_proc_ours());
    }

    #[test]
    fn numbers_are_parsed_and_written() {
        for number in [0, 7, 4711, u32::MAX] {
            let path = Path::new().append_number(number);
            assert_eq!(parse(&path.bytes[..path.used]), Some(number));
        }
        for other in [&b""[..], b"self", b"12x", b"4294967296"] {
            assert_eq!(parse(other), None);
        }
    }
}
