//! The policy of backups of a user, as `UID=POLICY`.

use std::str::FromStr;

use aquifer_agent::Backup;
use serde::Deserialize;

/// When pages of a user's runs have a copy on a disk node.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "String")]
pub struct UserBackup {
    /// The user's id.
    pub uid: u32,
    /// The policy.
    pub backup: Backup,
}

impl FromStr for UserBackup {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid = || format!("{text:?} is not UID=POLICY, such as 1000=always");
        let (uid, backup) = text.split_once('=').ok_or_else(invalid)?;
        Ok(Self { uid: uid.parse().map_err(|_| invalid())?, backup: backup.parse()? })
    }
}

impl TryFrom<String> for UserBackup {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_parsed_and_others_refused() {
        assert_eq!("1000=always".parse(), Ok(UserBackup { uid: 1000, backup: Backup::Always }));
        assert_eq!("0=never".parse(), Ok(UserBackup { uid: 0, backup: Backup::Never }));
        for odd in ["", "always", "=always", "user=always", "-1=never"] {
            assert!(odd.parse::<UserBackup>().unwrap_err().contains("UID=POLICY"), "{odd}");
        }
        assert!("1000=often".parse::<UserBackup>().unwrap_err().contains("if-needed"));
    }
}
