//! The statistics of a server, with memcached's names.

use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};
use rustix::process::Signal;

use super::dealing::WorkerHandle;
use super::{Common, ListenerAddress, Peer};
use crate::commands::{Context, PROTOCOL_VERSION, ServerReport};
use crate::counters::Sums;
use crate::store::Removed;

/// The statistics of a server, for its sessions.
#[derive(Debug)]
pub struct Report {
    common: Arc<Common>,
    workers: Vec<Arc<WorkerHandle>>,
    base: Mutex<Base>,
}

/// The counters at the last `stats reset`.
#[derive(Debug, Default)]
struct Base {
    sums: Sums,
    removed: Removed,
    connections_total: u64,
    connections_rejected: u64,
}

impl Report {
    /// The report of a server with these workers.
    pub fn new(common: Arc<Common>, workers: Vec<Arc<WorkerHandle>>) -> Self {
        Self { common, workers, base: Mutex::default() }
    }

    fn base(&self) -> MutexGuard<'_, Base> {
        self.base.lock()
    }
}

/// Adds the statistics of the pool, if there is one.
fn add_pool(common: &Common, sums: &Sums, add: &mut dyn FnMut(&str, &dyn Display)) {
    let store = &common.store;
    if !store.has_pool() {
        return;
    }
    let pool = store.pool();
    let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    add("pool_items", &store.items_in_pool());
    add("pool_runs", &load(&pool.runs));
    add("pool_bytes", &load(&pool.bytes));
    add("pool_hits", &load(&pool.hits));
    add("pool_losses", &load(&pool.losses));
    add("local_hits", &sums.get_hits.saturating_sub(sums.fetched_hits));
    for (tier, times) in [("local", &common.local_times()), ("pool", &pool.times)] {
        for (name, share) in [("p50", 0.5), ("p99", 0.99), ("max", 1.0)] {
            add(&format!("{tier}_hit_{name}_us"), &(times.quantile(share) / 1000));
        }
    }
}

impl ServerReport for Report {
    fn general(&self, context: &Context<'_>, add: &mut dyn FnMut(&str, &dyn Display)) {
        let (common, now_s) = (&self.common, context.access.now_s);
        let base = self.base();
        let sums = common.sums().since(&base.sums);
        let removed = common.store.removed().since(&base.removed);
        let content = common.store.content();
        let open = common.connections.load(Ordering::Relaxed);
        add("pid", &std::process::id());
        add("uptime", &common.started.elapsed().as_secs());
        add("time", &common.clock.unix_s(now_s));
        add("version", &PROTOCOL_VERSION);
        add("aquifer_version", &common.version);
        add("pointer_size", &usize::BITS);
        let usage = usage();
        add("rusage_user", &usage.0);
        add("rusage_system", &usage.1);
        add("max_connections", &common.connections_max);
        add("curr_connections", &open);
        add(
            "total_connections",
            &(common.connections_total.load(Ordering::Relaxed) - base.connections_total),
        );
        let rejected = common.connections_rejected.load(Ordering::Relaxed) - base.connections_rejected;
        add("rejected_connections", &rejected);
        add("connection_structures", &open);
        add("cmd_get", &(sums.get_hits + sums.get_misses));
        add("cmd_set", &sums.cmd_set);
        add("cmd_flush", &sums.cmd_flush);
        add("cmd_touch", &sums.cmd_touch);
        add("cmd_meta", &sums.cmd_meta);
        add("get_hits", &sums.get_hits);
        add("get_misses", &sums.get_misses);
        add("get_expired", &sums.get_expired);
        add("get_flushed", &sums.get_flushed);
        add("delete_misses", &sums.delete_misses);
        add("delete_hits", &sums.delete_hits);
        add("incr_misses", &sums.incr_misses);
        add("incr_hits", &sums.incr_hits);
        add("decr_misses", &sums.decr_misses);
        add("decr_hits", &sums.decr_hits);
        add("cas_misses", &sums.cas_misses);
        add("cas_hits", &sums.cas_hits);
        add("cas_badval", &sums.cas_badval);
        add("touch_hits", &sums.touch_hits);
        add("touch_misses", &sums.touch_misses);
        add("store_too_large", &sums.store_too_large);
        add("store_no_memory", &sums.store_no_memory);
        add("auth_cmds", &sums.auth_cmds);
        add("auth_errors", &sums.auth_errors);
        add("idle_kicks", &sums.idle_kicks);
        add("bytes_read", &sums.bytes_read);
        add("bytes_written", &sums.bytes_written);
        add("limit_maxbytes", &common.store.budget().limit());
        add("accepting_conns", &1);
        // Connections above the limit are closed at once, so that the server always accepts.
        add("listen_disabled_num", &0);
        add("time_in_listen_disabled_us", &0);
        add("threads", &common.counters.len());
        add("partition_misses", &sums.partition_misses);
        add("partition_errors", &sums.partition_errors);
        add("conn_yields", &sums.conn_yields);
        add("hash_power_level", &content.index_bytes.max(1).ilog2());
        add("hash_bytes", &content.index_bytes);
        // The index grows by one bucket at a time.
        add("hash_is_expanding", &0);
        add("bytes", &content.item_bytes);
        add("curr_items", &content.items);
        add("total_items", &sums.total_items);
        add("expired_unfetched", &removed.expired_unfetched);
        add("evicted_unfetched", &removed.evicted_unfetched);
        add("evictions", &removed.evicted);
        add_pool(common, &sums, add);
        add("reclaimed", &removed.expired);
    }

    fn settings(&self, context: &Context<'_>, add: &mut dyn FnMut(&str, &dyn Display)) {
        let (common, service) = (&self.common, context.service);
        let yes = |is: bool| if is { "yes" } else { "no" };
        add("maxbytes", &common.store.budget().limit());
        add("maxconns", &common.connections_max);
        let port = common.listeners.iter().find_map(|listener| match listener {
            ListenerAddress::Tcp(address) => Some(address.port()),
            ListenerAddress::Unix(_) => None,
        });
        add("tcpport", &port.unwrap_or(0));
        add("udpport", &0);
        let addresses = common.listeners.iter().filter_map(|listener| match listener {
            ListenerAddress::Tcp(address) => Some(address.ip().to_string()),
            ListenerAddress::Unix(_) => None,
        });
        let addresses: Vec<_> = addresses.collect();
        add("inter", &if addresses.is_empty() { "NULL".to_owned() } else { addresses.join(",") });
        add("verbosity", &service.verbosity.load(Ordering::Relaxed));
        add("evictions", &if common.store.evicts() { "on" } else { "off" });
        let path = common.listeners.iter().find_map(|listener| match listener {
            ListenerAddress::Unix(path) => Some(path.display().to_string()),
            ListenerAddress::Tcp(_) => None,
        });
        add("domain_socket", &path.unwrap_or_else(|| "NULL".to_owned()));
        add("shutdown_command", &yes(service.shutdown_is_enabled));
        add("num_threads", &common.counters.len());
        add("detail_enabled", &"no");
        add(
            "reqs_per_event",
            &if common.requests_per_turn == usize::MAX { 0 } else { common.requests_per_turn },
        );
        add("cas_enabled", &yes(common.store.has_cas()));
        add("tcp_backlog", &common.backlog);
        add("auth_enabled_sasl", &"no");
        add("auth_enabled_ascii", &yes(service.tokens.is_some()));
        add("item_size_max", &common.item_size_max);
        add("maxconns_fast", &"yes");
        add("flush_enabled", &yes(service.flush_is_enabled));
        add("dump_enabled", &yes(service.dump_is_enabled));
        add("hash_algorithm", &"siphash13");
        add("idle_timeout", &common.idle_timeout_s);
        add("ssl_enabled", &yes(common.tls.is_some()));
        add("memory_file", &if common.has_file { "yes" } else { "(null)" });
        add("partitions", &common.store.partitions().len());
    }

    fn connections(&self, add: &mut dyn FnMut(&str, &dyn Display)) {
        let now_s = self.common.clock.now_s();
        for worker in &self.workers {
            for (descriptor, report) in worker.reports().iter() {
                let listener = &self.common.listeners[report.listener];
                match &report.peer {
                    Peer::Tcp(address) => add(&format!("{descriptor}:addr"), &format!("tcp:{address}")),
                    Peer::Unix(path) => {
                        add(&format!("{descriptor}:addr"), &format!("unix:{}", path.display()));
                    }
                }
                add(&format!("{descriptor}:listen_addr"), listener);
                add(&format!("{descriptor}:state"), &"conn_read");
                let idle_s = now_s.saturating_sub(report.last_request_s.load(Ordering::Relaxed));
                add(&format!("{descriptor}:secs_since_last_cmd"), &idle_s);
            }
        }
    }

    fn reset(&self) {
        let common = &self.common;
        *self.base() = Base {
            sums: common.sums(),
            removed: common.store.removed(),
            connections_total: common.connections_total.load(Ordering::Relaxed),
            connections_rejected: common.connections_rejected.load(Ordering::Relaxed),
        };
    }

    fn refresh_certificates(&self) -> Result<(), String> {
        match &self.common.tls {
            Some(settings) => settings.refresh(),
            None => Err("the server has no certificates".to_owned()),
        }
    }

    fn shut_down(&self, is_graceful: bool) {
        let signal = if is_graceful { Signal::USR1 } else { Signal::INT };
        if let Err(error) = rustix::process::kill_process(rustix::process::getpid(), signal) {
            tracing::error!(%error, is_graceful, "cannot stop the server: the signal to this process failed");
        }
    }
}

/// Processor time of this process, in user mode and in the kernel.
fn usage() -> (String, String) {
    // SAFETY: an all-zero rusage is a valid object, which getrusage fills.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &raw mut usage);
        usage
    };
    let text = |time: libc::timeval| format!("{}.{:06}", time.tv_sec, time.tv_usec);
    (text(usage.ru_utime), text(usage.ru_stime))
}
