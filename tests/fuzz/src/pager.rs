//! The page table that an earlier agent left.

use aquifer_mutation::Mutations;
use aquifer_pager::Mutation;
use aquifer_pager::fuzz_target::{recover_table, table_seeds};

use crate::Target;

pub(crate) const TABLE: Target = Target {
    name: "page-table",
    run: recover_table,
    seeds: table_seeds,
    with_mutation: |work| Mutation::AcceptLinkedTwice.while_active(work),
};
