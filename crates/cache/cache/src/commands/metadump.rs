//! The command `lru_crawler metadump`, which lists all keys.

use std::fmt::Write;

use super::{Context, REPLIES_MAX, Replies, Session, Step};
use crate::protocol::words::Words;
use crate::store::Until;
use crate::store::item::Item;

/// The position of a list of keys: a partition, and a bucket of its index.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct DumpPosition {
    partition: usize,
    bucket: u64,
}

impl Session {
    /// Executes `lru_crawler metadump`. Other subcommands are errors: there is no crawler.
    pub(super) fn crawler<'p>(
        &mut self,
        words: &Words<'_>,
        context: &Context<'p>,
        out: &mut Replies<'p>,
    ) -> Step {
        if words.len() < 3 || words[1] != b"metadump" {
            return Session::error(out);
        }
        if !context.service.dump_is_enabled {
            out.push_line("ERROR metadump not allowed");
            return Step::Used(0);
        }
        // All items are in one class, with number 1.
        let lists = matches!(words[2], b"all" | b"hash")
            || words[2].split(|byte| *byte == b',').any(|class| class == b"1");
        let mut place = self.dump.take().unwrap_or_default();
        // The partitions of a server that may serve nothing may belong to other servers.
        let lists = lists && context.access.may_serve();
        while lists && let Some(partition) = context.access.store.partitions().get(place.partition) {
            if out.len() >= REPLIES_MAX {
                self.dump = Some(place);
                return Step::Again(Until::NextTurn);
            }
            let now_s = context.access.now_s;
            let next = partition.for_each_of_bucket(place.bucket, now_s, |item, begun_s| {
                out.push(line(item, begun_s, context).as_bytes());
            });
            place = match next {
                Some(bucket) => DumpPosition { bucket, ..place },
                None => DumpPosition { partition: place.partition + 1, bucket: 0 },
            };
        }
        out.push(b"END\r\n");
        Step::Used(0)
    }
}

/// The line of an item. The time of the last read is the one at which the item's run was opened.
fn line(item: &Item<'_>, begun_s: u32, context: &Context<'_>) -> String {
    let access = &context.access;
    let mut line = String::with_capacity(128);
    line.push_str("key=");
    for byte in item.key {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                line.push(char::from(*byte));
            }
            byte => {
                let _ = write!(line, "%{byte:02X}");
            }
        }
    }
    let expires_s = match item.header.expires_s {
        0 => -1,
        expires_s => access.clock.unix_s(expires_s),
    };
    let size = access.item_size(item.key.len(), item.header.client_flags, item.value.len());
    let _ = writeln!(
        line,
        " exp={expires_s} la={} cas={} fetch={} cls=1 size={size}",
        access.clock.unix_s(begun_s),
        item.header.cas,
        if item.is_fetched { "yes" } else { "no" },
    );
    line
}
