//! The command `stats`.

use std::fmt;

use super::{Context, Replies, Session, Step};
use crate::protocol::words::Words;

/// Statistics and control of a server, for its sessions.
pub trait ServerReport: fmt::Debug + Send + Sync {
    /// Reports the general statistics.
    fn general(&self, context: &Context<'_>, add: &mut dyn FnMut(&str, &dyn fmt::Display));
    /// Reports the settings.
    fn settings(&self, context: &Context<'_>, add: &mut dyn FnMut(&str, &dyn fmt::Display));
    /// Reports the connections.
    fn connections(&self, add: &mut dyn FnMut(&str, &dyn fmt::Display));
    /// Sets counters to 0.
    fn reset(&self);
    /// Reloads the server's certificates.
    ///
    /// # Errors
    /// The reason why they cannot be used; the previous certificates stay in use then.
    fn refresh_certificates(&self) -> Result<(), String>;
    /// Stops the server; if `is_graceful`, so that the next server can continue with its items.
    fn shut_down(&self, is_graceful: bool);
}

impl Session {
    pub(super) fn stats<'p>(
        &mut self,
        words: &Words<'_>,
        context: &Context<'p>,
        out: &mut Replies<'p>,
    ) -> Step {
        let subcommand = words.get(1).copied().unwrap_or_default();
        let mut add = |name: &str, value: &dyn fmt::Display| {
            out.push_line(&format!("STAT {name} {value}"));
        };
        if context.report(subcommand, &mut add) {
            out.push(b"END\r\n");
            return Step::Used(0);
        }
        match subcommand {
            b"reset" => {
                context.service.report.reset();
                out.push_line("RESET");
            }
            b"detail" => detail(words, out),
            b"cachedump" => dump(words, context, out),
            _ => return Session::error(out),
        }
        Step::Used(0)
    }
}

impl Context<'_> {
    /// Reports the statistics with this name; returns whether there are any.
    pub(super) fn report(&self, name: &[u8], add: &mut dyn FnMut(&str, &dyn fmt::Display)) -> bool {
        let report = &self.service.report;
        match name {
            b"" => report.general(self, add),
            b"settings" => report.settings(self, add),
            b"conns" => report.connections(add),
            b"items" => items(self, add),
            b"slabs" => slabs(self, add),
            b"sizes" => add("sizes_status", &"disabled"),
            _ => return false,
        }
        true
    }
}

/// Reports all items as those of one slab class, for tools that list classes and then their items.
fn items(context: &Context<'_>, add: &mut dyn FnMut(&str, &dyn fmt::Display)) {
    let content = context.access.store.content();
    if content.items == 0 {
        return;
    }
    let removed = context.access.store.removed();
    let mut class = |name: &str, value: u64| add(&format!("items:1:{name}"), &value);
    class("number", content.items);
    let now_s = context.access.now_s;
    class("age", u64::from(content.oldest_s.map_or(0, |oldest_s| now_s.saturating_sub(oldest_s))));
    class("mem_requested", content.item_bytes);
    class("evicted_time", context.access.store.evicted_age_s());
    class("evicted", removed.evicted);
    class("evicted_unfetched", removed.evicted_unfetched);
    class("expired_unfetched", removed.expired_unfetched);
    class("reclaimed", removed.expired);
    class("outofmemory", context.access.counters.store_no_memory.get());
}

fn slabs(context: &Context<'_>, add: &mut dyn FnMut(&str, &dyn fmt::Display)) {
    let content = context.access.store.content();
    if content.items != 0 {
        add("1:chunk_size", &context.access.item_size_max);
        add("1:total_pages", &context.access.store.budget().used().div_ceil(1 << 20));
        add("1:total_chunks", &content.items);
        add("1:used_chunks", &content.items);
        add("1:mem_requested", &content.item_bytes);
        add("active_slabs", &1);
    } else {
        add("active_slabs", &0);
    }
    add("total_malloced", &context.access.store.budget().used());
}

/// Answers `stats detail`. Statistics by prefix of the keys are not kept.
fn detail(words: &Words<'_>, out: &mut Replies<'_>) {
    out.push_line(match words.get(2).copied().unwrap_or_default() {
        b"dump" => "END",
        b"off" => "OK",
        b"on" => "SERVER_ERROR statistics by prefix are not supported",
        _ => "CLIENT_ERROR usage: stats detail on|off|dump",
    });
}

/// Lists keys of the one class.
fn dump(words: &Words<'_>, context: &Context<'_>, out: &mut Replies<'_>) {
    use crate::protocol::number::uint32;
    /// Longest list in bytes, as in memcached.
    const LIST_MAX: usize = 2 << 20;
    if !context.service.dump_is_enabled {
        out.push_line("CLIENT_ERROR stats cachedump not allowed");
        return;
    }
    if words.len() < 4 {
        out.push_line("CLIENT_ERROR bad command line");
        return;
    }
    let (Some(class), Some(limit)) = (uint32(words[2]), uint32(words[3])) else {
        out.push_line("CLIENT_ERROR bad command line format");
        return;
    };
    let start = out.len();
    let limit = if limit == 0 { u64::MAX } else { u64::from(limit) };
    let mut listed = 0;
    if class == 1 && context.access.may_serve() {
        for partition in context.access.store.partitions() {
            partition.for_each(context.access.now_s, |item| {
                if listed < limit && out.len() - start < LIST_MAX {
                    let expires_s = match item.header.expires_s {
                        0 => 0,
                        expires_s => context.access.clock.unix_s(expires_s),
                    };
                    out.push(b"ITEM ");
                    out.push(item.key);
                    out.push_line(&format!(" [{} b; {expires_s} s]", item.value.len()));
                    listed += 1;
                }
            });
        }
    }
    out.push(b"END\r\n");
}
