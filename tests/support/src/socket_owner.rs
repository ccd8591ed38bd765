//! The processes that have the TCP connections of this machine.

use std::net::{SocketAddr, SocketAddrV4};
use std::path::Path;

/// Reads of the kernel's table before a socket counts as closed. A read is no snapshot: it can miss
/// a socket while others are opened and closed.
const READS_MAX: usize = 50;

/// Whether a process has a connected IPv4 socket of this local address, and has not closed it.
///
/// Searches only the network namespace of this process.
#[must_use]
pub fn has_socket(pid: u32, local: SocketAddr) -> bool {
    let SocketAddr::V4(local) = local else { return false };
    let find = |_| {
        let table = std::fs::read_to_string("/proc/net/tcp").ok()?;
        let links: Vec<String> = inodes(&table, local).map(|inode| format!("socket:[{inode}]")).collect();
        (!links.is_empty()).then_some(links)
    };
    let links = (0..READS_MAX).find_map(find).unwrap_or_default();
    links.iter().any(|link| has_descriptor(pid, link))
}

/// The inodes of the open sockets with a local address, from the text of `/proc/net/tcp`: its
/// second column is the local address, and its tenth the inode. Connections that have been closed
/// and wait may have the same address, and have the inode 0.
fn inodes(table: &str, local: SocketAddrV4) -> impl Iterator<Item = &str> {
    let address = format!("{:08X}:{:04X}", u32::from_ne_bytes(local.ip().octets()), local.port());
    let inode = move |line| {
        let mut columns = str::split_whitespace(line).skip(1);
        (columns.next() == Some(&address)).then(|| columns.nth(7)).flatten()
    };
    table.lines().filter_map(inode).filter(|inode| *inode != "0")
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
    fn a_closed_connection_with_the_same_address_is_passed_over() {
        let line = |inode: u32| {
            format!(
                "  0: 0100007F:1F90 0100007F:C350 06 00000000:00000000 00:00000000 00000000  0  0 {inode} 1"
            )
        };
        let table = format!("head\n{}\n{}\n", line(0), line(7));
        let found: Vec<&str> = inodes(&table, "127.0.0.1:8080".parse().unwrap()).collect();
        assert_eq!(found, ["7"]);
    }

    #[test]
    fn a_connection_is_of_the_process_that_has_opened_it() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let local = stream.local_addr().unwrap();
        assert!(has_socket(std::process::id(), local));
        assert!(!has_socket(1, local));
        drop(stream);
        assert!(!has_socket(std::process::id(), local));
    }
}
