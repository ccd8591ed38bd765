//! A dead host's memory of a node, given back over several connections at once: what takes time is the way there and back, section after section.

use std::ops::Range;
use std::panic::resume_unwind;

use aquifer_fabric::{Endpoint, Host, Tenant};

use super::{NodeId, PoolClient};
use crate::error::PoolError;
use crate::op::Recovered;

/// Connections at once.
const CONNECTIONS_MAX: u32 = 4;
/// Below so many sections for each another connection is not worth its while.
const SECTIONS_MIN: u32 = 64;

/// Give back all that `host` held of a node, as [`PoolClient::recover`] does. Whoever calls has taken the dead host's number: every endpoint that `connect`
/// yields is of `host` and a new epoch, so that the dead one is fenced.
///
/// # Errors
/// The first of any connection; then some is not given back yet.
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
    let mut first = open()?;
    let sections = first.sections(id);
    let mut parts = parts(sections).into_iter();
    let ours = parts.next().unwrap_or(0..sections);
    std::thread::scope(|scope| {
        let recover = |part| move || open()?.recover_within(id, host, part).map_err(E::from);
        let others: Vec<_> = parts.map(|part| scope.spawn(recover(part))).collect();
        let mut outcome = first.recover_within(id, host, ours).map_err(E::from);
        for other in others {
            let there = other.join().unwrap_or_else(|panic| resume_unwind(panic));
            outcome = outcome.and_then(|mut found| {
                found.add(there?);
                Ok(found)
            });
        }
        outcome
    })
}

/// The sections, in as many parts as there are connections.
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
