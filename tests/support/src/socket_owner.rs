//! The process that has a TCP connection of this machine.

use std::net::{SocketAddr, SocketAddrV4};
use std::path::Path;

/// Reads of the kernel's table before a socket counts as closed. A read is no snapshot: it can miss
/// a socket while others are opened and closed.
const READS_MAX: usize = 50;

/// Returns the process with a connected IPv4 socket of this local address, or `None` if it has
/// closed the socket or is another user's.
///
/// Searches only the network namespace of this process.
#[must_use]
pub fn socket_owner(local: SocketAddr) -> Option<u32> {
    let SocketAddr::V4(local) = local else { return None };
    (0..READS_MAX).find_map(|_| {
        let table = std::fs::read_to_string("/proc/net/tcp").ok()?;
        let link = format!("socket:[{}]", inode(&table, local)?);
        let processes = std::fs::read_dir("/proc").ok()?.flatten();
        let mut pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        pids.find(|pid| has_descriptor(*pid, &link))
    })
}

/// The inode of a socket in the text of `/proc/net/tcp`, whose second column is the local address
/// and whose tenth the inode.
fn inode(table: &str, local: SocketAddrV4) -> Option<&str> {
    let address = format!("{:08X}:{:04X}", u32::from_ne_bytes(local.ip().octets()), local.port());
    table.lines().find_map(|line| {
        let mut columns = line.split_whitespace().skip(1);
        (columns.next() == Some(&address)).then(|| columns.nth(7)).flatten()
    })
}

fn has_descriptor(pid: u32, link: &str) -> bool {
    let folder = Path::new("/proc").join(pid.to_string()).join("fd");
    let Ok(descriptors) = std::fs::read_dir(folder) else { return false };
    let mut targets = descriptors.flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok());
    targets.any(|target| target.as_os_str() == link)
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_connection_is_of_the_process_that_has_opened_it() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let local = stream.local_addr().unwrap();
        assert_eq!(socket_owner(local), Some(std::process::id()));
        drop(stream);
        assert_eq!(socket_owner(local), None);
    }
}
