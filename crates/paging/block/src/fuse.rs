//! A FUSE file system with one file, which is the volume. A loop device is set up on that file.
//!
//! The kernel accesses the file by direct I/O, and caches none of its bytes.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use aquifer_pager::{Connector, PAGE_BYTES};
use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite,
    Request, Session, SessionACL, WriteFlags,
};
use parking_lot::Mutex;
use rustix::fs::FallocateFlags;
use rustix::mount::MountFlags;

use crate::error::BlockError;
use crate::volume::{BlockVolume, VolumeReader};

/// The name of the file.
pub const FILE: &str = "volume";
const ROOT: INodeNo = INodeNo(1);
const VOLUME: INodeNo = INodeNo(2);
/// Number of threads that serve requests.
const THREADS: usize = 4;
/// Maximum number of requests in flight. The kernel queues further ones.
const BACKGROUND_MAX: u16 = 64;
/// Maximum number of bytes of one request.
const REQUEST_BYTES_MAX: u32 = 1 << 20;
/// The validity of attributes and entries, which never change.
const FOREVER: Duration = Duration::from_secs(1 << 30);

/// The reader and the read buffer of one request.
#[derive(Debug)]
struct RequestBuffers {
    reader: VolumeReader,
    buffer: Vec<u8>,
}

/// The file system.
#[derive(Debug)]
struct VolumeFile {
    volume: Arc<BlockVolume>,
    buffers: Mutex<Vec<RequestBuffers>>,
}

/// A mounted volume, whose file is served by [`Self::serve`].
#[derive(Debug)]
pub struct FuseServer {
    session: Session<VolumeFile>,
}

impl FuseServer {
    /// Mounts the file of the volume in `folder`, for this user only. [`Self::serve`] serves it.
    ///
    /// # Errors
    /// If there is no FUSE device, or the kernel refuses the mount.
    pub fn mount(
        volume: Arc<BlockVolume>,
        connector: &Arc<dyn Connector>,
        folder: &Path,
    ) -> io::Result<Self> {
        let mut buffers = Vec::new();
        for _ in 0..THREADS {
            let reader = volume.reader(Arc::clone(connector))?;
            buffers.push(RequestBuffers { reader, buffer: vec![0; REQUEST_BYTES_MAX as usize] });
        }
        let device = OwnedFd::from(File::options().read(true).write(true).open("/dev/fuse")?);
        let user = rustix::process::geteuid().as_raw();
        let group = rustix::process::getegid().as_raw();
        let options = format!("fd={},rootmode=40000,user_id={user},group_id={group}", device.as_raw_fd());
        let options = std::ffi::CString::new(options).expect("numbers and words");
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        rustix::mount::mount("aquifer", folder, "fuse.aquifer", flags, options.as_c_str())?;
        let file = VolumeFile { volume, buffers: Mutex::new(buffers) };
        let mut config = Config::default();
        config.n_threads = Some(THREADS);
        config.clone_fd = true;
        let session = Session::from_fd(file, device, SessionACL::Owner, config).inspect_err(|_| {
            // Without the unmount, each access to the folder would wait for ever.
            let _ = unmount(folder);
        })?;
        Ok(Self { session })
    }

    /// Serves the file until it is unmounted.
    ///
    /// # Errors
    /// The error of the kernel.
    pub fn serve(self) -> io::Result<()> {
        self.session.run()
    }
}

/// Unmounts the file of a volume, whether or not it is served. Requests in flight fail. Succeeds if
/// nothing is mounted.
///
/// # Errors
/// The error of the kernel.
pub fn unmount(folder: &Path) -> io::Result<()> {
    use rustix::mount::{UnmountFlags, unmount};
    // With FORCE the kernel first fails the requests that wait for a server that does not answer.
    for flags in [UnmountFlags::FORCE, UnmountFlags::DETACH] {
        match unmount(folder, flags | UnmountFlags::NOFOLLOW) {
            Ok(()) | Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOENT) => return Ok(()),
            Err(rustix::io::Errno::BUSY) if flags == UnmountFlags::FORCE => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

impl VolumeFile {
    fn attributes(&self, ino: INodeNo) -> Option<FileAttr> {
        let (kind, perm, size) = match ino {
            ROOT => (FileType::Directory, 0o500, 0),
            VOLUME => (FileType::RegularFile, 0o600, self.volume.bytes()),
            _ => return None,
        };
        let time = SystemTime::UNIX_EPOCH;
        Some(FileAttr {
            ino,
            size,
            blocks: size / 512,
            atime: time,
            mtime: time,
            ctime: time,
            crtime: time,
            kind,
            perm,
            nlink: 1,
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            rdev: 0,
            blksize: u32::try_from(PAGE_BYTES).expect("a page is small"),
            flags: 0,
        })
    }

    /// Calls `act` with the buffers of one request. There are as many buffers as threads.
    fn with_buffers<T>(&self, act: impl FnOnce(&mut RequestBuffers) -> T) -> T {
        let lock = || self.buffers.lock();
        let mut buffers = lock().pop().expect("there is one for each thread");
        let result = act(&mut buffers);
        lock().push(buffers);
        result
    }
}

fn errno(error: &BlockError) -> Errno {
    match error {
        BlockError::OutOfRange { .. } => Errno::EINVAL,
        // Not ENOSPC: users of a block device do not expect it.
        BlockError::Lost { .. }
        | BlockError::StillLost { .. }
        | BlockError::NoRoom { .. }
        | BlockError::Closed => Errno::EIO,
    }
}

impl Filesystem for VolumeFile {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // A capability that this kernel lacks is not used.
        for flag in [InitFlags::FUSE_ASYNC_READ, InitFlags::FUSE_ASYNC_DIO, InitFlags::FUSE_MAX_PAGES] {
            let _ = config.add_capabilities(flag);
        }
        let _ = config.set_max_write(REQUEST_BYTES_MAX);
        let _ = config.set_max_background(BACKGROUND_MAX);
        let _ = config.set_congestion_threshold(BACKGROUND_MAX);
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.attributes(VOLUME) {
            Some(attributes) if parent == ROOT && name == FILE => {
                reply.entry(&FOREVER, &attributes, Generation(0));
            }
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _request: &Request, ino: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        match self.attributes(ino) {
            Some(attributes) => reply.attr(&FOREVER, &attributes),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn open(&self, _request: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        if ino == VOLUME {
            let flags = FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
            reply.opened(FileHandle(0), flags);
        } else {
            reply.error(Errno::EISDIR);
        }
    }

    fn read(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let left = self.volume.bytes().saturating_sub(offset);
        let len = usize::try_from(u64::from(size.min(REQUEST_BYTES_MAX)).min(left)).expect("bounded");
        self.with_buffers(|buffers| {
            let buffer = &mut buffers.buffer[..len];
            match self.volume.read(&mut buffers.reader, offset.min(self.volume.bytes()), buffer) {
                Ok(read) => reply.data(&buffer[..read]),
                Err(error) => reply.error(errno(&error)),
            }
        });
    }

    fn write(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        match self.with_buffers(|buffers| self.volume.write(&mut buffers.reader, offset, data)) {
            Ok(()) => reply.written(u32::try_from(data.len()).expect("requests are bounded")),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn fallocate(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let mode = FallocateFlags::from_bits_retain(mode.cast_unsigned());
        let empties = FallocateFlags::PUNCH_HOLE | FallocateFlags::ZERO_RANGE;
        if !mode.intersects(empties) {
            // A block volume allocates memory when a page is written.
            return reply.error(Errno::EOPNOTSUPP);
        }
        match self.with_buffers(|buffers| self.volume.discard(&mut buffers.reader, offset, length)) {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        match self.volume.flush() {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(errno(&error)),
        }
    }
}
