//! `aquifer core`: a core dump with the pages that are not resident.
//!
//! Only `process_vm_readv` waits until a missing page is filled; other ways to read the memory of
//! another process do not. So the agent fetches the pages as they are read, and evicts others.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::rc::Rc;

use aquifer_ipc::size::ByteSize;
use elfcore::{
    CoreDumpBuilder, CoreError, LinuxProcessMemoryReader, ProcessInfoSource, ProcessView, ReadProcessMemory,
};
use indicatif::{ProgressBar, ProgressStyle};
use nix::errno::Errno;
use nix::unistd::Pid;

use crate::Outcome;
use crate::cli::CoreArguments;
use crate::say::{say_error, say_line};

const PAGE: usize = 4096;
/// Maximum number of attempts to stop all threads of a process that starts threads meanwhile.
const STOPS_MAX: usize = 10;

/// Why no core dump was written.
#[derive(Debug, thiserror::Error)]
enum CoreDumpError {
    #[error("there is no process {0}, or it is ending")]
    NoProcess(i32),
    #[error(
        "process {0} may not be read: run as its user or as root, and as root if \
         /proc/sys/kernel/yama/ptrace_scope is not 0; and no debugger may be attached to it"
    )]
    NotPermitted(i32),
    #[error("process {0} starts and ends threads all the time, so that it cannot be stopped: try again")]
    Unsteady(i32),
    #[error("process {pid} cannot be read: {source}")]
    Process { pid: i32, source: CoreError },
    #[error("cannot write {path}: {source}", path = path.display())]
    Write { path: PathBuf, source: io::Error },
}

/// Writes a core dump of a process.
///
/// # Errors
/// If the process cannot be stopped or read, or the file cannot be written. Then an existing file
/// is not changed.
pub fn write(arguments: &CoreArguments) -> Outcome {
    let pid = arguments.pid;
    let path = arguments.output.clone().unwrap_or_else(|| PathBuf::from(format!("core.{pid}")));
    let unreadable = dump(pid, &path)?;
    if !is_on_pool(pid) {
        say_error!(
            "process {pid} is not on the pool: other tools, such as gcore, can write its core dump, too"
        );
    }
    if unreadable > 0 {
        say_error!(
            "{} of process {pid} could not be read, and are zeros in {}: guard pages, or lost pages",
            ByteSize(unreadable),
            path.display()
        );
    }
    say_line!("Wrote {}", path.display());
    Ok(ExitCode::SUCCESS)
}

/// Whether a library of Aquifer is mapped into a process; also true if the process's map cannot be
/// read any more.
fn is_on_pool(pid: i32) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"));
    maps.map_or(true, |maps| maps.lines().any(|line| line.contains("/libaquifer")))
}

/// Whether a process ends or has ended, so that it has no memory any more.
fn is_ending(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name before the state can have any characters.
    let state = stat.rsplit_once(") ").map(|(_, rest)| rest.chars().next());
    matches!(state, None | Some(None | Some('Z' | 'X')))
}

/// Writes the file, and returns the number of bytes that could not be read.
fn dump(pid: i32, path: &Path) -> Result<u64, CoreDumpError> {
    let failed = |source| CoreDumpError::Write { path: path.to_owned(), source };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let file = tempfile::Builder::new().prefix(".aquifer-core-").tempfile_in(folder).map_err(failed)?;
    let process = stop(pid)?;
    let bytes: u64 = process.va_regions().iter().map(|region| region.end - region.begin).sum();
    let style = ProgressStyle::with_template("{bar:40} {bytes} of {total_bytes}").expect("a valid template");
    let bar = ProgressBar::new(bytes).with_style(style);
    let unreadable = Rc::new(Cell::new(0));
    let reader = LinuxProcessMemoryReader::new(Pid::from_raw(pid)).map_err(|error| refused(pid, error))?;
    let left_out = left_out(pid).map_err(|error| refused(pid, CoreError::IoError(error)))?;
    let memory = Memory { reader, left_out, unreadable: Rc::clone(&unreadable), bar: bar.clone() };
    let mut written = SparseFile::new(file.as_file());
    let result = CoreDumpBuilder::from_source(process, memory).write(&mut written);
    bar.finish_and_clear();
    match result {
        Ok(_) => {}
        Err(CoreError::IoError(error)) => return Err(failed(error)),
        Err(error) => return Err(refused(pid, error)),
    }
    written.finish().map_err(failed)?;
    file.persist(path).map_err(|error| failed(error.error))?;
    Ok(unreadable.get())
}

/// Stops all threads of a process, until the result is dropped.
fn stop(pid: i32) -> Result<ProcessView, CoreDumpError> {
    for _ in 0..STOPS_MAX {
        match ProcessView::new(pid) {
            Err(CoreError::RaceTryAgain) => {}
            result => return result.map_err(|error| refused(pid, error)),
        }
    }
    Err(CoreDumpError::Unsteady(pid))
}

fn refused(pid: i32, error: CoreError) -> CoreDumpError {
    match error {
        _ if is_ending(pid) => CoreDumpError::NoProcess(pid),
        CoreError::NixError(Errno::EPERM) => CoreDumpError::NotPermitted(pid),
        CoreError::NixError(Errno::ESRCH) => CoreDumpError::NoProcess(pid),
        CoreError::IoError(error) if error.kind() == io::ErrorKind::NotFound => CoreDumpError::NoProcess(pid),
        CoreError::IoError(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            CoreDumpError::NotPermitted(pid)
        }
        source => CoreDumpError::Process { pid, source },
    }
}

/// The areas that core dumps leave out (`MADV_DONTDUMP`). They include the areas of the shim, where
/// a reader would delay the worker.
fn left_out(pid: i32) -> io::Result<Vec<Range<usize>>> {
    Ok(left_out_in(&std::fs::read_to_string(format!("/proc/{pid}/smaps"))?))
}

fn left_out_in(smaps: &str) -> Vec<Range<usize>> {
    let (mut areas, mut area) = (Vec::new(), 0..0);
    for line in smaps.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            if flags.split_whitespace().any(|flag| flag == "dd") {
                areas.push(area.clone());
            }
        } else if let Some((start, end)) =
            line.split_whitespace().next().and_then(|word| word.split_once('-'))
        {
            let address = |text| usize::from_str_radix(text, 16).ok();
            area = address(start).zip(address(end)).map_or(area, |(start, end)| start..end);
        }
    }
    areas
}

/// The memory of a stopped process.
struct Memory {
    reader: LinuxProcessMemoryReader,
    /// Areas that are left out, and read as zeros.
    left_out: Vec<Range<usize>>,
    /// Number of bytes that could not be read, and that are zeros in the dump.
    unreadable: Rc<Cell<u64>>,
    bar: ProgressBar,
}

impl ReadProcessMemory for Memory {
    fn read_process_memory(&mut self, base: usize, buffer: &mut [u8]) -> Result<usize, CoreError> {
        let is_left_out = self.left_out.iter().any(|area| area.contains(&base));
        if is_left_out {
            // Each read is within one area: elfcore reads area by area.
            buffer.fill(0);
            self.bar.inc(buffer.len() as u64);
            return Ok(buffer.len());
        }
        let read = match self.reader.read_process_memory(base, buffer) {
            Ok(read) if read > 0 => read,
            // The first page cannot be read.
            _ => {
                let skipped = (PAGE - base % PAGE).min(buffer.len());
                buffer[..skipped].fill(0);
                self.unreadable.set(self.unreadable.get() + skipped as u64);
                skipped
            }
        };
        self.bar.inc(read as u64);
        Ok(read)
    }
}

/// A file in which blocks of zeros take no space.
struct SparseFile<'a> {
    file: &'a File,
    length: u64,
}

impl<'a> SparseFile<'a> {
    fn new(file: &'a File) -> Self {
        Self { file, length: 0 }
    }

    /// Sets the length of the file, which may end with zeros.
    fn finish(&self) -> io::Result<()> {
        self.file.set_len(self.length)
    }
}

impl Write for SparseFile<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let is_hole = |block: &&[u8]| block.len() == PAGE && block.iter().all(|byte| *byte == 0);
        let zeros: usize = bytes.chunks(PAGE).take_while(is_hole).map(<[u8]>::len).sum();
        let written = if zeros > 0 {
            self.file.seek(SeekFrom::Current(i64::try_from(zeros).map_err(io::Error::other)?))?;
            zeros
        } else {
            let data = bytes.chunks(PAGE).take_while(|block| !is_hole(block)).map(<[u8]>::len).sum();
            self.file.write(&bytes[..data])?
        };
        self.length += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn a_sparse_file_has_the_bytes_that_were_written() {
        let mut file = tempfile::tempfile().unwrap();
        let mut bytes = vec![7; 100];
        bytes.extend(vec![0; 3 * PAGE]);
        bytes.extend(vec![9; PAGE]);
        bytes.extend(vec![0; PAGE]);
        let mut sparse = SparseFile::new(&file);
        sparse.write_all(&bytes).unwrap();
        sparse.finish().unwrap();
        let mut found = Vec::new();
        file.rewind().unwrap();
        file.read_to_end(&mut found).unwrap();
        assert!(found == bytes);
    }

    #[test]
    fn memory_that_is_not_to_be_dumped_is_found() {
        let smaps = "1000-3000 rw-p 00000000 00:00 0 \nSize: 8 kB\nVmFlags: rd wr mr dd um \n\
                     5000-6000 rw-p 00000000 00:00 0 [heap]\nVmFlags: rd wr\n\
                     7000-9000 r--p 00000000 00:00 0 /dd\nVmFlags: rd dd\n";
        assert_eq!(left_out_in(smaps), [0x1000..0x3000, 0x7000..0x9000]);
        assert!(left_out(i32::try_from(std::process::id()).unwrap()).is_ok());
    }

    #[test]
    fn a_process_that_has_ended_is_named() {
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        let pid = i32::try_from(ended.id()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let error = || dump(pid, &folder.path().join("core")).unwrap_err().to_string();
        while !is_ending(pid) {
            std::thread::yield_now();
        }
        assert!(error().contains(&format!("no process {pid}, or it is ending")), "{}", error());
        ended.wait().unwrap();
        assert!(error().contains(&format!("no process {pid}")), "{}", error());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left");
    }

    #[test]
    fn a_process_without_a_library_of_ours_is_not_on_the_pool() {
        assert!(!is_on_pool(i32::try_from(std::process::id()).unwrap()));
        assert!(is_on_pool(i32::MAX), "it has ended");
    }
}
