//! The weight of a user in the page cache, as `UID=WEIGHT`.

use std::str::FromStr;

use serde::Deserialize;

/// Largest weight.
const WEIGHT_MAX: u32 = 1000;

/// The weight of a user: of two users that both want all of the page cache, one with weight 2 has
/// twice as much as one with weight 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "String")]
pub struct CacheWeight {
    /// The user's id.
    pub uid: u32,
    /// The weight, 1 to 1000.
    pub weight: u32,
}

impl FromStr for CacheWeight {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid =
            || format!("{text:?} is not UID=WEIGHT, such as 1000=4, with a weight of 1 to {WEIGHT_MAX}");
        let (uid, weight) = text.split_once('=').ok_or_else(invalid)?;
        let uid = uid.parse().map_err(|_| invalid())?;
        let weight = weight.parse().map_err(|_| invalid())?;
        if (1..=WEIGHT_MAX).contains(&weight) { Ok(Self { uid, weight }) } else { Err(invalid()) }
    }
}

impl TryFrom<String> for CacheWeight {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_parsed_and_others_refused() {
        assert_eq!("1000=4".parse(), Ok(CacheWeight { uid: 1000, weight: 4 }));
        for odd in ["", "4", "=4", "1000=", "1000=0", "1000=1001", "user=4", "-1=4", "1000=4=4"] {
            assert!(odd.parse::<CacheWeight>().unwrap_err().contains("UID=WEIGHT"), "{odd}");
        }
    }
}
