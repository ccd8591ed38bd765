//! Owners of user ids.
//!
//! A user can have processes under all of its subordinate ids. Shares of users are counted by the
//! owner, because a user with many ids would otherwise have many shares.

/// The file with the ranges of subordinate ids: `OWNER:FIRST:COUNT` on each line.
const RANGES_FILE: &str = "/etc/subuid";
/// The file with the users: `NAME:PASSWORD:ID:…` on each line.
const USERS_FILE: &str = "/etc/passwd";
/// Number of ids of a container of root.
const CONTAINER_IDS: u32 = 65_536;

/// The present owner of a user id.
///
/// The owner is the user that has the id as a subordinate id, or else the user with this id. If the
/// owner is not in `/etc/passwd`, its first subordinate id represents it. In a range of root each
/// container is an owner, and its first id represents it.
#[must_use]
pub fn owner(uid: u32) -> u32 {
    let read = |file| std::fs::read_to_string(file).unwrap_or_default();
    owner_in(&read(RANGES_FILE), || read(USERS_FILE), uid)
}

/// A range of subordinate ids.
struct SubordinateRange<'a> {
    name: &'a str,
    first: u32,
    count: u32,
}

impl<'a> SubordinateRange<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let mut fields = line.trim().split(':');
        let name = fields.next()?;
        Some(Self { name, first: fields.next()?.parse().ok()?, count: fields.next()?.parse().ok()? })
    }

    /// The place of an id in the range.
    fn offset(&self, uid: u32) -> Option<u32> {
        uid.checked_sub(self.first).filter(|offset| *offset < self.count)
    }
}

fn owner_in(ranges: &str, users: impl FnOnce() -> String, uid: u32) -> u32 {
    let all = || ranges.lines().filter_map(SubordinateRange::parse);
    let found = all().find_map(|range| Some((range.offset(uid)?, range)));
    match found {
        None => uid,
        Some((offset, SubordinateRange { name: "root" | "0", first, .. })) => {
            first + offset / CONTAINER_IDS * CONTAINER_IDS
        }
        Some((_, SubordinateRange { name, first, .. })) => name
            .parse()
            .ok()
            .or_else(|| user_id(&users(), name))
            .or_else(|| all().find(|range| range.name == name).map(|range| range.first))
            .unwrap_or(first),
    }
}

/// The id of a user.
fn user_id(users: &str, name: &str) -> Option<u32> {
    users.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(name)).then(|| fields.nth(1)?.parse().ok()).flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subordinate_ids_belong_to_their_owner() {
        let ranges = "mallory:100000:65536\nroot:1000000:131072\nbad line\nmallory:300000:1\n1001:400000:2\n\
            remote:500000:10\nremote:600000:10";
        let users = "root:x:0:0::/root:/bin/sh\nmallory:x:1002:1002::/:/bin/sh\nbad";
        for (uid, owner) in [
            (0, 0),
            (99_999, 99_999),
            (100_000, 1002),
            (165_535, 1002),
            (165_536, 165_536),
            (300_000, 1002),
            (400_001, 1001),
            (500_009, 500_000),
            (600_009, 500_000),
            (1_000_000, 1_000_000),
            (1_065_535, 1_000_000),
            (1_065_536, 1_065_536),
            (u32::MAX, u32::MAX),
        ] {
            assert_eq!(owner_in(ranges, || users.to_owned(), uid), owner, "{uid}");
        }
    }
}
