//! Which user has a subordinate user id. A user can have processes under all of its ids.

/// The file with the ranges of ids: `OWNER:FIRST:COUNT` on each line.
const FILE: &str = "/etc/subuid";
/// Ids that a container of root has.
const CONTAINER_IDS: u64 = 65_536;

/// Who can use a user id.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Owner {
    /// The user with this id.
    User(u32),
    /// The user with this name or id, as subordinate ids.
    Range(String),
    /// A container of root, by its number in a range that begins here.
    Container { first: u64, number: u64 },
}

/// Who can use a user id, as the system says now.
pub(crate) fn owner(uid: u32) -> Owner {
    owner_in(&std::fs::read_to_string(FILE).unwrap_or_default(), uid)
}

fn owner_in(ranges: &str, uid: u32) -> Owner {
    let range = |line: &str| {
        let mut fields = line.split(':');
        let name = fields.next()?.to_owned();
        let (first, count) = (fields.next()?.parse::<u64>().ok()?, fields.next()?.parse::<u64>().ok()?);
        let offset = u64::from(uid).checked_sub(first).filter(|offset| *offset < count)?;
        Some(match name.as_str() {
            "root" | "0" => Owner::Container { first, number: offset / CONTAINER_IDS },
            _ => Owner::Range(name),
        })
    };
    ranges.lines().find_map(range).unwrap_or(Owner::User(uid))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subordinate_ids_belong_to_their_owner() {
        let ranges = "mallory:100000:65536\nroot:1000000:131072\nbad line\nmallory:300000:1\n1001:400000:2";
        let range = |name: &str| Owner::Range(name.to_owned());
        let container = |number| Owner::Container { first: 1_000_000, number };
        for (uid, owner) in [
            (0, Owner::User(0)),
            (99_999, Owner::User(99_999)),
            (100_000, range("mallory")),
            (165_535, range("mallory")),
            (165_536, Owner::User(165_536)),
            (300_000, range("mallory")),
            (400_001, range("1001")),
            (1_000_000, container(0)),
            (1_065_536, container(1)),
            (u32::MAX, Owner::User(u32::MAX)),
        ] {
            assert_eq!(owner_in(ranges, uid), owner, "{uid}");
        }
    }
}
