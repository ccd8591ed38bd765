//! The parts of a cluster, by name.

use std::fmt;

/// A part. The order is the one in which they are started; they are stopped from the last to the first, but the keeper, which
/// holds what the agent leaves behind, is outlived by nothing but the directory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Part {
    /// The cluster's metadata.
    Directory,
    /// Holds what must outlive the agent.
    Keeper,
    /// A memory node, by its number.
    Node(u16),
    /// The host agent.
    Agent,
}

impl Part {
    /// All parts of a cluster with so many nodes.
    pub fn all(nodes: u16) -> Vec<Self> {
        let mut parts = vec![Self::Directory, Self::Keeper];
        parts.extend((1..=nodes).map(Self::Node));
        parts.push(Self::Agent);
        parts
    }

    /// The part of this name.
    pub fn named(name: &str) -> Option<Self> {
        let part = match name {
            "directory" => Self::Directory,
            "keeper" => Self::Keeper,
            "agent" => Self::Agent,
            node => Self::Node(node.strip_prefix("node-")?.parse().ok()?),
        };
        (part.to_string() == name).then_some(part)
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory => f.write_str("directory"),
            Self::Keeper => f.write_str("keeper"),
            Self::Node(id) => write!(f, "node-{id}"),
            Self::Agent => f.write_str("agent"),
        }
    }
}

/// `a, b, c`
pub fn names(parts: &[Part]) -> String {
    parts.iter().map(Part::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back_and_others_are_not() {
        for part in Part::all(12) {
            assert_eq!(Part::named(&part.to_string()), Some(part));
        }
        for name in ["", "node", "node-", "node-x", "node-01", "node-65536", "agents", ".cluster"] {
            assert_eq!(Part::named(name), None, "{name}");
        }
    }
}
