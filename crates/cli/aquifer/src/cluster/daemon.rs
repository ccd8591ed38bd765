//! Names of a cluster's daemons.

use std::fmt;

/// A daemon of a cluster. The variants are in the order in which `aquifer up` starts them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Daemon {
    /// Serves the cluster's metadata.
    Directory,
    /// Holds memory and descriptors that outlive an agent or a node.
    Keeper,
    /// A memory node, by its number.
    Node(u16),
    /// The service of heaps of a node, by the node's number.
    Heaps(u16),
    /// The host agent.
    Agent,
    /// Restarts the other daemons when they die.
    Supervisor,
}

impl Daemon {
    /// All daemons of a cluster with this number of nodes, with or without heaps, and a supervisor.
    pub fn all(nodes: u16, has_heaps: bool) -> Vec<Self> {
        let mut daemons = vec![Self::Directory, Self::Keeper];
        daemons.extend((1..=nodes).map(Self::Node));
        daemons.extend((1..=nodes).map(Self::Heaps).filter(|_| has_heaps));
        daemons.extend([Self::Agent, Self::Supervisor]);
        daemons
    }

    /// The daemon with this name, as `Display` writes it.
    pub fn from_name(name: &str) -> Option<Self> {
        let daemon = match name {
            "directory" => Self::Directory,
            "keeper" => Self::Keeper,
            "agent" => Self::Agent,
            "supervisor" => Self::Supervisor,
            name => match name.strip_prefix("heaps-") {
                Some(number) => Self::Heaps(number.parse().ok()?),
                None => Self::Node(name.strip_prefix("node-")?.parse().ok()?),
            },
        };
        (daemon.to_string() == name).then_some(daemon)
    }
}

impl fmt::Display for Daemon {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory => f.write_str("directory"),
            Self::Keeper => f.write_str("keeper"),
            Self::Node(id) => write!(f, "node-{id}"),
            Self::Heaps(id) => write!(f, "heaps-{id}"),
            Self::Agent => f.write_str("agent"),
            Self::Supervisor => f.write_str("supervisor"),
        }
    }
}

/// The names of daemons, separated by commas.
pub fn names(daemons: &[Daemon]) -> String {
    daemons.iter().map(Daemon::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed_and_others_are_refused() {
        for daemon in Daemon::all(12, true) {
            assert_eq!(Daemon::from_name(&daemon.to_string()), Some(daemon));
        }
        for name in [
            "",
            "node",
            "node-",
            "node-x",
            "node-01",
            "node-65536",
            "heaps-",
            "heaps-01",
            "agents",
            ".cluster",
        ] {
            assert_eq!(Daemon::from_name(name), None, "{name}");
        }
    }
}
