//! Services on the machine of a node that is drained, as text: their memory is not part of the
//! drain.

use std::net::SocketAddr;

use aquifer_cache_cluster::records::ServerRecord;
use aquifer_directory::names::{self, CACHES, NodeRecord};
use aquifer_directory::{Directory, DirectoryEntry, DirectoryError};
use aquifer_ipc::size::ByteSize;

/// Returns a line for the node's service of heaps, and for each cache server on its machine.
///
/// # Errors
/// Those of the directory.
pub(super) fn show_services(
    directory: &dyn Directory,
    node: &NodeRecord,
) -> Result<Vec<String>, DirectoryError> {
    let heaps = names::heaps(directory)?.into_iter().filter(|heaps| heaps.node == node.id);
    let mut lines: Vec<String> = heaps.map(|heaps| show_heaps(heaps.memory_bytes)).collect();
    let entries = directory.list(CACHES)?.entries;
    let servers = entries.iter().filter_map(|entry| Some((cache_of(entry)?, server_of(entry)?)));
    let here = aquifer_cache_cluster::memories::machine();
    let on_machine = servers.filter(|(_, server)| is_on_machine(node, server, &here));
    lines.extend(on_machine.map(|(cache, server)| show_server(cache, &server)));
    Ok(lines)
}

fn show_heaps(memory_bytes: u64) -> String {
    let bytes = ByteSize(memory_bytes);
    format!("heaps of this node may take {bytes}, and end with it: `aquifer heap list` shows them")
}

fn show_server(cache: &str, server: &ServerRecord) -> String {
    let number = server.server;
    format!(
        "server {number} of the cache \"{cache}\" is on the machine of this node: empty it by \
         `aquifer cache drain {number}`"
    )
}

/// The name of the cache of a server's record; `None` for another record.
fn cache_of(entry: &DirectoryEntry) -> Option<&str> {
    let (cache, rest) = entry.key.strip_prefix(CACHES)?.split_once('/')?;
    rest.strip_prefix("servers/").map(|_| cache)
}

/// The record of a server; `None` if it is of a version that this one does not know.
fn server_of(entry: &DirectoryEntry) -> Option<ServerRecord> {
    names::decode(entry).ok()
}

/// Whether a server is on the machine of a node. `here`: the identity of this machine, which is
/// that of a node in shared memory.
fn is_on_machine(node: &NodeRecord, server: &ServerRecord, here: &str) -> bool {
    match node.address.parse::<SocketAddr>() {
        Ok(address) if !address.ip().is_loopback() => address.ip() == server.address.ip(),
        _ => !here.is_empty() && server.machine == here,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(fabric: &str, address: &str) -> NodeRecord {
        let numbers = r#""id":1,"memory_bytes":1,"held_up":null,"epoch":1"#;
        let text = format!(r#"{{{numbers},"fabric":"{fabric}","address":"{address}"}}"#);
        serde_json::from_str(&text).expect("the other fields have defaults")
    }

    fn server(address: &str, machine: &str) -> ServerRecord {
        ServerRecord {
            server: 3,
            epoch: 1,
            address: address.parse().expect("an address"),
            memory_address: address.parse().expect("an address"),
            machine: machine.into(),
            memory_socket: String::new(),
            clients: Vec::new(),
            memory_bytes: 1,
            drains: false,
        }
    }

    #[test]
    fn servers_of_the_nodes_machine_are_found() {
        let (far, near) = (node("tcp", "10.0.0.1:7400"), node("shm", "/run/node-1.sock"));
        assert!(is_on_machine(&far, &server("10.0.0.1:11311", "b"), "a"));
        assert!(!is_on_machine(&far, &server("10.0.0.2:11311", "a"), "a"));
        assert!(is_on_machine(&near, &server("127.0.0.1:11311", "a"), "a"));
        assert!(!is_on_machine(&near, &server("127.0.0.1:11311", "b"), "a"), "another machine");
        assert!(!is_on_machine(&near, &server("127.0.0.1:11311", ""), ""), "its machine is not known");
        assert!(is_on_machine(&node("tcp", "127.0.0.1:7400"), &server("10.0.0.1:11311", "a"), "a"));
    }

    #[test]
    fn records_of_servers_are_told_from_others() {
        let entry =
            |key: &str| DirectoryEntry { key: key.into(), value: Vec::new(), version: 1, lease: None };
        assert_eq!(cache_of(&entry("caches/blue/servers/3")), Some("blue"));
        assert_eq!(cache_of(&entry("caches/blue/partitions/3")), None);
        assert_eq!(cache_of(&entry("nodes/3")), None);
        let line = show_server("blue", &server("127.0.0.1:1", ""));
        assert!(line.contains("server 3 of the cache \"blue\""), "{line}");
    }
}
