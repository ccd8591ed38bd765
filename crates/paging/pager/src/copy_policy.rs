//! The copies that the pages of a run are to have on nodes (Valet, section 5.1 and Table 3).

use std::fmt;
use std::str::FromStr;

use crate::slabs::REPLICAS_MAX;

/// When the pages of a run have a copy on a disk node.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Backup {
    /// Never.
    Never,
    /// While memory nodes have no room for all replicas, or a replica is missing.
    #[default]
    IfNeeded,
    /// Always, beside the replicas in memory.
    Always,
}

impl Backup {
    /// All policies with their names.
    pub const NAMES: [(Self, &'static str); 3] =
        [(Self::Never, "never"), (Self::IfNeeded, "if-needed"), (Self::Always, "always")];

    /// The code of the policy in records and messages.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::Never => 0,
            Self::IfNeeded => 1,
            Self::Always => 2,
        }
    }

    /// The policy with a code; `None` if there is none.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            0 => Some(Self::Never),
            1 => Some(Self::IfNeeded),
            2 => Some(Self::Always),
            _ => None,
        }
    }
}

impl fmt::Display for Backup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::NAMES.iter().find(|(backup, _)| backup == self);
        f.write_str(name.expect("each policy has a name").1)
    }
}

impl FromStr for Backup {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::NAMES.iter().find(|(_, name)| *name == text);
        let wrong = || format!("\"{text}\" is no policy: give never, if-needed or always");
        found.map(|(backup, _)| *backup).ok_or_else(wrong)
    }
}

/// The copies that the pages of a run are to have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CopyPolicy {
    /// Replicas in memory: 1 to [`REPLICAS_MAX`].
    pub replicas: usize,
    /// Copies on disk nodes.
    pub backup: Backup,
}

impl CopyPolicy {
    /// Replicas in memory, and nothing on disk nodes.
    #[must_use]
    pub const fn in_memory(replicas: usize) -> Self {
        Self { replicas, backup: Backup::Never }
    }

    /// The number of copies that a page has if there is room for all.
    #[must_use]
    pub fn copies(self) -> usize {
        self.replicas + usize::from(self.backup == Backup::Always)
    }

    /// The number of the policy in records: the replicas, and 256 times the code of the backup.
    #[must_use]
    pub fn encode(self) -> usize {
        self.replicas | usize::from(self.backup.code()) << 8
    }

    /// The policy with a number; `None` if there is none.
    #[must_use]
    pub fn decode(number: usize) -> Option<Self> {
        let backup = Backup::from_code(u8::try_from(number >> 8).ok()?)?;
        let replicas = number & 0xff;
        (1..=REPLICAS_MAX).contains(&replicas).then_some(Self { replicas, backup })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_have_numbers_and_names() {
        for (backup, name) in Backup::NAMES {
            assert_eq!(backup.to_string(), name);
            assert_eq!(name.parse(), Ok(backup));
            for replicas in 1..=REPLICAS_MAX {
                let policy = CopyPolicy { replicas, backup };
                assert_eq!(CopyPolicy::decode(policy.encode()), Some(policy));
            }
        }
        assert!("sometimes".parse::<Backup>().is_err());
        assert_eq!(CopyPolicy::in_memory(2).encode(), 2, "as versions without backups wrote it");
        for number in [0, REPLICAS_MAX + 1, 256, 3 << 8 | 1, usize::MAX] {
            assert_eq!(CopyPolicy::decode(number), None, "{number}");
        }
    }
}
