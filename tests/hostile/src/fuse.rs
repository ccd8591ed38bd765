//! A file of a FUSE server that answers no FLUSH, so that each close of the file waits, and no
//! READ. The file has no cache if it is opened once more.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{PipeReader, Read, Write};
use std::path::Path;

use crate::sys;

const LOOKUP: u32 = 1;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const READ: u32 = 15;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
const ENOSYS: i32 = 38;
/// Length of the header of a request, in bytes.
const HEADER_BYTES: usize = 40;
/// Inode of the file.
const FILE: u64 = 2;
/// Flag of an open file whose mapping waits, under the lock of the memory, for pages that are read.
const DIRECT_IO: u64 = 1;

/// A file system and its open file.
#[derive(Debug)]
pub struct Mounted {
    pub file: File,
    pub server: i32,
    /// A pipe with a byte for each READ.
    pub reads: PipeReader,
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // The end of this process closes the file, which waits as long as the server lives.
        sys::kill(self.server);
        sys::wait(self.server);
    }
}

/// Mounts a file system in user and mount namespaces of this process, and opens its file. Another
/// process serves it.
pub fn mount(device: &Path, folder: &Path) -> Mounted {
    enter_namespaces();
    mount_here(device, folder, || true)
}

/// Mounts a file system with the rights of root, in a mount namespace of this process. Closes wait
/// once `is_waiting` returns true.
pub fn mount_as_root(device: &Path, folder: &Path, is_waiting: impl Fn() -> bool) -> Mounted {
    // SAFETY: this process has one thread.
    let result = unsafe {
        libc::unshare(libc::CLONE_NEWNS);
        let flags = libc::MS_REC | libc::MS_PRIVATE;
        libc::mount(std::ptr::null(), c"/".as_ptr(), std::ptr::null(), flags, std::ptr::null())
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    mount_here(device, folder, is_waiting)
}

fn mount_here(device: &Path, folder: &Path, is_waiting: impl Fn() -> bool) -> Mounted {
    let mut server =
        OpenOptions::new().read(true).write(true).open(device).expect("the device is accessible");
    let text = |path: &Path| CString::new(path.to_str().expect("a plain path")).expect("a plain path");
    let number = std::os::fd::AsRawFd::as_raw_fd(&server);
    let options = CString::new(format!("fd={number},rootmode=40000,user_id=0,group_id=0")).expect("plain");
    // SAFETY: the arguments are strings that end with a zero.
    let result = unsafe {
        let target = text(folder);
        libc::mount(c"attack".as_ptr(), target.as_ptr(), c"fuse".as_ptr(), 0, options.as_ptr().cast())
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    let (reads, mut has_read) = std::io::pipe().expect("a pipe");
    let child = sys::fork(|| {
        // A reader of this program's output must not wait for the end of the server.
        let null = OpenOptions::new().write(true).open("/dev/null").expect("it is there");
        rustix::stdio::dup2_stdout(&null).and_then(|()| rustix::stdio::dup2_stderr(&null)).expect("open");
        serve(&mut server, is_waiting, &mut has_read)
    });
    drop(server);
    let file = OpenOptions::new().read(true).write(true).open(folder.join("file"));
    Mounted { file: file.expect("the server opens it"), server: child, reads }
}

/// Becomes root in a user namespace, and enters a mount namespace.
fn enter_namespaces() {
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    // SAFETY: this process has one thread.
    let result = unsafe { libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNS) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    std::fs::write("/proc/self/setgroups", "deny").expect("a new namespace");
    std::fs::write("/proc/self/uid_map", format!("0 {uid} 1")).expect("a new namespace");
    std::fs::write("/proc/self/gid_map", format!("0 {gid} 1")).expect("a new namespace");
}

fn serve(device: &mut File, is_waiting: impl Fn() -> bool, has_read: &mut impl Write) {
    let mut opens = 0;
    let mut buffer = vec![0; 1 << 20];
    while let Ok(len) = device.read(&mut buffer) {
        let request = &buffer[..len];
        let word = |at: usize| u32::from_le_bytes(request[at..at + 4].try_into().expect("4 bytes"));
        let (operation, body) = (word(4), &request[HEADER_BYTES..]);
        let node = u64::from(word(16));
        let answer = match operation {
            INIT => Ok(initialised(body)),
            LOOKUP => Ok([words(&[FILE, 0, 1000, 1000, 0]), attributes(FILE)].concat()),
            GETATTR => Ok([words(&[1000, 0]), attributes(node)].concat()),
            OPEN => {
                opens += 1;
                Ok(words(&[7, if opens > 1 { DIRECT_IO } else { 0 }]))
            }
            READ => {
                has_read.write_all(&[1]).expect("a pipe");
                continue;
            }
            FLUSH if is_waiting() => continue,
            FLUSH => Ok(Vec::new()),
            _ => Err(ENOSYS),
        };
        let (error, body) = answer.map_or_else(|error| (-error, Vec::new()), |body| (0, body));
        let length = u32::try_from(16 + body.len()).expect("a short answer");
        let unique = &request[8..16];
        let answer = [&length.to_le_bytes(), &error.to_le_bytes(), unique, &body].concat();
        // Requests that were interrupted take no answer.
        let _interrupted = device.write_all(&answer);
    }
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// `struct fuse_init_out`, with the version of the request.
fn initialised(request: &[u8]) -> Vec<u8> {
    let mut answer = request[..8].to_vec();
    answer.extend([65_536_u32, 0].iter().flat_map(|word| word.to_le_bytes()));
    answer.extend([12_u16, 9].iter().flat_map(|word| word.to_le_bytes()));
    answer.extend([65_536_u32, 1].iter().flat_map(|word| word.to_le_bytes()));
    answer.resize(64, 0);
    answer
}

/// `struct fuse_attr` of the root or the file.
fn attributes(node: u64) -> Vec<u8> {
    let mode: u32 = if node == FILE { 0o100_666 } else { 0o40_777 };
    let mut answer = words(&[node, 4096, 8, 0, 0, 0]);
    answer.extend([0, 0, 0, mode, 1, 0, 0, 0, 4096, 0].iter().flat_map(|word: &u32| word.to_le_bytes()));
    answer
}
