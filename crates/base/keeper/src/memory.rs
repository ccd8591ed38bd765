//! A check whether the memory of a process exists.

use std::os::fd::AsFd;

use rustix::io::Errno;

/// Whether any process has the memory of an open `/proc/PID/pagemap`, even if the process with that
/// id has ended.
///
/// A read at an odd offset is refused only if the memory exists, before the kernel waits for a lock
/// of the memory, which a hostile process could hold.
pub fn exists(pagemap: impl AsFd) -> bool {
    rustix::io::pread(pagemap, &mut [0; 8], 1) == Err(Errno::INVAL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_exists_as_long_as_its_process() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pagemap = std::fs::File::open(format!("/proc/{}/pagemap", child.id())).unwrap();
        assert!(exists(&pagemap));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!exists(&pagemap));
    }
}
