//! Loop devices as swap areas, over a file with direct I/O.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::area::{self, PAGE_BYTES};
use super::record::{SetupRecord, SetupStep};
use super::{SetupError, read_number};

/// The ioctl `LOOP_CTL_GET_FREE` of `linux/loop.h`.
const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4C82;
const LOOP_CONFIGURE: libc::c_ulong = 0x4C0A;
const LO_FLAGS_AUTOCLEAR: u32 = 4;
const LO_FLAGS_DIRECT_IO: u32 = 16;
const CONTROL: &str = "/dev/loop-control";
/// Maximum number of attempts to claim a device, because other processes may claim the device that
/// the kernel offers.
const CLAIMS_MAX: u32 = 64;
const FILE_NAME_BYTES: usize = 64;

/// `struct loop_info64`.
#[repr(C)]
struct LoopInfo {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    sizelimit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; FILE_NAME_BYTES],
    crypt_name: [u8; FILE_NAME_BYTES],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// `struct loop_config`.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

/// Sets up a loop device over `backing`, which has `bytes` bytes, and starts to swap on it. The
/// kernel detaches the device when it is no longer in use.
pub fn swap_on(record: &mut SetupRecord, backing: &Path, bytes: u64) -> Result<(), SetupError> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(backing)
        .map_err(SetupError::io("open", backing))?;
    let (number, device) = attach(&file)?;
    let path = path(number);
    record.add(SetupStep::LoopSwap(number))?;
    // The kernel does not report that it has refused direct I/O.
    let attribute = attribute(number, "dio");
    if read_number(&attribute)? != 1 {
        let refused = io::Error::from(io::ErrorKind::Unsupported);
        return Err(SetupError::io("use direct I/O on", &path)(refused));
    }
    area::write_header(&device, bytes / PAGE_BYTES)
        .and_then(|()| device.sync_all())
        .map_err(SetupError::io("write the swap header to", &path))?;
    area::swap_on(&path, true).map_err(SetupError::io("start swapping on", &path))
}

/// Stops swapping on the device if its file belongs to the record of this name. Otherwise the
/// device has another user now.
pub fn swap_off(number: u32, name: &str) -> Result<(), SetupError> {
    let backing = fs::read_to_string(attribute(number, "backing_file")).unwrap_or_default();
    let is_own = Path::new(backing.trim_end()).components().any(|part| part.as_os_str() == name);
    if !is_own {
        return Ok(());
    }
    let path = path(number);
    area::swap_off(&path).map_err(SetupError::io("stop swapping on", &path))
}

/// Attaches a free device to `file`. Returns the device's number and descriptor: without an open
/// descriptor the kernel would detach the device.
fn attach(file: &File) -> Result<(u32, File), SetupError> {
    let control = Path::new(CONTROL);
    let controller = OpenOptions::new()
        .read(true)
        .write(true)
        .open(control)
        .map_err(SetupError::io("open (this kernel may have no loop devices)", control))?;
    let mut last = None;
    for _ in 0..CLAIMS_MAX {
        // SAFETY: this ioctl takes no argument and returns a number.
        let number = unsafe { libc::ioctl(controller.as_raw_fd(), LOOP_CTL_GET_FREE) };
        let number = u32::try_from(number).map_err(|_| {
            SetupError::io("get a free loop device from", control)(io::Error::last_os_error())
        })?;
        let path = path(number);
        let device = OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path)
            .map_err(SetupError::io("open the loop device", &path))?;
        match configure(&device, file) {
            Ok(()) => return Ok((number, device)),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                last = Some(SetupError::io("claim the loop device", &path)(error));
            }
            Err(error) => return Err(SetupError::io("set up the loop device", &path)(error)),
        }
    }
    Err(last.expect("there was at least one attempt"))
}

fn configure(device: &File, file: &File) -> io::Result<()> {
    // SAFETY: all fields are numbers or arrays of numbers, for which zeros are valid.
    let mut config: LoopConfig = unsafe { std::mem::zeroed() };
    config.fd = u32::try_from(file.as_raw_fd()).expect("descriptors are not negative");
    config.block_size = u32::try_from(PAGE_BYTES).expect("a page is small");
    config.info.flags = LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO;
    // SAFETY: the structure has the kernel's layout and is only read.
    match unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &raw const config) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn path(number: u32) -> PathBuf {
    PathBuf::from(format!("/dev/loop{number}"))
}

fn attribute(number: u32, name: &str) -> PathBuf {
    PathBuf::from(format!("/sys/block/loop{number}/loop/{name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_are_the_kernels() {
        assert_eq!(std::mem::size_of::<LoopInfo>(), 232);
        assert_eq!(std::mem::size_of::<LoopConfig>(), 304);
        assert_eq!(std::mem::offset_of!(LoopInfo, flags), 52);
    }

    #[test]
    fn devices_of_other_records_are_not_changed() {
        // No device of this machine has a file of that record.
        for number in 0..8 {
            swap_off(number, "aquifer-setup-0-0-0").unwrap();
        }
    }
}
