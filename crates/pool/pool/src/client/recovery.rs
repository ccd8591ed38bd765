//! Recovery of a dead host's memory on a node over several connections at once.
//!
//! The time of a recovery is that of round trips, section after section, so several connections are
//! faster than one.

use std::ops::Range;
use std::panic::resume_unwind;

use aquifer_fabric::{Endpoint, Host, Tenant};

use super::{NodeId, PoolClient};
use crate::error::PoolError;
use crate::op::Recovered;

/// Most connections of one recovery.
const CONNECTIONS_MAX: u32 = 4;
/// Least sections for each connection. For fewer, another connection costs more than it gains.
const SECTIONS_MIN: u32 = 64;

/// Frees all holdings of `host` on a node, as [`PoolClient::recover`] does.
///
/// The caller has claimed the dead host's number: every endpoint that `connect` returns is of
/// `host` with a new epoch, so that the dead host is fenced.
///
/// # Errors
/// The first error of any connection. Then some holdings are not freed yet.
pub fn recover_node<E: From<PoolError> + Send>(
    id: NodeId,
    host: Host,
    tenant: Tenant,
    connect: &(dyn Fn() -> Result<Box<dyn Endpoint>, E> + Sync),
) -> Result<Recovered, E> {
    let open = || {
        let mut pool = PoolClient::new(host, tenant);
        pool.add_node(id, connect()?)?;
        Ok::<_, E>(pool)
    };
    let mut first_client = open()?;
    let sections = first_client.sections(id);
    let mut parts = parts(sections).into_iter();
    let first_part = parts.next().unwrap_or(0..sections);
    std::thread::scope(|scope| {
        let recover = |part| move || open()?.recover_within(id, host, part).map_err(E::from);
        let threads: Vec<_> = parts.map(|part| scope.spawn(recover(part))).collect();
        let mut outcome = first_client.recover_within(id, host, first_part).map_err(E::from);
        for thread in threads {
            let of_part = thread.join().unwrap_or_else(|panic| resume_unwind(panic));
            outcome = outcome.and_then(|mut recovered| {
                recovered.add(of_part?);
                Ok(recovered)
            });
        }
        outcome
    })
}

/// Divides the sections into a part for each connection.
fn parts(sections: u32) -> Vec<Range<u32>> {
    let count = (sections / SECTIONS_MIN).clamp(1, CONNECTIONS_MAX);
    let each = sections.div_ceil(count).max(1);
    (0..sections).step_by(each as usize).map(|first| first..sections.min(first + each)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_all_sections_once() {
        for sections in [1, 2, 63, 64, 127, 128, 255, 256, 257, 1000, 1 << 19] {
            let parts = parts(sections);
            assert!(parts.len() <= 4, "{parts:?}");
            let all: Vec<u32> = parts.into_iter().flatten().collect();
            assert_eq!(all, (0..sections).collect::<Vec<u32>>());
        }
        assert_eq!((parts(100).len(), parts(5000).len()), (1, 4));
    }
}
